"""How long a product takes: by estimate or by simulation, behind one method.

Everything that is reproduced asks a `Timer`, so that both readings give the same tables.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from meshweave.algorithms.matmul import Algorithm, Config, MatmulProblem
from meshweave.algorithms.matmul.problem import AXES, MESH
from meshweave.cost.machine import Machine, mesh_machine
from meshweave.describe.cluster import Cluster
from meshweave.errors import UnsupportedError
from meshweave.estimate import estimate

By = Literal["estimate", "simulate"]


@dataclass(frozen=True)
class Timing:
    """Seconds of a product, or of several after one another. The parts are sums over ops, overlapped or not."""

    total_s: float
    compute_s: float
    copy_s: float
    launch_s: float
    sync_s: float
    transfer_s: float

    @property
    def communication_s(self) -> float:
        return self.launch_s + self.sync_s + self.transfer_s

    @property
    def serial_s(self) -> float:
        """How long it takes where nothing overlaps."""
        return self.compute_s + self.copy_s + self.communication_s


def add_up(timings: Iterable[Timing]) -> Timing:
    """One after another."""
    total = compute = copy = launch = sync = transfer = 0.0
    for one in timings:
        total += one.total_s
        compute += one.compute_s
        copy += one.copy_s
        launch += one.launch_s
        sync += one.sync_s
        transfer += one.transfer_s
    return Timing(total, compute, copy, launch, sync, transfer)


class Timer(Protocol):
    """Times one product on all chips of a cluster. Each product is computed once."""

    @property
    def by(self) -> By: ...

    def timing(
        self, problem: MatmulProblem, entry: Algorithm, config: Config, cluster: Cluster
    ) -> Timing: ...

    def product_s(
        self, problem: MatmulProblem, entry: Algorithm, config: Config, cluster: Cluster
    ) -> float: ...


_Key = tuple[str, MatmulProblem, Config, Cluster]


def _key(problem: MatmulProblem, entry: Algorithm, config: Config, cluster: Cluster) -> _Key:
    # A follower such as wang[S=meshslice] runs the programs of its base.
    return entry.name.partition("[")[0], problem, config, cluster


class EstimateTimer:
    """The closed form, from the skeleton."""

    by: By = "estimate"

    def __init__(self) -> None:
        self._known: dict[_Key, Timing] = {}

    def timing(self, problem: MatmulProblem, entry: Algorithm, config: Config, cluster: Cluster) -> Timing:
        key = _key(problem, entry, config, cluster)
        if key not in self._known:
            machine = mesh_machine(cluster, problem.mesh_shape, AXES[: len(problem.mesh_shape)], MESH)
            found = estimate(entry.skeleton(problem, config), machine)
            self._known[key] = Timing(
                found.total_s,
                found.compute_s,
                found.copy_s,
                found.launch_s,
                found.sync_s,
                found.transfer_s,
            )
        return self._known[key]

    def product_s(self, problem: MatmulProblem, entry: Algorithm, config: Config, cluster: Cluster) -> float:
        return self.timing(problem, entry, config, cluster).total_s


class SimulateTimer:
    """The discrete-event simulation of the program on every chip; the parts are those of rank 0.

    Raises UnsupportedError where the package was built without the engine.
    """

    by: By = "simulate"

    def __init__(self) -> None:
        try:
            from meshweave.simulate.engine import simulate
        except ImportError as error:
            raise UnsupportedError(
                f"this installation has no simulation engine ({error}); use --by estimate"
            ) from None
        self._simulate = simulate
        self._known: dict[_Key, Timing] = {}

    def timing(self, problem: MatmulProblem, entry: Algorithm, config: Config, cluster: Cluster) -> Timing:
        key = _key(problem, entry, config, cluster)
        if key not in self._known:
            program = entry.program(problem, config)
            run = self._simulate(program, Machine.of(cluster, program))
            parts = run.parts(0)
            self._known[key] = Timing(
                run.duration_s,
                parts["compute_s"],
                parts["copy_s"],
                parts["launch_s"],
                parts["sync_s"],
                parts["transfer_s"],
            )
        return self._known[key]

    def product_s(self, problem: MatmulProblem, entry: Algorithm, config: Config, cluster: Cluster) -> float:
        return self.timing(problem, entry, config, cluster).total_s


def timer(by: By) -> Timer:
    """Raises UnsupportedError as `SimulateTimer` does."""
    return EstimateTimer() if by == "estimate" else SimulateTimer()
