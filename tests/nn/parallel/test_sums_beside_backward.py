"""Gradients are summed beside the backward pass, and are those of one process however they are asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")

from meshweave.execute.ranks.launch import launch

HERE = {"PYTHONPATH": str(Path(__file__).parent)}
CASES = [
    {"model": "plain gpt", "strategy": "data_parallel", "options": {"layers": 3}},
    {"model": "gpt2", "strategy": "data_parallel"},
    {"model": "gpt2", "strategy": "data_parallel", "reentrant": False},
    {"model": "gpt2", "strategy": "zero2"},
    {"model": "gpt2", "strategy": "zero3"},
]


@pytest.mark.gloo
@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case['model']}-{case['strategy']}-{case.get('reentrant')}"
)
def test_gradients_are_those_of_one_process(case: dict[str, Any]) -> None:
    for answer in launch("overlap_rank_functions:gradients", 2, case, timeout_s=200, env=HERE):
        order = answer.pop("order")
        assert answer and max(answer.values()) < 1e-9, answer
        last = max(int(event.split()[1]) for event in order if event != "sum")
        assert last >= 1, order
        if case["strategy"] != "zero3":  # its gradients wait for the weights of the layer before
            assert "sum" in order[order.index(f"layer {last}") : order.index("layer 0")], order
