"""Writes `results/block_lab.md`: whole blocks as measured in labs, as tables made from the saved JSON files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from lab_tables import machine_line
from machine import RESULTS

LABS = {
    "block_lab_two_groups": ("Two fast groups of four behind a slow root", "two-groups-8"),
    "block_lab_bridged_pairs": ("Bridged pairs on a slower tree", "bridged-pairs-8"),
    "block_lab_torus": ("A torus of two rows and four columns", "torus-2x4"),
}


def table(name: str) -> Iterator[str]:
    """Yield the lines about one lab."""
    title, lab = LABS[name]
    data: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    result = data["rows"]
    problem, constants = result["problem"], result["constants"]
    yield f"## {title}"
    yield ""
    repeat = len(result["rows"][0]["runs_s"])
    yield f"`python benchmarks/block_lab.py examples/labs/{lab}.toml --repeat {repeat} --save {name}`"
    yield ""
    yield f"{machine_line(data)} {repeat} runs each."
    yield ""
    yield (
        f"A GPT layer of width {problem['hidden']} with {problem['heads']} heads on {problem['batch']} sequences "
        f"of {problem['sequence']} tokens, {problem['dtype']}. Calibrated before: goodput "
        f"{100 * constants['goodput']:.1f} %, {1e3 * constants['step_s']:.1f} ms a step of a ring, "
        f"{1e3 * constants['all_reduce_s']:.1f} ms an all-reduce of all ranks, each in addition to the bytes."
    )
    yield ""
    yield "| strategy | estimate s | simulated s | median s | simulated / measured | runs s | overruns ms a step |"
    yield "|---|---|---|---|---|---|---|"
    for row in sorted(result["rows"], key=lambda row: row["median_s"]):
        runs = f"{min(row['runs_s']):.3f} - {max(row['runs_s']):.3f}"
        expected = "- | - | {:.3f} | -".format(row["median_s"])
        if "simulated_s" in row:
            over = row["simulated_s"] / row["median_s"]
            expected = (
                f"{row['estimated_s']:.3f} | {row['simulated_s']:.3f} | {row['median_s']:.3f} | {over:.3f}"
            )
        yield f"| {row['name']} | {expected} | {runs} | {1e3 * row['overrun_s']:.0f} |"
    yield ""
    yield from verdict_lines(result)


def verdict_lines(result: dict[str, Any]) -> Iterator[str]:
    """Yield what the rows say of the ranking and of the chosen strategy."""
    said = result["verdicts"]
    for reading, word in (("simulated_s", "simulation"), ("estimated_s", "estimate")):
        one = said[reading]
        yield (
            f"- By {word}: mean error {100 * one['mean_error']:.1f} %, worst {100 * one['worst_error']:+.1f} %; "
            f"{said['pairs_apart'] - len(one['pairs_missed'])} of the {said['pairs_apart']} pairs that differ by "
            f"more than {100 * said['apart']:.0f} % are in the measured order."
        )
        for faster, slower in one["pairs_missed"]:
            yield f"  - Missed: {faster} was faster than {slower}."
    for name, gain in said["chosen_over"].items():
        text = f"- Chosen: {said['chosen']}. It is {gain['measured']:.2f} times as fast as {name}"
        if "predicted" in gain:
            hit = "within" if abs(gain["difference"]) <= said["apart"] else "beyond"
            text += (
                f"; the plan said {gain['predicted']:.2f} ({100 * gain['difference']:+.1f} %, {hit} "
                f"{100 * said['apart']:.0f} %)"
            )
        yield f"{text}."
    yield ""


def page() -> str:
    """Return the page for the results that there are."""
    lines = [
        "# Whole blocks in a lab",
        "",
        "Made by `python benchmarks/block_lab_tables.py`. Eight processes on 2 cores over gloo, one layer forward",
        "and backward, every result compared with the dense reference. Products, norms, attention and activations",
        "are paced, torch's own likewise. The plan is `rank_blocks` with all entries simulated, on the described",
        "lab with the constants that were calibrated before. A product or call overruns where it really takes",
        "longer than its paced time; the last column is the rank with most of that.",
        "",
    ]
    for name in LABS:
        if (RESULTS / f"{name}.json").exists():
            lines += table(name)
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    (RESULTS / "block_lab.md").write_text(page())


if __name__ == "__main__":
    main()
