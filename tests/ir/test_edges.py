"""Derived edges against a quadratic derivation over single elements: the orders they imply are the same."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
from builders import golden
from hypothesis import given
from hypothesis import strategies as st

from meshweave.ir.analysis import edges
from meshweave.ir.analysis.dataflow import analyse
from meshweave.ir.analysis.edges import local_edges
from meshweave.ir.program import BoundOp
from meshweave.ir.program.ops import READ, UPDATE, Add, Call, Copy, Fence, Get, Matmul, Op, Put, Zero
from meshweave.ir.program.parse import parse
from meshweave.ir.program.release import Release
from meshweave.ir.program.views import Blocked, Range, Selector, View, selector_indices
from sampling import examples

SIZE = 6
EXPOSED = frozenset({"x"})


@st.composite
def selectors(draw: st.DrawFn) -> Selector:
    start = draw(st.integers(0, SIZE))
    stop = draw(st.integers(start, SIZE))
    if draw(st.integers(0, 3)):
        return Range(start, stop)
    return Blocked(draw(st.integers(-2, 2)), 1, draw(st.integers(2, 3)), start, stop)


def views(buffers: str = "xyz") -> st.SearchStrategy[View]:
    return st.builds(
        View, st.sampled_from(buffers), st.tuples(selectors(), selectors()), st.integers(0, 1), st.none()
    )


remote = views("x").map(lambda view: View(view.buffer, view.selectors, view.slot, 1))
releases = st.sampled_from([None, Release(), Release(update=True)])
lane = {"lane": st.just("l")}
ops: st.SearchStrategy[Op] = st.one_of(
    st.builds(Copy, out=views(), src=views(), release=releases, **lane),
    st.builds(Add, out=views(), src=views(), **lane),
    st.builds(Zero, out=views(), **lane),
    st.builds(
        Matmul, out=views(), a=views(), b=views(), accumulate=st.integers(0, 1), release=releases, **lane
    ),
    st.builds(Put, out=remote, src=views(), release=releases, **lane),
    st.builds(Get, out=views(), src=remote, **lane),
    st.builds(Fence, over=st.just((0, 1)), **lane),
    st.builds(
        Call,
        fn=st.just("f"),
        outs=st.lists(views(), max_size=2).map(tuple),
        ins=st.lists(views(), max_size=2).map(tuple),
        **lane,
    ),
)


def elements(view: View) -> set[tuple[object, ...]]:
    return {
        (view.buffer, view.slot, *at)
        for at in product(*(selector_indices(s).tolist() for s in view.selectors))
    }


def conflict(first: Op, second: Op) -> bool:
    """Whether `second` must wait for `first`, straight from the words of the design."""
    fences = isinstance(first, Fence) + isinstance(second, Fence)
    if fences:
        return fences == 2 or touches(first) or touches(second)
    for (mode, view), (other_mode, other) in product(first.accesses(), second.accesses()):
        commute = mode == other_mode and mode in (READ, UPDATE)
        own = view.rank is None and other.rank is None
        if own and not commute and elements(view) & elements(other):
            return True
    return False


def touches(op: Op) -> bool:
    return any(view.rank is not None or view.buffer in EXPOSED for _, view in op.accesses())


def closure(edges: Sequence[Sequence[int]]) -> list[set[int]]:
    past: list[set[int]] = []
    for before in edges:
        past.append(set(before).union(*(past[other] for other in before)))
    return past


@examples(150)
@given(st.lists(ops, max_size=9))
def test_same_order_as_the_quadratic_derivation(listed: list[Op]) -> None:
    bound = [BoundOp((number,), op) for number, op in enumerate(listed)]
    brute = [[i for i in range(j) if conflict(listed[i], listed[j])] for j in range(len(listed))]
    derived = local_edges(bound, EXPOSED)
    assert closure(derived) == closure(brute)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edges, "_FEW", 0)  # as where there are many: boxes are compared all at once
        assert local_edges(bound, EXPOSED) == derived


def test_stash_orders_the_parts_of_a_stage() -> None:
    """The parts share no view: only the stash says that the gradients need the forward part."""
    out = [View(name, (Range(0, 1),), 0) for name in "abcd"]

    def part(kind: str, number: int, microbatch: int) -> BoundOp:
        op = Call(
            fn="f", outs=(out[number],), ins=(), stash="mb", part=kind, args=(microbatch,), lane="l"  # type: ignore[arg-type]
        )  # fmt: skip
        return BoundOp((number,), op)

    listed = [part("forward", 0, 0), part("forward", 1, 1), part("weight_grad", 2, 0), part("forward", 3, 0)]
    assert local_edges(listed) == ((), (), (0,), (0, 2))


def test_released_writes_are_waited_for_across_ranks_and_only_by_later_readers() -> None:
    flow = analyse(golden("t3_ring"))
    for node, writers in flow.remote_predecessors.items():
        assert flow.op(node).kind in ("put", "copy")
        for writer in writers:
            assert (writer[0] + 1) % 4 == node[0]
            assert flow.bound_op(writer).key < flow.bound_op(node).key


def test_updates_do_not_wait_for_each_other_but_readers_wait_for_all() -> None:
    text = """
program("tracked")
tp = mesh((3,), ("x",))
src = scratch((4, 2), "float32", on=tp)
acc = scratch((4, 2), "float32", on=tp)
out = scratch((4, 2), "float32", on=tp)
l = lane(order="ready", width=4)
with tp:
    zero(src, lane=l)
    zero(acc, lane=l)
    fence(over="tp", lane=l)
    put(at(0, acc[:2, :]), src[:2, :], release=release(update=True), lane=l)
    put(at(0, acc[1:, :]), src[1:, :], release=release(update=True), lane=l)
    copy(out[:1, :], acc[:1, :], lane=l)
    copy(out[1:, :], acc[1:, :], lane=l)
"""
    flow = analyse(parse(text))
    assert set(flow.remote_predecessors) == {(0, 5), (0, 6)}
    assert flow.remote_predecessors[0, 5] == tuple((rank, 3) for rank in range(3))
    assert flow.remote_predecessors[0, 6] == tuple((rank, op) for rank in range(3) for op in (3, 4))
