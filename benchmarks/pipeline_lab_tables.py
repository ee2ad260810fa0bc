"""Writes `results/pipeline_lab.md`: pipelines as measured in a lab, as tables made from the saved JSON files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from lab_tables import machine_line
from machine import RESULTS

NAMES = ("pipeline_lab_gpt", "pipeline_lab_u")
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
    """Return the page for the results that there are."""
    lines = [
        "# Pipelines in a lab with slow NICs",
        "",
        "Three stages of two ranks on `examples/labs/hosts-3x2.toml`, trained by `meshweave.pipeline`. The last",
        "row of a table sends one byte for each tensor: what no transfer can beat.",
        "",
    ]
    for name in NAMES:
        if not (RESULTS / f"{name}.json").exists():
            continue
        data: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
        result = data["rows"]
        for model in result["models"]:
            repeat = len(model["rows"][0]["runs_s"])
            lines += table(model)
            lines += [
                f"`python benchmarks/pipeline_lab.py --models {model['model']} --repeat {repeat} --save {name}`",
                "",
                f"{machine_line(data)} {result['micro_batches']} micro-batches; runs of each, in turns: {repeat}.",
                "",
            ]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    (RESULTS / "pipeline_lab.md").write_text(page())
