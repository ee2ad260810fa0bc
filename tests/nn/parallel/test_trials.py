"""Plans that are tried: what is chosen of measured times, what is kept of them, and a model of the fastest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")

import torch

from meshweave.algorithms.step import Parallelism
from meshweave.base.errors import LayoutError, PlanError
from meshweave.execute.ranks.launch import launch
from meshweave.nn.parallel.trials import Trial, Trials, TrialTable, corrections_of, keep_results

HERE = {"PYTHONPATH": str(Path(__file__).parent)}


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
    keep_results(path, _table(data_parallel=1.5, megatron=3.0))
    keep_results(path, _table(megatron=5.0))
    assert corrections_of(path) == {"data": 1.5, "tensor": 4.0}
    plans = [(Parallelism(tensor=4), 1.0), (Parallelism(data=2, tensor=2), 0.5), (Parallelism(data=4), 3.0)]
    tokens = torch.zeros(1, 1)
    listed = Trials(tokens, tokens, plans, results=path).candidates()
    assert [trial.words for trial in listed[:2]] == ["data_parallel", "zero3"]
    assert [trial.expected_s for trial in listed] == [4.5, None, 2.0, 4.0]
    assert len(Trials(tokens, tokens, plans, most=3).candidates()) == 3
    path.write_text("{", encoding="utf-8")
    with pytest.raises(LayoutError, match="no file of kept trials"):
        corrections_of(path)


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
