"""Measure how near `meshweave run` predicts: the runs of `make demo`, each in processes of its own.

    python benchmarks/local_runs.py [--runs 10] [--seconds 600]

Writes `results/local_runs.json`: of each run and product the measured and predicted seconds, and how many runs
have every prediction within 15 % of the measured median. Run nothing else meanwhile.

    meshweave plan gpt3 --cluster tpu-v4-pod:256 --out demo-out/plan.json    # or `make demo`, comes first
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from machine import RESULTS

import meshweave as mw
from meshweave_lab.provenance import describe_environment

WITHIN = 0.15
PLAN = RESULTS.parents[1] / "demo-out" / "plan.json"
ALGORITHMS = ("meshslice", "collective")


def main() -> None:
    """Run, save after each run, and print the share of runs within the limit."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no run after these")
    options = parser.parse_args()
    plan = mw.tune.load_plan(PLAN)
    began, rows = time.monotonic(), []
    for number in range(options.runs):
        if time.monotonic() - began > options.seconds:
            break
        report = mw.run(plan, layer="ff1", passes=["forward"], algorithms=list(ALGORITHMS), num_ranks=4)
        rows.append([_row(product.to_json()) for product in report.products])
        good = sum(all(abs(row["error"]) <= WITHIN for row in run) for run in rows)
        result = {"machine": describe_environment(), "within": WITHIN, "runs": rows, "num_within": good}
        (RESULTS / "local_runs.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        errors = ", ".join(f"{row['error']:+.0%}" for row in rows[-1])
        print(f"run {number}: {errors}; {good} of {len(rows)} within {WITHIN:.0%}", flush=True)


def _row(product: dict[str, Any]) -> dict[str, Any]:
    keys = ("title", "measured_median_s", "predicted_s", "constants")
    error = product["predicted_s"] / product["measured_median_s"] - 1
    return {**{key: product[key] for key in keys}, "error": error}


if __name__ == "__main__":
    main()
