"""Calls out of order, refused calls, and calls without a process group end in errors that say so, at once.

Data of one call never serves another: where there is an error no rank has a wrong result, and no rank is killed.
An error at the deadline would be a DeadlineError.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
from call_order_rank_functions import REFUSED, refused_cases, swapped_cases
from hypothesis import settings

from meshweave.execute.memory.shared import why_unavailable
from meshweave.execute.ranks.launch import launch
from shared_launch import SharedLaunch

HERE = {"PYTHONPATH": str(Path(__file__).parent)}
CLEAR = re.compile(
    r"BindError: (calls are out of order|rank \d refuses|ranks are about to|rank \d waits|buffer \w is of shape)"
    r"|LayoutError: "
)
THOROUGH = settings().max_examples > 100
CASES = ["swapped", "refused", "first_calls", "dims", "inference", "failed_groups", "without_group"]

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.skipif(bool(why_unavailable()), reason=f"shared memory {why_unavailable()}"),
]


@pytest.fixture(scope="module")
def answers(launch_once: SharedLaunch) -> list[dict[str, Any]]:
    """What each of four ranks says of all cases: one launch, for starting processes is what takes time."""
    return launch_once(
        "call_order_rank_functions:cases",
        4,
        {"cases": CASES, "thorough": THOROUGH},
        timeout_s=250,
        deadline_s=60.0,
        env=HERE,
    )


@pytest.mark.parametrize("case", swapped_cases(THOROUGH))
def test_swapped_calls_name_the_ranks_and_both_calls(answers: list[dict[str, Any]], case: str) -> None:
    heard = []
    for rank, answer in enumerate(answers):
        said, wrong = answer["swapped"][case]
        assert wrong == [], "data of one call was taken for another's"
        # A rank that needs nothing of the others may be through before they find out.
        heard += [rank] if said else []
        if said:
            sides = re.fullmatch(
                r"BindError: calls are out of order: (.*) (?:is|are) in (.*), (.*) in (.*)", said
            )
            assert sides is not None, said
            assert "rank 2 " in f"{said} ", said
            assert re.search(r"\(call \d+\), .*\(call \d+\)$", said), said
    assert 2 in heard
    assert len(heard) == 4 or "reshards" in case


@pytest.mark.parametrize("case", refused_cases(THOROUGH))
def test_a_wrong_local_shape_on_one_rank_is_told_to_all(answers: list[dict[str, Any]], case: str) -> None:
    for rank, answer in enumerate(answers):
        said = answer["refused"][case]
        if not said and rank == 0:  # needs nothing of rank 3 in a product on 2x2 ranks
            continue
        shapes = r"(BindError|LayoutError): .*\(\d+, \d+\).*\(\d+, \d+\)"
        start = "" if rank == 3 else r"BindError: rank 3 refuses .*: "
        assert re.match(f"{start}{shapes}", said), said


def test_different_first_calls_are_out_of_order(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        for case in ("matmul, state dict", "matmul, matmul2d"):
            said = answer["first_calls"][case]
            assert said.startswith("BindError: calls are out of order: ranks 0, 1 and 2 are in "), said
            assert "rank 3 in matmul 8x8 @ 8x8" in said
        said = answer["first_calls"]["dtypes"]
        assert said.startswith("BindError: ranks are about to run different programs: "), said


def test_ranks_that_wait_for_each_other_in_a_circle_are_named(answers: list[dict[str, Any]]) -> None:
    for rank, answer in enumerate(answers):
        said = answer["first_calls"]["circle"]
        if rank == 3:
            assert said == ""
            continue
        assert said.startswith("BindError: calls are out of order, and ranks wait for each other: "), said
        assert all(f"rank {other} is in program ring of 4 with " in said for other in (0, 1, 2)), said
        said = answer["first_calls"]["circle with a first call"]
        assert said.startswith("BindError: calls are out of order, and ranks wait for each other: "), said
        assert "rank 3 is in program ring of 6 with rank 2 (call 1)" in said, said


def test_a_rank_that_is_late_after_a_failed_agreement_waits_nowhere(answers: list[dict[str, Any]]) -> None:
    assert [answer["first_calls"]["late after a circle"] for answer in answers] == [""] * 4


def test_dims_that_a_tensor_does_not_have_are_refused(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        assert answer["dims"].pop("negative") == [True, True]
        assert len(answer["dims"]) == 8
        for case, said in answer["dims"].items():
            dim = -3 if "-3" in case else 2
            assert re.match(
                rf"LayoutError: .*names dim {dim} of a tensor of 2 dims, which has -2 to 1$", said
            ), said


def test_what_is_bound_under_inference_mode_trains_later(answers: list[dict[str, Any]]) -> None:
    assert [answer["inference"] for answer in answers] == [[]] * 4


def test_an_error_of_torch_is_explained_by_what_another_rank_refuses(answers: list[dict[str, Any]]) -> None:
    for answer in answers[:3]:
        assert answer["failed_groups"]["torch"].startswith("BindError: rank 3 refuses dispatch (call ")
        assert answer["failed_groups"]["torch"].endswith("LayoutError: no such dim")
        assert answer["failed_groups"]["own"].startswith("ValueError: invalid literal")
    assert set(answers[3]["failed_groups"].values()) == {"LayoutError: no such dim"}


def test_calls_without_a_process_group_say_so(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        cases = dict(answer["without_group"])
        assert cases.pop("new context") == ""
        assert cases.pop("default context in a new group") == ""
        assert len(cases) == 2 * len(REFUSED) + 1
        for case, said in cases.items():
            assert re.match(r"BindError: .*destroy_process_group\(\)", said), (case, said)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_faults_end_in_errors_or_not_at_all(seed: int) -> None:
    """A fault on one of four ranks: all end well, or those it touches say what is wrong; nobody has wrong data."""
    payload = {"seed": seed, "count": 40}
    answers: list[Any] = launch("call_order_rank_functions:by_lot", 4, payload, timeout_s=900, env=HERE)
    for rows in zip(*answers, strict=True):
        plan = rows[0][0]
        said = [row[1] for row in rows]
        assert [row[2] for row in rows] == [[]] * 4, plan
        assert all(said) or not any(said), (plan, said)
        for words in filter(None, said):
            assert CLEAR.match(words), (plan, said)
