"""What a bound op costs on a GPU beyond the call of torch that it makes: plain, and in a CUDA graph.

python benchmarks/gpu/bound_ops.py [--folder FOLDER]    # saves bound_ops.json

Ops are as small as they get, so that the host's time is what is measured. "Bare" is the same calls of torch in a
loop, "bare graph" that loop captured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))
from device import FOLDER, save_rows
from executor_overhead import BODIES, program

from meshweave.execute.torch.bind import bind
from meshweave.execute.torch.context import TorchContext

NUM_OPS = 1000
REPETITIONS = 15


def medians_us(runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median microseconds of an op of each run, until the device is done; runs take turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repetition in range(REPETITIONS + 3):
        for name, run in runs.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            torch.cuda.synchronize()
            if repetition >= 3:
                times[name].append(time.perf_counter() - start)
    return {f"{name}_us": statistics.median(listed) / NUM_OPS * 1e6 for name, listed in times.items()}


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """Return the replay of what a function queues."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def row(name: str, context: TorchContext) -> dict[str, Any]:
    """Return one program in each way of running it, beside the bare calls."""
    x, y = (torch.zeros(4, 4, device=context.device) for _ in range(2))

    def bare() -> None:
        for _ in range(NUM_OPS):
            if "matmul" in name:
                torch.mm(x, x, out=y)
            else:
                y.copy_(x)

    built = program(BODIES[name], NUM_OPS)
    plain = bind(built, 0, {"x": x, "y": y}, context=context)
    graph = bind(built, 0, {"x": x, "y": y}, context=context, graph=True)
    bare()
    torch.cuda.synchronize()
    runs = {"plain": plain.run, "bare": bare, "graph": graph.run, "bare_graph": captured(bare)}
    return {"ops": name, **medians_us(runs)}


def main() -> None:
    """Measure and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where results go")
    arguments = parser.parse_args()
    context = TorchContext(device="cuda:0")
    rows = [row(name, context) for name in BODIES]
    for of in rows:
        print(
            f"{of['ops']:52} plain {of['plain_us']:.2f} us, bare {of['bare_us']:.2f}, "
            f"graph {of['graph_us']:.2f}, bare graph {of['bare_graph_us']:.2f}"
        )
    print(save_rows(arguments.folder.resolve(), "bound_ops", rows))


if __name__ == "__main__":
    main()
