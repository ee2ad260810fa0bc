"""Write what the pages say in numbers from the saved results: readings beside rows, and how many rows hold.

Run `meshweave reproduce meshslice --reading NAME --out validation/results` for each reading first.

    python validation/readings_table.py             # results/meshslice-readings.md, README.md, papers.md
    python validation/readings_table.py --check     # exit with 1 if a committed page is not what would be written
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshweave_studies.alpacomm.readings import RIVAL_ROWS
from meshweave_studies.atp.readings import SIMULATED_ROWS
from meshweave_studies.meshslice.readings import MEASURED_ROWS, READINGS, PaperReading
from meshweave_studies.t3.readings import SUB_LAYER_ROWS

RESULTS = Path(__file__).parent / "results"
PAGE = RESULTS / "meshslice-readings.md"
README = Path(__file__).parent / "README.md"
ROW_BY_ROW = Path(__file__).parent / "papers.md"
BEFORE = RESULTS / "counts-before.json"
PAPERS = {
    "Slicing, all-factors": "slicing-pvc-node-h100-node",
    "Slicing, cut": "slicing-cut",
    "Slicing, shapes": "slicing-shapes",
    "AlpaComm, bandwidth": "alpacomm-p3.8xlarge",
    "AlpaComm, messages": "alpacomm-messages",
    "AlpaComm, alpa": "alpacomm-alpa",
    "AlpaComm, alpa-messages": "alpacomm-alpa-messages",
    "ATP, rates": "atp",
    "ATP, framework": "atp-framework",
    "ATP, framework-overlap": "atp-framework-overlap",
    "ATP, framework-host": "atp-framework-host",
    "ATP, framework-four-bytes": "atp-framework-four-bytes",
    "Zero Bubble": "zero-bubble-dgx-a100",
    "T3, table-1": "t3",
    "T3, occupancy": "t3-occupancy",
    "T3, link-75": "t3-link-75",
    "T3, occupancy-75": "t3-occupancy-75",
    "T3, link-90": "t3-link-90",
    "T3, rows": "t3-rows",
    "T3, occupancy-plain-sets": "t3-occupancy-plain-sets",
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
    """Return how many rows of each paper and reading count, hold, are near, differ and are listed.

    What counted and held before one rule judged every paper stands beside it.
    """
    before = json.loads(BEFORE.read_text(encoding="utf-8"))["counts"]
    columns = ["rows", "count", "hold", "near", "differ", "listed", "counted before", "held before"]
    lines = [f"| | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    tables = {f"MeshSlice, {name}": saved_rows(name) for name in READINGS}
    tables |= {paper: load(stem) for paper, stem in PAPERS.items()}
    for name, rows in tables.items():
        numbers = len(rows), sum(verdicts(rows)), *verdicts(rows), sum(bool(row["listed"]) for row in rows)
        was = before.get(name, {"count": "-", "hold": "-"})
        lines.append(f"| {name} | {' | '.join(map(str, (*numbers, was['count'], was['hold'])))} |")
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


CLAIMS = {
    "MeshSlice": (
        ("over Wang, end to end, GPT-3, 256 chips", "meshslice-public", "end_to_end", "gpt3"),
        ("over Wang, end to end, Megatron-NLG", "meshslice-public", "end_to_end", "megatron-nlg"),
        ("over Collective, 16 products", "meshslice-public", "products_over_collective", "both"),
        ("over Wang, 16 products", "meshslice-public", "products_over_wang", "both"),
        ("best mesh over a bad one", "meshslice-public", "mesh_effect", "gpt3"),
    ),
    "Slicing": (
        ("column block and inner product lead, PVC", "slicing-pvc-node-h100-node", "leaders", "pvc-mlp1"),
        ("outer product and 2D block lead, PVC", "slicing-pvc-node-h100-node", "leaders", "pvc-mlp2"),
        ("at or ahead of DTensor, MLP-1, PVC", "slicing-pvc-node-h100-node", "ahead_of_dtensor", "pvc-mlp1"),
        (
            "at or ahead of DTensor, MLP-2, H100",
            "slicing-pvc-node-h100-node",
            "ahead_of_dtensor",
            "h100-mlp2",
        ),
    ),
    "AlpaComm": (
        ("broadcast over all-gather, case 4", "alpacomm-p3.8xlarge", "reordered", "case4"),
        ("eager-1F1B, GPT 1.3B", "alpacomm-p3.8xlarge", "end_to_end", "GPT 1.3B (2, 2, 2)"),
        ("eager-1F1B, U-Transformer 2.1B", "alpacomm-p3.8xlarge", "end_to_end", "U-Transformer 2.1B"),
        (
            "share of the bound, U-Transformer 2.1B",
            "alpacomm-p3.8xlarge",
            "share_of_bound",
            "U-Transformer 2.1B",
        ),
    ),
    "ATP": (
        ("over Megatron-LM, IC1, the most", "atp", "largest_gain", "ic1"),
        ("the same, framework", "atp-framework", "largest_gain", "ic1"),
        ("over Megatron-LM, IC2, the most", "atp", "largest_gain", "ic2"),
        ("the same, framework", "atp-framework", "largest_gain", "ic2"),
        ("IC3, M3, no chunks", "atp", "table3_baseline", "ic3-m3"),
        ("the same, framework", "atp-framework", "table3_baseline", "ic3-m3"),
        ("IC2, M4, 2 chunks", "atp", "table3_chunk2", "ic2-m4"),
        ("the same, framework", "atp-framework", "table3_chunk2", "ic2-m4"),
    ),
    "T3": (
        ("T3-MCA, 16 sub-layers", "t3", "mca", "geomean"),
        ("T3, 16 sub-layers", "t3", "t3", "geomean"),
        ("accesses of DRAM", "t3", "traffic", "mean"),
        ("training, T3-MCA", "t3", "training_counted", "T3-MCA, geomean"),
    ),
    "Zero Bubble": (
        ("ZB-1p over 1F1B, 6.2B, 64 micro-batches", "zero-bubble-dgx-a100", "zb_1p_kernels", "6.2B, 64"),
        ("ZB-2p over 1F1B, 6.2B, 64 micro-batches", "zero-bubble-dgx-a100", "zb_2p_kernels", "6.2B, 64"),
    ),
}
"""What papers claim first: in words, and the saved row that has it. Chosen by abstracts and conclusions."""


def claims_table() -> str:
    """Return each paper's first claims beside ours, with verdicts."""
    lines = ["| | claim | published | ours | |", "|---|---|---:|---:|---|"]
    for paper, claims in CLAIMS.items():
        for what, stem, name, subject in claims:
            row = next(one for one in load(stem) if (one["id"], one["model"]) == (name, subject))
            published = f"{row['published']:.4g} {row['unit']}"
            lines.append(f"| {paper} | {what} | {published} | {row['ours']:.4g} | {row['verdict']} |")
    return "\n".join(lines) + "\n"


def table_3() -> str:
    """Return how the rows of ATP's table 3 come out by machine under each reading: hold, near, differ."""
    stems = _of("ATP")
    lines = [f"| table 3, hold / near / differ | {' | '.join(stems)} |", f"|---|{'---|' * len(stems)}"]
    for machine in ("ic1", "ic2", "ic3", "ic4"):
        cells = []
        for stem in stems.values():
            rows = [
                row
                for row in load(stem)
                if row["counts"] and row["id"].startswith("table3_") and row["model"].startswith(machine)
            ]
            cells.append(" / ".join(map(str, verdicts(rows))))
        lines.append(f"| {machine.upper()} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


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
    return _with_tables(README, {"claims": claims_table(), "counts": counts_table()})


def row_by_row() -> str:
    """Return papers.md with its tables as they should be."""
    tables = {
        "readings": readings_table(),
        "slicing": beside(_of("Slicing")),
        "alpacomm": beside(_of("AlpaComm"), RIVAL_ROWS),
        "atp": beside(_of("ATP"), SIMULATED_ROWS),
        "atp-table-3": table_3(),
        "t3": t3_table(),
        "t3-readings": beside(_of("T3"), SUB_LAYER_ROWS),
        "t3-orderings": t3_orderings(),
    }
    return _with_tables(ROW_BY_ROW, tables)


def _with_tables(page: Path, tables: dict[str, str]) -> str:
    """Return the text of a page with tables between their marks."""
    text = page.read_text(encoding="utf-8")
    for name, table_text in tables.items():
        begin, end = (
            f"<!-- {name}: begin (python validation/readings_table.py) -->\n",
            f"<!-- {name}: end -->",
        )
        before, _, rest = text.partition(begin)
        text = before + begin + table_text + end + rest.partition(end)[2]
    return text


def main() -> int:
    """Write the pages, or with --check return 1 where one is not up to date."""
    pages = {PAGE: page(), README: readme(), ROW_BY_ROW: row_by_row()}
    if sys.argv[1:] == ["--check"]:
        return int(any(path.read_text(encoding="utf-8") != text for path, text in pages.items()))
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
