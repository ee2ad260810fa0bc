"""Entries of the table that solve a `ReshardProblem`: one for each multicast strategy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from meshweave.algorithms.contract import Algorithm, Array, Arrays, Gradient, within
from meshweave.algorithms.reshard.multicast import Strategy
from meshweave.algorithms.reshard.order import ORDERS
from meshweave.algorithms.reshard.plan import MESSAGE_BYTES, ReshardPlan, plan_reshard
from meshweave.algorithms.reshard.problem import ReshardProblem, TensorMove
from meshweave.algorithms.reshard.program import reshard_program
from meshweave.algorithms.reshard.strategies import STRATEGIES
from meshweave.cost.fabric import HostTopology
from meshweave.cost.machine import Machine
from meshweave.describe.layout import Layout, Replicate, Shard
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.cluster import Cluster
from meshweave.estimate import Estimate
from meshweave.ir.program import Program

UNIFORM_BYTES_PER_S = 10**9
"""The rate between any two ranks where no cluster is given; plans do not depend on it."""


@dataclass(frozen=True)
class ReshardConfig:
    """How a reshard is planned.

    Attributes:
        network: the hosts and NICs that the plan is for.
        order: name of the search that orders the multicasts, one of `order.ORDERS`.
        message_bytes: the most bytes of a message, unless one element has more.
    """

    network: HostTopology
    order: str = "best"
    message_bytes: int = MESSAGE_BYTES

    def __str__(self) -> str:
        return f"order {self.order}"


class Reshard(Algorithm[ReshardProblem, ReshardConfig]):
    """A reshard in which all data is multicast by one strategy, such as "broadcast".

    Tensor i of the problem is the program's input "X{i}" in the source layout and output "Y{i}" in the target
    layout.
    """

    problem_type = ReshardProblem
    estimate_accuracy = within(1.0)  # bytes over the rates of NICs, which small messages do not reach

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.name = f"reshard_{strategy.name}"  # type: ignore[misc]
        self.title = f"Reshard by {strategy.name.replace('_', ' ')}"  # type: ignore[misc]
        self.source = "Zhuang et al., AlpaComm, MLSys '23, section 3"  # type: ignore[misc]

    def examples(self) -> Iterator[ReshardProblem]:
        """Yield a problem of one tensor, between disjoint meshes of one shape, then one of two tensors.

        The second tensor goes to a mesh of three ranks, one of which is among its sources.
        """
        source, destination = (
            Mesh.of("src", (2, 2), ("x", "y")),
            Mesh("dst", (2, 2), ("x", "y"), (4, 5, 6, 7)),
        )
        move = TensorMove(
            "T",
            (8, 6),
            "float32",
            Layout(source, (Shard(0), Replicate())),
            Layout(destination, (Replicate(), Shard(1))),
        )
        yield ReshardProblem((move,))
        three = Mesh("three", (3,), ("x",), (2, 5, 4))
        other = TensorMove(
            "U", (5,), "int64", Layout(source, (Shard(0), Shard(0))), Layout(three, (Shard(0),))
        )
        yield ReshardProblem((move, other))

    def candidates(self, problem: ReshardProblem, cluster: Cluster | None = None) -> Iterator[ReshardConfig]:
        """Yield one config for each order but "exact", "best" first.

        Args:
            cluster: the hosts and NICs; None for a network in which each rank is a host of its own.

        Raises:
            LayoutError: the cluster has too few chips for the problem's ranks.
        """
        count = problem.ranks[-1] + 1
        if cluster is None:
            network = HostTopology(
                tuple(range(count)), (0,) * count, UNIFORM_BYTES_PER_S, UNIFORM_BYTES_PER_S
            )
        else:
            network = HostTopology.of(cluster, count)
        yield ReshardConfig(network)
        yield from (ReshardConfig(network, order) for order in ORDERS if order not in ("best", "exact"))

    def plan(self, problem: ReshardProblem, config: ReshardConfig) -> ReshardPlan:
        """Return the plan of a config: who sends what to whom, in how many messages, and in which order."""
        return _planned(problem, config, self.strategy.name)

    def program(self, problem: ReshardProblem, config: ReshardConfig) -> Program:
        """Return the program that carries out the config's plan."""
        return reshard_program(self.plan(problem, config))

    def reference(self, problem: ReshardProblem, inputs: Arrays) -> dict[str, Array]:
        """Return each output "Y{i}" as a copy of the input "X{i}": a reshard changes no values."""
        return {f"Y{number}": inputs[f"X{number}"] for number in range(len(problem.moves))}

    def placements(self, problem: ReshardProblem) -> dict[str, Layout]:
        """Return, by name, the source layouts of inputs "X{i}" and the target layouts of outputs "Y{i}"."""
        sources = {f"X{number}": move.src for number, move in enumerate(problem.moves)}
        return sources | {f"Y{number}": move.dst for number, move in enumerate(problem.moves)}

    def estimate(self, problem: ReshardProblem, config: ReshardConfig, machine: Machine) -> Estimate:
        """Return the plan's predicted time on the config's hosts and NICs; `machine` is not read."""
        predicted_s = self.plan(problem, config).predicted_s
        return Estimate(predicted_s, 0.0, 0.0, 0.0, 0.0, predicted_s)

    def gradients(self, problem: ReshardProblem) -> tuple[Gradient[ReshardProblem], ...]:
        """Return for each input "X{i}" the reverse reshard of all tensors; its output "Y{i}" is the gradient."""
        numbers = range(len(problem.moves))
        back = ReshardProblem(
            tuple(TensorMove(move.name, move.shape, move.dtype, move.dst, move.src) for move in problem.moves)
        )
        operands = {f"X{number}": f"Y{number}" for number in numbers}
        return tuple(Gradient(f"X{number}", back, operands, f"Y{number}") for number in numbers)


@lru_cache(maxsize=64)
def _planned(problem: ReshardProblem, config: ReshardConfig, strategy: str) -> ReshardPlan:
    return plan_reshard(
        problem, config.network, strategy=strategy, order=config.order, message_bytes=config.message_bytes
    )


ENTRIES = tuple(Reshard(strategy) for strategy in STRATEGIES.values())
