"""Write the table of MeshSlice's readings beside its rows from the saved results.

meshweave reproduce meshslice --reading NAME --out validation/results     # one table and JSON per reading
python validation/readings_table.py                                       # validation/results/meshslice-readings.md
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshweave.reproduce.meshslice.readings import MEASURED_ROWS, READINGS, PaperReading

RESULTS = Path(__file__).parent / "results"
PAGE = RESULTS / "meshslice-readings.md"
MARKS = {"holds": "", "near": " ~", "differs": " x"}


def saved_rows(name: str) -> list[dict[str, Any]]:
    """Return the saved rows of a reading."""
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"meshslice-{name}.json").read_text(encoding="utf-8"))[
        "rows"
    ]
    return rows


def verdicts(rows: list[dict[str, Any]]) -> tuple[int, int, int]:
    """Return how many of the rows that count hold, are near and differ."""
    counted = [row["verdict"] for row in rows if row["counts"]]
    holds, near, differs = (counted.count(verdict) for verdict in MARKS)
    return holds, near, differs


def table(readings: list[PaperReading], measured: bool) -> str:
    """Return the rows of the pod, or of the measured mesh, beside their readings."""
    saved = {
        reading.name: {
            (row["id"], row["model"]): row
            for row in saved_rows(reading.name)
            if (row["id"] in MEASURED_ROWS) == measured
        }
        for reading in readings
    }
    lines = [f"| row | model | published | {' | '.join(saved)} |", f"|---|---|{'---:|' * (1 + len(saved))}"]
    rows = [list(of_reading.values()) for of_reading in saved.values()]
    lines.append(f"| rows that count | | | {' | '.join(str(sum(verdicts(r))) for r in rows)} |")
    for number, verdict in enumerate(MARKS):
        lines.append(f"| {verdict} | | | {' | '.join(str(verdicts(r)[number]) for r in rows)} |")
    for key in dict.fromkeys(key for of_reading in saved.values() for key in of_reading):
        cells = [_cell(of_reading.get(key)) for of_reading in saved.values()]
        one = next(of_reading[key] for of_reading in saved.values() if key in of_reading)
        published = "-" if one["published"] is None else f"{one['published']:.4g} {one['unit']}"
        lines.append(f"| {key[0]} | {key[1]} | {published} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(row: dict[str, Any] | None) -> str:
    if row is None or row["ours"] is None:
        return "-"
    text = f"{row['ours']:.4g}{MARKS.get(row['verdict'], '')}"
    return f"({text})" if row["listed"] else text


def page() -> str:
    """Return the page: what each reading is, then two tables."""
    pod = [reading for reading in READINGS.values() if reading.pod]
    mesh = [reading for reading in READINGS.values() if reading.mesh]
    parts = [
        "# MeshSlice: readings beside rows",
        "Written by `validation/readings_table.py` from the JSON files beside it. A row is near (~) or differs (x); one "
        "in "
        "brackets is listed and does not count; `-` is not computed. Each column is a table of its own: "
        + ", ".join(f"[{name}](meshslice-{name}.md)" for name in READINGS)
        + ".",
        "| reading | what it says | on a real torus | the event simulator | fitted |\n|---|---|---|---|---|\n"
        + "\n".join(
            f"| {r.name} | {r.title} | {r.mechanism} | {r.simulator} | {r.fit or 'nothing'} |"
            for r in READINGS.values()
        ),
        "## The simulated pod",
        table(pod, measured=False),
        "## The real 4x4 mesh",
        table(mesh, measured=True),
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
