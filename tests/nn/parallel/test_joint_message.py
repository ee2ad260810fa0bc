"""What a call compares and the terms of its loss are two numbers: ranks see whether all say the same."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from meshweave.execute.torch.call_order import CallOrder, OpenCall  # noqa: E402
from meshweave.nn.parallel.step_agreement import JointMessage  # noqa: E402
from sampling import examples  # noqa: E402


class _AllAreSaid(Exception):
    """Ends a call of which only what it sends is wanted."""


class OneOrder:
    """The order of calls of one rank, of which only what runs beside others is used."""

    open: OpenCall | None = None
    leave_open, finish_open = CallOrder.leave_open, CallOrder.finish_open


class SummedLater:
    """The ranks of a step, whose messages are summed once all of them are there."""

    def __init__(self, num_ranks: int) -> None:
        self.strategy = SimpleNamespace(mesh=SimpleNamespace(ranks=tuple(range(num_ranks))))
        self.said: list[Any] = []
        self.total: Any = None

    def reduced(self, order: Any, values: Any, op: Any) -> Callable[[], None]:
        if self.total is None:
            self.said.append(values.clone())
            raise _AllAreSaid
        values.copy_(self.total)
        return lambda: None


def _word(seed: int) -> int:
    return int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:8], "big", signed=True)


@examples(60)
@given(st.lists(st.integers(0, 2), min_size=2, max_size=40), st.integers(0, 10**9), st.booleans(), st.data())
def test_all_ranks_see_whether_all_say_the_same(
    which: list[int], seed: int, has_terms: bool, data: st.DataObject
) -> None:
    terms = [data.draw(st.floats(-1e9, 1e9)) if has_terms else None for _ in which]
    ranks = SummedLater(len(which))
    seen: list[bool] = []

    def conclude(is_same: bool) -> None:
        seen.append(is_same)
        if not is_same:
            raise _AllAreSaid

    numbers = [_word(seed + each) for each in which]
    sums = list[float]()
    for is_summed in (False, True):
        for number, term in zip(numbers, terms, strict=True):
            order: Any = OneOrder()
            message = JointMessage(ranks, order, number, conclude)  # type: ignore[arg-type]
            try:
                if term is None:
                    order.finish_open()
                else:
                    wait = message.begin(term, sums.append)
                    assert not message.is_unsent and order.open is not None
                    wait()
                    assert order.open is None
            except _AllAreSaid:
                assert not is_summed or len(set(which)) > 1
        ranks.total = torch.stack(ranks.said).sum(0)
    assert seen == [len(set(which)) == 1] * len(which)
    assert not has_terms or all(math.isclose(each, math.fsum(terms), abs_tol=1e-3) for each in sums)  # type: ignore[arg-type]


def test_a_loss_that_is_no_number_is_summed_and_compares_as_well() -> None:
    ranks, seen, sums = SummedLater(2), [], list[float]()
    messages = [JointMessage(ranks, OneOrder(), _word(0), seen.append) for _ in range(2)]  # type: ignore[arg-type]
    for message in messages:
        with pytest.raises(_AllAreSaid):
            message.begin(math.nan, sums.append)
    ranks.total = torch.stack(ranks.said).sum(0)
    for message in messages:
        message.begin(math.nan, sums.append)()
    assert len(sums) == 2 and all(map(math.isnan, sums)) and seen == [True] * 2
