"""The accuracy gate of a release: what fails it, on the scores that the last release saved."""

import copy
import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GATE = runpy.run_path(str(ROOT / "validation" / "accuracy.py"))
SAVED = json.loads((ROOT / "validation" / "results" / "accuracy.json").read_text())


@pytest.mark.parametrize(("points", "fails"), [(0.0, False), (0.9, False), (1.1, True), (-5.0, False)])
def test_a_median_that_is_worse_by_more_than_a_point_fails(points: float, fails: bool) -> None:
    now = copy.deepcopy(SAVED)
    name = "collectives across hosts: oci-a100"
    now[name]["median"] += points / 100
    lines = GATE["failures"](SAVED, now)
    assert bool(lines) == fails and all(name in line for line in lines)


def test_a_median_that_is_scored_no_longer_fails() -> None:
    name = "collectives across hosts: oci-a100"
    now = {each: score for each, score in SAVED.items() if each != name}
    assert GATE["failures"](SAVED, now) == [f"gone: {name}: scored in the last release"]
    assert GATE["failures"](now, SAVED) == []
    assert f"only one release has {name}" in GATE["page"](SAVED, now)


def test_a_row_that_is_scored_no_longer_fails() -> None:
    name = "lab: torus-2x4, layers, simulation"
    now = copy.deepcopy(SAVED)
    row = sorted(now[name]["rows"])[0]
    del now[name]["rows"][row]
    assert GATE["failures"](SAVED, now) == [f"gone: {name}, row {row}: scored in the last release"]
