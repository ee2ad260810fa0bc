"""Gradients are summed beside the backward pass, and are those of one process however they are asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")

from meshweave.execute.ranks.launch import launch

HERE = {"PYTHONPATH": str(Path(__file__).parent)}
CASES: list[dict[str, Any]] = [
    {"model": "plain gpt", "strategy": "data_parallel", "options": {"layers": 3}},
    {"model": "gpt2", "strategy": "data_parallel"},
    {"model": "gpt2", "strategy": "data_parallel", "reentrant": False},
    {"model": "gpt2", "strategy": "zero2"},
    {"model": "gpt2", "strategy": "zero3"},
]


@pytest.mark.gloo
@pytest.mark.parametrize(
    "cases", [CASES[::2], pytest.param(CASES[1::2], marks=pytest.mark.slow)], ids=["few", "more"]
)
def test_gradients_are_those_of_one_process(cases: list[dict[str, Any]]) -> None:
    ranks = launch("overlap_rank_functions:gradients", 2, {"cases": cases}, timeout_s=200, env=HERE)
    for answers in ranks:
        for case, answer in zip(cases, answers, strict=True):
            order = answer.pop("order")
            assert (
                answer.pop("left to autograd") == 1
            )  # which is watched until the first step of an optimizer
            assert answer and max(answer.values()) < 1e-9, (case, answer)
            last = max(int(event.split()[1]) for event in order if event != "sum")
            assert last >= 1, order
            if case["strategy"] != "zero3":  # its gradients wait for the weights of the layer before
                assert "sum" in order[order.index(f"layer {last}") : order.index("layer 0")], (case, order)


@pytest.mark.gloo
def test_gradients_that_are_kept_stay_as_they_are_and_the_memory_of_others_is_used_again() -> None:
    ranks = launch("overlap_rank_functions:kept_gradients", 2, {}, timeout_s=200, env=HERE)
    for number, (far, places, has_gradients) in enumerate(ranks):
        assert len(far) == 2 - number
        assert max(far) < 1e-9
        first, second = places[:2]
        assert (first == second) == (number == 1)  # the first rank keeps the first
        assert places[2] != first
        assert places[-1] == first
        assert has_gradients == [[True], [False]]  # of a layer that no rank uses, no parameter has one


@pytest.mark.gloo
def test_a_rank_that_keeps_gradients_is_in_the_same_call_as_others() -> None:
    first, *others = launch("overlap_rank_functions:late", 3, {}, timeout_s=200, env=HERE)
    assert others == [first, first]
