"""Steps that are recorded beside what was predicted: who is late, and what is slow, on real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
from meshweave.base.errors import RankLostError
from meshweave.execute.ranks.launch import launch
from meshweave.nn.step_watch import StepComparison, WatchRow
from meshweave.trace import Trace

HERE = {"PYTHONPATH": str(Path(__file__).parent)}


@pytest.mark.gloo
def test_a_late_rank_and_slow_links_are_named_after_several_steps() -> None:
    results = launch("step_watch_rank_functions:late_steps", 2, {}, timeout_s=60, env=HERE)
    first, second = results
    assert first["warned_at"] == second["warned_at"] == [4]
    assert first["words"] == second["words"] and first["rows"] == second["rows"]
    assert any("others wait for rank 1" in words for words in first["words"])
    assert not any("others wait for rank 0" in words for words in first["words"])
    late = {where: seconds for kind, where, seconds in first["rows"] if kind == "late"}
    assert late["rank 1"] > 0.02 > late["rank 0"]
    assert any(kind == "link" and where == "axis col" for kind, where, _ in first["rows"])
    assert first["same"] and second["same"]
    assert first["sizes"] == 2  # of two products of one name, each beside its own prediction


@pytest.mark.gloo
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_a_rank_that_is_lost_before_it_tells_its_times_is_named(tmp_path: Path, name: str) -> None:
    payload = {"signal": name, "deadline_s": 4.0, "folder": str(tmp_path)}
    with pytest.raises(RankLostError, match="rank 1"):
        launch("step_watch_rank_functions:lost_in_exchange", 3, payload, timeout_s=60, env=HERE)
    for rank in (0, 2):
        error, missing, seconds, text = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (error, missing) == ("RankLostError", [1]) and "times of all ranks in step 1" in text
        assert seconds < 9.0


def test_what_is_small_in_the_step_is_not_behind() -> None:
    row = WatchRow("link", "gather", "axis tp", measured_s=0.002, predicted_s=0.001)
    assert row.is_behind(0.5, step_s=0.05) and not row.is_behind(0.5, step_s=1.0)
    assert not row.is_behind(1.5, step_s=0.05)
    assert str(row) == "transfers of gather along axis tp: 2 ms, predicted 1 ms"


def test_a_compared_step_says_first_which_op_rank_and_link_differ_most() -> None:
    slow_link = WatchRow("link", "gather", "axis tp", measured_s=0.020, predicted_s=0.001)
    other_link = WatchRow("link", "reduce", "axis dp", measured_s=0.010, predicted_s=0.001)
    slow_rank = WatchRow("products", "up", "rank 1", measured_s=0.040, predicted_s=0.010)
    quick = WatchRow("late", "gather", "rank 0", measured_s=0.001, predicted_s=0.001)
    nothing = Trace("step 7", "torch", ())
    rows = (other_link, slow_link, quick, slow_rank)
    compared = StepComparison(7, 0.1, rows, nothing, nothing)
    assert compared.furthest == (slow_rank, slow_link)
    lines = str(compared).splitlines()
    assert lines[1] == f"  differs most by 30 ms: {slow_rank}"
    assert lines[2] == f"  differs most by 19 ms: {slow_link}"
    assert lines[3:] == [f"  {other_link}", f"  {quick}"]
