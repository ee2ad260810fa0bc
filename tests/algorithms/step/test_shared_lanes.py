"""Steps whose layers and collectives of weights share links: estimates beside simulations."""

from __future__ import annotations

from typing import Any

import pytest

import meshweave as mw
from meshweave.algorithms.step import SoftwareStack, simulate_step
from meshweave.algorithms.step.data_parallel import APART, Sharing, exposed_both_s, exposed_s, mean_sharing

ON_TORUS: list[dict[str, Any]] = [
    {"tp": 8},
    {"tp": 8, "zero": 1, "strategy": "megatron_sp"},
    {"tp": 2, "cp": 2, "recompute": "full"},
    {"tp": 8, "pp": 2, "strategy": "megatron_sp"},
    {"tp": 4, "zero": 3},
]


@pytest.mark.parametrize("options", ON_TORUS, ids=str)
def test_steps_on_a_torus_whose_groups_share_links(options: dict[str, Any]) -> None:
    stack = SoftwareStack()
    step = mw.step("llama-2-7b", "tpu-v4-pod:64", 32, 2048, micro_batch=1, stack=stack, **options)
    assert step.time_s == pytest.approx(simulate_step(step).time_s, rel=0.04)


def test_a_context_ring_slows_beside_reductions_through_the_same_nics() -> None:
    options: dict[str, Any] = {"tp": 8, "cp": 2, "dp": 4, "stack": SoftwareStack()}
    step = mw.step("llama-3-8b", "dgx-h100:64", 4, 8192, **options)
    assert step.stages.sharing.sums.added_s > 0
    assert step.time_s == pytest.approx(simulate_step(step).time_s, rel=0.03)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_a_share_of_collectives_that_is_waited_for_leaves_the_rest_hidden(share: float) -> None:
    step = mw.step("llama-3-8b", "dgx-h100:16", 32, 4096, zero=3, stack=SoftwareStack(overlap=share))
    assert step.time_s == pytest.approx(simulate_step(step).time_s, rel=0.03)


def test_lanes_that_share_links_hide_less_and_add_to_each_other() -> None:
    """A part of 10 s takes 14 s beside collectives, in which 8 s of these pass."""
    shared = Sharing(4.0, 6.0)
    assert shared.hides(10.0) == (8.0, 0.5)
    assert APART.hides(10.0) == (10.0, 0.0)
    assert Sharing(4.0, 6.0, 0.0).hides(10.0) == (10.0, 0.0)
    assert exposed_s(5, 10.0, 4.0, 1.0) == 4
    assert exposed_s(5, 10.0, 4.0, 1.0, sharing=shared) == 4 + 0.5 * 16
    assert exposed_s(5, 10.0, 20.0, 1.0, sharing=shared) == (8 + 5 * 12) + 0.5 * 32
    assert exposed_s(5, 10.0, 4.0, 0.0, sharing=shared) == exposed_s(5, 10.0, 4.0, 0.0)
    both = exposed_both_s(5, 10.0, (4.0, 4.0), 1.0, sharing=(shared, shared))
    assert both == exposed_both_s(5, 10.0, (4.0, 4.0), 1.0) + 0.5 * 32


def test_the_mean_of_sharings_counts_seconds_in_which_bytes_flow() -> None:
    one, other = Sharing(4.0, 6.0, 1.0), Sharing(0.0, 0.0, 0.5)
    assert mean_sharing((one, other), (1.0, 1.0)) == Sharing(pytest.approx(8 / 3), pytest.approx(4.0), 0.75)
    assert mean_sharing((APART, APART), (1.0, 1.0)) == APART
    assert mean_sharing((one, other), (0.0, 0.0)) == APART
