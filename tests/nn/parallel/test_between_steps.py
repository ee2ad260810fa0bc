"""What lies between two steps: states are the optimizer's own, and what differs once spoils nothing later."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")

from meshweave.execute.ranks.launch import launch

HERE = {"PYTHONPATH": str(Path(__file__).parent)}


@pytest.mark.gloo
def test_between_two_steps() -> None:
    names = (
        "states_of_a_removed_parameter",
        "memory_between_steps",
        "states_after_a_failed_step",
        "two_differences",
        "differences_that_nobody_looked_at",
        "models_in_another_order",
    )
    first, second = launch(
        "between_steps_rank_functions:between", 2, {"names": names}, timeout_s=300, env=HERE
    )
    assert first["two_differences"][2] == second["two_differences"][2]
    for answer in (first, second):
        assert answer["states_of_a_removed_parameter"] == [False, True]
        assert answer["memory_between_steps"] == [True, True]
        assert answer["states_after_a_failed_step"] == 0
        said, later, _ = answer["two_differences"]
        assert said.startswith("LayoutError: rank") and "targets" in said
        assert later.startswith("LayoutError: rank") and "tokens" in later
        *said, last = answer["differences_that_nobody_looked_at"]
        assert len(said) == 3 and all(
            each.startswith("LayoutError: rank") and "tokens" in each for each in said
        )
        assert last == first["differences_that_nobody_looked_at"][-1]
        said, later = answer["models_in_another_order"]
        assert said.startswith("LayoutError: rank") and "call models in the same order on every rank" in said
        assert later == ""
