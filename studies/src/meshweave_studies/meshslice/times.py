"""How long a product takes: by estimate or by simulation, and by which reading of the paper, behind one method.

All rows and figures take their times from a `Timer`, so that every reading gives the same tables.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from meshweave.algorithms.matmul2d import Matmul2d, Matmul2dConfig, Matmul2dProblem
from meshweave.algorithms.matmul2d.common.problem import AXES, MESH
from meshweave.cost.machine import Machine, mesh_machine
from meshweave.cost.price import price
from meshweave.describe.machine.cluster import Cluster
from meshweave.estimate import Estimate, estimate_skeleton
from meshweave.estimate.timeline import timeline
from meshweave.ir.skeleton import Skeleton
from meshweave.ir.work import Transfer
from meshweave.lower.rings import BACK
from meshweave.simulate import simulate
from meshweave.simulate.result import PARTS
from meshweave_studies.meshslice.shared_links import pooled_s

Reading = Literal["estimate", "simulate"]
Rule = Literal["apart", "together", "pooled"]
"""How what a product exposes, and what its two mesh axes move, add up; see `Timer`."""


@dataclass(frozen=True)
class Timing(Estimate):
    """Seconds of a product, or of several after one another, by either reading.

    Both directions of a two-way ring run at once, so that communication counts one of them.

    Attributes:
        before_s: seconds before the first product runs, the prologue.
        after_s: seconds after the last product has run, the epilogue.
    """

    before_s: float = 0.0
    after_s: float = 0.0

    @property
    def serial_s(self) -> float:
        """Seconds if nothing overlaps."""
        return self.compute_s + self.copy_s + self.communication_s


def sum_timings(timings: Iterable[Timing]) -> Timing:
    """Return the timing of products that run one after another."""
    listed = [tuple(vars(timing).values()) for timing in timings]
    return Timing(*map(sum, zip(*listed, strict=True))) if listed else Timing(*[0.0] * 6)


_Key = tuple[str, Matmul2dProblem, Matmul2dConfig, Cluster]


class Timer:
    """Times products on all chips of a cluster, each once.

    Args:
        by: the estimate of a skeleton, or the simulation of the program.
        rule: what the paper leaves open (`readings` says more). "apart": a product pays its prologue and its
            epilogue, and each mesh axis has links of its own. "together": prologue and epilogue run at once, so
            that a product pays the longer of the two (section 4.2). "pooled": both axes share one pool of
            bandwidth, so that operations of a and b seconds take (a + b) / 2 together; by estimate only.
    """

    def __init__(self, by: Reading, rule: Rule = "apart") -> None:
        self.by: Reading = by
        self.rule: Rule = rule
        self._timed = _simulated if by == "simulate" else _pooled if rule == "pooled" else _estimated
        self._known: dict[_Key, Timing] = {}

    def timing(
        self, problem: Matmul2dProblem, entry: Matmul2d, config: Matmul2dConfig, cluster: Cluster
    ) -> Timing:
        """Return the seconds of one product and their parts. Raises what `estimate` and `simulate` raise."""
        # A follower such as wang[S=meshslice] runs the programs of its base.
        key = entry.name.partition("[")[0], problem, config, cluster
        if key not in self._known:
            timing = self._timed(problem, entry, config, cluster)
            if self.rule == "together":
                timing = replace(timing, total_s=timing.total_s - min(timing.before_s, timing.after_s))
            self._known[key] = timing
        return self._known[key]

    def product_s(
        self, problem: Matmul2dProblem, entry: Matmul2d, config: Matmul2dConfig, cluster: Cluster
    ) -> float:
        """Return the seconds of one product."""
        return self.timing(problem, entry, config, cluster).total_s


def _machine(problem: Matmul2dProblem, cluster: Cluster) -> Machine:
    return mesh_machine(cluster, problem.mesh_shape, AXES[: len(problem.mesh_shape)], MESH)


def _estimated(problem: Matmul2dProblem, entry: Matmul2d, config: Matmul2dConfig, cluster: Cluster) -> Timing:
    """Return the timing by closed form, from the skeleton."""
    machine, skeleton = _machine(problem, cluster), entry.skeleton(problem, config)
    timing = Timing(**vars(estimate_skeleton(skeleton, machine)), **_ends(skeleton, machine))
    return _less_backwards(timing, skeleton, machine)


def _pooled(problem: Matmul2dProblem, entry: Matmul2d, config: Matmul2dConfig, cluster: Cluster) -> Timing:
    """Return the timing by closed form where both mesh axes share one pool of bandwidth.

    On one axis there is nothing to share, so that the timing is the estimate.
    """
    timing = _estimated(problem, entry, config, cluster)
    if min(problem.mesh_shape[:2]) == 1:
        return timing
    total_s = pooled_s(entry.skeleton(problem, config), _machine(problem, cluster))
    halves = {name: getattr(timing, name) / 2 for name in ("launch_s", "sync_s", "transfer_s")}
    return replace(timing, total_s=total_s, **halves)


def _simulated(problem: Matmul2dProblem, entry: Matmul2d, config: Matmul2dConfig, cluster: Cluster) -> Timing:
    """Return the timing of the program on every chip; the parts are those of rank 0."""
    program, skeleton = entry.program(problem, config), entry.skeleton(problem, config)
    run = simulate(program, Machine.of(cluster, program))
    parts = run.parts(0)
    products = [span for span in run.spans(0) if span.kind == "matmul"]
    first, last = min(span.start_ps for span in products), max(span.end_ps for span in products)
    ends = {"before_s": first / 1e12, "after_s": run.duration_s - last / 1e12}
    timing = Timing(run.duration_s, *(parts[name] for name in PARTS[:5]), **ends)
    return _less_backwards(timing, skeleton, _machine(problem, cluster))


def _ends(skeleton: Skeleton, machine: Machine) -> dict[str, float]:
    """Return the seconds before the first and after the last product of a skeleton."""
    spans = timeline(skeleton, machine).spans
    products = [span for span in spans if span.kind == "matmul"]
    end = max(span.end_ps for span in spans)
    return {
        "before_s": min(span.start_ps for span in products) / 1e12,
        "after_s": (end - max(span.end_ps for span in products)) / 1e12,
    }


def _less_backwards(timing: Timing, skeleton: Skeleton, machine: Machine) -> Timing:
    """Return a timing whose communication leaves out the ring steps that run backwards.

    They run beside those that run forwards, of which there are at least as many.
    """
    launch = sync = transfer = 0
    for count, task in skeleton.counted_tasks():
        if isinstance(task.work, Transfer) and task.lane.endswith(BACK):
            cost = price(task.work, machine)
            launch += count * cost.launch_ps
            sync += count * cost.sync_ps
            transfer += count * cost.flow_ps
    return replace(
        timing,
        launch_s=timing.launch_s - launch / 1e12,
        sync_s=timing.sync_s - sync / 1e12,
        transfer_s=timing.transfer_s - transfer / 1e12,
    )
