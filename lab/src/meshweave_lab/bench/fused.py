"""Fused products in a lab: ours beside a product and a reduce-scatter in sequence, and Wang's looped product."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from meshweave.algorithms.table import FUSED_PRODUCTS
from meshweave.algorithms.universal.problem import UniversalProblem
from meshweave.base.errors import LayoutError, ProgramError
from meshweave.describe.layout import Layout, Shard
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.cluster import Cluster
from meshweave.ir.program.text import to_text
from meshweave.tune.fused import FusedChoice, fused_choices
from meshweave_lab.description import SwitchLab
from meshweave_lab.lab import Lab

FusedOp = Literal["reduce-scatter", "all-gather"]
"""What is fused with a product: the reduce-scatter behind it, or the all-gather before it."""

RIVALS: dict[FusedOp, tuple[str, ...]] = {
    "reduce-scatter": ("t3_sequential", "looped_reduce_scatter"),
    "all-gather": ("sequential_all_gather", "looped_all_gather"),
}
OURS: dict[FusedOp, tuple[str, ...]] = {
    "reduce-scatter": ("t3_ring", "t3_direct"),
    "all-gather": ("t3_all_gather",),
}
NOT_RUN = dict.fromkeys(
    (
        "torch.ops.symm_mem.fused_matmul_reduce_scatter",
        "torch.ops.symm_mem.fused_all_gather_matmul",
        "torch async tensor parallelism",
    ),
    "needs CUDA symmetric memory: it does not run on CPU ranks",
)
"""torch's own fused products, and why they are not measured here."""


@dataclass(frozen=True)
class FusedTimes:
    """One rival's runs.

    Attributes:
        times_s: seconds of each run, from the common start to the end of the last rank.
        simulated_s: seconds as predicted.
        bound_s: max(product, transfer) + the transfer of as many rows as the smallest of our tiles has.
        error: the largest absolute error of a result.
    """

    algorithm: str
    tiles: str
    times_s: tuple[float, ...]
    simulated_s: float
    bound_s: float
    error: float

    @property
    def median_s(self) -> float:
        """The median of the runs in seconds."""
        return statistics.median(self.times_s)

    def to_json(self) -> dict[str, Any]:
        """Return all fields, the median, and its ratios to the bound and to the simulation, as JSON values."""
        return {
            **asdict(self),
            "median_s": self.median_s,
            "over_bound": self.median_s / self.bound_s,
            "simulated_over_measured": self.simulated_s / self.median_s,
        }


def fused_problem(sizes: tuple[int, int, int], num_ranks: int, op: FusedOp) -> UniversalProblem:
    """Return the product of A by columns and B by rows whose sum is scattered by rows, or that of A by rows and B
    by columns."""
    mesh = Mesh.of("tp", (num_ranks,), ("x",))
    shards = (1, 0, 0) if op == "reduce-scatter" else (0, 1, 1)
    a, b, c = (Layout(mesh, (Shard(dim),)) for dim in shards)
    return UniversalProblem(*sizes, a, b, c)


def moved_row_bytes(problem: UniversalProblem, op: FusedOp) -> int:
    """Return the bytes of a row that moves: of C where it is scattered, of A where it is gathered."""
    return 4 * (problem.n if op == "reduce-scatter" else problem.k)


def transfer_s(problem: UniversalProblem, op: FusedOp, link_bytes_per_s: float) -> float:
    """Return the seconds in which a rank sends all rows of C but its own, or gets all of A but its own.

    No reduce-scatter or all-gather is faster.
    """
    count = len(problem.ranks)
    return problem.m * moved_row_bytes(problem, op) * (count - 1) / count / link_bytes_per_s


def chosen(problem: UniversalProblem, op: FusedOp, cluster: Cluster) -> list[FusedChoice]:
    """Return both rivals, then our algorithms, each with the tiles that are fastest in simulation.

    Raises LayoutError where one of them does not take the product.
    """
    best: dict[str, FusedChoice] = {}
    for choice in fused_choices(problem, cluster):
        known = best.get(choice.algorithm)
        if known is None or choice.simulated_s < known.simulated_s:
            best[choice.algorithm] = choice
    names = (*RIVALS[op], *OURS[op])
    for name in names:
        if name not in best:
            raise LayoutError(f"{name}: {FUSED_PRODUCTS[name].refusal(problem)}")
    return [best[name] for name in names]


def refuse_wrong_results(measured: Sequence[FusedTimes]) -> None:
    """Raise ProgramError where a result differs from the dense product."""
    for times in measured:
        if times.error:
            raise ProgramError(f"{times.algorithm}: differs from the dense product by {times.error:g}")


def bench_fused(
    lab: Lab,
    sizes: tuple[int, int, int],
    ratio: float = 1.0,
    *,
    op: FusedOp = "reduce-scatter",
    calibrated: Cluster | None = None,
    repeat: int = 5,
    timeout_s: float = 600.0,
) -> list[FusedTimes]:
    """Build a lab, run all rivals in it by turns, and take it down.

    Args:
        sizes: m, n, k of the product, over all ranks.
        op: what is fused with the product.
        ratio: seconds of the product over those of the transfer; sets the pace of products.
        calibrated: the cluster on which tiles are chosen and runs are simulated; the described lab if None.

    Raises what `Lab.up` and `RunningLab.launch` raise, and LayoutError where the product does not fit.
    """
    problem, described = fused_problem(sizes, lab.num_ranks, op), lab.cluster()
    network = lab.description.network
    if not isinstance(network, SwitchLab) or network.ranks_per_host > 1:
        raise LayoutError(
            f"{lab.description.name}: fused products are measured in a lab whose hosts are on one switch, a rank "
            "to a host; give a lab of kind switch with ranks_per_host = 1"
        )
    rate = network.nic
    moved_s = transfer_s(problem, op, rate.bytes_per_s)
    pace = 2 * problem.m * problem.n * problem.k / lab.num_ranks / (ratio * moved_s)
    cluster = calibrated or described
    choices = chosen(problem, op, replace(cluster, chip=cluster.chip.with_flops_per_s(pace)))
    payload = {
        "sizes": list(sizes),
        "programs": [to_text(choice.program) for choice in choices],
        "flops_per_s": pace,
        "repeat": repeat,
        "seed": 0,
        "deadline_s": timeout_s,
    }
    no_pace = {"MESHWEAVE_PACE_FLOPS_PER_S": ""}
    with lab.up() as running:
        ranks = running.launch(
            "meshweave_lab.bench.fused_rank:bench_fused", payload, timeout_s=timeout_s, env=no_pace
        )
    tile_rows = min(choice.tiles.rows for choice in choices if choice.tiles is not None)
    bound_s = max(ratio, 1.0) * moved_s + tile_rows * moved_row_bytes(problem, op) / rate.bytes_per_s
    measured = []
    for number, choice in enumerate(choices):
        runs = zip(*(rank["times"][number] for rank in ranks), strict=True)
        measured.append(
            FusedTimes(
                choice.algorithm,
                "" if choice.tiles is None else str(choice.tiles),
                tuple(max(run) for run in runs),
                choice.simulated_s,
                bound_s,
                max(rank["errors"][number] for rank in ranks),
            )
        )
    return measured
