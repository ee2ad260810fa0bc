"""How far the estimate of a training step is from its simulation: programs of all layers, with contention.

    python benchmarks/step_estimates.py [--save] [--seconds 150] [--overlap sites] [--experts]

Random configurations of four models on four clusters: degrees, strategy, ZeRO-0 or 1, schedule, recomputation,
and whether reductions overlap. Replicas that are alike are folded. "error" is estimate over simulation, less one.
With --save, rows of an unfinished run are kept and the next run goes on behind them; each row depends on its
number alone. Saved rows have the overlap of whole layers.

With --experts the models are those of the catalog with experts, and DeepSeek-V2-Lite, which is small. It draws
besides the ranks that share experts and each of them, every level of ZeRO, the library that sends copies, and how
uneven these are. Saved rows have the overlap of sites, the default of a step.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import Any, get_args

from machine import RESULTS, save

import meshweave as mw
from meshweave.algorithms.block.problem import Overlap
from meshweave.cost.exchange import libraries
from meshweave.describe.catalog import models
from meshweave.describe.model.hugging_face import transformer_from_config

COUNT, ROUTED_COUNT = 200, 100
MODELS = ("gpt3", "llama-2-7b", "llama-3-8b", "llama-3-70b")
CLUSTERS = ("dgx-a100:64", "dgx-h100:128", "dgx-a100:512", "tpu-v4-pod:64")
LEAST = {"gpt3": 32, "llama-2-7b": 1, "llama-3-8b": 1, "llama-3-70b": 16}
"""Chips over which the weights of each model are cut at least."""
V2_LITE = transformer_from_config(
    {
        "model_type": "deepseek_v2", "num_hidden_layers": 27, "hidden_size": 2048, "num_attention_heads": 16,
        "vocab_size": 102400, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "q_lora_rank": None,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    },
    "deepseek-v2-lite",
)  # fmt: skip
ROUTED = (V2_LITE, *(model for name in models() if (model := mw.load_model(name)).is_routed))
ROUTED_CLUSTERS = ("dgx-h100:64", "dgx-h100:256", "dgx-a100:128", "dgx-b200:64", "dgx-h100:1024")


def draw_routed(number: int, overlap: Overlap) -> mw.algorithms.Step:
    """Return the step of a row of a model with experts."""
    chance = random.Random(number)
    while True:
        model, cluster = chance.choice(ROUTED), mw.load_cluster(chance.choice(ROUTED_CLUSTERS))
        tp, pp, cp = chance.choice((1, 2, 4, 8)), chance.choice((1, 2, 4, 8, 16)), chance.choice((1, 1, 1, 2))
        ep, etp = chance.choice((1, 2, 4, 8, 16, 32, 64)), chance.choice((1, 1, 1, 2, 4))
        dp, rest = divmod(cluster.num_chips, tp * pp * cp)
        micro_batches = pp * chance.choice((1, 2, 4))
        options = {
            "vp": chance.choice((1, 1, 2)) if pp > 1 else 1,
            "zero": chance.choice((0, 1, 2, 3)),
            "schedule": chance.choice(("1f1b", "1f1b", "gpipe")),
            "recompute": chance.choice(("none", "selective", "full")),
            "dispatcher": chance.choice(sorted(libraries())),
            "imbalance": chance.choice((0.0, 0.0, 0.5, 1.0)),
            "stack": mw.SoftwareStack(overlap=chance.choice((0, 1))),
        }
        if rest or not dp:
            continue
        degrees = {"tp": tp, "pp": pp, "cp": cp, "dp": dp, "ep": ep, "etp": etp}
        try:
            return mw.step(model, cluster, dp * micro_batches, 4096, **degrees, **options, overlap=overlap)
        except mw.MeshweaveError:  # heads, layers or experts do not divide so far, or rings have no latents
            continue


def draw(number: int, overlap: Overlap) -> mw.algorithms.Step:
    """Return the step of a row."""
    chance = random.Random(number)
    while True:
        model, cluster = chance.choice(MODELS), mw.load_cluster(chance.choice(CLUSTERS))
        tp, pp, cp = chance.choice((1, 2, 4, 8)), chance.choice((1, 2, 4, 8, 16)), chance.choice((1, 1, 1, 2))
        dp, rest = divmod(cluster.num_chips, tp * pp * cp)
        if rest or not dp or tp * pp < LEAST[model]:
            continue
        micro_batches = pp * chance.choice((1, 2, 4))
        try:
            return mw.step(
                model,
                cluster,
                batch=dp * micro_batches,
                sequence=2048,
                tp=tp,
                pp=pp,
                cp=cp,
                dp=dp,
                vp=chance.choice((1, 1, 2)) if pp > 1 else 1,
                zero=chance.choice((0, 1)),
                schedule=chance.choice(("1f1b", "1f1b", "gpipe")),
                recompute=chance.choice(("none", "selective", "full")),
                strategy=chance.choice(("megatron", "megatron_sp")),
                stack=mw.SoftwareStack(overlap=chance.choice((0, 1))),
                overlap=overlap,
            )
        except mw.MeshweaveError:  # heads or layers do not divide so far
            continue


def row_of(number: int, overlap: Overlap, *, is_routed: bool = False) -> dict[str, Any]:
    """Return a row: what was laid out, estimate, simulation and error."""
    step = (draw_routed if is_routed else draw)(number, overlap)
    p, begin = step.parallelism, time.perf_counter()
    simulated = mw.simulation.simulate_step(step)
    degrees = {"dp": p.data, "pp": p.pipeline, "cp": p.context, "tp": p.tensor_size, "vp": p.virtual_stages}
    if is_routed:
        degrees |= {"ep": p.expert, "etp": p.expert_tensor, "dispatcher": step.problem.dispatcher}
        degrees["imbalance"] = step.problem.imbalance
    return {
        "model": step.problem.model.name,
        "cluster": f"{step.problem.cluster.name}:{p.num_ranks}",
        **degrees,
        "zero": p.zero,
        "strategy": p.strategy,
        "schedule": p.schedule,
        "recompute": p.recompute,
        "overlap": step.problem.stack.overlap,
        "micro_batches": step.num_micro_batches,
        "estimate_s": step.time_s,
        "simulated_s": simulated.time_s,
        "error": step.time_s / simulated.time_s - 1,
        "fold": simulated.fold,
        "took_s": round(time.perf_counter() - begin, 2),
    }


def main() -> None:
    """Print the errors, and save rows if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--overlap", choices=get_args(Overlap))
    parser.add_argument("--experts", action="store_true")
    options = parser.parse_args()
    saved: Overlap = "sites" if options.experts else "layers"
    overlap = options.overlap or saved
    if options.save and overlap != saved:
        parser.error(f"saved rows have the overlap of {saved}; leave --save or --overlap out")
    name, count = ("routed_estimates", ROUTED_COUNT) if options.experts else ("step_estimates", COUNT)
    path, rows = RESULTS / f"{name}.json", []
    if options.save and path.exists():
        rows = json.loads(path.read_text())["rows"]
    rows = [] if len(rows) == count else rows
    begin = time.perf_counter()
    while len(rows) < count and time.perf_counter() - begin < options.seconds:
        rows.append(row_of(len(rows), overlap, is_routed=options.experts))
        last = rows[-1]
        print(
            f"{len(rows):3} {last['model']:16} {last['cluster']:14} {last['error']:+.2%} {last['took_s']} s",
            flush=True,
        )
        if options.save:
            save(name, rows)
    errors = [abs(row["error"]) for row in rows]
    print(f"{len(rows)} steps: mean error {statistics.mean(errors):.2%}, worst {max(errors):.2%}")


if __name__ == "__main__":
    main()
