"""Write what the pages say in numbers from the saved results: readings beside rows, and how many rows hold.

Run `meshweave reproduce meshslice --reading NAME --out validation/results` for each reading first.

    python validation/readings_table.py             # results/meshslice-readings.md and the tables of README.md
    python validation/readings_table.py --check     # exit with 1 if a committed page is not what would be written
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshweave_studies.alpacomm.readings import RIVAL_ROWS
from meshweave_studies.meshslice.readings import MEASURED_ROWS, READINGS, PaperReading

RESULTS = Path(__file__).parent / "results"
PAGE = RESULTS / "meshslice-readings.md"
README = Path(__file__).parent / "README.md"
PAPERS = {
    "Slicing, all-factors": "slicing-pvc-node-h100-node",
    "Slicing, cut": "slicing-cut",
    "AlpaComm, bandwidth": "alpacomm-p3.8xlarge",
    "AlpaComm, messages": "alpacomm-messages",
    "AlpaComm, alpa": "alpacomm-alpa",
    "AlpaComm, alpa-messages": "alpacomm-alpa-messages",
    "ATP": "atp",
    "T3": "t3",
}
MARKS = {"holds": "", "near": " ~", "differs": " x"}


def saved_rows(name: str) -> list[dict[str, Any]]:
    """Return the saved rows of a reading."""
    return load(f"meshslice-{name}")


def load(stem: str) -> list[dict[str, Any]]:
    """Return the rows of a saved table."""
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"{stem}.json").read_text(encoding="utf-8"))["rows"]
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
        "Written by `validation/readings_table.py` from the JSON files beside it. A row is near (~) or differs "
        "(x); one in brackets is listed and does not count; `-` is not computed. Each column is a table: "
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


def counts_table() -> str:
    """Return how many rows of each paper and reading count, hold, are near, differ and are listed."""
    lines = ["| | rows | count | hold | near | differ | listed |", "|---|---:|---:|---:|---:|---:|---:|"]
    tables = {f"MeshSlice, {name}": saved_rows(name) for name in READINGS}
    tables |= {paper: load(stem) for paper, stem in PAPERS.items()}
    for name, rows in tables.items():
        numbers = len(rows), sum(verdicts(rows)), *verdicts(rows), sum(bool(row["listed"]) for row in rows)
        lines.append(f"| {name} | {' | '.join(map(str, numbers))} |")
    return "\n".join(lines) + "\n"


HEADLINES = {
    "utilisation": "utilisation, %",
    "over_wang": "over Wang at MeshSlice's S, %",
    "end_to_end": "end to end, %",
    "unoptimised": "all Y-stationary, %",
    "products_over_collective": "16 products over Collective, %",
    "products_over_wang": "16 products over Wang, %",
}


def readings_table() -> str:
    """Return the main numbers of the pod by reading, GPT-3 and Megatron-NLG."""
    pod = [reading.name for reading in READINGS.values() if reading.pod]
    lines = [
        f"| at 256 chips, GPT-3 / Megatron-NLG | published | {' | '.join(pod)} |",
        f"|---|---|{'---|' * len(pod)}",
    ]
    for name, what in HEADLINES.items():
        listed = [[row for row in saved_rows(reading) if row["id"] == name] for reading in pod]
        published = " / ".join(f"{row['published']:.1f}" for row in listed[0])
        cells = [" / ".join(f"{row['ours']:.1f}" for row in rows) for rows in listed]
        lines.append(f"| {what} | {published} | {' | '.join(cells)} |")
    lines.append(f"| fitted | | {' | '.join(READINGS[name].fit or 'nothing' for name in pod)} |")
    return "\n".join(lines) + "\n"


def beside(stems: dict[str, str], ids: Sequence[str] = ()) -> str:
    """Return rows with these ids, or all, of some tables of a paper, one column for each table."""
    saved = {name: {(row["id"], row["model"]): row for row in load(stem)} for name, stem in stems.items()}
    lines = [f"| row | of | published | {' | '.join(saved)} |", f"|---|---|{'---:|' * (1 + len(saved))}"]
    for key in next(iter(saved.values())):
        rows = [of_reading.get(key) for of_reading in saved.values()]
        one = rows[0]
        if one is None or (ids and key[0] not in ids):
            continue
        published = "-" if one["published"] is None else f"{one['published']:.4g} {one['unit']}".strip()
        lines.append(f"| {key[0]} | {key[1]} | {published} | {' | '.join(map(_cell, rows))} |")
    return "\n".join(lines) + "\n"


def _of(paper: str) -> dict[str, str]:
    """Return the tables of a paper by their readings."""
    return {name.split(", ")[1]: stem for name, stem in PAPERS.items() if name.startswith(f"{paper}, ")}


T3_ROWS = {
    "ideal_overlap": "ideal overlap, % faster (the row that the machine was checked against)",
    "t3": "T3, % faster",
    "mca": "T3-MCA, % faster",
    "large": "T3-MCA on larger models, % faster",
    "traffic": "T3-MCA, % fewer DRAM accesses",
    "scatter_reads": "reads of the reduce-scatter, sequential over T3-MCA",
    "writes": "writes, % fewer",
    "product_reads": "reads of the product, sequential over T3-MCA",
    "split_all_reduce": "all-reduce with a share of the compute units, % longer",
    "split_product": "product with a share of the compute units, % longer",
    "training_counted": "training, % faster, counted",
    "training_stated": "training, % faster, stated",
    "prompt_counted": "prompt, % faster, counted",
    "prompt_stated": "prompt, % faster, stated",
    "ring_error": "reduce-scatter of 6 to 192 MB, % from theory",
    "ring_error_with_sum": "the same with the memory time of the last sum",
}


def t3_table() -> str:
    """Return the main numbers of T3 beside ours."""
    lines = ["| | of | published | ours |", "|---|---|---:|---:|"]
    for name, what in T3_ROWS.items():
        for row in load("t3"):
            if row["id"] == name:
                lines.append(f"| {what} | {row['model']} | {row['published']:.4g} | {_cell(row)} |")
    return "\n".join(lines) + "\n"


def t3_orderings() -> str:
    """Return a sentence about the orderings, and those that do not hold everywhere."""
    saved = json.loads((RESULTS / "t3.json").read_text(encoding="utf-8"))["orderings"]
    cases, holds = sum(one["cases"] for one in saved), sum(one["holds"] for one in saved)
    whole = [one for one in saved if one["holds"] == one["cases"]]
    lines = [
        f"{len(saved)} orderings that the text states, in {cases} cases: {holds} cases hold, and {len(whole)} "
        "orderings hold in all of theirs. The others:",
        "",
        "| ordering | holds in | of |",
        "|---|---:|---:|",
        *(f"| {one['statement']} | {one['holds']} | {one['cases']} |" for one in saved if one not in whole),
    ]
    return "\n".join(lines) + "\n"


def readme() -> str:
    """Return README.md of this folder with its tables as they should be."""
    text = README.read_text(encoding="utf-8")
    tables = {
        "counts": counts_table(),
        "readings": readings_table(),
        "slicing": beside(_of("Slicing")),
        "alpacomm": beside(_of("AlpaComm"), RIVAL_ROWS),
        "t3": t3_table(),
        "t3-orderings": t3_orderings(),
    }
    for name, table_text in tables.items():
        begin, end = (
            f"<!-- {name}: begin (python validation/readings_table.py) -->\n",
            f"<!-- {name}: end -->",
        )
        before, _, rest = text.partition(begin)
        text = before + begin + table_text + end + rest.partition(end)[2]
    return text


def main() -> int:
    """Write both pages, or with --check return 1 where one is not up to date."""
    pages = {PAGE: page(), README: readme()}
    if sys.argv[1:] == ["--check"]:
        return int(any(path.read_text(encoding="utf-8") != text for path, text in pages.items()))
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
