"""Logical bytes that the universal product and DTensor move for every pair of placements of a 2D mesh.

The result has the placements that DTensor chooses; ours is the way that moves least. Bytes are those that all
ranks together receive, DTensor's counted generously (an all-to-all as one, although gloo gathers for it).

    python benchmarks/universal_bytes.py --mesh 2x2 --sizes 96,64,128
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from machine import save

from meshweave.algorithms.universal import UniversalProblem
from meshweave.cost.rates import RankRates
from meshweave.describe.layout import Layout, Partial, Placement, Replicate, Shard
from meshweave.describe.layout.mesh import Mesh
from meshweave.tune.universal import tune_universal
from meshweave_lab.bench.dtensor_traffic import PlacedProduct, dtensor_traffics

KINDS: tuple[Placement, ...] = (Shard(0), Shard(1), Replicate(), Partial())
RATES = RankRates(60e9, 2.4e9, 1e-4, 0.0, 49e9)  # choose among ways that move the same


def text(placed: tuple[Placement, ...]) -> str:
    return "".join(str(one).replace("(", "").replace(")", "") for one in placed)


def table(mesh_shape: tuple[int, int], sizes: tuple[int, int, int]) -> list[dict[str, Any]]:
    pairs = list(itertools.product(itertools.product(KINDS, repeat=2), repeat=2))
    mesh = Mesh.of("mesh", mesh_shape, ("row", "col"))
    rows = []
    for (a, b), theirs in zip(
        pairs, dtensor_traffics(mesh_shape, [PlacedProduct(a, b, sizes) for a, b in pairs]), strict=True
    ):
        out = theirs.out_placements
        problem = UniversalProblem(*sizes, Layout(mesh, a), Layout(mesh, b), Layout(mesh, out))
        ours = tune_universal(problem, RATES, objective="bytes")
        rows.append(
            {
                "a": text(a),
                "b": text(b),
                "out": text(out),
                "dtensor_bytes": theirs.received_bytes,
                "ours_bytes": ours.moved_bytes,
                "stationary": ours.config.stationary,
                "dtensor_does": [one.kind for one in theirs.collectives[0]],
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--mesh", type=lambda t: tuple(map(int, t.split("x"))), action="append", help="ROWSxCOLS, repeatable"
    )
    parser.add_argument("--sizes", type=lambda t: tuple(map(int, t.split(","))), default=(96, 64, 128))
    parser.add_argument("--save", action="store_true", help="write results/universal_bytes.json")
    options = parser.parse_args()
    saved = []
    for mesh_shape in options.mesh or [(2, 2), (2, 4)]:
        rows = table(mesh_shape, options.sizes)
        count = Counter(
            "less"
            if row["ours_bytes"] < row["dtensor_bytes"]
            else "more"
            if row["ours_bytes"] > row["dtensor_bytes"]
            else "same"
            for row in rows
        )
        total = [sum(row[name] for row in rows) for name in ("ours_bytes", "dtensor_bytes")]
        print(
            f"\n{mesh_shape}, M, N, K = {options.sizes}, float32: {len(rows)} pairs, ours moves less for",
            end=" ",
        )
        print(f"{count['less']}, the same for {count['same']}, more for {count['more']};", end=" ")
        print(f"{total[0]} bytes over all against {total[1]}")
        print(f"{'A':8}{'B':8}{'C':8}{'ours':>10}{'DTensor':>10}  ratio  stays")
        less = [row for row in rows if row["ours_bytes"] != row["dtensor_bytes"]]
        for row in sorted(less, key=lambda row: row["ours_bytes"] / row["dtensor_bytes"]):
            ratio = row["ours_bytes"] / row["dtensor_bytes"]
            print(f"{row['a']:8}{row['b']:8}{row['out']:8}{row['ours_bytes']:10}", end="")
            print(f"{row['dtensor_bytes']:10}  {ratio:.2f}   {row['stationary'].upper()}")
        saved.append({"mesh_shape": list(mesh_shape), "sizes": list(options.sizes), "pairs": rows})
    if options.save:
        print(save("universal_bytes", saved))


if __name__ == "__main__":
    main()
