"""What the torch executor adds to the work itself: time to bind, per op, per handover between lanes.

    python benchmarks/executor_overhead.py [--json FILE]

Ops are as small as they get, so that what is left is overhead. "Bare" is the same torch calls in a plain
loop. The ring steps run in two processes over gloo. Each row is the median of several runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import describe_environment

from meshweave.execute.ranks.job import RankContext
from meshweave.execute.ranks.launch import launch
from meshweave.execute.torch.bind import bind
from meshweave.execute.torch.context import TorchContext
from meshweave.ir.program import Program
from meshweave.ir.program.parse import parse

NUM_OPS = 2000
NUM_STEPS = 300
REPETITIONS = 15

_HEAD = """
program("overhead")
q = mesh(({ranks},), ("x",))
X = tensor((4, {columns}), "float32")
x = input(X, q[S(1)])
y = output(X, q[S(1)])
z = scratch((4, 4), "float32", on=q)
compute = lane()
other = lane()
with q:
"""

BODIES = {
    "copy, one lane": """
    for i in range(N):
        copy(y, x, lane=compute)
""",
    "matmul 4x4x4, one lane": """
    for i in range(N):
        matmul(y, x, x, lane=compute)
""",
    "copies in two lanes that know nothing of each other": """
    for i in range(N // 2):
        copy(y, x, lane=compute)
        copy(z, x, lane=other)
""",
    "copies handed from lane to lane": """
    for i in range(N // 2):
        copy(y, x, lane=compute)
        copy(z, y, lane=other)
""",
}
RING = """
    for i in range(N):
        permute(y, x, over="q.x", lane=other)
"""


def program(body: str, num_ops: int, num_ranks: int = 1) -> Program:
    """A program of `num_ops` ops on each rank."""
    text = _HEAD.format(ranks=num_ranks, columns=4 * num_ranks) + body
    return parse(text.replace("(N // 2)", f"({num_ops // 2})").replace("(N)", f"({num_ops})"))


def medians_us(runs: dict[str, Callable[[], object]], num_ops: int) -> dict[str, float]:
    """Microseconds per op of each run, which take turns so that a busy machine is unfair to none."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repetition in range(REPETITIONS + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if repetition:  # the first is an outlier
                times[name].append(time.perf_counter() - start)
    return {f"{name}_us": statistics.median(found) / num_ops * 1e6 for name, found in times.items()}


def row(
    name: str, built: Program, num_ops: int, rank: int, context: TorchContext, bare: Callable[[], object]
) -> dict[str, Any]:
    """One program in all ways of running it, beside the bare calls."""
    x, y = torch.zeros(4, 4), torch.zeros(4, 4)
    start = time.perf_counter()
    bound = bind(built, rank, {"x": x, "y": y}, context=context)
    bind_us = (time.perf_counter() - start) / num_ops * 1e6
    traced = bind(built, rank, {"x": x, "y": y}, context=context, trace=True)
    linear = bind(built, rank, {"x": x, "y": y}, context=context, mode="linear")
    runs = {"run": bound.run, "linear": linear.run, "traced": traced.run, "bare": bare}
    return {"ops": name, "bind_us": bind_us, **medians_us(runs, num_ops)}


def local_rows() -> list[dict[str, Any]]:
    """The rows that need one process."""
    x, y = torch.zeros(4, 4), torch.zeros(4, 4)

    def copies() -> None:
        for _ in range(NUM_OPS):
            y.copy_(x)

    def products() -> None:
        for _ in range(NUM_OPS):
            torch.mm(x, x, out=y)

    context = TorchContext()
    return [
        row(name, program(body, NUM_OPS), NUM_OPS, 0, context, products if "matmul" in name else copies)
        for name, body in BODIES.items()
    ]


def ring_rows(context: RankContext, payload: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of one of two ranks."""
    ours = TorchContext(liveness=context.liveness)
    built = program(RING, NUM_STEPS, 2)
    ours.prepare(built)
    x, y, peer, group = torch.zeros(4, 4), torch.zeros(4, 4), 1 - context.rank, dist.new_group([0, 1])

    def bare() -> None:
        for _ in range(NUM_STEPS):
            works = [dist.irecv(y, peer, group=group), dist.isend(x, peer, group=group)]
            for work in works:
                work.wait()

    return [row("ring step of 64 bytes, two processes", built, NUM_STEPS, context.rank, ours, bare)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write machine, versions, date and rows here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = local_rows()
    folder = str(Path(__file__).parent)
    rows += launch("executor_overhead:ring_rows", 2, {}, timeout_s=300.0, env={"PYTHONPATH": folder})[0]
    columns = ("bind_us", "run_us", "linear_us", "traced_us", "bare_us")
    print(f"{'microseconds per op':52}" + "".join(f"{name[:-3]:>9}" for name in columns))
    for found in rows:
        print(f"{found['ops']:52}" + "".join(f"{found[name]:9.2f}" for name in columns))
    if options.json:
        data = {
            "machine": describe_environment(),
            "num_ops": NUM_OPS,
            "num_steps": NUM_STEPS,
            "repetitions": REPETITIONS,
            "rows": rows,
        }
        options.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
