"""`meshweave.matmul` beside DTensor's `a @ b` over all pairs of placements on a 2D mesh, interleaved.

    python benchmarks/universal_placements.py [--pairs N] [--json FILE]                     on this host, unpaced
    python benchmarks/universal_placements.py --lab examples/labs/torus-2x2.toml --pairs 32      on shaped links

Both give the result in the placements that DTensor chooses. A time is from a common start to the end of the last
rank; what counts is the median of each and their ratio. In a lab products are paced and each time stands beside
max(compute, bytes / rate) of the rank with most to do, the bytes over all its links at once, for the best way
there is of computing it. `--ours dtensor` puts DTensor in both places, which shows the noise.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from machine import describe_environment
from universal_rank import placements, words

from meshweave.algorithms.universal import Slicing, UniversalProblem, universal_configs
from meshweave.algorithms.universal.volume import volume
from meshweave.describe.layout import Layout
from meshweave.describe.layout.mesh import Mesh
from meshweave.execute.ranks.launch import launch
from meshweave_lab import Lab
from meshweave_lab.bench.dtensor_traffic import DTensorTraffic, PlacedProduct, dtensor_traffics
from meshweave_lab.description import SwitchLab, TorusLab

Pair = tuple[tuple[str, ...], tuple[str, ...]]
TARGET = "universal_rank:measure"


def all_pairs(num_axes: int) -> list[Pair]:
    """Every placement of A with every placement of B."""
    placed = list(itertools.product(("S0", "S1", "R", "P"), repeat=num_axes))
    return [(a, b) for a in placed for b in placed]


def kind(traffic: DTensorTraffic) -> str:
    """The collectives that DTensor uses."""
    return " + ".join(sorted(one.kind for one in traffic.collectives[0])) or "none"


def stratified(pairs: Sequence[Pair], kinds: Sequence[str], count: int, seed: int) -> list[int]:
    """`count` of the pairs, of each kind of what DTensor does its share, in the order given."""
    generator = random.Random(seed)
    ordered = sorted(range(len(pairs)), key=lambda index: (kinds[index], generator.random()))
    step = len(pairs) / min(count, len(pairs))
    return sorted(ordered[int((turn + 0.5) * step)] for turn in range(min(count, len(pairs))))


@dataclass(frozen=True)
class Work:
    """What one choice of the universal product asks of the rank it asks most of, and of all together."""

    flops: int
    received_bytes: int
    received_bytes_of_all: int


def works(sizes: tuple[int, int, int], mesh: Mesh, pair: Pair, out: Sequence[str], dtype: str) -> list[Work]:
    """Of every choice there is: which matrix stays, who computes copies, where partial operands are summed."""
    a, b, c = (Layout(mesh, placements(one)) for one in (*pair, out))
    problem = UniversalProblem(*sizes, a, b, c, dtype)
    found = []
    for choice in dict.fromkeys(replace(one, num_slices=1) for one in universal_configs(problem)):
        moved = volume(Slicing(problem, choice))
        received = [sum(phase[rank].received_bytes for phase in moved.phases) for rank in mesh.ranks]
        found.append(Work(moved.max_rank_flops, max(received), sum(received)))
    return found


def incoming_bytes_per_s(lab: Lab) -> float:
    """What a rank can receive over all its links together."""
    network = lab.description.network
    if isinstance(network, TorusLab):
        axes = zip(network.shape, network.links, strict=True)
        return sum(
            link.bytes_per_s + (link.back_bytes_per_s if size > 2 else 0) for size, link in axes if size > 1
        )
    if isinstance(network, SwitchLab):
        inside = network.local_bytes_per_s if network.ranks_per_host > 1 else 0.0
        return network.nic.bytes_per_s / network.ranks_per_host + inside
    direct = 0 if network.direct is None else network.direct.bytes_per_s
    return network.nic.bytes_per_s + direct * (network.hosts_per_group - 1)


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def pair(text: str) -> tuple[tuple[str, ...], ...]:
    """`R,S1:P,P` as words."""
    return tuple(tuple(part.split(",")) for part in text.split(":"))


def run(
    options: argparse.Namespace, pairs: Sequence[Pair], lab: Lab | None, pace: float
) -> list[dict[str, Any]]:
    """What each rank measured."""
    payload = {
        "sizes": options.sizes,
        "mesh_shape": options.mesh,
        "dtype": options.dtype,
        "pairs": pairs,
        "lab": str(options.lab.resolve()) if options.lab else None,
        "repeat": options.repeat,
        "ours": options.ours,
        "transport": options.transport,
        "flops_per_s": pace,
        "deadline_s": options.timeout,
    }
    env = {"PYTHONPATH": str(Path(__file__).parent), "MESHWEAVE_PACE_FLOPS_PER_S": ""}
    if lab is None:
        return launch(TARGET, math.prod(options.mesh), payload, timeout_s=options.timeout, env=env)
    with lab.up() as running:
        return running.launch(TARGET, payload, timeout_s=options.timeout, env=env)


def rows_of(
    options: argparse.Namespace,
    pairs: Sequence[Pair],
    found: Sequence[DTensorTraffic],
    ranks: Sequence[dict[str, Any]],
    pace: float,
    rate: float,
) -> list[dict[str, Any]]:
    """One row per pair: times, medians, how many times faster, bytes and, with a pace and a rate, the bound."""
    mesh, rows = Mesh.of("mesh", options.mesh, ("row", "col")[: len(options.mesh)]), []
    for number, (pair, traffic) in enumerate(zip(pairs, found, strict=True)):
        parts = [rank["rows"][number] for rank in ranks]
        out = parts[0]["out"]
        errors = [max(part["errors"][which] for part in parts) for which in (0, 1)]
        if any(errors):
            sys.exit(f"{show(pair, out)}: wrong by {errors[0]:g} (DTensor), {errors[1]:g} (ours)")
        if out != words(traffic.out_placements):
            sys.exit(f"{show(pair, out)}: DTensor was expected to choose {words(traffic.out_placements)}")
        times = {
            name: [max(run) for run in zip(*(part[name] for part in parts), strict=True)]
            for name in ("dtensor_s", "ours_s")
        }
        medians = {name: statistics.median(runs) for name, runs in times.items()}
        ways = works(options.sizes, mesh, pair, out, options.dtype)
        bound = None
        if pace and rate:
            bound = min(max(way.flops / pace, way.received_bytes / rate) for way in ways)
        rows.append(
            {
                "a": pair[0],
                "b": pair[1],
                "out": out,
                "dtensor_does": kind(traffic),
                "dtensor_bytes": traffic.received_bytes,
                "least_bytes": min(way.received_bytes_of_all for way in ways),
                "bound_s": bound,
                "times_faster": medians["dtensor_s"] / medians["ours_s"],
                **{f"median_{name}": median for name, median in medians.items()},
                **times,
            }
        )
    return rows


def show(pair: Pair, out: Sequence[str]) -> str:
    return " ".join(f"({','.join(one)})" for one in pair) + f" -> ({','.join(out)})"


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    faster = [row["times_faster"] for row in rows]
    kinds = sorted({row["dtensor_does"] for row in rows})
    of_kind = {one: [row["times_faster"] for row in rows if row["dtensor_does"] == one] for one in kinds}
    bounded = [row for row in rows if row["bound_s"]]
    over = {
        name: geometric_mean([row[f"median_{name}_s"] / row["bound_s"] for row in bounded])
        for name in ("dtensor", "ours")
        if bounded
    }
    return {
        "num_pairs": len(rows),
        "times_faster": {
            "geometric_mean": geometric_mean(faster),
            "least": min(faster),
            "most": max(faster),
            "slower_pairs": sum(one < 1 for one in faster),
        },
        "by_what_dtensor_does": {
            one: {"num_pairs": len(found), "geometric_mean": geometric_mean(found), "least": min(found)}
            for one, found in of_kind.items()
        },
        "over_bound": over,
    }


def report(rows: Sequence[dict[str, Any]], total: dict[str, Any]) -> None:
    def line(row: dict[str, Any]) -> str:
        over = f"  {row['median_ours_s'] / row['bound_s']:.2f} x bound" if row["bound_s"] else ""
        return (
            f"  {show((row['a'], row['b']), row['out']):34}{row['median_dtensor_s'] * 1e3:10.2f}"
            f"{row['median_ours_s'] * 1e3:10.2f}{row['times_faster']:8.2f}{over}  {row['dtensor_does']}"
        )

    faster = total["times_faster"]
    moved = {name: sum(row[f"{name}_bytes"] for row in rows) for name in ("dtensor", "least")}
    print(f"bytes received, all pairs: DTensor {moved['dtensor']}, least of ours {moved['least']}")
    print(
        f"{total['num_pairs']} pairs, times faster than DTensor: geometric mean {faster['geometric_mean']:.2f}, "
        f"least {faster['least']:.2f}, most {faster['most']:.2f}; slower on {faster['slower_pairs']}"
    )
    for name, over in total["over_bound"].items():
        print(f"{name}: {over:.2f} x the bound (geometric mean)")
    print(f"\n{'what DTensor does':42}{'pairs':>6}{'mean':>8}{'least':>8}")
    for name, found in total["by_what_dtensor_does"].items():
        print(f"{name:42}{found['num_pairs']:6}{found['geometric_mean']:8.2f}{found['least']:8.2f}")
    print(f"\nworst five{'DTensor ms':>36}{'ours ms':>10}{'faster':>8}")
    for row in sorted(rows, key=lambda row: row["times_faster"])[:5]:
        print(line(row))


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.replace("x", ",").split(",")))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=numbers, default=(512, 512, 512), help="M,N,K")
    parser.add_argument("--mesh", type=numbers, default=(2, 2), help="ROWSxCOLS")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64"))
    parser.add_argument("--pairs", type=int, help="as many of all, spread over what DTensor does for them")
    parser.add_argument("--seed", type=int, default=0, help="of that choice")
    parser.add_argument("--only", type=pair, nargs="+", help="these pairs, such as R,S1:P,P")
    parser.add_argument("--repeat", type=int, default=7, help="runs of each on a pair, after one to warm up")
    parser.add_argument("--transport", default="messages", choices=("auto", "messages", "shared"))
    parser.add_argument("--lab", type=Path, help="LAB.toml: run in it, with products at its pace")
    parser.add_argument("--flops-per-s", type=float, help="another pace than the lab's")
    parser.add_argument("--unpaced", action="store_true", help="no pace in the lab")
    parser.add_argument("--ours", default="meshweave", choices=("meshweave", "dtensor"))
    parser.add_argument("--timeout", type=float, default=580.0, help="seconds for the run")
    parser.add_argument("--json", type=Path, help="write machine, versions, date and rows here")
    options = parser.parse_args()
    if len(options.sizes) != 3 or len(options.mesh) > 2 or options.repeat < 1:
        parser.error("sizes are M,N,K, a mesh has one or two axes, and each runs at least once")
    if options.lab and options.transport != "messages":
        parser.error("shared memory goes round the links of a lab")
    lab = Lab.load(options.lab) if options.lab else None
    if lab is not None and lab.num_ranks != math.prod(options.mesh):
        parser.error(f"{options.lab} has {lab.num_ranks} ranks")
    pace = 0.0
    if not options.unpaced:
        pace = options.flops_per_s or (lab.description.flops_per_s if lab is not None else None) or 0.0

    pairs = all_pairs(len(options.mesh))
    products = [PlacedProduct(placements(a), placements(b), options.sizes) for a, b in pairs]
    found = dtensor_traffics(options.mesh, products, options.dtype)
    chosen = stratified(pairs, [kind(one) for one in found], options.pairs or len(pairs), options.seed)
    if options.only:
        chosen = [index for index, one in enumerate(pairs) if tuple(map(tuple, one)) in options.only]
    pairs, found = [pairs[i] for i in chosen], [found[i] for i in chosen]
    ranks = run(options, pairs, lab, pace)
    rows = rows_of(options, pairs, found, ranks, pace, incoming_bytes_per_s(lab) if lab is not None else 0.0)
    total = summary(rows)
    where = f"lab {lab.description.name}" if lab is not None else "one host"
    paced = f"{pace:g} FLOP/s" if pace else "unpaced"
    print(f"{where}, mesh {options.mesh}, {options.sizes} {options.dtype}, {paced}")
    report(rows, total)
    if options.json:
        record = {
            "machine": describe_environment(),
            "ours": options.ours,
            "transport": options.transport,
            "lab": lab.description.name if lab is not None else None,
            "mesh_shape": options.mesh,
            "sizes": options.sizes,
            "dtype": options.dtype,
            "flops_per_s": pace or None,
            "repeat": options.repeat,
            "late_s": max(rank["late_s"] for rank in ranks),
            "pace": [rank["pace"] for rank in ranks],
            "summary": total,
            "rows": rows,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
