"""Ranks that differ: an error on every rank that names what differs and who has it, or the right gradients."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")

sys.path.insert(0, str(Path(__file__).parent))

from differing_pipeline_rank_functions import FEW
from differing_pipeline_rank_functions import WAYS as PIPELINES
from ways_in_steps import WAYS
from ways_to_differ import HARMLESS, NOT_COMPARED, Way

from meshweave.execute.ranks.launch import launch

HERE = {"PYTHONPATH": str(Path(__file__).parent)}
TOLERANCE = 1e-9
FAST = (
    "one_weight", "sign_of_zero", "weights_that_are_broadcast", "a_frozen_parameter", "a_layer_more",
    "another_strategy", "a_strategy_that_does_not_exist", "precision_of_products", "version_of_torch", "one_token",
    "no_targets", "a_token_out_of_range", "a_row_less_in_the_third_step", "a_mask_of_one_rank",
    "evaluation", "no_gradients", "autocast",
    "seed_of_dropout", "a_copy_of_a_gain", "learning_rate", "clipping", "a_step_left_out", "a_backward_left_out",
)  # fmt: skip


def _check(ways: list[Way], num_ranks: int, timeout_s: float, stages: tuple[str, ...] = ()) -> None:
    payload = {"ways": [each.name for each in ways], "stages": stages}
    ranks = launch("differing_rank_functions:differ", num_ranks, payload, timeout_s=timeout_s, env=HERE)
    for each in ways:
        for answer in ranks:
            _check_answer(each, answer[each.name], num_ranks)
    _check_stages([answer["stages"] for answer in ranks])


def _check_stages(ranks: list[dict[str, str]]) -> None:
    """Compare what each rank says of ways by which ranks of a pipeline differ."""
    for said in ranks:
        for name, text in said.items():
            assert not text if not name else PIPELINES[name][2] in text, (name, text)


def _check_answer(way: Way, answer: dict[str, Any], num_ranks: int) -> None:
    if way.expected == HARMLESS:
        assert answer.get("worst", 1.0) < TOLERANCE, (way.name, answer)
    elif way.expected == NOT_COMPARED:
        assert "error" not in answer, (way.name, answer)
    else:
        assert re.fullmatch(way.error, answer.get("error", "")), (way.name, answer)
        assert re.search(way.expected, answer["text"]), (way.name, answer)
        if way.error == "LayoutError":
            others = "rank 0" if num_ranks == 2 else "ranks 0, 2 and 3"
            assert re.match(rf"rank 1 has other .* than {others}: ", answer["text"]), (way.name, answer)
        if way.when == "model":
            assert not answer["is_made"], way.name
            assert answer["replaced"] in ("", "Embedding"), way.name


def test_the_table_has_ways() -> None:
    assert len({each.name for each in WAYS}) == len(WAYS) >= 40
    assert set(FAST) <= {each.name for each in WAYS}


@pytest.mark.gloo
def test_ways_to_differ() -> None:
    _check([each for each in WAYS if each.name in FAST], 2, 200, FEW)


@pytest.mark.gloo
@pytest.mark.slow
def test_ways_to_differ_in_a_pipeline() -> None:
    payload = {"ways": ["", *PIPELINES]}
    _check_stages(launch("differing_pipeline_rank_functions:differ", 4, payload, timeout_s=300, env=HERE))


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("part", range(6))
def test_all_ways_to_differ(num_ranks: int, part: int) -> None:
    _check(WAYS[part::6], num_ranks, 500)
