"""What a rank makes of where the others are, while it waits for them; tags that tell programs apart."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave.base.errors import BindError, DeadlineError, LayoutError, RankLostError

dist = pytest.importorskip("torch.distributed")

from meshweave.execute.ranks.agreement import _check_same_talk  # noqa: E402
from meshweave.execute.torch import call_order  # noqa: E402
from meshweave.execute.torch.call_order import wire_tag  # noqa: E402
from meshweave.execute.torch.call_records import CallKind, ContextCalls, SharedCalls  # noqa: E402
from meshweave.execute.torch.call_watch import WatchedCalls, out_of_order  # noqa: E402
from meshweave.execute.torch.context import TorchContext  # noqa: E402
from meshweave.execute.torch.world import SignedStore  # noqa: E402

RANKS = (0, 1, 2)
FOLDER = "meshweave/talk/0-1-2/1/4"
ELSEWHERE = "elsewhere/4"
BEGUN = {(RANKS, 1): 4}


def look(store: object, rank: int = 2) -> None:
    """A rank looks around in call 4 of ranks 0, 1 and 2."""
    _check_same_talk(SignedStore(store), BEGUN, rank, RANKS, "this", FOLDER)


def waits(store: object, ranks: tuple[int, ...], session: int, number: int) -> None:
    """Rank 0 says where it waits."""
    said = json.dumps([ranks, session, number, "something else", ELSEWHERE])
    SignedStore(store).set("meshweave/talk/now/0", said)


def test_a_rank_that_waits_for_others_in_another_call_breaks_this_one() -> None:
    store = dist.HashStore()
    waits(store, (0, 1, 2, 3), 1, 1)
    with pytest.raises(BindError, match="rank 2 waits with ranks"):
        look(store)
    with pytest.raises(BindError, match="rank 2 waits with ranks"):
        look(store, 1)
    assert SignedStore(store).check([f"{ELSEWHERE}/broken"]), "ranks of the other call learn it too"


def test_a_rank_that_has_spoken_and_gone_on_breaks_nothing() -> None:
    store = dist.HashStore()
    waits(store, (0, 1, 2, 3), 1, 1)
    SignedStore(store).set(f"{FOLDER}/0", "its words")
    look(store)
    assert not store.check([f"{FOLDER}/broken"])


def test_a_rank_that_waits_in_what_this_one_has_begun_breaks_nothing() -> None:
    store = dist.HashStore()
    waits(store, RANKS, 1, 4)
    look(store)
    waits(store, RANKS, 1, 3)
    look(store)


# --- refusals ---------------------------------------------------------------------------------------------------


class HangingStore:
    """A store whose host is stopped."""

    def set(self, key: str, value: str) -> None:
        raise TimeoutError("timed out after 2.0 s")


def test_a_refusal_that_cannot_be_told_leaves_the_error_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_order, "signed_store", lambda limit_s: HangingStore())
    order = call_order.CallOrder(TorchContext(liveness=False))
    sequence = order.sequences[0, 1] = call_order.CallSequence(order, (0, 1))
    sequence.refuse("matmul", RuntimeError("why"))
    assert sequence.recent[-1][1].refusal == "RuntimeError: why"


@pytest.mark.parametrize("kind", [RankLostError, DeadlineError])
def test_what_liveness_tells_all_is_not_told_again(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    context = TorchContext(liveness=False)
    context.is_distributed, context.rank, context.liveness = True, 0, cast(Any, "tells the others")
    told: list[str] = []
    monkeypatch.setattr(
        call_order.CallOrder,
        "sequence",
        lambda *_: SimpleNamespace(refuse=lambda title, _: told.append(title)),
    )
    lost = kind("rank 1 stopped answering", (1,)) if kind is RankLostError else kind("gave up")
    for error, expected in ((lost, []), (LayoutError("no such dim"), ["matmul"])):
        with pytest.raises(type(error)), call_order.share_refusal(context, (0, 1), "matmul"):
            raise error
        assert told == expected


# --- tags -------------------------------------------------------------------------------------------------------


@given(st.integers(1, 1 << 20), st.integers(1, 32_767), st.integers(0, 65_535), st.integers(0, 65_535))
def test_messages_of_two_programs_never_match(number: int, later: int, tag: int, other: int) -> None:
    assert wire_tag(number, tag) != wire_tag(number + later, other)
    assert 0 <= wire_tag(number, tag) < 1 << 31


@given(st.integers(1, 1 << 20), st.integers(0, (1 << 31) - 2), st.integers(1, (1 << 31) - 1))
def test_messages_of_a_program_match_by_their_tags(number: int, tag: int, more: int) -> None:
    other = (tag + more) % (1 << 31)
    assert (wire_tag(number, tag) == wire_tag(number, other)) == (tag == other)


# --- verdicts ---------------------------------------------------------------------------------------------------


def test_a_verdict_names_the_ranks_and_what_they_are_in() -> None:
    parties = {("program 1", "matmul 4x4 @ 4x4"): [3, 0], ("agree", "reshard of 8x6"): [2]}
    assert out_of_order(parties, 7) == (
        "calls are out of order: ranks 0 and 3 are in matmul 4x4 @ 4x4 (call 7), rank 2 in reshard of 8x6 (call 7)"
    )
    twins = {("program 1", "ring"): [1], ("program 2", "ring"): [0]}
    assert out_of_order(twins, 2) == (
        "calls are out of order: rank 0 is in ring, bound as program 2 (call 2), "
        "rank 1 in ring, bound as program 1 (call 2)"
    )


@pytest.mark.parametrize("own", ["", "ValueError: here"])
@pytest.mark.parametrize("other", ["", "ValueError: there"])
def test_a_program_that_failed_on_another_rank_alone_ends_a_later_call(own: str, other: str) -> None:
    store, context = SignedStore(dist.HashStore()), TorchContext(liveness=False)
    for rank, why in ((1, other), (0, own)):
        order, sequence = ContextCalls(rank, f"{rank}.0"), SharedCalls((0, 1))
        sequence.tokens = {0: "0.0", 1: "1.0"}
        sequence.recent += [(1, CallKind("program 1", "a step", why)), (2, CallKind("agree", "the next"))]
        order.sequences, order.current = {(0, 1): sequence}, sequence
        watched = WatchedCalls(order, context)
        watched.publish(store)
    watched.look(store, is_urgent=True)
    assert order.verdict == ("" if own or not other else f"rank 1 failed in a step (call 1): {other}")
