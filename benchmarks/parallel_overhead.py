"""What parallelised layers cost in Python: one process against the plain model, and a small layer on two ranks.

    python benchmarks/parallel_overhead.py [--save FILE]

The ratio is of CPU times of steps of the same Llama, plain and parallelised on a mesh of one rank, taken in turns;
each is the median of rounds. The cost of a layer on two ranks is what a step of a tiny model takes more with each
more layer, of which nearly all is Python.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshweave as mw

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "nn" / "parallel"))
from plain_models import PlainLlama, sized_llama

ROUNDS = 9


def _median_s(step: Callable[[], None], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        began = time.process_time()
        step()
        times.append(time.process_time() - began)
    return statistics.median(times)


def alone(context: mw.RankContext, payload: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of a step, plain and parallelised, on one rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    whole = sized_llama(hidden=512, layers=2, heads=8, width=1408, words=256)
    made = mw.parallelize(copy.deepcopy(whole), "megatron", init_device_mesh("cpu", (1,)))
    tokens = torch.randint(0, 256, (2, 128))

    def plain() -> None:
        nn.functional.cross_entropy(whole(tokens).flatten(0, 1), tokens.flatten()).backward()

    def parallel() -> None:
        made.loss(tokens, tokens).backward()

    ratios, seconds = [], []
    for _ in range(payload["rounds"]):
        own, theirs = _median_s(parallel, 1), _median_s(plain, 1)
        ratios.append(own / theirs)
        seconds.append(theirs)
    return {"plain_s": statistics.median(seconds), "ratio": statistics.median(ratios)}


def of_a_layer(context: mw.RankContext, payload: Mapping[str, Any]) -> dict[str, float]:
    """Return the CPU seconds of this rank per layer and step of a tiny model, on all ranks."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (payload["ranks"],))
    seconds = {}
    for layers in (2, 10):
        torch.manual_seed(0)
        made = mw.parallelize(PlainLlama(layers=layers), payload["strategy"], mesh)
        tokens = torch.randint(0, 24, (2, 8))
        for _ in range(5):
            made.step(tokens, tokens)
        seconds[layers] = _median_s(
            lambda made=made, tokens=tokens: made.step(tokens, tokens), payload["rounds"]
        )  # type: ignore[misc]
    torch.manual_seed(0)
    plain = {}
    for layers in (2, 10):
        model = PlainLlama(layers=layers)
        plain[layers] = _median_s(
            lambda model=model: nn.functional.cross_entropy(
                model(tokens).flatten(0, 1), tokens.flatten()
            ).backward(),  # type: ignore[misc]
            payload["rounds"],
        )
    return {"layer_s": (seconds[10] - seconds[2]) / 8, "plain_layer_s": (plain[10] - plain[2]) / 8}


def main() -> None:
    """Print the measurements, and save them where asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", type=Path)
    save = parser.parse_args().save
    here = {"PYTHONPATH": str(Path(__file__).resolve().parent)}
    result: dict[str, Any] = {"rounds": ROUNDS}
    result["alone"] = mw.launch("parallel_overhead:alone", 1, {"rounds": ROUNDS}, timeout_s=200, env=here)[0]
    for strategy in ("megatron", "megatron_sp"):
        payload = {"ranks": 2, "strategy": strategy, "rounds": 4 * ROUNDS}
        result[strategy] = mw.launch("parallel_overhead:of_a_layer", 2, payload, timeout_s=200, env=here)[0]
    one = mw.launch(
        "parallel_overhead:of_a_layer",
        1,
        {"ranks": 1, "strategy": "megatron", "rounds": 4 * ROUNDS},
        env=here,
    )
    result["one rank"] = one[0]
    text = json.dumps(result, indent=1)
    print(text)
    if save is not None:
        save.write_text(text + "\n")


if __name__ == "__main__":
    main()
