"""How long a product takes: by estimate or by simulation, behind one method.

All rows and figures take their times from a `Timer`, so that both readings give the same tables.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from meshweave.algorithms.matmul2d import Matmul2d, Matmul2dConfig, Matmul2dProblem
from meshweave.algorithms.matmul2d.common.problem import AXES, MESH
from meshweave.cost.machine import Machine, mesh_machine
from meshweave.describe.machine.cluster import Cluster
from meshweave.estimate import Estimate, estimate_skeleton
from meshweave.simulate import simulate
from meshweave.simulate.result import PARTS

Reading = Literal["estimate", "simulate"]


@dataclass(frozen=True)
class Timing(Estimate):
    """Seconds of a product, or of several after one another, by either reading."""

    @property
    def serial_s(self) -> float:
        """Seconds if nothing overlaps."""
        return self.compute_s + self.copy_s + self.communication_s


def sum_timings(timings: Iterable[Timing]) -> Timing:
    """Return the timing of products that run one after another."""
    total = compute = copy = launch = sync = transfer = 0.0
    for timing in timings:
        total += timing.total_s
        compute += timing.compute_s
        copy += timing.copy_s
        launch += timing.launch_s
        sync += timing.sync_s
        transfer += timing.transfer_s
    return Timing(total, compute, copy, launch, sync, transfer)


_Key = tuple[str, Matmul2dProblem, Matmul2dConfig, Cluster]


class Timer:
    """Times products on all chips of a cluster, each once, by one of the two readings."""

    def __init__(self, by: Reading) -> None:
        self.by: Reading = by
        self._timed = _estimated if by == "estimate" else _simulated
        self._known: dict[_Key, Timing] = {}

    def timing(
        self, problem: Matmul2dProblem, entry: Matmul2d, config: Matmul2dConfig, cluster: Cluster
    ) -> Timing:
        """Return the seconds of one product and their parts. Raises what `estimate` and `simulate` raise."""
        # A follower such as wang[S=meshslice] runs the programs of its base.
        key = entry.name.partition("[")[0], problem, config, cluster
        if key not in self._known:
            self._known[key] = self._timed(problem, entry, config, cluster)
        return self._known[key]

    def product_s(
        self, problem: Matmul2dProblem, entry: Matmul2d, config: Matmul2dConfig, cluster: Cluster
    ) -> float:
        """Return the seconds of one product."""
        return self.timing(problem, entry, config, cluster).total_s


def _estimated(problem: Matmul2dProblem, entry: Matmul2d, config: Matmul2dConfig, cluster: Cluster) -> Timing:
    """Return the timing by closed form, from the skeleton."""
    machine = mesh_machine(cluster, problem.mesh_shape, AXES[: len(problem.mesh_shape)], MESH)
    return Timing(**vars(estimate_skeleton(entry.skeleton(problem, config), machine)))


def _simulated(problem: Matmul2dProblem, entry: Matmul2d, config: Matmul2dConfig, cluster: Cluster) -> Timing:
    """Return the timing of the program on every chip; the parts are those of rank 0."""
    program = entry.program(problem, config)
    run = simulate(program, Machine.of(cluster, program))
    parts = run.parts(0)
    return Timing(run.duration_s, *(parts[name] for name in PARTS[:5]))
