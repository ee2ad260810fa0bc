"""Steps of training by `mw.parallelize`, beside torch's own ways of spreading a model, on one host.

    python benchmarks/rivals.py [--ranks 2,4] [--models gpt2,llama] [--by data_parallel] [--runs 3] [--save NAME]

Ours and theirs run with the same degrees: data parallelism beside DDP, ZeRO-3 beside FSDP2, Megatron beside
`parallelize_module`. Each runs alone in processes of its own, by turns, in another order each time. A step clears
gradients, computes a loss and its gradients, and steps AdamW; all ranks begin it together. Saved are the median
step of each run, the ratio of the medians over runs (theirs to ours: above 1 ours is faster), the CPU seconds of a
step on a rank, and the load of the machine before each run.

Theirs is set up as its authors advise: DDP with gradients in its buckets, FSDP2 with a group for each layer, and
the columns and rows of each layer for `parallelize_module`. It runs twice: as a user has it, and in processes that
keep memory that a step frees, as `mw.parallelize` has processes do (`ratio_kept`, by the allocator's settings).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import save
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import meshweave as mw

SIZES = {"tiny": (4, 128, 2, 64), "small": (4, 128, 8, 64), "large": (4, 256, 8, 128)}
"""Layers, features, rows for each rank, and tokens of a row."""
PAIRS = {"data_parallel": "DDP", "zero3": "FSDP2", "megatron": "parallelize_module"}
KEPT = {"MALLOC_TRIM_THRESHOLD_": "4294967296", "MALLOC_MMAP_THRESHOLD_": "1073741824"}
"""Settings of glibc's allocator by which a process gives no memory back."""
ENTRIES = ("ours", "theirs", "theirs_kept")
WORDS = 512
"""The vocabulary."""
STEPS, STEPS_BEFORE = 15, 4
COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS_OF = ("self_attn.o_proj", "mlp.down_proj")


def build(name: str, size: str) -> nn.Module:
    """Return a model of transformers with random weights."""
    import transformers

    layers, hidden, _, sequence = SIZES[size]
    torch.manual_seed(0)
    if name == "gpt2":
        config: Any = transformers.GPT2Config(
            vocab_size=WORDS, n_positions=sequence, n_embd=hidden, n_layer=layers, n_head=4,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    kind = {"llama": "Llama", "gemma2": "Gemma2"}[name]
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=WORDS, hidden_size=hidden, intermediate_size=8 * hidden // 3 // 16 * 16, head_dim=hidden // 4,
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=4,
        max_position_embeddings=sequence, tie_word_embeddings=False,
    )  # fmt: skip
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    return model


def measure(context: mw.nn.RankContext, payload: Mapping[str, Any]) -> dict[str, float]:
    """Return the median seconds of a step from a common start, and those of this rank's CPU."""
    torch.set_num_threads(1)
    model, by = build(payload["model"], payload["size"]), payload["by"]
    *_, rows, sequence = SIZES[payload["size"]]
    tokens = torch.randint(0, WORDS, (rows * context.num_ranks, sequence))
    loss, module = _ours(model, by, tokens) if by in PAIRS else _theirs(model, by, tokens)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    seconds, of_cpu = [], []
    for number in range(STEPS_BEFORE + STEPS):
        dist.barrier()
        began, cpu_began = time.monotonic(), time.process_time()
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        if number >= STEPS_BEFORE:
            seconds.append(time.monotonic() - began)
            of_cpu.append(time.process_time() - cpu_began)
    return {"step_s": statistics.median(seconds), "cpu_s": statistics.median(of_cpu)}


def _ours(model: nn.Module, by: str, tokens: Tensor) -> tuple[Callable[[], Tensor], nn.Module]:
    made = mw.parallelize(model, by, init_device_mesh("cpu", (dist.get_world_size(),)), check=False)
    return (lambda: made.module(tokens, labels=tokens).loss), made.module


def _theirs(model: nn.Module, by: str, tokens: Tensor) -> tuple[Callable[[], Tensor], nn.Module]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rank = dist.get_rank()
    rows = len(tokens) // dist.get_world_size()
    mine = tokens if by == "parallelize_module" else tokens[rows * rank : rows * (rank + 1)]
    layers: Any = model.get_submodule("transformer.h" if hasattr(model, "transformer") else "model.layers")
    wrapped: Any = model
    if by == "DDP":
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif by == "FSDP2":
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        styles: dict[str, Any] = dict.fromkeys(COLUMNS, ColwiseParallel()) | dict.fromkeys(
            ROWS_OF, RowwiseParallel()
        )
        for layer in layers:
            parallelize_module(layer, mesh, styles)
    return (lambda: wrapped(input_ids=mine, labels=mine, use_cache=False).loss), model


def main() -> None:
    """Run all pairs by turns, print the ratios and save them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--models", default="gpt2,llama,gemma2")
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--by", default=",".join(PAIRS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=900.0, help="begin no run after these")
    parser.add_argument("--save")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    kinds = product(
        map(int, options.ranks.split(",")),
        options.models.split(","),
        options.sizes.split(","),
        options.by.split(","),
    )
    cases = [case for case in kinds if not (case[1] == "gpt2" and case[3] == "megatron")]
    rows: dict[Any, dict[str, list[Any]]] = {case: {key: [] for key in (*ENTRIES, "load")} for case in cases}
    for number in range(options.runs):
        for case in cases:
            if time.monotonic() < until:
                with contextlib.suppress(mw.errors.UnsupportedError):
                    _run(case, rows[case], reverse=bool(number % 2))
    answer = [_row(case, runs) for case, runs in rows.items() if all(runs.values())]
    for row in answer:
        what = f"{row['model']} {row['size']}, {row['ranks']} ranks, {row['by']}"
        print(
            f"{what}: {row['ratio']:.2f} x {row['beside']}, {row['ratio_kept']:.2f} x where it keeps memory"
        )
    if options.save:
        print(f"saved {save(options.save, answer)}")


def _run(case: tuple[Any, ...], runs: dict[str, list[Any]], *, reverse: bool) -> None:
    ranks, model, size, strategy = case
    load = os.getloadavg()[0]
    for name in ENTRIES[:: -1 if reverse else 1]:
        env = {"PYTHONPATH": str(Path(__file__).resolve().parent)} | (KEPT if name == "theirs_kept" else {})
        payload = {"model": model, "size": size, "by": strategy if name == "ours" else PAIRS[strategy]}
        answers = mw.launch("rivals:measure", ranks, payload, timeout_s=300, env=env)
        runs[name].append({key: max(answer[key] for answer in answers) for key in answers[0]})
    runs["load"].append(load)


def _row(case: tuple[Any, ...], runs: dict[str, list[Any]]) -> dict[str, Any]:
    ranks, model, size, strategy = case
    ours, theirs, kept = (statistics.median(run["step_s"] for run in runs[name]) for name in ENTRIES)
    return {
        "model": model, "size": size, "ranks": ranks, "by": strategy, "beside": PAIRS[strategy],
        "ratio": theirs / ours, "ratio_kept": kept / ours, **runs,
    }  # fmt: skip


if __name__ == "__main__":
    main()
