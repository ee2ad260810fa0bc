"""The universal product beside ScaLAPACK's p?gemm, for ScaLAPACK's own layouts: 2D block-cyclic tiles on a
process grid.

Both on one host with shared memory and one thread per rank, in turns: short runs of one, then of the other, for
the speed of a machine is not the same all the time. Both do the same products, with results checked exactly.

    python benchmarks/universal_scalapack.py --sizes 1024,2048,4096 --grids 2x2,1x2 --rounds 5
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from machine import save
from scalapack import rival

from meshweave.execute.ranks.launch import launch


def ours(size: int, nb: int, grid: tuple[int, int], dtype: str, repeats: int) -> list[float]:
    """Seconds of each product, of the slowest rank, from a common start."""
    payload = {"size": size, "nb": nb, "grid": list(grid), "dtype": dtype, "repeats": repeats}
    env = {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    ranks = launch("universal_scalapack_rank:measure", math.prod(grid), payload, timeout_s=300, env=env)
    return [max(times) for times in zip(*ranks, strict=True)]


def row(size: int, grid: tuple[int, int], dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    times: dict[str, list[float]] = {"ours": [], "scalapack": []}
    ratios = []
    blas: dict[str, Any] = {}
    for number in range(options.rounds):
        medians = {}
        for which in ("ours", "scalapack") if number % 2 else ("scalapack", "ours"):
            if which == "ours":
                found = ours(size, options.nb, grid, dtype, options.repeats)
            else:
                measured = rival.measure(size, size, size, options.nb, grid, dtype, options.repeats)
                found = measured["times_s"]
                blas = {
                    key: measured[key] for key in ("blas", "openblas", "core", "threads", "mpi", "yields")
                }
            times[which] += found
            medians[which] = statistics.median(found)
        ratios.append(medians["scalapack"] / medians["ours"])
    flops = 2.0 * size**3
    return {
        "size": size,
        "grid": list(grid),
        "nb": options.nb,
        "dtype": dtype,
        "times_faster": statistics.median(ratios),
        "times_faster_of_rounds": ratios,
        "gflops_ours": flops / statistics.median(times["ours"]) / 1e9,
        "gflops_scalapack": flops / statistics.median(times["scalapack"]) / 1e9,
        "times_s": times,
        "rival": blas,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--sizes", type=lambda text: list(map(int, text.split(","))), default=[1024, 2048, 4096]
    )
    parser.add_argument(
        "--grids",
        type=lambda text: [tuple(map(int, part.split("x"))) for part in text.split(",")],
        default=[(2, 2), (1, 2)],
    )
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=["float64", "float32"])
    parser.add_argument("--nb", type=int, default=128, help="rows and columns of a tile")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3, help="products in a run, after one to warm up")
    parser.add_argument("--save", action="store_true", help="write results/universal_scalapack.json")
    options = parser.parse_args()
    rows = []
    print("size   grid  dtype     ours GFLOP/s  ScaLAPACK  times faster (rounds)")
    for dtype in options.dtypes:
        for size in options.sizes:
            for grid in options.grids:
                one = row(size, grid, dtype, options)
                rows.append(one)
                rounds = " ".join(f"{ratio:.2f}" for ratio in one["times_faster_of_rounds"])
                print(
                    f"{size:5d}  {grid[0]}x{grid[1]}  {dtype}  {one['gflops_ours']:12.1f}  "
                    f"{one['gflops_scalapack']:9.1f}  {one['times_faster']:.2f} ({rounds})",
                    flush=True,
                )
    mean = math.exp(statistics.fmean(math.log(one["times_faster"]) for one in rows))
    print(f"geometric mean {mean:.2f}, least {min(one['times_faster'] for one in rows):.2f}")
    if options.save:
        print(save("universal_scalapack", rows))


if __name__ == "__main__":
    main()
