"""Direct execution of the universal product beside schedules by costs, simulated.

    python benchmarks/universal_schedules.py [--states N] [--only TEXT] [--rows FILE] [--seconds N] [--save]

Slicing Is All You Need, sections 4.2, 4.3 and 5.2: "direct execution was almost always as efficient as the optimal
schedule". Every case is simulated in the order of direct execution, two steps ahead, and in the orders of the
greedy, the cost-greedy and the exhaustive schedule, with as many steps ahead. Steps are those of the tiles, which
differ most where these are misaligned, or cut into at least 8. "balanced" is a switch on which the rank with most
to do computes as long as it communicates.

Beside the simulations stand the staged costs of the schedules, the most of any rank; the exhaustive one with the
bound that its search proved.

All rows take some minutes. With --rows each is appended to a file as soon as it is known, and those that the
file has are not computed again, so that a run may be cut (--seconds) and go on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from machine import save

from meshweave.algorithms.universal import (
    Operand,
    Slicing,
    UniversalConfig,
    UniversalProblem,
)
from meshweave.algorithms.universal.config import ScheduleKind
from meshweave.algorithms.universal.volume import volume
from meshweave.cost.rates import RankRates
from meshweave.describe.layout import Layout
from meshweave.describe.layout.grid import ProcessGrid, block_2d, block_cyclic, column_block, row_block
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.describe.machine.network import SwitchNetwork
from meshweave_studies.slicing.issue_rules import schedule_graph
from meshweave_studies.slicing.schedules import search_schedule

CLAIM = 1.05
SIZES = {"square": (12_000, 12_000, 12_000), "mlp-1": (6_000, 48_000, 12_000)}
MACHINES = ("pvc-node", "h100-node", "balanced")
SLICES = (1, 8)
SCHEDULES: tuple[ScheduleKind, ...] = ("greedy", "cost-greedy", "exhaustive")


@dataclass(frozen=True)
class Case:
    """Layouts of A, B and C; `aligned` where no cut of one matrix lies within a tile of another."""

    name: str
    num_ranks: int
    sizes: str
    a: Layout
    b: Layout
    c: Layout
    aligned: bool


def traditional(num_ranks: int, sizes: tuple[int, int, int]) -> tuple[Layout, Layout, Layout]:
    """2D blocks, A and B dealt along k in tiles that both have in common, as SUMMA needs it."""
    grid = ProcessGrid.over(num_ranks)
    m, n, k = sizes
    rows, cols = -(-m // grid.rows), -(-n // grid.cols)
    tile = -(-k // num_ranks)
    return grid.block_cyclic_layout((rows, tile)), grid.block_cyclic_layout((tile, cols)), grid.block_layout()


def cases() -> Iterator[Case]:
    for name, sizes in SIZES.items():
        for count in (4, 6, 8, 12):
            row, column, block = row_block(count), column_block(count), block_2d(count)
            yield Case("row block", count, name, row, row, row, True)
            yield Case("column block", count, name, column, column, column, True)
            yield Case("inner product", count, name, row, column, column, True)
            yield Case("outer product", count, name, column, row, row, True)
            yield Case("2D block, A and B aligned", count, name, *traditional(count, sizes), True)
            if count == 4:
                yield Case("2D block", count, name, block, block, block, True)
        yield from misaligned(name, 12)
    yield from misaligned("square", 8)


def misaligned(sizes: str, count: int) -> Iterator[Case]:
    shapes = {8: ((2, 4), (4, 2), (1, 8)), 12: ((3, 4), (4, 3), (2, 6))}[count]
    first, second, third = (block_2d(count, shape) for shape in shapes)

    def off(shape: tuple[int, int], tile: tuple[int, int], by: tuple[int, int]) -> Layout:
        return ProcessGrid.over(count, shape).block_cyclic_layout(tile, by)

    yield Case("2D block", count, sizes, first, first, first, False)
    yield Case("2D blocks on three grids", count, sizes, first, second, third, False)
    yield Case(
        "2D block, row block, column block", count, sizes, first, row_block(count), column_block(count), False
    )
    tiles = off(shapes[0], (4000, 3000), (1000, 700)), off(shapes[0], (4000, 3000), (0, 0))
    yield Case("tiles, A off by 1000, 700", count, sizes, *tiles, tiles[1], False)
    odd = off(shapes[0], (3100, 2300), (900, 400)), off(shapes[1], (2700, 3700), (300, 1100))
    yield Case(
        "odd tiles off on three grids", count, sizes, *odd, off(shapes[2], (4100, 1900), (50, 650)), False
    )
    cyclic = tuple(block_cyclic((size, size), count, shapes[0]) for size in (1500, 1000, 2000))
    yield Case("block-cyclic 1500, 1000, 2000", count, sizes, *cyclic, False)
    cyclic = tuple(block_cyclic((size, size), count, shapes[0]) for size in (2500, 1800, 700))
    yield Case("block-cyclic 2500, 1800, 700", count, sizes, *cyclic, False)


def machine_of(name: str, slicing: Slicing) -> Cluster | None:
    """The machine with as many chips as the problem has ranks, or None where it has too few."""
    ranks = len(slicing.problem.ranks)
    if name != "balanced":
        cluster = load_cluster(name)
        return cluster if cluster.num_chips >= ranks else None
    base = load_cluster("h100-node")
    assert isinstance(base.network, SwitchNetwork)
    loads = volume(slicing).during.values()
    seconds = (
        max(load.busier_direction_bytes for load in loads) / base.network.axis(0, 1, None).link_bytes_per_s
    )
    if not seconds:
        return None
    chip = replace(
        base.chip, effective_flops_per_s=max(load.flops for load in loads) / seconds, accumulate_share=0.0
    )
    return replace(base, name=name, chip=chip).with_chips(ranks)


def row(case: Case, stationary: Operand, slices: int, where: str, states: int) -> dict[str, Any] | None:
    problem = UniversalProblem(*SIZES[case.sizes], case.a, case.b, case.c)
    config = UniversalConfig(stationary, num_slices=slices)
    slicing = Slicing(problem, config)
    cluster = machine_of(where, slicing)
    if cluster is None:
        return None
    graphs = [schedule_graph(slicing, rank, RankRates.of(cluster)) for rank in problem.ranks]
    if not any(graph.fetches or graph.accumulating for graph in graphs):
        return None
    schedules = {
        schedule.kind: schedule for schedule in search_schedule(problem, config, cluster, max_states=states)
    }
    names = ("direct", *SCHEDULES)
    times, best = {name: schedules[name].simulated_s for name in names}, schedules["exhaustive"]
    return {
        "case": case.name,
        "ranks": case.num_ranks,
        "sizes": case.sizes,
        "aligned": case.aligned,
        "stationary": stationary,
        "slices": slices,
        "machine": where,
        "steps": max(len(graph.products) for graph in graphs),
        "simulated_s": times,
        "direct_over_exhaustive": times["direct"] / times["exhaustive"],
        "direct_over_best": times["direct"] / min(times.values()),
        "staged_s": {name: schedules[name].staged_s for name in names},
        "staged_bound_s": best.bound_s,
        "proven_ranks": best.num_proven,
        "states": best.num_states,
    }


def line(one: dict[str, Any]) -> str:
    """A row of the results, in the order of `COLUMNS`."""
    times, costs = one["simulated_s"], one["staged_s"]
    names = ("direct", *SCHEDULES)
    numbers = [*(times[name] for name in names), *(costs[name] for name in names), one["staged_bound_s"]]
    what = [
        one["case"].replace(",", ""),
        one["ranks"],
        one["sizes"],
        one["stationary"],
        one["slices"],
        one["machine"],
    ]
    cells = [*what, one["steps"], *(f"{value:.6g}" for value in numbers), one["proven_ranks"]]
    return ",".join(map(str, cells))


COLUMNS = ",".join(
    (
        *("case", "ranks", "sizes", "stationary", "slices", "machine", "steps"),
        *(f"simulated {name} s" for name in ("direct", *SCHEDULES)),
        *(f"staged {name} s" for name in ("direct", *SCHEDULES)),
        *("staged bound s", "ranks with proof"),
    )
)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By alignment and stationary matrix: how often direct execution is within 5 % of the exhaustive order."""
    ratios_by = {}
    for aligned in (True, False):
        for stationary in ("c", "a", "b"):
            of = [r for r in rows if r["aligned"] == aligned and r["stationary"] == stationary]
            if not of:
                continue
            ratios = [r["direct_over_exhaustive"] for r in of]
            ratios_by[f"{'aligned' if aligned else 'misaligned'}, stationary {stationary.upper()}"] = {
                "rows": len(of),
                "all ranks proven": sum(r["proven_ranks"] == r["ranks"] for r in of),
                "within 5 %": sum(ratio <= CLAIM for ratio in ratios),
                "mean": statistics.fmean(ratios),
                "least": min(ratios),
                "most": max(ratios),
                "most over the best of all orders": max(r["direct_over_best"] for r in of),
            }
    return ratios_by


Key = tuple[str, int, str, Operand, int, str]
"""Case, ranks, sizes, stationary matrix, slices and machine of a row."""


def jobs(only: str) -> Iterator[tuple[Key, Case]]:
    """All rows to be computed, with the cases whose name has `only`."""
    for case in (case for case in cases() if only in case.name):
        stationaries: tuple[Operand, ...] = ("c", "a", "b")
        for stationary, slices, where in itertools.product(stationaries, SLICES, MACHINES):
            yield (case.name, case.num_ranks, case.sizes, stationary, slices, where), case


def known_rows(path: Path | None, states: int) -> dict[Key, dict[str, Any] | None]:
    """The rows of a file by their keys; None where a machine has no such case."""
    if path is None or not path.exists():
        return {}
    entries = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {tuple(entry["key"]): entry["row"] for entry in entries if entry["states"] == states}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--states", type=int, default=1000, help="that the exhaustive search weighs per rank")
    parser.add_argument("--only", default="", help="cases whose name has this")
    parser.add_argument(
        "--rows", type=Path, help="a file of rows that are known, to which new ones are added"
    )
    parser.add_argument("--seconds", type=float, default=0, help="end after this time; needs --rows to go on")
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/universal_schedules.json"
    )
    options = parser.parse_args()
    known = known_rows(options.rows, options.states)
    began, wanted = time.monotonic(), dict(jobs(options.only))
    for key, case in wanted.items():
        if key in known:
            continue
        if options.seconds and time.monotonic() - began > options.seconds:
            print(f"{len(wanted.keys() - known.keys())} of {len(wanted)} rows are left")
            return
        known[key] = row(case, *key[3:], options.states)
        if options.rows is not None:
            entry = {"key": key, "states": options.states, "row": known[key]}
            with options.rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
    rows = [of for key in wanted if (of := known[key]) is not None]
    total = summary(rows)
    for name, values in total.items():
        print(name, values)
    worse = sorted(
        (r for r in rows if r["direct_over_exhaustive"] > CLAIM), key=lambda r: -r["direct_over_exhaustive"]
    )
    for one in worse:
        aligned = "aligned" if one["aligned"] else "misaligned"
        print(f"{one['direct_over_exhaustive']:.3f} {aligned:10} {line(one)}")
    if options.save:
        record = {
            "states": options.states,
            "summary": total,
            "columns": COLUMNS,
            "more than 5 % over, aligned": [line(one) for one in worse if one["aligned"]],
            "more than 5 % over, misaligned": [line(one) for one in worse if not one["aligned"]],
            "all": [line(one) for one in rows],
        }
        print(save("universal_schedules", record))


if __name__ == "__main__":
    main()
