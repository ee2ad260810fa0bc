"""What the proof before training costs: how much longer `parallelize` takes for 24 layers on 4 ranks.

    python benchmarks/parallel_check.py [--save NAME]

Each rank parallelises the same Llama of transformers, with and without `check`, in turns, after one of each that
imports what is needed; the medians are of the slowest rank, and of the CPU seconds of all ranks, with one thread
each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from machine import save
from torch.distributed.device_mesh import init_device_mesh

import meshweave as mw

LAYERS, HIDDEN, HEADS, WORDS, ROUNDS = 24, 1024, 16, 32_000, 3


def of_a_model(context: mw.nn.RankContext, payload: Mapping[str, Any]) -> list[list[list[float]]]:
    """Return the seconds of each round with the proof, and without it: those of a clock, and of the CPU."""
    import transformers

    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", tuple(payload["mesh"]))
    sizes = transformers.LlamaConfig(
        hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=2,
        intermediate_size=4864, vocab_size=WORDS,
    )  # fmt: skip
    seconds: list[list[list[float]]] = [[[], []], [[], []]]
    for _ in range(payload["rounds"] + 1):
        for number, check in enumerate((True, False)):
            with torch.device("meta"):
                model = transformers.LlamaForCausalLM(sizes)
            torch.distributed.barrier()
            began, cpu = time.perf_counter(), time.process_time()
            mw.parallelize(model, payload["strategy"], mesh, check=check)
            seconds[number][0].append(time.perf_counter() - began)
            seconds[number][1].append(time.process_time() - cpu)
    return [[each[1:] for each in both] for both in seconds]


def _median(how: Callable[[Sequence[float]], float], ranks: Sequence[Sequence[float]]) -> float:
    """Return the median over rounds of what is made of the seconds of all ranks."""
    return statistics.median(how(each) for each in zip(*ranks, strict=True))


def main() -> None:
    """Print the measurements, and save them where asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--save")
    name = parser.parse_args().save
    here = {"PYTHONPATH": str(Path(__file__).resolve().parent)}
    result: dict[str, Any] = {
        "layers": LAYERS,
        "hidden": HIDDEN,
        "words": WORDS,
        "rounds": ROUNDS,
        "ranks": 4,
    }
    for strategy, mesh in (("megatron", [4]), ("atp", [2, 2])):
        payload = {"strategy": strategy, "mesh": mesh, "rounds": ROUNDS}
        ranks = mw.launch("parallel_check:of_a_model", 4, payload, timeout_s=500, env=here)
        (with_s, with_cpu), (without_s, without_cpu) = (
            [_median(how, [rank[number][at] for rank in ranks]) for at, how in enumerate((max, sum))]
            for number in range(2)
        )
        result[strategy] = {"proof_s": with_s - without_s, "proof_cpu_s": with_cpu - without_cpu}
        result[strategy] |= {"with_proof_s": with_s, "without_s": without_s}
    print(json.dumps(result, indent=1))
    if name is not None:
        print(f"saved {save(name, result)}")


if __name__ == "__main__":
    main()
