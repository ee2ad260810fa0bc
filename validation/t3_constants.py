"""Vary T3's constants without a source, one at a time, and write what the sub-layer that its text names does.

python validation/t3_constants.py           # results/t3-constants.json and .md, some minutes
python validation/t3_constants.py --page    # the page alone, from the saved numbers
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from meshweave_studies.t3.models import sub_layer_of
from meshweave_studies.t3.readings import READINGS, TABLE_1, VARIATIONS
from meshweave_studies.t3.study import SEQUENTIAL, T3, T3_MCA, GpuJob, T3Study

OUT = Path(__file__).parent / "results" / "t3-constants.json"
SUB_LAYER = "T-NLG TP 16, FC-1"
OURS = {
    "cut points of T3-MCA": "5, 10, 30, none: from 32, 16, 8 entries in the mean, or fewer (gpu_device.cpp)",
    "memory.starvation": "1000 cycles after which communication goes first",
    "memory.turn_limit": "32 column commands before the bus turns",
    "memory.age_limit": "2000 cycles after which the oldest request may close a row",
    "tracker.dma_lines": "4096 lines that may be read and not yet sent",
    "tile": "slices of 64 along k",
    "slots": "two work groups a compute unit",
    "order of tiles": "bands of eight rows of tiles (gpu/memory_map.py)",
    "in_flight_bytes": "512 sectors of 32 bytes a compute unit: another simulator's, of another GPU",
    "rate of a link": "150 GB/s each way, a reading of table 1",
}
"""Constants of ours, or read one way of several, and their values."""


def measure() -> None:
    """Save gains of T3 and T3-MCA (%), and their product over the one alone (% longer), after each variation."""
    product = sub_layer_of(SUB_LAYER).product
    out: dict[str, dict[str, float]] = {}
    for name, reading in {TABLE_1: READINGS[TABLE_1], **VARIATIONS}.items():
        study = T3Study(reading)
        jobs = [GpuJob(product, what) for what in (SEQUENTIAL, T3, T3_MCA)]
        study.prefetch(jobs)
        whole, t3, mca = (study.run(job) for job in jobs)
        out[name] = {
            "t3_faster": 100 * (whole.duration_ps / t3.duration_ps - 1),
            "mca_faster": 100 * (whole.duration_ps / mca.duration_ps - 1),
            "t3_product_longer": 100 * (t3.kernel_ps("product") / whole.kernel_ps("product") - 1),
            "mca_product_longer": 100 * (mca.kernel_ps("product") / whole.kernel_ps("product") - 1),
            "threshold": mca.counters["threshold"],
        }
        OUT.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")


def saved() -> dict[str, dict[str, float]]:
    """Return the saved numbers by variation; none where nothing was computed."""
    rows: dict[str, dict[str, float]] = json.loads(OUT.read_text("utf-8")) if OUT.exists() else {}
    return rows


def page(rows: dict[str, dict[str, float]]) -> str:
    """Return the page of the saved numbers."""
    lines = [
        "# T3: constants of ours, and what the result does when they vary",
        "",
        "Written by `validation/t3_constants.py`. No source has these.",
        "",
        "| constant | value |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in OURS.items()),
        "",
    ]
    if not rows:
        lines.append("No variation is saved: the script computes all in some minutes.")
        return "\n".join(lines) + "\n"
    lines += [
        f"{SUB_LAYER}, one constant changed at a time. A threshold of 65 of 64 entries is none.",
        "",
        "| variation | T3, % faster | T3-MCA, % faster | T3's product, % longer | T3-MCA's | threshold |",
        "|---|---:|---:|---:|---:|---:|",
        *(
            f"| {name} | {row['t3_faster']:.1f} | {row['mca_faster']:.1f} | {row['t3_product_longer']:.1f} "
            f"| {row['mca_product_longer']:.1f} | {row['threshold']:.0f} |"
            for name, row in rows.items()
        ),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Compute and write the numbers and the page, or with --page the page alone."""
    if sys.argv[1:] != ["--page"]:
        measure()
    OUT.with_suffix(".md").write_text(page(saved()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
