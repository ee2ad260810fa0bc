"""What comparing ranks costs a training step: steps with and without it, in turns.

    python benchmarks/agreement_cost.py [--save NAME]

Each pair is a few steps of the same model, with the comparison of each call and without, in an order that
alternates. The ratio is the median of those of the pairs, from when all ranks begin to when the last is done; its
scatter is half the range in which the middle half of the pairs lie. Beside it the seconds that checksums of all
weights take in `parallelize`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from machine import save
from torch.distributed.device_mesh import init_device_mesh

import meshweave as mw
from meshweave.nn.parallel.model_words import weight_words

PAIRS = 21
STEPS = 4
CASES: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("megatron", (2,)),
    ("megatron", (4,)),
    ("atp", (2, 2)),
    ("data_parallel", (4,)),
)


def compared(context: mw.nn.RankContext, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return the seconds of a step in each pair, with comparison and without, and those of checksums."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", tuple(payload["mesh"]))
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=256, num_hidden_layers=4, num_attention_heads=8, intermediate_size=704, vocab_size=256
        )
    )
    began = time.perf_counter()
    words = weight_words(model)
    checksums_s = time.perf_counter() - began
    assert words
    weights_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    made = mw.parallelize(model, payload["strategy"], mesh)
    optimizer = torch.optim.SGD(made.module.parameters(), lr=1e-4)
    tokens = torch.randint(0, 256, (8, 128))
    agreement, beside = made.agreement, made.agreement.beside

    def step_s(is_compared: bool) -> float:
        agreement.beside = (
            beside if is_compared else lambda tokens, targets, refused: contextlib.nullcontext()
        )  # type: ignore[method-assign]
        dist.barrier()
        began = time.perf_counter()
        for _ in range(STEPS):
            optimizer.zero_grad()
            made.step(tokens, tokens)
            optimizer.step()
        dist.barrier()
        return (time.perf_counter() - began) / STEPS

    step_s(True)
    pairs = []
    for number in range(payload["pairs"]):
        pair = {is_compared: step_s(is_compared) for is_compared in (True, False)[:: 1 if number % 2 else -1]}
        pairs.append((pair[True], pair[False]))
    return {"pairs": pairs, "checksums_s": checksums_s, "weights_bytes": float(weights_bytes)}


def summary(ranks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the ratio of the slowest rank's seconds, its scatter, and a step's seconds without comparison."""
    pairs = [
        tuple(map(max, zip(*pair, strict=True))) for pair in zip(*(r["pairs"] for r in ranks), strict=True)
    ]
    low, ratio, high = statistics.quantiles([with_s / without_s for with_s, without_s in pairs], n=4)
    return {
        "ratio": ratio,
        "scatter": (high - low) / 2,
        "step_s": statistics.median(without_s for _, without_s in pairs),
        "checksums_s": max(rank["checksums_s"] for rank in ranks),
        "weights_bytes": ranks[0]["weights_bytes"],
    }


def main() -> None:
    """Print the measurements, and save them where asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--save")
    name = parser.parse_args().save
    here = {"PYTHONPATH": str(Path(__file__).resolve().parent)}
    result: dict[str, Any] = {"pairs": PAIRS, "steps": STEPS}
    for strategy, mesh in CASES:
        payload = {"strategy": strategy, "mesh": mesh, "pairs": PAIRS}
        ranks = mw.launch("agreement_cost:compared", math.prod(mesh), payload, timeout_s=900, env=here)
        result[f"{strategy} {'x'.join(map(str, mesh))}"] = summary(ranks)
    print(json.dumps(result, indent=1))
    if name is not None:
        print(f"saved {save(name, result)}")


if __name__ == "__main__":
    main()
