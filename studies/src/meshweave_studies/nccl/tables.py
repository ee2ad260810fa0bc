"""Published and predicted bus bandwidths as a Markdown table and a page."""

from __future__ import annotations

from collections.abc import Sequence

from meshweave_studies.markdown import markdown_table
from meshweave_studies.nccl.score import GOAL, BandwidthRow

_HEAD = (
    "source",
    "GPUs",
    "collective",
    "bytes",
    "published GB/s",
    "predicted GB/s",
    "error",
    "algorithm",
    "",
)


def bandwidth_table(rows: Sequence[BandwidthRow]) -> str:
    """Return the rows as a Markdown table."""
    lines = []
    for row in rows:
        verdict = ("hit" if row.is_hit else "miss") if row.counts else "not counted"
        cells = (
            *(
                row.source,
                str(row.num_gpus),
                row.kind,
                str(row.bytes),
                f"{row.published:g}",
                f"{row.predicted:g}",
            ),
            *(f"{100 * row.error:+.1f} %", row.algorithm, verdict + (f" ({row.note})" if row.note else "")),
        )
        lines.append(cells)
    return markdown_table(_HEAD, "lrlrrrrll", lines)


def summary_line(rows: Sequence[BandwidthRow]) -> str:
    """Return how many of the rows that count are hits."""
    counted = [row for row in rows if row.counts]
    hits = sum(row.is_hit for row in counted)
    mean = sum(abs(row.error) for row in counted) / max(len(counted), 1)
    return (
        f"{hits} of {len(counted)} published bus bandwidths are met within {100 * GOAL:.0f} %; "
        f"mean error {100 * mean:.1f} %."
    )


def bandwidth_page(rows: Sequence[BandwidthRow]) -> str:
    """Return the page of the published bus bandwidths, Markdown."""
    sources = {row.source: row for row in rows}
    lines = [
        "# Collectives across hosts: predicted beside published bus bandwidths",
        "",
        f"{summary_line(rows)} `meshweave reproduce nccl` computes this page. Figures that their authors call too "
        "low are shown and not counted.",
        "",
        "What was fitted: the latency of a network to the first row of its table, which is not scored. What was "
        "chosen with the committed figures in view: the form of a tree's pipeline, and 128 MiB as its longest "
        "fill. After a first comparison one latency was corrected to what NCCL's source says: a ring all-reduce "
        "crosses between hosts 2 N times, not 2 (N - 1). So this is agreement, not a forecast of unseen runs.",
        "",
        bandwidth_table(rows),
        "## Sources",
        "",
        *(f"- {name}: {row.host}. {row.url}" for name, row in sources.items()),
    ]
    return "\n".join(lines) + "\n"
