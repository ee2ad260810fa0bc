"""Ranks that run alike are expanded once, and only those."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave.algorithms.matmul2d import Matmul2dConfig, Matmul2dProblem
from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.ir.analysis.dataflow import analyse
from meshweave.ir.program import Program
from meshweave.ir.program.expressions import Var, select
from meshweave.ir.program.parse import parse
from meshweave.lower import lower_rings
from meshweave.simulate.columns import Columns
from meshweave.simulate.engine import Core
from sampling import examples

RANKS = 6
RING = """
program("ring")
tp = mesh(({ranks},), ("i",))
A = tensor(({size}, 4), "float32")
own = input(A, tp[S(0)])
whole = scratch(({size}, 4), "float32", on=tp, slots=2)
x = lane()
with tp:
    for s in range(3):
        all_gather(whole(s % 2), own, over="tp.i", dim=0, sizes={sizes}, lane=x)
"""


def same_edges(program: Program) -> Core:
    """Compare the edges of every rank with those of the dataflow."""
    core = Core(Columns(program).data)
    before = analyse(program).predecessors
    for position, rank in enumerate(program.ranks):
        edges: list[list[int]] = [[] for _ in before[rank]]
        for op, other in core.edges(position).reshape(-1, 2).tolist():
            edges[op].append(other)
        assert tuple(map(tuple, edges)) == before[rank]
    return core


def views_by_table(draw: random.Random) -> Program:
    """Copies of parts that each rank takes in an order of its own.

    In many of these programs some ranks run alike: their parts are permuted, or the parts of all begin elsewhere.
    """
    num_parts = draw.randint(2, 5)
    kind = draw.choice(["rotated", "permuted", "random"])
    orders = []
    for rank in range(RANKS):
        order = list(range(num_parts))
        if kind == "rotated":
            order = order[rank % num_parts :] + order[: rank % num_parts]
        elif kind == "permuted":
            draw.shuffle(order)
        else:
            order = draw.choices(order, k=num_parts)
        orders.append(order)
    width = draw.choice([1, 2])
    lines = [
        'program("tables")',
        f'tp = mesh(({RANKS},), ("i",))',
        f'a = scratch(({2 * num_parts + 2}, 3), "float32", on=tp, slots=2)',
        f'b = scratch(({2 * num_parts + 2}, 3), "float32", on=tp)',
        "x = lane()",
        "y = lane()",
        "with tp:",
    ]
    for _ in range(draw.randint(3, 9)):
        part = draw.randrange(num_parts)
        begin = select([2 * order[part] for order in orders], Var("tp.i"))
        of_a = f"a({draw.choice(['0', '1', 'tp.i % 2'])})[{begin}:{begin} + {width}, :]"
        if draw.random() < 0.2:
            of_a = f"a[{draw.choice(['tp.i', '0', '(tp.i // 3)'])}:, :]"
            of_b = of_a.replace("a", "b", 1)
        else:
            other = draw.choice([str(begin), "2"])
            of_b = f"b[{other}:{other} + {width}, :]"
        out, src = draw.sample([of_a, of_b], 2)
        lines.append(f"    copy({out}, {src}, lane={draw.choice('xy')})")
    return parse("\n".join(lines))


@examples(100)
@given(st.integers(0, 2**63))
def test_edges_are_right_where_ranks_share_them(seed: int) -> None:
    same_edges(views_by_table(random.Random(seed)))


def test_some_of_these_programs_have_ranks_that_run_alike_and_some_do_not() -> None:
    counts = {Core(Columns(views_by_table(random.Random(seed))).data).num_classes for seed in range(40)}
    assert 1 in counts
    assert RANKS in counts


@pytest.mark.parametrize("directions", [1, 2])
def test_the_ranks_of_an_even_ring_are_one_class(directions: int) -> None:
    program = parse(RING.format(ranks=8, size=32, sizes=4))
    assert same_edges(lower_rings(program, directions)).num_classes == 1  # type: ignore[arg-type]


def test_ranks_of_uneven_rings_are_classes_of_their_own() -> None:
    program = parse(RING.format(ranks=4, size=19, sizes=(5, 5, 5, 4)))
    assert same_edges(lower_rings(program)).num_classes == 4


@pytest.mark.parametrize("name", ["wang", "tp1d"])
def test_some_ranks_of_products_with_rings_run_alike(name: str) -> None:
    entry = PRODUCTS_2D[name]
    shape = (1, 4) if name == "tp1d" else (4, 4)
    problem = Matmul2dProblem(64, 64, 64, shape, "os")
    program = entry.program(problem, Matmul2dConfig((1, 1)))
    assert same_edges(program).num_classes < len(program.ranks)
