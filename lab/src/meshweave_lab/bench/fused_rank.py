"""One rank of a benchmark of fused products: all rivals on the same operands, by turns, from a common start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshweave.check.reference import random_tensor
from meshweave_lab.bench.rank import BoundRival, run_and_check, run_round


def bench_fused(context: Any, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Run the programs of `payload` once to warm up, then `repeat` times by turns; each result is checked.

    Args:
        payload: sizes [m, n, k], programs [text], flops_per_s (0: unpaced), repeat, seed, deadline_s.

    Returns:
        What `rank.bench_matmul` returns of a round.
    """
    import torch

    from meshweave.execute.torch.context import TorchContext
    from meshweave.execute.torch.measure import without_garbage_collection

    torch.set_num_threads(1)
    shared = TorchContext(liveness=context.liveness, deadline_s=payload["deadline_s"])
    m, n, k = payload["sizes"]
    seed = int(payload["seed"])
    whole = {
        name: random_tensor(name, shape, "float32", seed) for name, shape in (("a", (m, k)), ("b", (k, n)))
    }
    whole["c"] = whole["a"] @ whole["b"]
    rivals = [_bind(text, whole, shared) for text in payload["programs"]]
    round_ = {"rivals": range(len(rivals)), "flops_per_s": payload["flops_per_s"]}
    with without_garbage_collection():
        result = run_round(round_, rivals, int(payload["repeat"]), shared)
    shared.close()
    return result


def _bind(text: str, whole: Mapping[str, Any], shared: Any) -> BoundRival:
    import numpy as np
    import torch

    from meshweave.execute.torch.bind import bind
    from meshweave.ir.program.parse import parse

    program = parse(text)

    def shard(name: str) -> Any:
        layout = program.buffer_of[name].layout
        assert layout is not None
        return torch.from_numpy(
            np.ascontiguousarray(whole[name][np.ix_(*layout.indices(whole[name].shape, shared.rank))])
        )

    bound = bind(program, shared.rank, {"a": shard("a"), "b": shard("b")}, context=shared)
    return run_and_check(bound, bound.outputs["c"], shard("c"))
