"""Plans that are tried: what is chosen of measured times, what is kept of them, and a model of the fastest."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")

import torch

from meshweave.algorithms.step import Parallelism
from meshweave.base.errors import LayoutError, PlanError, RankLostError
from meshweave.execute.ranks.launch import launch
from meshweave.nn.parallel.trial_results import corrections_of, keep_results
from meshweave.nn.parallel.trials import Trial, Trials, TrialTable

HERE = {"PYTHONPATH": str(Path(__file__).parent)}
DEADLINE_S = 5.0


def _table(within: float = 0.05, **seconds: float | None) -> TrialTable:
    rows = [replace(Trial.of(name, 1.0), measured_s=value) for name, value in seconds.items()]
    return TrialTable(tuple(rows), within)


def test_plain_data_parallelism_wins_where_others_are_about_as_fast() -> None:
    assert _table(data_parallel=1.05, zero3=1.0).chosen.words == "data_parallel"
    assert _table(data_parallel=1.06, zero3=1.0).chosen.words == "zero3"
    assert _table(data_parallel=None, zero3=1.0, megatron=0.9).chosen.words == "megatron"
    assert _table(0.2, data_parallel=1.15, megatron=1.0).chosen.words == "data_parallel"
    with pytest.raises(PlanError, match="no plan could be tried"):
        _table(data_parallel=None)


def test_measured_times_correct_later_predictions_by_kind(tmp_path: Path) -> None:
    path = tmp_path / "machine.trials.json"
    keep_results(path, _table(data_parallel=1.5, megatron=3.0).trials)
    keep_results(path, _table(megatron=5.0).trials)
    assert corrections_of(path) == {"data": 1.5, "tensor": 4.0}
    plans = [(Parallelism(tensor=4), 1.0), (Parallelism(data=2, tensor=2), 0.5), (Parallelism(data=4), 3.0)]
    tokens = torch.zeros(1, 1)
    listed = Trials(tokens, tokens, plans, results=path).candidates()
    assert [trial.words for trial in listed[:2]] == ["data_parallel", "zero3"]
    assert [trial.expected_s for trial in listed] == [4.5, None, 2.0, 4.0]
    assert len(Trials(tokens, tokens, plans, most=3).candidates()) == 3
    read_once: Any = zip(["megatron"], [1.0], strict=True)
    assert [each.words for each in Trials(tokens, tokens, read_once).candidates()][2:] == ["megatron"]
    path.write_text("{", encoding="utf-8")
    with pytest.raises(LayoutError, match="no file of kept trials"):
        corrections_of(path)


def test_given_plans_are_tried_unless_they_are_those_that_always_are() -> None:
    given = [
        (Parallelism(data=2, zero=1), None), ("zero2", None), (Parallelism(data=2, recompute="full"), None),
        (Parallelism(data=2, zero=3, micro_batch=4, strategy="megatron"), 2.0), ("data_parallel", 1.0),
    ]  # fmt: skip
    tokens = torch.zeros(1, 1)
    listed = Trials(tokens, tokens, given, most=9).candidates({})
    assert [(trial.words, trial.kind, trial.predicted_s) for trial in listed] == [
        ("data_parallel", "data", 1.0), ("zero3", "zero", 2.0), ("dp 2, zero 1, micro-batch 1", "zero", None),
        ("zero2", "zero", None), ("dp 2, micro-batch 1, recompute full", "data", None),
    ]  # fmt: skip


@pytest.mark.gloo
def test_a_model_by_the_fastest_plan_of_those_tried(tmp_path: Path) -> None:
    payload = {"results": str(tmp_path / "kept.json")}
    answers = launch("trial_rank_functions:choose", 2, payload, timeout_s=200, env=HERE)
    for answer in answers:
        assert "trials=" in answer["refused"]
        words, kinds, predicted, measured, refused = zip(*answer["rows"], strict=True)
        assert words[:2] == ("data_parallel", "zero3") and kinds == (
            "data",
            "zero",
            "tensor",
            "tensor",
            "tensor",
        )
        assert predicted == (1.0, None, 2.0, None, None)
        assert all(measured[:4]) and measured[4] is None and "no_such_strategy" in refused[4]
        assert answer["is_same"] and answer["chosen"] in answer["table"]
        assert answer["next"][0] == pytest.approx(measured[0])
    assert answers[0]["rows"] == answers[1]["rows"] and answers[0]["loss"] == answers[1]["loss"]


def _check_misuse(tmp_path: Path, table: str) -> None:
    sys.path.insert(0, HERE["PYTHONPATH"])
    from trial_misuse_rank_functions import TABLES

    payload = {"table": table, "deadline_s": DEADLINE_S, "folder": str(tmp_path)}
    said = launch("trial_misuse_rank_functions:misuse", 2, payload, timeout_s=400, env=HERE)
    for name, (_, word) in TABLES[table].items():
        for rank, answers in enumerate(said):
            answer = answers[name]
            is_own = name == "an error in a step" and rank == 1
            assert answer["error"] == "raw OSError" if is_own else "raw" not in answer["error"], (
                name,
                answer,
            )
            assert answer["error"] and word in answer["text"], (name, rank, answer)
            assert is_own or "\n" not in answer["text"], (name, rank, answer)
            assert answer["seconds"] < DEADLINE_S + 5, (name, rank, answer)


@pytest.mark.gloo
def test_what_one_rank_tries_otherwise_is_named_on_all(tmp_path: Path) -> None:
    _check_misuse(tmp_path, "one")


@pytest.mark.gloo
@pytest.mark.slow
def test_what_cannot_be_tried_is_refused_on_all_ranks(tmp_path: Path) -> None:
    _check_misuse(tmp_path, "all")


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("call", [1, 3])
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_a_rank_that_is_lost_in_a_trial_is_named(tmp_path: Path, name: str, call: int) -> None:
    payload = {"signal": name, "call": call, "deadline_s": DEADLINE_S, "folder": str(tmp_path)}
    with pytest.raises(RankLostError, match="rank 1"):
        launch("trial_misuse_rank_functions:die_in_a_trial", 3, payload, timeout_s=100, env=HERE)
    for rank in (0, 2):
        error, missing, seconds = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (error, missing) == ("RankLostError", [1]), (rank, error, missing)
        assert seconds < DEADLINE_S + 5


def test_files_of_kept_trials_are_read_whole_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    row = {"kind": "data", "words": "x", "predicted_s": 1.0, "measured_s": 1.0}
    odd: list[Any] = [[], {}, {"trials": 5}, {"trials": [1]}, {"trials": [row | {"kind": 3}]}]
    odd += [{"trials": [row | {name: value}]} for name in row if name.endswith("_s") for value in ("x", -1.0)]
    odd += [{"trials": [row | {"measured_s": value}]} for value in (None, float("nan"), 10**400)]
    for content in odd:
        path.write_text(json.dumps(content), encoding="utf-8")
        with pytest.raises(LayoutError, match="no file of kept trials"):
            corrections_of(path)
    path.write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(LayoutError, match="no file of kept trials"):
        corrections_of(path)
    with pytest.raises(LayoutError, match="no file of kept trials"):
        corrections_of(tmp_path)
    assert corrections_of(tmp_path / "none.json") == {}
    path.write_text('{"trials": [{"kind": "data", "measured_s": 1.0}]}')
    assert corrections_of(path) == {}
