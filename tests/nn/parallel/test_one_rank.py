"""A rank that is alone opens its parameters layer by layer, where that changes nothing else."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
if importlib.util.find_spec("peft") is None:  # which only the rank imports
    pytest.skip("peft is not installed", allow_module_level=True)

from meshweave.execute.ranks.launch import launch

HERE = {"PYTHONPATH": str(Path(__file__).parent)}


@pytest.mark.gloo
def test_a_rank_that_is_alone() -> None:
    (answer,) = launch("one_rank_functions:answers", 1, {}, timeout_s=200, env=HERE)
    assert answer["compiled, computed again"] < 1e-12
    assert answer["adapted, computed again"] < 1e-6
    events = [f"{kind} {number}" for number in (2, 1, 0) for kind in ("layer", "weight")]
    assert answer["order"] == events
    assert answer["is told of gradients"] == [False, True]
    before, after = answer["ascends"]
    assert after > before
