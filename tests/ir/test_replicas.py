"""How copies of an output come to have the same bits: what is judged certain, and what is not."""

from __future__ import annotations

import pytest

from meshweave.ir.analysis.replicas import ReplicaAgreement
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program.parse import parse

HEAD = """
program("copies")
tp = mesh((3,), ("x",))
A = tensor((6, 8), "float32")
B = tensor((8, 5), "float32")
C = tensor((6, 5), "float32")
computes(C, product(A, B))
a = input(A, tp[R])
b = input(B, tp[R])
c = output(C, tp[R])
wide = scratch((6, 40), "float32", on=tp)
part = scratch((8, 5), "float32", on=tp)
l = lane()
m = lane()
"""

ALIKE = "matmul(c, a, b, lane=l)"
IN_TWO = "matmul(c, a[:, :4], b[:4, :], lane=l)\n    matmul(c, a[:, 4:], b[4:, :], accumulate=1, lane=l)"
IN_TWO_BACKWARDS = (
    "matmul(c, a[:, 4:], b[4:, :], lane=l)\n    matmul(c, a[:, :4], b[:4, :], accumulate=1, lane=l)"
)
BY_ROWS = "matmul(c[:4, :], a[:4, :], b, lane=l)\n    matmul(c[4:, :], a[4:, :], b, lane=l)"
OTHER_STRIDES = "copy(wide[:, :8], a, lane=l)\n    matmul(c, wide[:, :8], b, lane=l)"
OTHER_ALIGNMENT = "copy(wide[:, 1:9], a, lane=l)\n    matmul(c, wide[:, 1:9], b, lane=l)"
ALIGNED_ALIKE = "copy(wide[:, 16:24], a, lane=l)\n    matmul(c, wide[:, 16:24], b, lane=l)"
OTHER_PLACE = "copy(part, b, lane=l)\n    matmul(c, a, part, lane=l)"


def agreement(body: str) -> ReplicaAgreement:
    (agreed,) = validate(parse(HEAD + body)).replicas
    return agreed


def on_two_sides(first: str, other: str) -> ReplicaAgreement:
    """Return how C agrees where ranks 0 and 1 do one thing, and rank 2 another."""
    return agreement(f"with ranks(0, 1):\n    {first}\nwith ranks(2):\n    {other}\n")


@pytest.mark.parametrize("body", [ALIKE, IN_TWO, IN_TWO_BACKWARDS, BY_ROWS, OTHER_STRIDES, OTHER_ALIGNMENT])
def test_ranks_that_do_the_same_recompute_the_same(body: str) -> None:
    agreed = agreement(f"with tp:\n    {body}\n")
    assert agreed.kind == "recomputed" and agreed.is_certain
    assert str(agreed) == "copies of c are recomputed"


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (ALIKE, IN_TWO),
        (IN_TWO, IN_TWO_BACKWARDS),
        (ALIKE, BY_ROWS),
        (ALIKE, OTHER_STRIDES),
        (OTHER_STRIDES, OTHER_ALIGNMENT),
    ],
)
def test_products_of_other_shapes_strides_or_orders_may_differ(first: str, other: str) -> None:
    agreed = on_two_sides(first, other)
    assert agreed.kind == "may differ" and not agreed.is_certain
    assert str(agreed) == "copies of c may differ: C[0, 0] on ranks 0 and 2"


@pytest.mark.parametrize(("first", "other"), [(ALIKE, OTHER_PLACE), (OTHER_STRIDES, ALIGNED_ALIKE)])
def test_other_memory_with_the_same_strides_and_alignment_makes_no_difference(first: str, other: str) -> None:
    assert on_two_sides(first, other).kind == "recomputed"


def test_what_one_rank_computes_is_copied() -> None:
    body = f"with ranks(0):\n    {ALIKE}\nwith tp:\n    broadcast(c, c, over='tp', root=0, lane=m)\n"
    assert agreement(body.replace("'", '"')).kind == "copied"
    messages = f"with ranks(0):\n    {ALIKE}\n" + "".join(
        f"with ranks(0):\n    send(c, peer={rank}, lane=m)\nwith ranks({rank}):\n    recv(c, peer=0, lane=m)\n"
        for rank in (1, 2)
    )
    assert agreement(messages).kind == "copied"


SUM = """
program("sums")
tp = mesh((2, 3), ("x", "y"))
X = tensor((4, 5), "float32")
Y = tensor((4, 5), "float32")
computes(Y, same(X))
x = input(X, tp[R, P])
y = output(Y, tp[R, R])
got = scratch((4, 5), "float32", on=tp, slots=3)
l = lane()
with tp:
    all_gather(got_all, x, over="tp.y", dim=0, lane=l)
"""


def summed(orders: dict[int, tuple[int, int, int]]) -> str:
    """Return how Y agrees where each rank of the second axis adds up the terms in an order of its own."""
    text = SUM.replace("slots=3)", 'slots=3)\ngot_all = scratch((12, 5), "float32", on=tp)')
    for rank, order in orders.items():
        views = [f"got_all[{4 * term}:{4 * term + 4}, :]" for term in order]
        text += f"with ranks({rank}):\n    copy(y, {views[0]}, lane=l)\n"
        text += "".join(f"    add(y, {view}, lane=l)\n" for view in views[1:])
    (agreed,) = validate(parse(text)).replicas
    return agreed.kind


def test_sums_depend_on_the_order_of_their_terms_but_for_the_first_two() -> None:
    same = dict.fromkeys(range(6), (0, 1, 2))
    assert summed(same) == "recomputed"
    assert summed(same | {4: (1, 0, 2)}) == "recomputed"
    assert summed(same | {4: (0, 2, 1)}) == "may differ"


def test_terms_of_a_partial_sum_are_no_copies_of_each_other() -> None:
    text = HEAD.replace("c = output(C, tp[R])", "c = output(C, tp[P])")
    shares = "".join(
        f"with ranks({rank}):\n    matmul(c, a[:, {lo}:{hi}], b[{lo}:{hi}, :], lane=l)\n"
        for rank, (lo, hi) in enumerate([(0, 2), (2, 5), (5, 8)])
    )
    (agreed,) = validate(parse(text + shares)).replicas
    assert agreed.kind == "single" and str(agreed) == "c has no copies"
