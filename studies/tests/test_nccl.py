"""`reproduce nccl`: published bus bandwidths across hosts, and the saved scores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshweave.cli.app import run_app
from meshweave_studies.nccl.score import bandwidth_rows, cluster_of, collective_s, published_sources
from meshweave_studies.nccl.tables import bandwidth_page, summary_line

ROOT = Path(__file__).parents[2]


def test_figures_are_cited_and_cover_what_they_claim() -> None:
    sources = [source for source in published_sources() if not source.get("too_low")]
    assert all(source["url"].startswith("https://") and source["rows"] for source in sources)
    assert len({source["url"].split("/")[3] for source in sources}) >= 3
    assert {source["chip"] for source in sources} == {"a100", "h100"}
    assert {source["hosts"] * 8 for source in sources} >= {16, 32, 64, 256}
    sizes = [num_bytes for source in sources for num_bytes, _ in source["rows"]]
    assert len(sizes) >= 12 and min(sizes) == 1 << 20 and max(sizes) == 1 << 32


def test_the_saved_scores_and_the_page_are_those_of_this_code() -> None:
    rows = bandwidth_rows()
    saved = json.loads((ROOT / "benchmarks" / "results" / "nccl.json").read_text())
    assert [row.to_json() for row in rows] == saved, "run meshweave reproduce nccl --json"
    assert (ROOT / "validation" / "results" / "nccl.md").read_text() == bandwidth_page(rows)
    assert sum(row.is_hit for row in rows if row.counts) >= 0.85 * sum(row.counts for row in rows)
    for page in ("validation/README.md", "docs/guide/reproducing.md", "CHANGELOG.md"):
        assert summary_line(rows).split(";")[0] in " ".join((ROOT / page).read_text().split()), page


def test_the_command_prints_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["reproduce", "nccl"]) == 0
    text = capsys.readouterr().out
    assert all(source["name"] in text for source in published_sources())


def test_a_slower_network_takes_longer() -> None:
    source = next(source for source in published_sources() if source["name"] == "p5")
    times = [
        collective_s(cluster_of(source, latency), "all_reduce", 1 << 20) for latency in (0.0, 1e-5, 1e-4)
    ]
    assert times == sorted(times) and times[0] < times[2]
