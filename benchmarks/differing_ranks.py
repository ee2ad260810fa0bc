"""What comes of ranks that differ: every way of tests/nn/parallel/ways_to_differ.py, tried, as a table.

    python benchmarks/differing_ranks.py [RANKS ...]

Rank 1 differs from the others; of two stages of two ranks, the rank that the way names. The table goes to
benchmarks/results/differing_ranks.md; status 1 where an outcome is not the one that the way lists.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import meshweave as mw

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "nn" / "parallel"))
from differing_pipeline_rank_functions import WAYS as PIPELINES
from ways_to_differ import HARMLESS, WAYS, Way

RESULT = Path(__file__).resolve().parent / "results" / "differing_ranks.md"
ENV = {"PYTHONPATH": sys.path[0]}
_TOGETHER = 12
_TOLERANCE = 1e-9
_WHEN = {"model": "in parallelize", "step": "from the first step", "later": "in the third step"}


def outcome(way: Way, answers: list[dict[str, Any]]) -> tuple[bool, str]:
    """Return whether all ranks had the outcome that a way lists, and what it was in words."""
    if way.expected.startswith(HARMLESS):
        worst = [answer.get("worst", float("inf")) for answer in answers]
        is_right = all("error" not in answer for answer in answers) and not any(w > _TOLERANCE for w in worst)
        return is_right, way.expected if is_right else str(answers)
    is_right = all(
        re.fullmatch(way.error, answer.get("error", "")) and re.search(way.expected, answer["text"])
        for answer in answers
    )
    first = answers[0]
    return is_right, f"{first.get('error', 'no error')}: {first.get('text', '').partition(';')[0]}"


def _of_stages() -> dict[str, tuple[bool, str]]:
    """Return the same of the ways in which a rank of a pipeline may differ, by name."""
    ranks = mw.launch(
        "differing_pipeline_rank_functions:differ", 4, {"ways": list(PIPELINES)}, timeout_s=900, env=ENV
    )
    listed = {}
    for name, (_, _, expected) in PIPELINES.items():
        said = [rank[name] for rank in ranks]
        listed[name] = all(expected in text for text in said), said[0].partition(";")[0]
    return listed


def main() -> int:
    """Try all ways and write the table."""
    counts = [int(argument) for argument in sys.argv[1:]] or [2, 4]
    rows: dict[str, list[str]] = {each.name: [] for each in WAYS}
    wrong = 0
    for num_ranks in counts:
        for start in range(0, len(WAYS), _TOGETHER):
            ways = WAYS[start : start + _TOGETHER]
            payload = {"ways": [each.name for each in ways], "stages": ()}
            ranks = mw.launch("differing_rank_functions:differ", num_ranks, payload, timeout_s=900, env=ENV)
            for way in ways:
                is_right, words = outcome(way, [rank[way.name] for rank in ranks])
                wrong += not is_right
                rows[way.name].append(words if is_right else f"**NOT AS LISTED** {words}")
    stages = _of_stages()
    wrong += sum(not is_right for is_right, _ in stages.values())
    lines = [
        "# Ways in which one rank may differ", "",
        f"Rank 1 differs; what every rank of {counts[-1]} then has, from `benchmarks/differing_ranks.py` "
        f"(tried on {' and '.join(map(str, counts))} ranks; {len(WAYS)} ways, and {len(stages)} in which a rank "
        f"of two stages of two ranks may differ, tried on 4; {wrong} not as listed).", "",
        "| way | when | outcome |", "|---|---|---|",
    ]  # fmt: skip
    for way in WAYS:
        cell = rows[way.name][-1].replace("|", "/")
        lines.append(f"| {way.name.replace('_', ' ')} | {_WHEN[way.when]} | {cell} |")
    for name, (is_right, words) in stages.items():
        cell = (words if is_right else f"**NOT AS LISTED** {words}").replace("|", "/")
        lines.append(f"| a stage: {name} | from the first step | {cell} |")
    RESULT.write_text("\n".join(lines) + "\n")
    print(f"{len(WAYS) + len(stages)} ways, {wrong} outcomes not as listed; written to {RESULT}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
