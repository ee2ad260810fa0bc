"""What it costs to keep calls in order: products with and without the count, the tags and the watch, in turns.

    python benchmarks/call_tags.py --json results/call_tags.json
    python benchmarks/call_tags.py --sizes 256 --kinds matmul-shared --calls 200

Four processes on a 2x2 mesh, gloo, one thread each. A pair of blocks of calls, one with and one without, follows
the last pair in the opposite order, so that what else the machine does falls on both alike. A time is that of a
block from a common start to the end of the last rank, divided by its calls; the ratio is that of the medians over
pairs. "Without" leaves out what a call adds: its number, the entry among the last calls, the look at the process
group, and the thread that looks ten times a second. The tag of a message is a number that it has anyway.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from machine import describe_environment  # noqa: E402

from meshweave.execute.ranks.launch import launch  # noqa: E402

KINDS = ("matmul-shared", "matmul-messages", "matmul2d")


def measure(context: Any, payload: Mapping[str, Any]) -> dict[str, list[list[float]]]:
    """Return this rank's seconds per call of each block, by kind and size: [with, without].

    `payload`: sizes, kinds, blocks (pairs), calls (per block).
    """
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from meshweave.execute.torch.context import TorchContext
    from meshweave.execute.torch.measure import start_together, without_garbage_collection

    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2))
    shared = TorchContext(liveness=context.liveness, deadline_s=120.0)
    seconds: dict[str, list[list[float]]] = {}
    with torch.no_grad(), without_garbage_collection():
        for kind in payload["kinds"]:
            for size in payload["sizes"]:
                call = _call(kind, size, mesh, shared)
                for _ in range(10):
                    call()
                blocks: list[list[float]] = [[], []]
                for number in range(payload["blocks"]):
                    for which in (1, 0) if number % 2 else (0, 1):
                        with _without_order(shared, is_off=which == 1):
                            start_ns, _ = start_together(shared)
                            for _ in range(payload["calls"]):
                                call()
                            took_s = time.monotonic() - start_ns / 1e9
                        blocks[which].append(took_s / payload["calls"])
                seconds[f"{kind} {size}"] = blocks
    shared.close()
    return seconds


def _call(kind: str, size: int, mesh: Any, context: Any) -> Callable[[], Any]:
    import torch
    from torch.distributed.tensor import DTensor, Shard

    from meshweave import matmul
    from meshweave.nn import matmul2d

    half = size // 2
    a, b = torch.randn(half, half), torch.randn(half, half)
    if kind == "matmul2d":
        return lambda: matmul2d(a, b, mesh=mesh, shape=(size, size, size), context=context)
    placements = (Shard(0), Shard(1))
    left, right = (DTensor.from_local(each, mesh, placements, run_check=False) for each in (a, b))
    transport = kind.partition("-")[2]
    return lambda: matmul(left, right, placements, transport=transport, context=context)


class _without_order:
    """Leaves out what keeps the calls of a context in order, if `is_off`."""

    def __init__(self, context: Any, *, is_off: bool) -> None:
        from meshweave.execute.torch import call_order, call_watch

        self._order = call_order.call_order(context)
        self._sequence, self._watch = call_order.CallSequence, call_watch.CallWatch
        self._is_off = is_off

    def __enter__(self) -> None:
        if not self._is_off:
            return
        self._before = self._sequence.begin, self._sequence.end
        self._sequence.begin = lambda sequence, kind: 0  # type: ignore[method-assign]
        self._sequence.end = lambda sequence, error=None: None  # type: ignore[method-assign]
        self._order.unwatch()  # the watch ends where nothing is left to look after

    def __exit__(self, *_: object) -> None:
        if self._is_off:
            self._sequence.begin, self._sequence.end = self._before  # type: ignore[method-assign]
            self._order.watch()


def rows_of(ranks: list[dict[str, list[list[float]]]]) -> list[dict[str, Any]]:
    """Return a row per kind and size: medians with and without in microseconds, their difference and ratio."""
    rows = []
    for name in ranks[0]:
        with_s, without_s = (
            [max(times) for times in zip(*(rank[name][which] for rank in ranks), strict=True)]
            for which in (0, 1)
        )
        medians = statistics.median(with_s) * 1e6, statistics.median(without_s) * 1e6
        rows.append(
            {
                "call": name,
                "with_us": medians[0],
                "without_us": medians[1],
                "difference_us": medians[0] - medians[1],
                "ratio": medians[0] / medians[1],
                "with_s": with_s,
                "without_s": without_s,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--blocks", type=int, default=31, help="pairs of blocks, with and without")
    parser.add_argument("--calls", type=int, default=20, help="calls in a block")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for the run")
    parser.add_argument("--json", type=Path, help="write machine, versions, date and rows here")
    options = parser.parse_args()
    if any(size < 2 or size % 2 for size in options.sizes) or min(options.blocks, options.calls) < 1:
        parser.error("sizes are even, and there is at least one block of one call")
    payload = {name: getattr(options, name) for name in ("sizes", "kinds", "blocks", "calls")}
    env = {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    rows = rows_of(launch("call_tags:measure", 4, payload, timeout_s=options.timeout, env=env))
    print(f"{'call':24}{'with us':>12}{'without us':>12}{'difference':>12}{'ratio':>8}")
    for row in rows:
        print(
            f"{row['call']:24}{row['with_us']:12.1f}{row['without_us']:12.1f}{row['difference_us']:12.1f}"
            f"{row['ratio']:8.3f}"
        )
    if options.json:
        record = {"machine": describe_environment(), **payload, "rows": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
