"""How far the estimate of a training step is from its simulation: programs of all layers, with contention.

    python benchmarks/step_estimates.py [--save] [--seconds 150] [--overlap sites]

Random configurations of four models on four clusters: degrees, strategy, ZeRO-0 or 1, schedule, recomputation,
and whether reductions overlap. Replicas that are alike are folded. "error" is estimate over simulation, less one.
With --save, rows of an unfinished run are kept and the next run goes on behind them; each row depends on its
number alone. Saved rows have the overlap of whole layers.
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

COUNT = 200
MODELS = ("gpt3", "llama-2-7b", "llama-3-8b", "llama-3-70b")
CLUSTERS = ("dgx-a100:64", "dgx-h100:128", "dgx-a100:512", "tpu-v4-pod:64")
LEAST = {"gpt3": 32, "llama-2-7b": 1, "llama-3-8b": 1, "llama-3-70b": 16}
"""Chips over which the weights of each model are cut at least."""


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


def row_of(number: int, overlap: Overlap) -> dict[str, Any]:
    """Return a row: what was laid out, estimate, simulation and error."""
    step = draw(number, overlap)
    p, begin = step.parallelism, time.perf_counter()
    simulated = mw.simulation.simulate_step(step)
    degrees = {"dp": p.data, "pp": p.pipeline, "cp": p.context, "tp": p.tensor_size, "vp": p.virtual_stages}
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
    parser.add_argument("--overlap", choices=get_args(Overlap), default="layers")
    options = parser.parse_args()
    if options.save and options.overlap != "layers":
        parser.error("saved rows have the overlap of whole layers; leave --save or --overlap out")
    path, rows = RESULTS / "step_estimates.json", []
    if options.save and path.exists():
        rows = json.loads(path.read_text())["rows"]
    rows = [] if len(rows) == COUNT else rows
    begin = time.perf_counter()
    while len(rows) < COUNT and time.perf_counter() - begin < options.seconds:
        rows.append(row_of(len(rows), options.overlap))
        last = rows[-1]
        print(
            f"{len(rows):3} {last['model']:12} {last['cluster']:14} {last['error']:+.2%} {last['took_s']} s",
            flush=True,
        )
        if options.save:
            save("step_estimates", rows)
    errors = [abs(row["error"]) for row in rows]
    print(f"{len(rows)} steps: mean error {statistics.mean(errors):.2%}, worst {max(errors):.2%}")


if __name__ == "__main__":
    main()
