"""Writes `results/reshard.md`: resharding as measured in the lab, as tables made from the saved JSON files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from lab_tables import machine_line
from machine import RESULTS

COMMANDS = {
    "reshard_one_to_many": ("One sender to A hosts x B ranks", "one_to_many --repeat 4 --shape 256,128,126"),
    "reshard_cases": (
        "The nine cases of AlpaComm's table 2",
        "cases --repeat 3 --shape 256,256,126 --strategies broadcast,global_all_gather",
    ),
    "reshard_lab_llama": ("llama-2-7b's 291 tensors at a 16th of their width", "llama --repeat 3"),
}


def table(name: str) -> Iterator[str]:
    title, command = COMMANDS[name]
    data: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    found = data["rows"]
    yield f"## {title}"
    yield ""
    yield f"`python benchmarks/reshard_lab.py {command} --save {name}`"
    yield ""
    yield f"{machine_line(data)}. {len(found['rows'][0]['runs_s'])} runs each."
    yield ""
    yield "| | strategy, order | bound s | closed form | simulated | median s | x bound | x closed form | runs s |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in found["rows"]:
        runs = f"{min(row['runs_s']):.3f} - {max(row['runs_s']):.3f}"
        expected = f"{row['predicted_s']:.3f} | {row['simulated_s']:.3f}"
        over = f"{row['over_bound']:.3f} | {row['over_predicted']:.3f}"
        what = f"{row['setting']} | {row['strategy']}, {row['order']}"
        yield f"| {what} | {row['bound_s']:.3f} | {expected} | {row['median_s']:.3f} | {over} | {runs} |"
    yield ""


def main() -> None:
    lines = [
        "# Resharding in a lab",
        "",
        "Made by `python benchmarks/reshard_tables.py`. Five hosts of four ranks, one NIC of 100 Mbit/s each "
        "(`examples/labs/hosts-5x4.toml`), gloo, 20 processes on 2 cores, fp32; "
        "every value that arrives is checked.",
        "",
        "- Bound: the bytes of the busiest NIC over its nominal rate; goodput of TCP is 97 to 99 % of that.",
        "- Closed form: that of the plan (`meshweave.algorithms.reshard.multicast`), on the lab's description, "
        "uncalibrated; simulated: the same program on the same description.",
        "- naive: one task strictly after another, the first holder sends. Gathers: the approach of Alpa and "
        "Megatron-LM, as rings of messages by us.",
        "",
    ]
    for name in COMMANDS:
        if (RESULTS / f"{name}.json").exists():
            lines += table(name)
    (RESULTS / "reshard.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
