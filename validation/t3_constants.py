"""Vary T3's constants without a source, one at a time, and write what the sub-layer that its text names does.

Thresholds of the arbitration are varied in all 16 sub-layers, with and without a drain at the product's end.

python validation/t3_constants.py           # results/t3-constants.json, -thresholds.json and .md, some minutes
python validation/t3_constants.py --page    # the page alone, from the saved numbers
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from meshweave_studies.t3.groups import SMALL
from meshweave_studies.t3.models import sub_layer_of
from meshweave_studies.t3.readings import OCCUPANCY, READINGS, TABLE_1, THRESHOLDS, VARIATIONS
from meshweave_studies.t3.study import SEQUENTIAL, T3, T3_MCA, GpuJob, T3Study

OUT = Path(__file__).parent / "results" / "t3-constants.json"
THRESHOLDS_OUT = OUT.with_name("t3-thresholds.json")
SUB_LAYER = "T-NLG TP 16, FC-1"
OURS = {
    "cut points of T3-MCA": "5, 10, 30, none: from 32, 16, 8 entries in the mean, or fewer (gpu_device.cpp)",
    "memory.starvation": "1000 cycles after which communication goes first",
    "memory.turn_limit": "32 column commands before the bus turns",
    "memory.age_limit": "2000 cycles after which the oldest request may close a row",
    "tracker.dma_lines": "4096 lines that may be read and not yet sent",
    "tile": "slices of 64 along k",
    "slots": "two work groups a compute unit",
    "sets of the cache": "a hash of the line's number",
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


def measure_thresholds() -> None:
    """Save the gains (%) of T3, and of T3-MCA by its own threshold and by each that is set, by sub-layer.

    A threshold that is set holds to the end of the run, or, drained, to that of the product's last work group.
    """
    base = READINGS[OCCUPANCY]
    study = T3Study(base)
    out: dict[str, dict[str, float]] = {}
    for layer in SMALL:
        whole, t3, own = (study.run(GpuJob(layer.product, what)) for what in (SEQUENTIAL, T3, T3_MCA))
        row = {"t3": t3.duration_ps, "own": own.duration_ps}
        for entries in THRESHOLDS:
            for drains, name in ((False, ""), (True, " drained")):
                reading = replace(base, threshold=entries, drains=drains)
                run = T3Study(reading).run(GpuJob(layer.product, T3_MCA))
                row[f"{entries}{name}"] = run.duration_ps
        faster = {name: 100 * (whole.duration_ps / ps - 1) for name, ps in row.items()}
        out[str(layer)] = {**faster, "threshold": own.counters["threshold"]}
        THRESHOLDS_OUT.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")


def saved_thresholds() -> dict[str, dict[str, float]]:
    """Return the saved gains by sub-layer and threshold."""
    rows: dict[str, dict[str, float]] = json.loads(THRESHOLDS_OUT.read_text("utf-8"))
    return rows


def thresholds_page(rows: dict[str, dict[str, float]]) -> list[str]:
    """Return the lines of the table of thresholds."""
    columns = [f"{entries}{name}" for entries in THRESHOLDS if entries <= 64 for name in ("", " drained")]
    own = {THRESHOLDS[int(row["threshold"])] for row in rows.values()}
    best = {
        layer: max(("own", *columns), key=lambda name, row=row: row[name])  # type: ignore[misc]
        for layer, row in rows.items()
    }
    return [
        "",
        "## Thresholds by sub-layer",
        "",
        f"By reading {OCCUPANCY}, % faster than sequential. T3-MCA takes the threshold {', '.join(sorted(own))} "
        f"in all {len(rows)}, since queues are never full enough while a product runs alone; other columns set "
        "one. Drained: nothing is held back from the end of the product's last work group on (section 4.5), which "
        "without a threshold changes nothing.",
        "",
        f"| sub-layer | T3 | T3-MCA | {' | '.join(columns)} | best |",
        f"|---|{'---:|' * (2 + len(columns))}---|",
        *(
            f"| {layer} | {' | '.join(f'{row[name]:.1f}' for name in ('t3', 'own', *columns))} | {best[layer]} |"
            for layer, row in rows.items()
        ),
    ]


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
        *thresholds_page(saved_thresholds()),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Compute and write the numbers and the page, or with --page the page alone."""
    if sys.argv[1:] != ["--page"]:
        measure()
        measure_thresholds()
    OUT.with_suffix(".md").write_text(page(saved()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
