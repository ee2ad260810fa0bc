"""The page of the plan of a step: complete, well-formed, and it loads nothing."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from meshweave.cli.app import run_app
from meshweave.report.step_page import _ranking
from meshweave.tune import load_plan

FIXED = "strategy=megatron_sp,cp=1,micro_batch=1,vp=1,schedule=1f1b,zero=1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    files = ["--report", str(folder / "page.html"), "--out", str(folder / "plan.json")]
    args = [
        "--cluster",
        "dgx-h100:16",
        "--batch",
        "32",
        "--sequence",
        "2048",
        "--fix",
        FIXED,
        "--sensitivity",
    ]
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
    ranked = len(steps.ranked) + 1
    parts, configurations, memory = (
        rows.rows[: -2 * ranked],
        rows.rows[-2 * ranked : -ranked],
        rows.rows[-ranked:],
    )
    assert len(parts) > 4 and set(parts) == {3}
    assert len(set(configurations)) == len(set(memory)) == 1
    script = re.search(r'id="data">(.*?)</script>', text)
    assert script is not None
    outside = text.replace(script[1], "")
    assert not re.search(r"(src|href)=|url\(|@import|https?://(?!www\.w3\.org/2000/svg)", outside)
    for word in (
        "color-scheme: light dark",
        "max-width: 600px",
        "Time against memory",
        "Other links",
        "NICs twice",
    ):
        assert word in text
    assert len(text) < 2_000_000


def test_the_page_has_what_its_script_draws(folder: Path) -> None:
    text = (folder / "page.html").read_text()
    steps = load_plan(folder / "plan.json").step
    script = re.search(r'id="data">(.*?)</script>', text)
    assert script is not None
    data = json.loads(script[1])
    titles = [timeline["title"] for timeline in data["timelines"]]
    assert titles == ["best", "runner-up", "a layer of the best", "a layer of the runner-up"]
    for timeline, record in zip(data["timelines"][:2], steps.ranked[:2], strict=True):
        assert timeline["end"] == pytest.approx(record.step_s, rel=2e-3)
    spans = [span for timeline in data["timelines"] for lane in timeline["lanes"] for span in lane["spans"]]
    for begin, end, kind, name, *_ in spans:
        assert begin <= end and kind < len(data["kinds"]) and name < len(data["names"])
    assert [curve["name"] for curve in data["curves"]] == ["chips", "batch", "links"]
    for curve in data["curves"]:
        for line, record in zip(curve["lines"], steps.ranked, strict=False):
            assert [point[1] for point in line if point[0] == curve["here"]] == [record.step_s]
    front = sorted((bytes_, step) for bytes_, step, _, is_front in data["front"] if is_front)
    assert front == sorted((record.memory_bytes, record.step_s) for record in steps.front)


def test_values_to_sort_by_are_numbers(folder: Path) -> None:
    text = (folder / "page.html").read_text()
    steps = load_plan(folder / "plan.json").step
    table = text[text.index(">Configurations<") : text.index(">Memory of the fullest")]
    seconds = [float(value) for value in re.findall(r'data-value="([0-9.e-]+)">[0-9.]+ m?s<', table)]
    assert seconds == [record.step_s for record in steps.ranked]


def test_no_bar_is_longer_than_that_of_the_slowest(folder: Path) -> None:
    """`margin` may put the slower of two configurations first."""
    steps = load_plan(folder / "plan.json").step
    slow_first = steps.model_copy(update={"ranked": (steps.ranked[-1], steps.ranked[0])})
    table = _ranking(slow_first, lambda degrees: degrees.strategy)
    widths = [
        sum(map(float, re.findall(r"width:([0-9.]+)%", bar)))
        for bar in re.findall(r'<div class="stack">(.*?)</div>', table)
    ]
    assert len(widths) == 2 and 99 < widths[0] < 101 and widths[1] < widths[0]
