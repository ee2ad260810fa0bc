"""Measure and fit the constants of local processes, for one planned product at a time.

Processes that share cores slow each other down, and by how much depends on what they do at once. So constants are
measured with the same algorithm on a part of the product: three quarters of the slices, or of the sliced dim where
there is one slice, on the same mesh, lanes and processes, in turns with the product itself. Two programs run, each
from an instant that all ranks share:

- `transfers`: the part of the product without its multiplications;
- `work`: the part of the product.

Two constants are fitted to their durations: one factor for the times of messages and copies, and the FLOP rate of
a process, with what transfers take of its core. The duration of the product itself is no part of the fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from meshweave.algorithms.matmul2d import Matmul2dConfig, Matmul2dProblem
from meshweave.base.units import format_bytes
from meshweave.cost.machine import Machine
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.links import NetworkAxis
from meshweave.describe.machine.network import with_axes
from meshweave.ir.program import Program
from meshweave.ir.program.ops import Matmul, Op
from meshweave.ir.program.statements import rewrite
from meshweave.simulate import simulate

_MOST_FACTOR = 1e4
"""Measured times are within this factor of those of the description that is adapted."""
_STEPS = 32
"""Of a bisection: to 1e-8 of the factor."""


@dataclass(frozen=True)
class ConstantPrograms:
    """The two programs that are run to measure the constants of a product.

    `work` is a part of the product, and `transfers` is the same without its multiplications.
    """

    transfers: Program
    work: Program

    @classmethod
    def of(cls, part: Program) -> ConstantPrograms:
        """Return the two programs to measure, from the program of a part of the product (`part_of_product`)."""
        body = rewrite(part.body, _without_products)
        return cls(replace(part, name="transfers", body=body, computes=()), part)

    @property
    def listed(self) -> tuple[Program, ...]:
        """Return (`transfers`, `work`)."""
        return self.transfers, self.work


@dataclass(frozen=True)
class LocalConstants:
    """The constants of local processes, fitted for one product, as the rates of a `cluster`."""

    cluster: Cluster

    @property
    def link(self) -> NetworkAxis:
        """Return the description of the links between processes, with their rate and latency."""
        return self.cluster.network.axis(0, 1, (self.cluster.num_chips,))

    def to_json(self) -> dict[str, float]:
        """Return `message_bytes_per_s`, `message_latency_s`, `memory_bytes_per_s` and `flops_per_s` by name.

        Those of messages are left out where there is one process, which sends none.
        """
        link, is_alone = self.link, self.cluster.num_chips == 1
        messages = {"message_bytes_per_s": link.link_bytes_per_s, "message_latency_s": link.link_latency_s}
        return ({} if is_alone else messages) | {
            "memory_bytes_per_s": self.cluster.chip.memory_bytes_per_s,
            "flops_per_s": self.cluster.chip.effective_flops_per_s,
        }

    def __str__(self) -> str:
        messages = (
            f"messages {format_bytes(self.link.link_bytes_per_s)}/s, " if self.cluster.num_chips > 1 else ""
        )
        return f"{messages}products {self.cluster.chip.effective_flops_per_s / 1e9:.3g} GFLOP/s a process"


def fit_local_constants(
    programs: ConstantPrograms, durations_s: Sequence[float], cluster: Cluster
) -> LocalConstants:
    """Return the constants with which the simulations of both programs take the measured seconds.

    Args:
        programs: the programs that were measured.
        durations_s: the measured seconds of `transfers` and of `work`.
        cluster: a description of local processes; its messages, copies and products are made faster or slower,
            by factors of up to 10,000.
    """
    transfers_s, work_s = durations_s

    def simulated_s(program: Program, adapted: Cluster) -> float:
        return simulate(program, Machine.of(adapted, program)).duration_s

    slower = _factor(lambda factor: simulated_s(programs.transfers, _slowed(cluster, factor)), transfers_s)
    cluster = _slowed(cluster, slower)
    rate = cluster.chip.effective_flops_per_s
    slower = _factor(lambda factor: simulated_s(programs.work, _with_flops(cluster, rate / factor)), work_s)
    return LocalConstants(_with_flops(cluster, rate / slower))


def _factor(seconds: Callable[[float], float], wanted_s: float) -> float:
    """Return the factor that makes an increasing function of it take the wanted seconds, by bisection."""
    low, high = -math.log(_MOST_FACTOR), math.log(_MOST_FACTOR)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(math.exp(middle)) < wanted_s else (low, middle)
    return math.exp((low + high) / 2)


def _with_flops(cluster: Cluster, flops_per_s: float) -> Cluster:
    return replace(cluster, chip=cluster.chip.with_flops_per_s(flops_per_s))


def _slowed(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with messages and copies that take so many times as long."""

    def slowed(axis: NetworkAxis) -> NetworkAxis:
        return replace(
            axis,
            link_bytes_per_s=axis.link_bytes_per_s / factor,
            link_latency_s=axis.link_latency_s * factor,
            constants=(),
        )

    chip = replace(cluster.chip, memory_bytes_per_s=max(cluster.chip.memory_bytes_per_s / factor, 1.0))
    return replace(cluster, chip=chip, network=with_axes(cluster.network, slowed))


# --- programs ---------------------------------------------------------------------------------------------


def part_of_product(
    problem: Matmul2dProblem, config: Matmul2dConfig
) -> tuple[Matmul2dProblem, Matmul2dConfig]:
    """Return a part of a product to measure constants on, and its config.

    It has three quarters of the slices, or of the sliced dim where there is one slice.
    """
    count = len(config.slices)
    kept = max(3 * count // 4, 1)
    size = problem.sliced_size * kept // count if count > 1 else 3 * problem.sliced_size // 4
    match problem.dataflow:
        case "os":
            part = replace(problem, k=size)
        case "ls":
            part = replace(problem, n=size)
        case "rs":
            part = replace(problem, m=size)
    return part, replace(config, slices=config.slices[:kept])


def _without_products(op: Op) -> tuple[Op, ...]:
    return () if isinstance(op, Matmul) else (op,)
