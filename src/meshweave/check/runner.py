"""Runs of a planned layer on local processes: checked, timed, and predicted beside it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.base.errors import LayoutError
from meshweave.base.units import to_s
from meshweave.check.local_constants import (
    ConstantPrograms,
    LocalConstants,
    fit_local_constants,
    part_of_product,
)
from meshweave.check.processes import run_on_processes
from meshweave.check.reduced import ReducedProduct, reduce_products
from meshweave.check.verifier import (
    NumRingDirections,
    check_num_ranks,
    check_num_ring_directions,
    program_run,
)
from meshweave.cost.machine import Machine
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.ir.analysis.dataflow import Dataflow, analyse
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program import Program
from meshweave.ir.program.text import to_text
from meshweave.lower import lower_rings
from meshweave.simulate import simulate
from meshweave.trace import Trace, check_order, merge
from meshweave.tune.plan import Plan
from meshweave.tune.selection import select_candidates, select_layers, select_passes, select_products


@dataclass(frozen=True)
class MeasuredProduct:
    """A product of a plan that ran on local processes at reduced size.

    Attributes:
        title: its algorithm, layer, pass and config in words.
        product: the product in the plan, and the program of reduced size.
        error: the largest absolute difference from the dense product over all runs.
        runs_s: seconds of every measured run, ascending.
        measured: the trace of the median run (of two, the shorter).
        predicted: the trace of a simulation of the same program.
        constants: the constants of the prediction, where they were measured beside the runs; else None.
        num_orderings: over all measured runs, the number of edges (an op waits for another) that were checked
            against the measured times; all of them held.
    """

    title: str
    product: ReducedProduct
    error: float
    runs_s: tuple[float, ...]
    measured: Trace
    predicted: Trace
    num_orderings: int
    constants: LocalConstants | None = None

    @property
    def median_s(self) -> float:
        """Return the median of the measured runs, in seconds."""
        return statistics.median(self.runs_s)

    def to_json(self) -> dict[str, Any]:
        """Return the measurement as JSON values: sizes, error, seconds and constants, without the traces.

        Of these it has "overlap_s" and "exposed_s" of the median run, one number for each rank that has ops.
        """
        problem = self.product.problem
        assert problem is not None
        ranks = sorted({span.rank for span in self.measured.spans})
        return {
            "title": self.title,
            "mesh_shape": list(problem.mesh_shape),
            "m_n_k": [problem.m, problem.n, problem.k],
            "dataflow": problem.dataflow,
            "max_abs_error": self.error,
            "orderings_checked": self.num_orderings,
            "measured_s": list(self.runs_s),
            "measured_median_s": self.median_s,
            "predicted_s": self.predicted.duration_s,
            "constants": None if self.constants is None else self.constants.to_json(),
            "overlap_s": [self.measured.overlap_s(rank) for rank in ranks],
            "exposed_s": [self.measured.exposed_s(rank) for rank in ranks],
        }


@dataclass(frozen=True)
class RunReport:
    """What `run` measured.

    `skipped` has the names of the algorithms that "all" left out because they have no mesh of so many ranks.
    """

    products: tuple[MeasuredProduct, ...]
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class PreparedProduct:
    """A product ready to run.

    Attributes:
        title: its algorithm, layer, pass and config in words.
        flow: the dataflow of its program, proved by `validate` except for the numbers. Collectives are rings in
            `num_ring_directions` directions; for 0 they stay collectives.
    """

    title: str
    product: ReducedProduct
    flow: Dataflow
    num_ring_directions: NumRingDirections

    @property
    def constant_programs(self) -> ConstantPrograms | None:
        """Return the programs that measure constants for this product; None if a part of it has no program."""
        problem = self.product.problem
        assert problem is not None
        try:
            entry = PRODUCTS_2D.named(self.product.planned.candidate.entry_name)
            program = entry.program(*part_of_product(problem, self.product.config))
        except LayoutError:
            return None
        return ConstantPrograms.of(_lowered(program, self.num_ring_directions))


def run(
    plan: Plan,
    cluster: Cluster | None = None,
    *,
    layer: str = "ff1",
    passes: Sequence[str] | None = None,
    algorithms: Sequence[str] | str = "best",
    num_ranks: int = 4,
    max_dim: int = 2048,
    repeat: int = 25,
    num_ring_directions: NumRingDirections = 1,
    seed: int = 0,
    timeout_s: float = 120.0,
) -> RunReport:
    """Execute a layer of a plan at reduced size on local processes, and check its numbers and order of events.

    Args:
        cluster: the machine that the prediction beside the measurement is made for. By default these
            processes: constants are measured in turns with the runs (`check.local_constants`).
        layer: name of a layer of the plan.
        passes: of "forward", "backward_data", "backward_weight"; None for all.
        algorithms: names, "best" for the first of the plan that has a mesh of `num_ranks`, or "all".
        num_ranks: number of local processes, 1 to 64.
        max_dim: sizes are reduced by one factor until none is larger.
        repeat: measured runs of each program, after one to warm up.
        num_ring_directions: directions of the rings that collectives run as, 1 or 2; 0 leaves them to gloo.
        seed: seed of the operands.
        timeout_s: seconds after which everything is stopped.

    Raises:
        DescriptionError: the plan has no such layer, pass or algorithm.
        LayoutError: an argument is out of range, an algorithm has no mesh of so many ranks, or a product does
            not fit at this size.
        ProgramError: a program is unsound, or a run broke the order that its program demands.
        UnsupportedError: torch is missing.
        RankLostError, DeadlineError: a process died, hung, or all took too long.
        MeshweaveError, RankError: what a rank raised.
    """
    check_num_ranks(num_ranks)
    if not (1 <= repeat <= 1000 and 8 <= max_dim <= 1 << 20 and 0 < timeout_s < 1e6):
        raise LayoutError("repeat must be 1 to 1000, max-dim 8 to 2**20, timeout positive seconds")
    check_num_ring_directions(num_ring_directions)
    prepared, skipped = prepare(plan, layer, passes, algorithms, num_ranks, max_dim, num_ring_directions)
    if cluster is not None and cluster.num_chips < num_ranks:
        cluster = cluster.with_chips(num_ranks)
    measured = measure(prepared, cluster, num_ranks, repeat, seed, timeout_s)
    return RunReport(tuple(measured), skipped)


def prepare(
    plan: Plan,
    layer: str,
    passes: Sequence[str] | None,
    algorithms: Sequence[str] | str,
    num_ranks: int,
    max_dim: int,
    num_ring_directions: NumRingDirections,
) -> tuple[list[PreparedProduct], tuple[str, ...]]:
    """Return the products to run, and the names of the algorithms that "all" leaves out for want of a mesh.

    Args:
        layer: name of a layer of the plan.
        passes: of "forward", "backward_data", "backward_weight"; None for all.
        algorithms: names, "best" for the first of the plan that has a mesh of `num_ranks`, or "all".
        num_ranks: number of local processes.
        max_dim: sizes are reduced by one factor until none is larger.
        num_ring_directions: directions of the rings that collectives become, 1 or 2; 0 leaves them as they are.

    Raises:
        DescriptionError: the plan has no such layer, pass or algorithm.
        LayoutError: a product cannot be reduced, or an algorithm has no mesh of so many ranks.
        ProgramError: a program is unsound, or its collectives cannot become rings.
    """
    select_layers(plan, [layer])
    if passes is not None:
        select_passes(passes)
    names, skipped = _algorithms(plan, algorithms, num_ranks)
    selected = select_products(plan, algorithms=names, layers=[layer], passes=passes)
    prepared = []
    for product in reduce_products(selected, num_ranks, max_dim, where_too_small="drop slices"):
        if product.program is None:
            raise LayoutError(f"{product.title}: {product.skipped}")
        program = _lowered(product.program, num_ring_directions)
        validate(program, labels=False)
        title = product.planned.title(product.config)
        prepared.append(PreparedProduct(title, product, analyse(program), num_ring_directions))
    if not prepared:
        raise LayoutError(f"no algorithm of the plan has a mesh of {num_ranks} ranks")
    return prepared, skipped


def _lowered(program: Program, num_ring_directions: NumRingDirections) -> Program:
    return lower_rings(program, 2 if num_ring_directions == 2 else 1) if num_ring_directions else program


def _algorithms(
    plan: Plan, algorithms: Sequence[str] | str, num_ranks: int
) -> tuple[list[str], tuple[str, ...]]:
    """Return the names of the algorithms to run, and of "all" those that cannot."""
    usable = {
        c.algorithm: bool(PRODUCTS_2D.named(c.entry_name).mesh_shapes(num_ranks)) for c in plan.candidates
    }
    with_mesh = [name for name, has_mesh in usable.items() if has_mesh]
    if algorithms == "all":
        return with_mesh, tuple(name for name, has_mesh in usable.items() if not has_mesh)
    if algorithms == "best":
        names = with_mesh[:1] or list(usable)[:1]
    else:
        names = [algorithms] if isinstance(algorithms, str) else list(algorithms)
    for candidate in select_candidates(plan, names):
        if not usable[candidate.algorithm]:
            raise LayoutError(
                f"{candidate.algorithm} has no mesh of {num_ranks} ranks; give another number of --ranks"
            )
    return names, ()


def measure(
    prepared: Sequence[PreparedProduct],
    cluster: Cluster | None,
    num_ranks: int,
    repeat: int,
    seed: int,
    timeout_s: float,
) -> list[MeasuredProduct]:
    """Run all products in one set of processes, and simulate each beside its measurement.

    Args:
        cluster: the machine that is simulated; None for the catalog's `local-cpu`, with constants measured in
            turns with the runs where a part of the product can run.
        repeat: measured runs of each program, after one to warm up.
        seed: seed of the operands.
        timeout_s: seconds after which everything is stopped.

    Raises:
        ProgramError: a run broke the order that its program demands.
        UnsupportedError: torch is missing.
        RankLostError, DeadlineError: a process died, hung, or all took too long.
        MeshweaveError, RankError: what a rank raised.
    """
    deadline_s = max(timeout_s - 10, timeout_s / 2)  # so that ranks can find out, and say, what is wrong
    requests, beside = [], []
    for item in prepared:
        request = program_run(item.flow.program, 0, seed, deadline_s, repeat)
        programs = None if cluster is not None else item.constant_programs
        if programs is not None:
            request = replace(request, beside=tuple(map(to_text, programs.listed)))
        requests.append(request)
        beside.append(programs)
    by_rank = run_on_processes(requests, num_ranks, timeout_s)
    local = load_cluster("local-cpu").with_chips(num_ranks)
    measured = []
    for number, (item, programs) in enumerate(zip(prepared, beside, strict=True)):
        results = [results[number] for results in by_rank]
        constants = None
        if programs is not None:
            constants = fit_local_constants(programs, _median_durations(results), local)
        measured.append(_measured_product(item, results, constants or cluster or local, repeat))
    return measured


def _median_durations(results: Sequence[dict[str, Any]]) -> list[float]:
    """Return the median seconds of each program beside a product, from the first start to the last end."""
    by_program = zip(*(result["beside"] for result in results), strict=True)
    return [
        statistics.median(
            to_s(max(end for _, end in run) - min(start for start, _ in run))
            for run in zip(*ranks, strict=True)
        )
        for ranks in by_program
    ]


def _measured_product(
    item: PreparedProduct, results: Sequence[dict[str, Any]], machine: Cluster | LocalConstants, repeat: int
) -> MeasuredProduct:
    runs = [
        merge([Trace.from_json(result["traces"][number]) for result in results]) for number in range(repeat)
    ]
    num_orderings = sum(check_order(trace, item.flow) for trace in runs)
    runs.sort(key=lambda trace: trace.duration_s)
    program = item.flow.program
    constants = machine if isinstance(machine, LocalConstants) else None
    cluster = machine.cluster if isinstance(machine, LocalConstants) else machine
    return MeasuredProduct(
        item.title,
        item.product,
        max(result["error"] for result in results),
        tuple(trace.duration_s for trace in runs),
        runs[(len(runs) - 1) // 2],
        simulate(program, Machine.of(cluster, program)).trace(),
        num_orderings,
        constants,
    )
