"""What one rank of `universal_placements.py` does: DTensor and ours on the same operands, interleaved."""

from __future__ import annotations

import gc
import logging
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from meshweave.describe.layout import Layout, Partial, Placement, Replicate, Shard
from meshweave.describe.layout.mesh import Mesh
from meshweave.execute.ranks.job import RankContext
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.measure import start_together, without_garbage_collection
from meshweave_lab.bench.dtensor_traffic import from_torch, to_torch
from meshweave_lab.description_file import load_lab
from meshweave_lab.pace import paced

WORDS: dict[str, Placement] = {"S0": Shard(0), "S1": Shard(1), "R": Replicate(), "P": Partial()}
_NOTHING = 3.4e38
_PROGRESS_EVERY = 16


def placements(words: Sequence[str]) -> tuple[Placement, ...]:
    return tuple(WORDS[word] for word in words)


def words(placed: Sequence[Placement]) -> list[str]:
    return [next(word for word, known in WORDS.items() if known == one) for one in placed]


class Matrices:
    """The operands, small integers so that sums are exact, and their product; a rank's share of each."""

    def __init__(self, sizes: Sequence[int], mesh: Mesh, rank: int, dtype: str) -> None:
        m, n, k = sizes
        self.mesh, self.rank = mesh, rank
        generator = np.random.default_rng(0)
        self._whole = {
            "a": generator.integers(-3, 4, (m, k)).astype(dtype),
            "b": generator.integers(-3, 4, (k, n)).astype(dtype),
        }
        self._whole["c"] = self._whole["a"] @ self._whole["b"]
        self._terms: dict[tuple[str, int, int], np.ndarray[Any, Any]] = {}

    def shard(self, name: str, placed: tuple[Placement, ...]) -> torch.Tensor:
        """What this rank holds: of sums, one of the terms."""
        axes = [axis for axis, one in enumerate(placed) if isinstance(one, Partial)]
        coords = self.mesh.coords(self.rank)
        count = math.prod(self.mesh.shape[axis] for axis in axes)
        index = 0
        for axis in axes:
            index = index * self.mesh.shape[axis] + coords[axis]
        shape = self._whole[name].shape
        at = np.ix_(*Layout(self.mesh, placed).indices(shape, self.rank))
        return torch.from_numpy(np.ascontiguousarray(self._term(name, index, count)[at]))

    def _term(self, name: str, index: int, count: int) -> np.ndarray[Any, Any]:
        key = (name, index, count)
        if key not in self._terms:
            whole = self._whole[name]
            if index < count - 1:
                made = (
                    np.random.default_rng([ord(name), index]).integers(-3, 4, whole.shape).astype(whole.dtype)
                )
            else:
                made = whole - sum(self._term(name, other, count) for other in range(count - 1))
            self._terms[key] = made
        return self._terms[key]

    def error(self, found: DTensor) -> float:
        """The largest difference from the product. Collective where the result is sums."""
        placed = from_torch(found.placements)
        whole = self._whole["c"]
        if any(isinstance(one, Partial) for one in placed):
            return _difference(found.full_tensor(), torch.from_numpy(whole))
        at = np.ix_(*Layout(self.mesh, placed).indices(whole.shape, self.rank))
        return _difference(_local(found), torch.from_numpy(whole[at]))


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    if found.shape != expected.shape:
        return _NOTHING
    return float((found - expected).abs().nan_to_num(nan=_NOTHING).max()) if expected.numel() else 0.0


def _local(tensor: DTensor) -> torch.Tensor:
    """The local tensor, there: DTensor's collectives are waited for at the first use of their result."""
    local = tensor.to_local()
    return local.wait() if hasattr(local, "wait") else local


def _dtensor(a: DTensor, b: DTensor, out: Any) -> DTensor:
    """DTensor in the place of ours: what is measured then is the noise of the benchmark."""
    found = a @ b
    assert tuple(found.placements) == tuple(out)
    return found


def _ours(payload: Mapping[str, Any], shared: TorchContext) -> Callable[..., DTensor]:
    """Told about the machine what a user would tell it: in a lab its description."""
    if payload["ours"] == "dtensor":
        return _dtensor
    from meshweave import matmul

    cluster = None
    if payload["lab"]:
        pace = payload["flops_per_s"]
        cluster = replace(load_lab(payload["lab"]), flops_per_s=pace or None).cluster()
    return partial(matmul, transport=payload["transport"], cluster=cluster, context=shared)


def measure(context: RankContext, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Runs both on every pair once to warm up and then `repeat` times, first one then the other first.

    `payload`: sizes [m, n, k], mesh_shape, dtype, pairs [[words of a, words of b]], repeat, ours, transport, lab
    (its file, or None), flops_per_s (0: unpaced), deadline_s. Returns for each pair the placements of the result
    that DTensor chose, the times of both in seconds from the common start of all ranks to the end of this rank's
    part, and the largest error of any run; and late_s, by how much this rank began later than told, at worst, and
    the pace report.
    """
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    shape = tuple(payload["mesh_shape"])
    device_mesh = init_device_mesh("cpu", shape, mesh_dim_names=("row", "col")[: len(shape)])
    mesh = Mesh.of("mesh", shape, ("row", "col")[: len(shape)])
    matrices = Matrices(payload["sizes"], mesh, context.rank, payload["dtype"])
    shared = TorchContext(liveness=context.liveness, deadline_s=payload["deadline_s"])
    ours, repeat, rate = _ours(payload, shared), int(payload["repeat"]), float(payload["flops_per_s"])
    rows, late_s = [], 0.0
    with torch.no_grad(), paced(rate) if rate else nullcontext() as pacer:
        for number, pair in enumerate(payload["pairs"]):
            a, b = (
                DTensor.from_local(
                    matrices.shard(name, placements(one)),
                    device_mesh,
                    to_torch(placements(one)),
                    run_check=False,
                    shape=torch.Size(size),
                    stride=(size[1], 1),
                )
                for name, one, size in zip("ab", pair, _shapes(payload["sizes"]), strict=True)
            )
            gc.collect()
            with without_garbage_collection():
                row, late = _pair(a, b, ours, repeat, matrices, shared)
            rows.append(row)
            late_s = max(late_s, late)
            if context.rank == 0 and number % _PROGRESS_EVERY == _PROGRESS_EVERY - 1:
                print(f"{number + 1} of {len(payload['pairs'])} pairs", file=sys.stderr, flush=True)
        report = vars(pacer.report()) if pacer is not None else None
    shared.close()
    return {"rows": rows, "late_s": late_s, "pace": report}


def _shapes(sizes: Sequence[int]) -> tuple[tuple[int, int], tuple[int, int]]:
    m, n, k = sizes
    return (m, k), (k, n)


def _pair(
    a: DTensor,
    b: DTensor,
    ours: Callable[..., DTensor],
    repeat: int,
    matrices: Matrices,
    shared: TorchContext,
) -> tuple[dict[str, Any], float]:
    first = a @ b
    out = tuple(first.placements)
    errors = [matrices.error(first), 0.0]
    second = ours(a, b, out=out)
    errors[1] = matrices.error(second)
    if tuple(second.placements) != out:
        raise ValueError(f"asked for {out}, got {second.placements}")
    known = [_local(first).clone(), _local(second).clone()]
    runs: list[Callable[[], DTensor]] = [lambda: a @ b, lambda: ours(a, b, out=out)]
    times: list[list[float]] = [[], []]
    late_s = 0.0
    for repetition in range(repeat):
        for which in (1, 0) if repetition % 2 else (0, 1):
            start_ns, late_ns = start_together(shared)
            local = _local(runs[which]())
            times[which].append(time.monotonic() - start_ns / 1e9)
            late_s = max(late_s, late_ns / 1e9)
            # Which terms a rank has of sums is its own business, but the same in every run.
            errors[which] = max(errors[which], _difference(local, known[which]))
    row = {"out": words(from_torch(out)), "dtensor_s": times[0], "ours_s": times[1], "errors": errors}
    return row, late_s
