"""`meshweave.matmul` with its defaults beside DTensor's `a @ b` on one host: all pairs of placements, in turns.

    python benchmarks/default_transport.py --json results/default_transport_1024.json
    python benchmarks/default_transport.py --sizes 512,512,512 --json results/default_transport_512.json
    python benchmarks/default_transport.py --only R,S1:P,P S0,R:R,S1 --repeat 21

Four processes on a 2x2 mesh, gloo, one thread each; both give the result in the placements that DTensor chooses. A
time is from a common start to the end of the last rank. Per pair the median of each and their ratio count; beside
them stands CPU time, summed over ranks, which other work on the machine changes less. Operands are normal random
numbers: every call must give the bits of the first one, on every rank, and what is off from DTensor's result is
rounding alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from machine import describe_environment  # noqa: E402

from meshweave.execute.ranks.launch import launch  # noqa: E402

WORDS = ("S0", "S1", "R", "P")
TARGET_RATIO = 0.95

Pair = tuple[tuple[str, ...], tuple[str, ...]]


def all_pairs() -> list[Pair]:
    """Return every placement of A on two mesh dims with every placement of B."""
    placed = list(itertools.product(WORDS, repeat=2))
    return [(a, b) for a in placed for b in placed]


# --- what a rank does -------------------------------------------------------------------------------------------


def measure(context: Any, payload: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Run both on every pair, once to warm up and then `repeat` times in turns, and return a row per pair.

    `payload`: sizes [M, N, K], pairs [[words of A, words of B]], repeat, transport (None: the default), dtype.
    A row has the placements that DTensor chose, this rank's seconds from the common start of all ranks and its CPU
    seconds for each run of both, the largest relative difference of the results, and how many of ours had other
    bits than the first.
    """
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from meshweave.execute.torch.context import TorchContext
    from meshweave.execute.torch.measure import without_garbage_collection

    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "col"))
    shared = TorchContext(liveness=context.liveness, deadline_s=120.0)
    rows = []
    for number, (words_a, words_b) in enumerate(payload["pairs"]):
        with torch.no_grad(), without_garbage_collection():
            rows.append(_row(mesh, shared, words_a, words_b, payload))
        if context.rank == 0 and number % 16 == 15:
            print(f"{number + 1} of {len(payload['pairs'])} pairs", file=sys.stderr, flush=True)
    shared.close()
    return rows


def _row(
    mesh: Any, shared: Any, words_a: Sequence[str], words_b: Sequence[str], payload: Mapping[str, Any]
) -> dict[str, Any]:
    import torch

    from meshweave import matmul
    from meshweave.execute.torch.measure import start_together

    m, n, k = payload["sizes"]
    dtype = getattr(torch, payload["dtype"])
    a, b = _operand(mesh, words_a, (m, k), 1, dtype), _operand(mesh, words_b, (k, n), 2, dtype)
    theirs = a @ b
    out = tuple(theirs.placements)
    options = {} if payload["transport"] is None else {"transport": payload["transport"]}
    calls: list[Callable[[], Any]] = [
        lambda: a @ b,
        lambda: matmul(a, b, out, context=shared, **options),
    ]
    ours = calls[1]()
    whole = theirs.full_tensor(), ours.full_tensor()
    scale = float(whole[0].abs().max()) or 1.0
    first = ours.to_local().clone()
    walls: list[list[float]] = [[], []]
    cpus: list[list[float]] = [[], []]
    num_changed = 0
    for repetition in range(payload["repeat"]):
        for which in (1, 0) if repetition % 2 else (0, 1):
            start_ns, _ = start_together(shared)
            cpu_s = time.process_time()
            local = calls[which]().to_local()
            local = local.wait() if hasattr(local, "wait") else local
            walls[which].append(time.monotonic() - start_ns / 1e9)
            cpus[which].append(time.process_time() - cpu_s)
            if which == 1 and not torch.equal(local, first):
                num_changed += 1
    return {
        "out": [_word(placement) for placement in out],
        "wall_s": walls,
        "cpu_s": cpus,
        "difference": _largest(whole[0] - whole[1]) / scale,
        "num_changed": num_changed,
        "copies_alike": _copies_alike(mesh, ours),
    }


def _largest(difference: Any) -> float:
    """Return the largest element by size; one that is no number counts as infinite."""
    return float(difference.abs().nan_to_num(nan=math.inf, posinf=math.inf).max())


def _operand(mesh: Any, words: Sequence[str], shape: tuple[int, int], seed: int, dtype: Any) -> Any:
    """Return a DTensor of normal random numbers; of a partial one every rank has other terms."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    known = {"S0": Shard(0), "S1": Shard(1), "R": Replicate(), "P": Partial()}
    placements = [known[word] for word in words]
    local_shape = list(shape)
    number = 0
    for axis, word in enumerate(words):
        coordinate = mesh.get_local_rank(axis)
        if word in ("S0", "S1"):
            local_shape[int(word[1])] //= mesh.size(axis)
        number = 2 * number + (0 if word == "R" else coordinate)  # copies have the same numbers
    assert dist.is_initialized()
    generator = torch.Generator().manual_seed(10 * seed + number)
    local = torch.randn(local_shape, generator=generator).to(dtype)
    stride = (shape[1], 1)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def _copies_alike(mesh: Any, tensor: Any) -> bool:
    """Return whether the copies of a result that this rank and its neighbours hold have the same bits."""
    import torch
    import torch.distributed as dist

    local = tensor.to_local().contiguous()
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            parts = [torch.empty_like(local) for _ in range(mesh.size(axis))]
            dist.all_gather(parts, local, group=mesh.get_group(axis))
            if not all(torch.equal(part, local) for part in parts):
                return False
    return True


def _word(placement: Any) -> str:
    return f"S{placement.dim}" if placement.is_shard() else "R" if placement.is_replicate() else "P"


# --- the table --------------------------------------------------------------------------------------------------


def rows_of(pairs: Sequence[Pair], ranks: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return a row per pair from those of its ranks: the slowest rank's wall time, all ranks' CPU time."""
    rows = []
    for number, (a, b) in enumerate(pairs):
        of_ranks = [rank[number] for rank in ranks]
        walls = [
            [max(times) for times in zip(*(row["wall_s"][i] for row in of_ranks), strict=True)]
            for i in (0, 1)
        ]
        cpus = [
            [sum(times) for times in zip(*(row["cpu_s"][i] for row in of_ranks), strict=True)] for i in (0, 1)
        ]
        medians = [statistics.median(times) for times in walls]
        cpu_medians = [statistics.median(times) for times in cpus]
        rows.append(
            {
                "a": a,
                "b": b,
                "out": of_ranks[0]["out"],
                "dtensor_s": walls[0],
                "ours_s": walls[1],
                "times_faster": medians[0] / medians[1],
                "times_less_cpu": cpu_medians[0] / cpu_medians[1],
                "difference": max(row["difference"] for row in of_ranks),
                "num_changed": sum(row["num_changed"] for row in of_ranks),
                "copies_alike": all(row["copies_alike"] for row in of_ranks),
            }
        )
    return rows


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what counts of all pairs."""

    def spread(name: str) -> dict[str, Any]:
        ratios = [row[name] for row in rows]
        return {
            "geometric_mean": math.exp(statistics.fmean(map(math.log, ratios))),
            "least": min(ratios),
            "most": max(ratios),
            "num_below_target": sum(ratio < TARGET_RATIO for ratio in ratios),
        }

    return {
        "num_pairs": len(rows),
        "times_faster": spread("times_faster"),
        "times_less_cpu": spread("times_less_cpu"),
        "largest_difference": max(row["difference"] for row in rows),
        "num_changed": sum(row["num_changed"] for row in rows),
        "pairs_with_unlike_copies": sum(not row["copies_alike"] for row in rows),
    }


def show(row: Mapping[str, Any]) -> str:
    """Return a line of the table."""
    names = f"{','.join(row['a'])} x {','.join(row['b'])} -> {','.join(row['out'])}"
    times = [statistics.median(row[name]) * 1e3 for name in ("dtensor_s", "ours_s")]
    return f"{names:26}{times[0]:10.2f}{times[1]:10.2f}{row['times_faster']:8.2f}{row['times_less_cpu']:8.2f}"


def sizes_of(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def pair_of(text: str) -> Pair:
    a, b = text.split(":")
    return tuple(a.split(",")), tuple(b.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=sizes_of, default=(1024, 1024, 1024), help="M,N,K")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64", "bfloat16"))
    parser.add_argument("--only", type=pair_of, nargs="+", help="these pairs, such as R,S1:P,P")
    parser.add_argument("--every", type=int, default=1, help="every n-th pair")
    parser.add_argument("--repeat", type=int, default=9, help="runs of each on a pair, after one to warm up")
    parser.add_argument("--transport", help="another than the default")
    parser.add_argument("--timeout", type=float, default=3000.0, help="seconds for the run")
    parser.add_argument("--json", type=Path, help="write machine, versions, date and rows here")
    options = parser.parse_args()
    if len(options.sizes) != 3 or any(size % 4 for size in options.sizes) or options.repeat < 1:
        parser.error("sizes are M,N,K, multiples of 4, and each runs at least once")
    pairs = options.only or all_pairs()[:: options.every]
    payload = {
        "sizes": options.sizes,
        "pairs": pairs,
        "repeat": options.repeat,
        "transport": options.transport,
        "dtype": options.dtype,
    }
    env = {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    ranks = launch("default_transport:measure", 4, payload, timeout_s=options.timeout, env=env)
    rows = rows_of(pairs, ranks)
    total = summary(rows)
    print(f"{'A x B -> C':26}{'DTensor ms':>10}{'ours ms':>10}{'faster':>8}{'CPU':>8}")
    for row in sorted(rows, key=lambda row: row["times_faster"])[:24]:
        print(show(row))
    print(json.dumps(total, indent=1))
    if options.json:
        record = {"machine": describe_environment(), **payload, "summary": total, "rows": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
