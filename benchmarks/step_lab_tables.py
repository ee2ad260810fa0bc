"""Writes `results/step_lab.md`: training steps as measured in a lab, as a table made from the saved JSON file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from lab_tables import machine_line
from machine import RESULTS

NAME = "step_lab"


def table(data: dict[str, Any]) -> Iterator[str]:
    """Yield the lines about one lab."""
    result = data["rows"]
    model, constants, rows = result["model"], result["constants"], result["rows"]
    repeat = len(rows[0]["runs_s"])
    yield f"`python benchmarks/step_lab.py --repeat {repeat} --save`"
    yield ""
    yield f"{machine_line(data)} One step to warm up, which is checked, then {repeat} of each."
    yield ""
    yield (
        f"A GPT of {model['num_layers']} layers of width {model['hidden']} with {model['vocab_size']} tokens, "
        f"{result['batch']} sequences of {result['seq']}, float32. Calibrated before: "
        + "; ".join(
            f"{where} {1e-6 * of['bytes_per_s']:.1f} MB/s, {1e3 * of['step_s']:.1f} ms a step of a ring, "
            f"{1e3 * of['reduce_step_s']:.1f} ms a step of an all-reduce, {1e3 * of['message_s']:.1f} ms a message"
            for where, of in (("inside a host", constants["intra"]), ("between hosts", constants["nic"]))
        )
        + "."
    )
    yield ""
    yield "| configuration | estimate s | simulated s | median s | estimate | simulated | runs s |"
    yield "|---|---|---|---|---|---|---|"
    for row in sorted(rows, key=lambda row: row["median_s"]):
        off = (100 * (row[each] / row["median_s"] - 1) for each in ("estimated_s", "simulated_s"))
        runs = f"{min(row['runs_s']):.3f} - {max(row['runs_s']):.3f}"
        yield (
            f"| {row['name']} | {row['estimated_s']:.3f} | {row['simulated_s']:.3f} | {row['median_s']:.3f} | "
            + " | ".join(f"{error:+.1f} %" for error in off)
            + f" | {runs} |"
        )
    yield ""
    said = result["verdicts"]
    for reading, word in (("simulated_s", "simulation"), ("estimated_s", "estimate")):
        one = said[reading]
        yield (
            f"- By {word}: mean error {100 * one['mean_error']:.1f} %, worst {100 * one['worst_error']:+.1f} %; "
            f"{one['within']} of {len(rows)} within {100 * said['apart']:.0f} %; "
            f"{said['pairs_apart'] - len(one['pairs_missed'])} of the {said['pairs_apart']} pairs that differ by "
            f"more than {100 * said['apart']:.0f} % are in the measured order."
        )
        for faster, slower in one["pairs_missed"]:
            yield f"  - Missed: {faster} was faster than {slower}."


def page() -> str:
    """Return the page."""
    lines = [
        "# Training steps in a lab",
        "",
        "Made by `python benchmarks/step_lab_tables.py`. 16 processes on 2 cores over gloo, in four hosts with",
        "one slow NIC each (`examples/labs/hosts-4x4.toml`). A step is the forward and backward part of all",
        "micro-batches, the messages of the pipeline, the reductions of gradients, and Adam. Loss, and weights",
        "after the first step, are compared with one process. Products, norms, attention, activations, the loss",
        "and Adam are paced.",
        "",
    ]
    lines += table(json.loads((RESULTS / f"{NAME}.json").read_text()))
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    (RESULTS / f"{NAME}.md").write_text(page())
