"""`meshweave.reshard` and `meshweave.nn.reshard_state_dict` on real processes, there and back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
from sections import launched

from meshweave.base.errors import RankLostError
from meshweave.execute.ranks.launch import launch
from shared_launch import SharedLaunch

HERE = {"PYTHONPATH": str(Path(__file__).parent)}
MORE = "reshard_state_rank_functions"

SECTIONS = {
    "between meshes of any ranks": "meshes",
    "sums that are yet to be made": "sums",
    "gradients on a mesh whose ranks do not ascend": "permuted_gradients",
    "strided shards and shard orders": "strided",
    "scalars, empty tensors, views": "odd",
    "what ranks outside the source hold": "outside",
    "dtypes": "dtypes",
    "plans for several hosts": "clusters",
    "by lot": "draws",
    "gradients": f"{MORE}:gradients",
    "state dicts": f"{MORE}:states",
    "plain tensors in state dicts": f"{MORE}:plain",
    "optimizer states": f"{MORE}:optimizer",
    "state dicts that do not fit": f"{MORE}:state_refusals",
    "wrong arguments": f"{MORE}:refusals",
}


@pytest.fixture(scope="module")
def found(launch_once: SharedLaunch) -> list[dict[str, list[str]]]:
    """One launch for all that ends well: starting processes is what takes time."""
    return launched(launch_once, "reshard_rank_functions:sections", SECTIONS, HERE)


@pytest.mark.gloo
@pytest.mark.parametrize("section", SECTIONS)
def test_what_arrives_is_what_lay_there_and_gradients_come_back(
    section: str, found: list[dict[str, list[str]]]
) -> None:
    assert [answer[SECTIONS[section]] for answer in found] == [[]] * 4


@pytest.mark.gloo
def test_ranks_that_ask_for_different_reshards_are_all_told_before_any_byte_moves() -> None:
    answers: list[Any] = launch(f"{MORE}:disagreements", 4, {}, timeout_s=100, env=HERE)
    for rank, (*said, alone, right, apart) in enumerate(answers):
        assert right == "right"
        for words in said[:5]:
            assert re.fullmatch(
                r"BindError: ranks are about to reshard different tensors: "
                r"ranks 0, 1 and 2 '.*', rank 3 '.*'",
                words,
            ), words
        shapes = ("4x6 from", "4x9 from")
        assert all(shape in said[1] for shape in shapes), said[1]
        for words, why in zip(said[5:], ("names dim 2 of", "2 placements for the 1 dims"), strict=True):
            assert words.startswith("LayoutError: " if rank == 3 else "BindError: rank 3 refuses reshard"), (
                words
            )
            assert why in words
        assert re.match(r"BindError: .* rank 3 'up.weight ", alone), alone
        assert apart.startswith("BindError: rank "), apart
        assert "waits with ranks" in apart


@pytest.mark.gloo
def test_a_rank_that_is_killed_among_reshards_is_named_by_all() -> None:
    with pytest.raises(RankLostError, match=r"^rank 2 was killed by SIGKILL$") as caught:
        launch(f"{MORE}:dies", 4, {}, timeout_s=180, env=HERE, stale_s=1.0)
    assert caught.value.missing == (2,)
    for rank in (0, 1, 3):
        said = caught.value.reports[rank]
        assert said.startswith("rank 2 stopped answering while waiting for "), said
