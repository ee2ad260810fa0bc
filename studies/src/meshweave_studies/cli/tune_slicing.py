"""`meshweave tune layouts` and `tune schedule`: layouts of a universal product, and the order of its steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from meshweave.algorithms.universal import Operand, Slicing, StageLimits, UniversalConfig, UniversalProblem
from meshweave.algorithms.universal.config import SCHEDULE_KINDS
from meshweave.algorithms.universal.problem import OPERANDS
from meshweave.base.errors import LayoutError, UnsupportedError, printable, require_known
from meshweave.base.limits import SCHEDULED_PRODUCTS
from meshweave.base.units import format_bytes, format_s
from meshweave.cli.option_fields import option, refuse_given, with_options
from meshweave.cli.options import (
    BARE_CHIP_BYTES,
    print_json,
    progress_bar,
    read_bytes,
    read_dtype,
    read_mesh,
    read_names,
)
from meshweave.cli.tune import JsonOption
from meshweave.cost.rates import RankRates
from meshweave.describe.layout import Layout
from meshweave.describe.layout.grid import ProcessGrid
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.report.tables import print_table
from meshweave.tune.universal import tune_universal
from meshweave_studies.slicing.layouts import TunedLayouts, layout_words, tune_layouts
from meshweave_studies.slicing.schedules import SimulatedSchedule, search_schedule

MAX_LAYOUT_RANKS = 64
MAX_SCHEDULE_RANKS = 64
MAX_SIZE = 1 << 24
MAX_AT_ONCE = 8
"""Of products, fetches or accumulates: a stage of more has too many selections to weigh."""

DtypeOption = Annotated[str, typer.Option(help="Element type.")]


@dataclass(frozen=True)
class ProductOptions:
    """The sizes of a product, and the machine."""

    m: int = option(4096, "Rows of A and C.", min=1, max=MAX_SIZE)
    n: int = option(4096, "Columns of B and C.", min=1, max=MAX_SIZE)
    k: int = option(4096, "Columns of A, rows of B.", min=1, max=MAX_SIZE)
    cluster: str = option("h100-node", "A catalog cluster or a TOML file; ':N' sets the number of chips.")


@dataclass(frozen=True)
class LayoutsOptions(ProductOptions):
    """The product whose layouts are searched, those that are given, and the limit of memory."""

    a: str | None = option(None, "Keep A in this layout: a grid ROWSxCOLS or COPIESxROWSxCOLS.")
    b: str | None = option(None, "Keep B in this layout.")
    c: str | None = option(None, "Keep C in this layout.")
    dtype: DtypeOption = "float32"
    memory: str | None = option(
        None, "The most that a rank may hold, such as 512MiB or 2GB. Default: the chip's memory."
    )
    count: int = option(5, "How many to list, the best first.", min=1, max=1000)
    json: JsonOption = False


@with_options
def layouts(options: LayoutsOptions) -> None:
    """Find the layouts of A, B and C in which their product takes the least time within a memory limit.

    Tried are blocks on every process grid with every number of copies, and in each of them every stationary
    matrix, number of slices and place to sum up (Slicing Is All You Need, section 5.2). Times are estimates.

    Example: meshweave tune layouts --m 8192 --n 8192 --k 8192 --cluster h100-node:8 --memory 256MiB
    """

    m, n, k = options.m, options.n, options.k
    target = _cluster(options.cluster, MAX_LAYOUT_RANKS)
    limit = (
        target.chip.memory_bytes
        if options.memory is None
        else read_bytes("--memory", options.memory, BARE_CHIP_BYTES)
    )
    kept = {
        name: read_grid(text, target.num_chips)
        for name, text in zip(OPERANDS, (options.a, options.b, options.c), strict=True)
        if text
    }
    with progress_bar("trying layouts", plain_lines=True) as progress:
        results = tune_layouts(
            (m, n, k),
            target.num_chips,
            RankRates.of(target, read_dtype(options.dtype)),
            given=kept,
            dtype=read_dtype(options.dtype),
            memory_bytes=limit,
            count=options.count,
            progress=progress,
        )
    if options.json:
        print_json([_layouts_json(result) for result in results])
        return
    typer.echo(
        f"C ({m}, {n}) = A ({m}, {k}) B ({k}, {n}) in {options.dtype} on {target.num_chips} chips of "
        f"{target.name}, at most {format_bytes(limit)} a rank"
    )
    _print_layouts(results)


@dataclass(frozen=True)
class ScheduleOptions(ProductOptions):
    """The product whose order is searched, its layouts, and the limits of its stages."""

    a: str | None = option(None, "Layout of A: a grid ROWSxCOLS or COPIESxROWSxCOLS. Default: row blocks.")
    b: str | None = option(None, "Layout of B. Default: row blocks.")
    c: str | None = option(None, "Layout of C. Default: row blocks.")
    dtype: DtypeOption = "float32"
    kinds: str = option(
        "all", "direct, greedy, cost-greedy or exhaustive, several with commas, or 'all'.", "--kind"
    )
    max_states: int | None = option(
        None,
        "States that the exhaustive search may weigh per rank before it settles. "
        "Default: up to 20,000, fewer where ranks have much work that differs.",
        min=1,
    )
    stationary: str = option("", "The matrix that stays put: a, b or c. Default: what is estimated fastest.")
    products: int = option(1, "Products of one stage, and at once on a rank.", min=1, max=MAX_AT_ONCE)
    fetches: int = option(2, "Fetches of one stage.", min=1, max=MAX_AT_ONCE)
    accumulates: int = option(1, "Accumulates of one stage, and at once on a rank.", min=1, max=MAX_AT_ONCE)
    json: JsonOption = False


@with_options
def schedule(options: ScheduleOptions) -> None:
    """Find the order in which the ranks of a product issue their fetches, products and accumulates.

    Each kind of schedule gives an order, and its program is simulated, contention included (Slicing Is All You
    Need, sections 4.2 and 4.3). Stationary matrix and slices are those with the least estimated time.
    `meshweave.matmul` takes the same kinds and limits as `schedule` and `limits`.

    Example: meshweave tune schedule --m 4096 --n 4096 --k 4096 --cluster h100-node:8 --a 2x4 --b 2x4 --c 2x4
    """

    target = _cluster(options.cluster, MAX_SCHEDULE_RANKS)
    rows = f"{target.num_chips}x1"
    grid_a, grid_b, grid_c = (
        read_grid(text or rows, target.num_chips) for text in (options.a, options.b, options.c)
    )
    problem = UniversalProblem(
        options.m, options.n, options.k, grid_a, grid_b, grid_c, read_dtype(options.dtype)
    )
    wanted = _schedule_kinds(options.kinds)
    if "exhaustive" not in wanted:
        refuse_given(options, ("max_states",), f"--kind {options.kinds}", "has no exhaustive search")
    with progress_bar("simulating schedules", plain_lines=True) as progress:
        config = tune_universal(
            problem,
            RankRates.of(target, problem.dtype),
            stationary=_operand(options.stationary),
            limits=StageLimits(options.products, options.fetches, options.accumulates),
        ).config
        _check_schedule(problem, config)
        results = search_schedule(
            problem, config, target, kinds=wanted, max_states=options.max_states, progress=progress
        )
    if options.json:
        print_json({"config": str(config), "schedules": [_schedule_json(result) for result in results]})
        return
    _print_schedules(problem, config, target, results)


def read_grid(text: str, num_ranks: int) -> Layout:
    """Return blocks on the process grid that "4x2" or, in two copies, "2x2x2" stands for. Raises LayoutError."""
    shape = read_mesh(text)
    if math.prod(shape) != num_ranks:
        raise LayoutError(f"grid '{printable(text)}' is not one of {num_ranks} processes, one a rank")
    copies, rows, cols = shape if len(shape) == 3 else (1, *shape)
    return ProcessGrid(rows, cols, copies).block_layout()


def _cluster(text: str, max_ranks: int) -> Cluster:
    cluster = load_cluster(text)
    if cluster.num_chips > max_ranks:
        raise LayoutError(
            f"{printable(text)} has {cluster.num_chips} chips; the search takes at most {max_ranks}: give NAME:N"
        )
    return cluster


def _check_schedule(problem: UniversalProblem, config: UniversalConfig) -> None:

    slicing, most = Slicing(problem, config), SCHEDULED_PRODUCTS.most
    num_products = sum(len(slicing.steps(rank)) for rank in problem.ranks)
    if num_products > most:
        raise UnsupportedError(
            f"the product on {len(problem.ranks)} ranks {SCHEDULED_PRODUCTS.refusal(num_products)}"
        )


def _operand(text: str) -> Operand | None:

    for operand in OPERANDS:
        if text == operand:
            return operand
    if text:
        raise LayoutError(f"--stationary {printable(text)}: give a, b or c")
    return None


def _schedule_kinds(text: str) -> Any:

    names = read_names(text) or SCHEDULE_KINDS
    for name in names:
        require_known(name, SCHEDULE_KINDS, "there is no schedule", UnsupportedError, "there are")
    return names


def _layouts_json(result: TunedLayouts) -> dict[str, Any]:

    return {
        **{name: layout_words(result.problem.layout(name)) for name in ("a", "b", "c")},
        "config": str(result.tuned.config),
        "estimate_s": result.tuned.estimate.total_s,
        "moved_bytes": result.tuned.moved_bytes,
        "matrix_bytes": result.matrix_bytes,
        "extra_bytes": result.extra_bytes,
    }


def _print_layouts(results: tuple[TunedLayouts, ...]) -> None:
    head = ("A", "B", "C", "computed with", "time", "moved", "matrices", "besides")
    rows = []
    for data in map(_layouts_json, results):
        amounts = (format_bytes(data[name]) for name in ("moved_bytes", "matrix_bytes", "extra_bytes"))
        names = (data[name] for name in ("a", "b", "c", "config"))
        rows.append((*names, format_s(data["estimate_s"]), *amounts))
    print_table(head, rows, num_left=4)
    typer.echo(
        "2 x (3 x 2): two copies, each in blocks on a grid of 3 x 2. Moved: by all ranks together. "
        "Matrices and besides: the most on a rank."
    )


def _schedule_json(result: SimulatedSchedule) -> dict[str, Any]:
    return {
        "kind": result.kind,
        "simulated_s": result.simulated_s,
        "staged_s": result.staged_s,
        "bound_s": result.bound_s,
        "num_proven": result.num_proven,
        "num_states": result.num_states,
    }


def _print_schedules(
    problem: UniversalProblem,
    config: UniversalConfig,
    cluster: Cluster,
    results: tuple[SimulatedSchedule, ...],
) -> None:

    a, b, c = (layout_words(problem.layout(name)) for name in ("a", "b", "c"))
    typer.echo(
        f"C ({problem.m}, {problem.n}) on {c} = A ({problem.m}, {problem.k}) on {a} times B ({problem.k}, "
        f"{problem.n}) on {b}, {problem.dtype}, {cluster.num_chips} chips of {cluster.name}; {config}"
    )
    rows = []
    for result in results:
        proven = bound = "-"
        if result.bound_s is not None:
            proven, bound = f"{result.num_proven} of {len(problem.ranks)} ranks", format_s(result.bound_s)
        rows.append((result.kind, format_s(result.simulated_s), format_s(result.staged_s), bound, proven))
    print_table(("schedule", "simulated", "staged", "staged at least", "proven best"), rows, num_left=1)
    typer.echo(
        "Staged: as if the slowest rank waited for all its transfers and products after every stage, the cost "
        "that greedy and exhaustive schedules lower."
    )
