"""What a rank makes of where the others are, while it waits for their words."""

from __future__ import annotations

import json

import pytest

from meshweave.base.errors import BindError
from meshweave.execute.ranks.agreement import _check_same_talk

dist = pytest.importorskip("torch.distributed")
ROUND = "meshweave/talk/0-1-2/1"


def look(store: object) -> None:
    """Rank 2 looks around in the first round of ranks 0, 1 and 2."""
    _check_same_talk(store, {(0, 1, 2): 1}, 2, (0, 1, 2), "this", f"{ROUND}/broken")


def test_a_rank_that_waits_for_others_in_another_round_breaks_this_one() -> None:
    store = dist.HashStore()
    store.set("meshweave/talk/now/0", json.dumps([[0, 1, 2, 3], 1, "something else"]))
    with pytest.raises(BindError, match="rank 2 waits with ranks"):
        look(store)
    with pytest.raises(BindError, match="rank 2 waits with ranks"):
        _check_same_talk(store, {(0, 1, 2): 1}, 1, (0, 1, 2), "this", f"{ROUND}/broken")


def test_a_rank_that_has_spoken_and_gone_on_breaks_nothing() -> None:
    store = dist.HashStore()
    store.set("meshweave/talk/now/0", json.dumps([[0, 1, 2, 3], 1, "the next"]))
    store.set(f"{ROUND}/0", "its words")
    look(store)
    assert not store.check([f"{ROUND}/broken"])
