"""The page of the plan of a step: complete, well-formed, and it loads nothing."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from meshweave.cli.app import run_app
from meshweave.tune import load_plan

FIXED = "strategy=megatron_sp,cp=1,micro_batch=1,vp=1,schedule=1f1b,zero=1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    files = ["--report", str(folder / "page.html"), "--out", str(folder / "plan.json")]
    args = ["--cluster", "dgx-h100:16", "--batch", "32", "--seq", "2048", "--fix", FIXED, "--sensitivity"]
    assert run_app(["plan", "llama-2-7b", *args, *files]) == 0
    return folder


class _Rows(HTMLParser):
    """Counts the cells of each row, and checks that tags close in the order in which they opened."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[int] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append(0)
        if tag in ("td", "th"):
            self.rows[-1] += 1
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_has_every_row_and_loads_nothing(folder: Path) -> None:
    text = (folder / "page.html").read_text()
    steps = load_plan(folder / "plan.json").step
    rows = _Rows()
    rows.feed(text)
    assert rows.open == []
    tables = 2
    assert len(rows.rows) == tables * (len(steps.ranked) + 1)
    assert len(set(rows.rows[: len(steps.ranked) + 1])) == 1
    assert not re.search(r"(src|href)=|url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text)
    for word in ("prefers-color-scheme: dark", "max-width: 600px", "Less memory", "Other links", "nic twice"):
        assert word in text
    assert len(text) < 2_000_000 and "NaN" not in text.split("<script>")[0]


def test_values_to_sort_by_are_numbers(folder: Path) -> None:
    text = (folder / "page.html").read_text()
    steps = load_plan(folder / "plan.json").step
    table = text[text.index("Configurations") : text.index("Memory of the fullest")]
    seconds = [float(value) for value in re.findall(r'data-value="([0-9.e-]+)">[0-9.]+ m?s<', table)]
    assert seconds == [record.step_s for record in steps.ranked]
