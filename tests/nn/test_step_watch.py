"""Steps that are recorded beside what was predicted: who is late, and what is slow, on real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
import meshweave as mw
from meshweave.base.errors import DescriptionError, RankLostError
from meshweave.describe.machine.levels import level_under
from meshweave.execute.ranks.launch import launch
from meshweave.execute.torch.context import TorchContext
from meshweave.nn.new_plan import NewPlan
from meshweave.nn.step_watch import StepComparison, WatchRow
from meshweave.trace import Trace
from meshweave.tune.step_search import SpaceOptions, plan_step

HERE = {"PYTHONPATH": str(Path(__file__).parent)}


@pytest.mark.gloo
def test_a_late_rank_and_slow_links_are_named_after_several_steps() -> None:
    results = launch("step_watch_rank_functions:late_steps", 2, {}, timeout_s=180, env=HERE)
    first, second = results
    assert first["warned_at"] == second["warned_at"] == [4]
    assert first["words"] == second["words"] and first["rows"] == second["rows"]
    assert any("others wait for rank 1" in words for words in first["words"])
    late = {where: seconds for kind, where, seconds in first["rows"] if kind == "late"}
    assert late["rank 1"] > 0.02 and late["rank 1"] > late["rank 0"]
    assert any(kind == "link" and where == "axis col" for kind, where, _ in first["rows"])
    assert first["same"] and second["same"]
    assert first["sizes"] == 2  # of two products of one name, each beside its own prediction
    assert first["factors"] == second["factors"] and first["new_plan"] == second["new_plan"]
    levels, products = first["factors"]
    assert [level for level, _ in levels] == [0] and levels[0][1] > 1 < products  # an H100's, on a CPU
    assert "at measured rates a step is predicted to take" in first["new_plan"]
    assert "the watch predicts for h100-node; give both the same cluster" in first["refusal"]


@pytest.mark.gloo
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_a_rank_that_is_lost_before_it_tells_its_times_is_named(tmp_path: Path, name: str) -> None:
    payload = {"signal": name, "deadline_s": 4.0, "folder": str(tmp_path)}
    with pytest.raises(RankLostError, match="rank 1"):
        launch("step_watch_rank_functions:lost_in_exchange", 3, payload, timeout_s=180, env=HERE)
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


def test_rates_that_all_fall_alike_change_the_seconds_and_not_the_plan() -> None:
    step = mw.step("llama-3-8b", "dgx-h100:16", batch=32, sequence=4096, tp=8, dp=2)
    options = SpaceOptions(tensor=(1, 8), pipeline=(1,), strategies=("megatron_sp",))
    planned = plan_step(step.problem, options).step.ranked[0]
    as_it_is, slower = (
        NewPlan.of(step, options, dict.fromkeys((0, 1), factor), factor) for factor in (1.0, 3.0)
    )
    assert as_it_is.running_s == step.time_s and as_it_is.best_s == planned.step_s
    assert slower.running_s == pytest.approx(3 * step.time_s, rel=1e-12)
    assert slower.best == as_it_is.best and slower.best_s == pytest.approx(3 * planned.step_s, rel=1e-12)
    assert slower.gain_s > 0 and "% less) with dp 16" in str(slower)


def test_slower_links_are_those_that_were_measured() -> None:
    step = mw.step("llama-3-8b", "dgx-h100:16", batch=32, sequence=4096, tp=8, dp=2)
    options = SpaceOptions(tensor=(8,), data=(2,), pipeline=(1,), strategies=("megatron_sp",))
    inside, between = (NewPlan.of(step, options, {level: 4.0}, 1.0).running_s for level in (1, 0))
    assert inside > between > step.time_s  # tensor ranks share a host
    cluster = mw.load_cluster("dgx-h100:16")
    assert [level_under(cluster, chips) for chips in ((0, 7), (8, 15), (0, 8), (3, 4, 12))] == [1, 1, 0, 0]
    assert level_under(mw.load_cluster("dgx-h100:8"), (0, 1)) == 0
    assert level_under(mw.load_cluster("tpu-v4-pod:64"), (0, 1)) == 0


@pytest.mark.parametrize("given", [{"every": 0}, {"steps": 0}, {"every": 1.5}])
def test_steps_are_counted_from_one(given: dict[str, Any]) -> None:
    with pytest.raises(DescriptionError, match=f"{next(iter(given))} is .*; give a whole number of steps"):
        mw.StepWatch("h100-node", context=TorchContext(), **given)


def test_a_new_plan_needs_a_recorded_step() -> None:
    step = mw.step("llama-2-7b", "h100-node", batch=8, sequence=512, dp=8, zero=3, dtype="float32")
    watch = mw.StepWatch("h100-node", context=TorchContext())
    with pytest.raises(DescriptionError, match="no step has been recorded yet; the first is step 100"):
        watch.replan(step)
    nothing = Trace("step 100", "torch", ())
    watch.latest = StepComparison(100, 0.1, (), nothing, nothing)
    assert "no program ran in the context of the watch" in str(watch.latest)
    with pytest.raises(DescriptionError, match="step 100 has nothing to compare"):
        watch.replan(step)
