"""What one rank of `universal_scalapack.py` does: the universal product of block-cyclic matrices in shared
memory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from meshweave.algorithms.universal import UniversalProblem
from meshweave.cost.rates import RankRates
from meshweave.describe.layout.grid import ProcessGrid
from meshweave.execute.ranks.job import RankContext
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.measure import start_together, without_garbage_collection
from meshweave.nn.products import prepare
from meshweave.tune.universal import tune_universal


def measure(context: RankContext, payload: Mapping[str, Any]) -> list[float]:
    """Seconds of each of `repeats` products on this rank, after one to warm up that is checked exactly."""
    torch.set_num_threads(1)
    size, nb = int(payload["size"]), int(payload["nb"])
    rows, columns = payload["grid"]
    layout = ProcessGrid(rows, columns).block_cyclic_layout((nb, nb))
    problem = UniversalProblem(size, size, size, layout, layout, layout, payload["dtype"])
    tuned = tune_universal(problem, RankRates(30e9, 5e9), objective="bytes", slices=(1,))
    shared = TorchContext(liveness=context.liveness, deadline_s=60)
    run = prepare(problem, tuned, context.rank, "shared", shared)
    at = np.ix_(*layout.indices((size, size), context.rank))
    rng = np.random.default_rng(0)
    whole = [rng.integers(-4, 5, (size, size)).astype(payload["dtype"]) for _ in "ab"]
    a, b = (torch.from_numpy(np.ascontiguousarray(one[at])) for one in whole)
    # C x = A (B x): whole numbers, so both sides are exact, and cheap to compare.
    rng_x = np.random.default_rng(1).integers(-1, 2, size).astype(payload["dtype"])
    mine = torch.zeros(size, dtype=a.dtype)
    columns_of = torch.from_numpy(rng_x[at[1].reshape(-1)])
    mine[torch.from_numpy(at[0].reshape(-1))] = run(a, b) @ columns_of
    torch.distributed.all_reduce(mine)
    expected = torch.from_numpy(whole[0] @ (whole[1] @ rng_x))
    if not torch.equal(mine, expected):
        raise ValueError(f"wrong by {float((mine - expected).abs().max())}")
    times = []
    with without_garbage_collection():
        for _ in range(int(payload["repeats"])):
            start_ns, _ = start_together(shared)
            run(a, b)
            times.append(time.monotonic() - start_ns / 1e9)
    shared.close()
    return times
