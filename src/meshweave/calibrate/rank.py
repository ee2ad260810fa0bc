"""One rank of a calibration; the only module here that needs torch."""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshweave.base.errors import UnsupportedError
from meshweave.ir.program import Program
from meshweave.ir.program.parse import parse

if TYPE_CHECKING:
    from meshweave.trace import Trace


Times = list[list[list[list[float]]]]
"""Seconds by case, repetition and loop: [collective] or [product, copy]."""


def measure(context: Any, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Run every case once to warm up, then `repeat` times, each time in another order. Collective.

    Args:
        context: the `RankContext` of this rank.
        payload: cases [{name, program, loops [[kind, iterations, warmup_iterations]]}], repeat, seed,
            deadline_s, and is_one_host: whether all ranks read the same CLOCK_MONOTONIC.

    Returns:
        times (see `Times`), versions that ran, and send_buffer_bytes, how much of a message a socket buffers.
    """
    import torch

    from meshweave.execute.torch.bind import bind
    from meshweave.execute.torch.context import TorchContext
    from meshweave.execute.torch.measure import start_together, without_garbage_collection

    torch.set_num_threads(1)
    shared = TorchContext(liveness=context.liveness, deadline_s=payload["deadline_s"])
    cases = payload["cases"]
    say = _say if context.rank == 0 else _say_nothing
    say(f"binding {len(cases)} programs")
    bound, readers = [], []
    for case in cases:
        program = parse(case["program"])
        bound.append(bind(program, context.rank, {}, context=shared, trace=True))
        readers.append(_reader(program, context.rank, case["loops"]))
    times: Times = [[] for _ in cases]
    order = list(range(len(cases)))
    shuffle = random.Random(payload["seed"])
    repeat = int(payload["repeat"])
    offset_ns = 0 if payload["is_one_host"] else None
    with without_garbage_collection():
        for repetition in range(repeat + 1):
            began = time.monotonic()
            shuffle.shuffle(order)
            for number in order:
                start_together(shared, offset_ns)
                trace = bound[number].run()
                assert trace is not None
                if repetition:
                    times[number].append(readers[number](trace))
            what = f"repetition {repetition} of {repeat}" if repetition else "warming up"
            say(f"{what}: {time.monotonic() - began:.1f} s")
    with shared.guard("all ranks to end", range(context.num_ranks)):
        torch.distributed.barrier()
    shared.close()
    versions = {"torch": torch.__version__, "python": sys.version.split()[0]}
    return {"times": times, "versions": versions, "send_buffer_bytes": _send_buffer_bytes()}


def _send_buffer_bytes() -> int:
    """Return how many bytes of a message a TCP socket buffers: the maximum of net.ipv4.tcp_wmem, 0 if unknown."""
    try:
        return int(Path("/proc/sys/net/ipv4/tcp_wmem").read_text(encoding="ascii").split()[2])
    except (OSError, ValueError, IndexError):
        return 0


def _reader(
    program: Program, rank: int, loops: Sequence[tuple[str, int, int]]
) -> Callable[[Trace], list[list[float]]]:
    """Return a function that reads the seconds of each loop off a trace.

    For collectives they are the time from the end of the last warm-up iteration to the end of the last iteration,
    over the iterations between, so that the start of a run is not in them. For products they are the mean, for
    copies the median.
    """
    ops = program.ops_on_rank(rank)
    # The key of an op in a loop is (mesh, loop statement, turn, op, ...); all else is less deep.
    statements = sorted({bound.key[1] for bound in ops if len(bound.key) >= 4})
    assert len(statements) == len(loops), (statements, loops)
    places: list[dict[tuple[str, int], list[int]]] = [{} for _ in loops]
    for index, bound in enumerate(ops):
        if len(bound.key) >= 4:
            at, turn = statements.index(bound.key[1]), bound.key[2]
            kind = bound.op.kind if loops[at][0] == "compute" else ""
            places[at].setdefault((kind, turn), []).append(index)

    def read(trace: Trace) -> list[list[float]]:
        out = []
        for (kind, turns, warm), positions in zip(loops, places, strict=True):
            if kind == "compute":
                products, copies = (_seconds(trace, positions, op, warm, turns) for op in ("matmul", "copy"))
                # A copy takes microseconds: one that lost its core for milliseconds says nothing about copies.
                out.append([statistics.fmean(products), statistics.median(copies)])
                continue
            first, last = (
                max(trace.spans[index].end_ps for index in positions["", turn])
                for turn in (warm - 1, turns - 1)
            )
            out.append([(last - first) * 1e-12 / (turns - warm)])
        return out

    return read


def _seconds(
    trace: Trace, positions: Mapping[tuple[str, int], Sequence[int]], kind: str, warm: int, turns: int
) -> list[float]:
    spans = (trace.spans[index] for turn in range(warm, turns) for index in positions[kind, turn])
    return [(span.end_ps - span.start_ps) * 1e-12 for span in spans]


def _say(text: str) -> None:
    print(f"calibrate: {text}", file=sys.stderr, flush=True)


def _say_nothing(text: str) -> None:
    pass


# --- under torchrun -------------------------------------------------------------------------------------


def is_under_launcher() -> bool:
    """Return whether torchrun, or a launcher that sets the same variables, started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def measure_in_world(payload: Mapping[str, Any]) -> list[Any] | None:
    """Run `measure` with `payload` on all ranks that torchrun started; return the results by rank on rank 0.

    On other ranks it returns None. Each wait for other ranks may take `payload["deadline_s"]` seconds.

    Raises:
        RankLostError: a rank stopped answering.
        DeadlineError: a rank did not arrive in time.
        UnsupportedError: torch is not installed.
    """
    try:
        import torch.distributed as dist
    except ImportError:
        raise UnsupportedError("calibrating needs torch: pip install 'meshweave[torch]'") from None

    from meshweave.execute.ranks.job import RankContext
    from meshweave.execute.ranks.liveness import Liveness

    deadline_s = float(payload["deadline_s"])
    patience = timedelta(seconds=deadline_s)
    store, rank, num_ranks = next(dist.rendezvous("env://", timeout=patience))
    store.set_timeout(patience)
    beats = dist.PrefixStore("meshweave", store)
    with Liveness(beats, rank, range(num_ranks), stale_s=5.0, deadline_s=deadline_s) as liveness:
        with liveness.guard("all ranks to join"):
            group_store = dist.PrefixStore("group", store)
            dist.init_process_group(
                "gloo", store=group_store, rank=rank, world_size=num_ranks, timeout=patience
            )
        result = measure(RankContext(rank, num_ranks, store, liveness), payload)
        # Results go through the store as text: what comes from other processes is not unpickled.
        beats.set(f"result/{rank}", json.dumps(result))
        results = None
        with liveness.guard("the results of all ranks"):
            if rank == 0:
                results = [json.loads(beats.get(f"result/{other}")) for other in range(num_ranks)]
            dist.barrier()  # the store may be that of rank 0
        dist.destroy_process_group()
    return results
