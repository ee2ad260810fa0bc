"""Plan 30 pairs of a model and a cluster, and save their rankings in plans.json, which the explorer shows.

    python docs/explorer/plans.py        # some minutes of CPU time

Each is planned as `meshweave plan MODEL --cluster CLUSTER` does. What cannot be planned is saved with the reason.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import meshweave as mw
from meshweave.tune.step_search.reasons import advice, choice_text, difference_text

SAVED = Path(__file__).parent / "plans.json"
MODELS = {
    "llama-3-8b": (16, 64, 8192),
    "llama-2-13b": (16, 64, 4096),
    "mixtral-8x7b": (32, 128, 4096),
    "llama-3-70b": (64, 128, 8192),
    "gpt3": (128, 256, 2048),
    "llama-3.1-405b": (512, 256, 8192),
}
"""Chips, sequences of a step and their tokens, by model."""
CLUSTERS = ("dgx-a100", "dgx-h100", "dgx-b200", "mi300x-platform", "tpu-v4-pod")
NUM_ROWS = 24


def planned(model: str, cluster: str) -> dict[str, Any]:
    """Return what is saved of a pair: the ranking, or why there is none."""
    chips, batch, sequence = MODELS[model]
    pair = {"model": model, "cluster": cluster, "chips": chips, "batch": batch, "sequence": sequence}
    try:
        plan = mw.plan(model, f"{cluster}:{chips}", batch=batch, sequence=sequence)
    except mw.MeshweaveError as error:
        return {**pair, "refused": str(error)}
    steps = plan.step
    runner_up = steps.runner_up
    return {
        **pair,
        "limit": steps.memory_limit_bytes,
        "unmeasured": plan.unmeasured,
        "summary": plan.summary().splitlines(),
        "difference": difference_text(steps.best, runner_up) if runner_up else "",
        "advice": advice(steps),
        "rows": [
            {
                "text": choice_text(row.degrees),
                "step_s": _short(row.step_s),
                "mfu": _short(row.mfu),
                "tokens": round(row.tokens_per_s_per_chip),
                "memory": row.memory_bytes,
                "parts": {name: _short(value) for name, value in row.parts_s.items() if value},
                "kinds": {name: value for name, value in row.memory_parts.items() if value},
            }
            for row in steps.ranked[:NUM_ROWS]
        ],
    }


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def main() -> None:
    """Plan all pairs and save them."""
    pairs = []
    for model in MODELS:
        for cluster in CLUSTERS:
            pairs.append(planned(model, cluster))
            print(pairs[-1].get("summary", [pairs[-1].get("refused")])[0])
    SAVED.write_text(json.dumps({"version": mw.__version__, "pairs": pairs}, separators=(",", ":")) + "\n")
    print(f"written: {SAVED}, {SAVED.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
