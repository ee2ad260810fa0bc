"""Writes `results/pipeline_lab.md`: pipelines as measured in a lab, as tables made from the saved JSON file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from lab_tables import machine_line
from machine import RESULTS

NAME = "pipeline_lab"
TITLES = {"gpt": "A GPT", "u": "A model in the shape of a U"}


def table(model: dict[str, Any]) -> Iterator[str]:
    """Yield the lines about one model."""
    rows = model["rows"]
    baseline, bound = rows[0], rows[-1]
    yield f"## {TITLES[model['model']]}"
    yield ""
    yield (
        "| variant | simulated s | median s | simulated / measured | runs s | times faster than the first | "
        "simulated | of the bound |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        runs = f"{min(row['runs_s']):.3f} - {max(row['runs_s']):.3f}"
        yield (
            f"| {row['name']} | {row['simulated_s']:.3f} | {row['median_s']:.3f} | "
            f"{row['simulated_s'] / row['median_s']:.3f} | {runs} | "
            f"{baseline['median_s'] / row['median_s']:.3f} | {baseline['simulated_s'] / row['simulated_s']:.3f} | "
            f"{100 * bound['median_s'] / row['median_s']:.1f} % |"
        )
    yield ""
    errors = [row["simulated_s"] / row["median_s"] - 1 for row in rows]
    mean = sum(map(abs, errors)) / len(errors)
    yield f"Mean error of the simulation {100 * mean:.1f} %, worst {100 * max(errors, key=abs):+.1f} %."
    yield ""


def page() -> str:
    """Return the page."""
    data: dict[str, Any] = json.loads((RESULTS / f"{NAME}.json").read_text())
    result = data["rows"]
    repeat = len(result["models"][0]["rows"][0]["runs_s"])
    lines = [
        "# Pipelines in a lab with slow NICs",
        "",
        f"`python benchmarks/pipeline_lab.py --repeat {repeat} --save {NAME}`",
        "",
        f"{machine_line(data)} {repeat} runs each, in turns; {result['micro_batches']} micro-batches.",
        "",
        "Three stages of two ranks on `examples/labs/hosts-3x2.toml`, trained by `meshweave.pipeline`. The last",
        "row sends one byte for each tensor: what no transfer can beat.",
        "",
    ]
    for model in result["models"]:
        lines += table(model)
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    (RESULTS / f"{NAME}.md").write_text(page())
