"""The explorer: one small page of saved and simulated data that loads nothing; its plans are those of today."""

from __future__ import annotations

import csv
import json
import re
import runpy

import pages
import pytest

import meshweave as mw

FOLDER = pages.ROOT / "docs" / "explorer"
PLANS = runpy.run_path(str(FOLDER / "plans.py"))
BUILD = runpy.run_path(str(FOLDER / "build.py"))
SAVED = json.loads((FOLDER / "plans.json").read_text("utf-8"))["pairs"]


@pytest.fixture(scope="module")
def page() -> str:
    text: str = BUILD["explorer_page"]()
    return text


def test_the_page_is_small_and_loads_nothing(page: str) -> None:
    assert len(page.encode()) < 3e6 and (FOLDER / "plans.json").stat().st_size < 1e6
    assert not re.search(
        r"(src|href)=|@import|url\(|fetch\(|XMLHttpRequest", page.replace("location.href", "")
    )
    assert set(re.findall(r"https?://[^\s\"'<]+", page)) <= {"http://www.w3.org/2000/svg"}


def test_it_has_every_algorithm_pair_and_published_run(page: str) -> None:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found is not None
    data = json.loads(found[1])
    assert [len(run["ranks"]) for run in data["runs"]] == [16] * len(BUILD["ALGORITHMS"])
    assert len(data["plans"]) == 30 and sum("rows" in pair for pair in data["plans"]) >= 25
    with BUILD["RUNS"].open(encoding="utf-8", newline="") as file:
        assert len(data["published"]) == len(list(csv.DictReader(file)))
    known = {
        name
        for group, of in json.loads(BUILD["ACCURACY"].read_text()).items()
        if group.startswith("runs")
        for name in of["rows"]
    }
    shown = {f"{run['line']}: {run['model']}" for run in data["published"] if run["error"] is not None}
    assert shown == known  # lines of the file are those of the scores


def test_an_op_lights_the_line_that_it_is_of() -> None:
    run = BUILD["_run"]("meshslice")
    for begin, end, lane, _, name, line in run["ranks"][5]:
        text = run["text"][line]
        assert begin <= end and f"lane={run['lanes'][lane]}" in text
        assert run["names"][name] in text


def test_pairs_name_what_the_catalog_has() -> None:
    assert {pair["model"] for pair in SAVED} <= set(mw.models())
    assert {pair["cluster"] for pair in SAVED} <= set(mw.clusters())


def test_a_saved_plan_is_what_is_planned_today() -> None:
    saved = next(pair for pair in SAVED if (pair["model"], pair["cluster"]) == ("llama-2-13b", "dgx-b200"))
    assert PLANS["planned"]("llama-2-13b", "dgx-b200") == saved, "run python docs/explorer/plans.py"
