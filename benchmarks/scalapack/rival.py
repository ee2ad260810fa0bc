"""ScaLAPACK's pdgemm / psgemm as a rival: `run` starts it under mpiexec and returns its times.

    python benchmarks/scalapack/rival.py [--sizes 1024,2048,4096] [--grids 2x2,1x2,2x1] [--tiles 64,128,256]
        [--dtypes float64,float32] [--rounds 3] [--repeats 3] [--json FILE]

prints the rates it reaches here beside that of torch.mm with one thread in as many processes as there are cores.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

from build import BuildError, build  # noqa: E402
from machine import describe_environment  # noqa: E402

_LETTER = {"float64": "d", "float32": "s"}
_MM = """
import json, sys, time, torch
torch.set_num_threads(1)
size, dtype = int(sys.argv[1]), getattr(torch, sys.argv[2])
a, b, c = (torch.randn(size, size, dtype=dtype) for _ in range(3))
torch.mm(a, b, out=c)
for line in sys.stdin:
    times = []
    for _ in range(int(line)):
        start = time.perf_counter()
        torch.mm(a, b, out=c)
        times.append(time.perf_counter() - start)
    print(json.dumps(times), flush=True)
"""


class RivalError(RuntimeError):
    """The rival failed, was wrong, or took too long."""


def run(
    m: int, n: int, k: int, nb: int, grid: tuple[int, int], dtype: str, repeats: int, timeout_s: float = 120.0
) -> list[float]:
    """Seconds of each of `repeats` products, after one to warm up; as `measure`, which says more."""
    return list(measure(m, n, k, nb, grid, dtype, repeats, timeout_s)["times_s"])


def measure(
    m: int, n: int, k: int, nb: int, grid: tuple[int, int], dtype: str, repeats: int, timeout_s: float = 120.0
) -> dict[str, Any]:
    """C (m, n) = A (m, k) B (k, n) in tiles of `nb` on a process grid of `grid` ranks on this host.

    Returns times_s (from a barrier to the end of the slowest rank), and which BLAS and MPI that was: blas,
    openblas, core, threads, mpi, yields (see yield.c). Every product is checked.

    Raises BuildError where it cannot be built, RivalError for a wrong result or none in `timeout_s` seconds.
    """
    program = build()
    mpiexec = next(filter(None, map(shutil.which, ("mpiexec.mpich", "mpiexec"))), None)
    if mpiexec is None:
        raise BuildError("no mpiexec; on Debian: apt-get install mpich")
    numbers = [str(number) for number in (m, n, k, nb, *grid)]
    command = [mpiexec, "-n", str(grid[0] * grid[1]), str(program), *numbers, _LETTER[dtype], str(repeats)]
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    )
    try:
        out, said = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise RivalError(f"{' '.join(command)}: not done after {timeout_s:g} s") from None
    finally:
        if process.poll() is None:  # mpiexec's ranks are of its session
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode:
        raise RivalError(f"{' '.join(command)}: exit status {process.returncode}\n{said}{out}")
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


class PlainMM:
    """torch.mm of square matrices with one thread in each of several processes, which keep until they are asked.

    Raises RivalError where one of them ends or does not answer in `timeout_s`.
    """

    def __init__(self, size: int, dtype: str, num_processes: int, timeout_s: float = 120.0) -> None:
        self._size, self._timeout_s = size, timeout_s
        command = [sys.executable, "-c", _MM, str(size), dtype]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(num_processes)
        ]

    def __enter__(self) -> Self:
        try:
            self.flops_per_s(1)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    def flops_per_s(self, repeats: int) -> float:
        """FLOP/s of all together at the median of `repeats` products each."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{repeats}\n")
            process.stdin.flush()
        until = time.monotonic() + self._timeout_s
        return sum(
            2.0 * self._size**3 / statistics.median(self._answer(process, until))
            for process in self._processes
        )

    def _answer(self, process: subprocess.Popen[str], until: float) -> list[float]:
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], max(until - time.monotonic(), 0.0))[0]:
            raise RivalError(f"torch.mm: no answer in {self._timeout_s:g} s")
        line = process.stdout.readline()
        if not line:
            raise RivalError("a process of torch.mm ended")
        times: list[float] = json.loads(line)
        return times


def rows_of(dtype: str, size: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row per process grid and tile, of runs that take turns with torch.mm."""
    cases = [(grid, nb) for grid in options.grids for nb in options.tiles]
    found: dict[tuple[tuple[int, int], int], list[dict[str, Any]]] = {case: [] for case in cases}
    over: dict[tuple[tuple[int, int], int], list[float]] = {case: [] for case in cases}
    rates = []
    with PlainMM(size, dtype, os.cpu_count() or 1) as mm:
        for _ in range(options.rounds):
            for grid, nb in cases:
                before = mm.flops_per_s(options.repeats)
                one = measure(size, size, size, nb, grid, dtype, options.repeats)
                # The machine's speed is not the same all the time: what counts is the ratio to a neighbour.
                rates.append(before)
                over[grid, nb].append(2.0 * size**3 / statistics.median(one["times_s"]) / before)
                found[grid, nb].append(one)
    for grid, nb in cases:
        times = [time for one in found[grid, nb] for time in one.pop("times_s")]
        yield {
            "dtype": dtype,
            "size": size,
            "grid": grid,
            "nb": nb,
            "gflops_per_s": 2e-9 * size**3 / statistics.median(times),
            "over_mm": statistics.median(over[grid, nb]),
            "over_mm_of_rounds": over[grid, nb],
            "mm_gflops_per_s": statistics.median(rates) / 1e9,
            "times_s": times,
            **found[grid, nb][0],
        }


def main() -> None:
    def listed(text: str) -> list[int]:
        return list(map(int, text.split(",")))

    def grids(text: str) -> list[tuple[int, ...]]:
        return [tuple(map(int, part.split("x"))) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=listed, default=[1024, 2048, 4096])
    parser.add_argument("--grids", type=grids, default=[(2, 2), (1, 2), (2, 1)])
    parser.add_argument("--tiles", type=listed, default=[64, 128, 256])
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=["float64", "float32"])
    parser.add_argument("--rounds", type=int, default=3, help="runs of each, in turn")
    parser.add_argument("--repeats", type=int, default=3, help="products in a run, after one to warm up")
    parser.add_argument("--json", type=Path, help="write machine, versions, date and rows here")
    options = parser.parse_args()
    rows = []
    try:
        for dtype in options.dtypes:
            for size in options.sizes:
                for row in rows_of(dtype, size, options):
                    rows.append(row)
                    print(
                        f"{dtype} {size:5} {'x'.join(map(str, row['grid']))} nb={row['nb']:<4}"
                        f"{row['gflops_per_s']:7.1f} GFLOP/s, {row['over_mm']:.2f} of torch.mm's "
                        f"{row['mm_gflops_per_s']:.1f}",
                        flush=True,
                    )
    except (BuildError, RivalError) as error:
        sys.exit(str(error))
    print({key: rows[-1][key] for key in ("openblas", "core", "threads", "mpi", "blas")})
    if options.json:
        record = {
            "machine": describe_environment(),
            "rounds": options.rounds,
            "repeats": options.repeats,
            "rows": rows,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
