"""Which rows of published runs are one figure: the second of them does not count."""

from __future__ import annotations

import pytest

from meshweave_studies.training_runs.rows import COLUMNS, parse_runs
from meshweave_studies.training_runs.score import score_runs

ROW = {"model": "llama-3-8b", "chips": "8 H100", "tp": "8", "mbs": "1", "gbs": "8", "seq": "4096",
       "config": "bf16 zero-1", "metric": "step time s"}  # fmt: skip


def _rows(*sources: str) -> str:
    lines = [",".join(COLUMNS)]
    for number, source in enumerate(sources):
        row = {**ROW, "source": source, "value": str(1 + number)}
        lines.append(",".join(row.get(column, "") for column in COLUMNS))
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("second", "counts"), [("llm-foundry again", False), ("NeMo 24.07", True), ("llm-foundry", True)]
)
def test_only_a_run_of_the_same_software_in_another_source_is_one_figure(second: str, counts: bool) -> None:
    scored = score_runs(parse_runs(_rows("llm-foundry", second), "runs.csv"))
    assert all(row.predicted for row in scored), [row.reason for row in scored]
    assert [row.counts for row in scored] == [True, counts]
