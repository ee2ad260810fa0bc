"""Each collective on uneven parts and in any member order, against numpy on the members' arrays."""

from __future__ import annotations

import numpy as np
import pytest
from builders import numbers_for, run_numbers
from hypothesis import given
from hypothesis import strategies as st

from meshweave.base.errors import ProgramError
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program.parse import parse
from sampling import examples

RANKS = 3


def run(
    src: list[tuple[int, int]], out: list[tuple[int, int]], op: str, order: tuple[int, ...]
) -> list[np.ndarray]:
    """Runs one collective on members of the given shapes; returns src arrays, then out arrays."""
    lines = ['program("one collective")', f'm = mesh((3,), ("x",), ranks={order})']
    for at in range(RANKS):
        lines.append(f'p{at} = mesh((1,), ("x",), first={order[at]})')
        lines.append(f'X{at} = tensor({src[at]}, "float32")\nx{at} = input(X{at}, p{at}[R])')
    # A buffer of every rank whose shape depends on the coordinate.
    rows, cols = (sum_of(shape[dim] for shape in out) for dim in range(2))
    srows, scols = (sum_of(shape[dim] for shape in src) for dim in range(2))
    lines.append(f'x = scratch(({srows}, {scols}), "float32", on=m)')
    lines.append(f'y = scratch(({rows}, {cols}), "float32", on=m)')
    lines += ["l = lane()"]
    lines += [f"with p{at}:\n    copy(x, x{at}, lane=l)" for at in range(RANKS)]
    lines.append(f"with m:\n    zero(y, lane=l)\n    {op.format('y, x', 'm')}")
    program = parse("\n".join(lines) + "\n")
    flow = validate(program, labels=False).flow
    values = numbers_for(program)
    machine = run_numbers(flow, validate(program, labels=False).order, values)
    return [values[f"X{at}"] for at in range(RANKS)] + [machine.memory[rank, "y", 0] for rank in order]


def sum_of(sizes: object) -> str:
    return " + ".join(f"{size} * (m.x == {at})" for at, size in enumerate(sizes))  # type: ignore[arg-type, call-overload]


sizes = st.tuples(*[st.integers(0, 4)] * RANKS)
members = st.permutations([4, 0, 7]).map(tuple)


@examples(25)
@given(sizes, members, st.integers(0, 1))
def test_all_gather_and_reduce_scatter(parts: tuple[int, ...], order: tuple[int, ...], dim: int) -> None:
    total = sum(parts)
    each = [(size, 2) if dim == 0 else (2, size) for size in parts]
    whole = [(total, 2) if dim == 0 else (2, total)] * RANKS
    text = f'{{}}({{{{}}}}, over="{{{{}}}}", dim={dim}, sizes={parts}, lane=l)'
    *src, first, second, third = run(each, whole, text.format("all_gather"), order)
    for got in (first, second, third):
        assert np.array_equal(got, np.concatenate(src, axis=dim))
    *src, first, second, third = run(whole, each, text.format("reduce_scatter"), order)
    wanted = np.split(sum(src), np.cumsum(parts)[:-1], axis=dim)
    assert all(np.array_equal(got, want) for got, want in zip((first, second, third), wanted, strict=True))


@examples(25)
@given(st.tuples(sizes, sizes, sizes), members)
def test_all_to_all(table: tuple[tuple[int, ...], ...], order: tuple[int, ...]) -> None:
    """Row i of the table is what member i sends to each; all along dim 0."""
    send = " + ".join(
        f"{table[i][j]} * (m.x == {i}) * (peer == {j})" for i in range(RANKS) for j in range(RANKS)
    )
    recv = " + ".join(
        f"{table[j][i]} * (m.x == {i}) * (peer == {j})" for i in range(RANKS) for j in range(RANKS)
    )
    src = [(sum(row), 2) for row in table]
    out = [(sum(row[i] for row in table), 2) for i in range(RANKS)]
    op = 'all_to_all({}, over="{}", split_dim=0, concat_dim=0, '
    op += f"send_sizes={send}, recv_sizes={recv}, lane=l)"
    result = run(src, out, op, order)
    cut = [np.split(result[i], np.cumsum(table[i])[:-1]) for i in range(RANKS)]
    for i in range(RANKS):
        assert np.array_equal(result[RANKS + i], np.concatenate([cut[j][i] for j in range(RANKS)]))


def test_all_to_all_that_turns_a_matrix() -> None:
    """Rows are split, columns are joined: the transposition of a sharding."""
    op = 'all_to_all({}, over="{}", split_dim=0, concat_dim=1, lane=l)'
    *src, first, second, third = run([(6, 2)] * 3, [(2, 6)] * 3, op, (0, 1, 2))
    for number, got in enumerate((first, second, third)):
        assert np.array_equal(got, np.concatenate([x[2 * number : 2 * number + 2] for x in src], axis=1))


@examples(20)
@given(members, st.integers(0, 2), st.integers(-3, 4), st.sampled_from(["sum", "max"]))
def test_the_rest(order: tuple[int, ...], root: int, shift: int, how: str) -> None:
    shapes = [(3, 2)] * RANKS
    combine = {"sum": np.sum, "max": np.max}[how]
    *src, a, b, c = run(shapes, shapes, f'all_reduce({{}}, over="{{}}", op="{how}", lane=l)', order)
    assert all(np.array_equal(got, combine(np.stack(src), axis=0)) for got in (a, b, c))
    *src, a, b, c = run(shapes, shapes, f'reduce({{}}, over="{{}}", root={root}, op="{how}", lane=l)', order)
    for number, got in enumerate((a, b, c)):
        assert np.array_equal(got, combine(np.stack(src), axis=0) if number == root else np.zeros((3, 2)))
    *src, a, b, c = run(
        shapes, shapes, f'broadcast({{}}, over="{{}}", root={root}, packets=2, lane=l)', order
    )
    assert all(np.array_equal(got, src[root]) for got in (a, b, c))
    rows = [(1, 2), (2, 2), (3, 2)]
    moved = [rows[(i - shift) % RANKS] for i in range(RANKS)]
    *src, a, b, c = run(rows, moved, f'permute({{}}, over="{{}}", shift={shift}, lane=l)', order)
    assert all(np.array_equal(got, src[(i - shift) % RANKS]) for i, got in enumerate((a, b, c)))


@pytest.mark.parametrize(
    ("op", "message"),
    [
        ('all_gather({}, over="{}", dim=2, lane=l)', "no dim 2"),
        ('all_gather({}, over="{}", dim=-1, lane=l)', "no dim -1"),
        ('reduce_scatter({}, over="{}", dim=0, sizes=(1, 1, 2), lane=l)', "do not sum to the 3 of src"),
        ('reduce_scatter({}, over="{}", dim=1, lane=l)', "do not sum to the 2 of src"),
        (
            'all_to_all({}, over="{}", split_dim=0, concat_dim=0, send_sizes=(3, 0, 0), lane=l)',
            "gives member 0",
        ),
        ('reduce({}, over="{}", root=-1, lane=l)', "root -1"),
        ('broadcast({}, over="{}", root=0, packets=0, lane=l)', "0 packets"),
    ],
)
def test_collectives_that_do_not_fit(op: str, message: str) -> None:
    with pytest.raises(ProgramError) as caught:
        run([(3, 2)] * 3, [(3, 2)] * 3, op, (0, 1, 2))
    assert message in caught.value.message and caught.value.op is not None and caught.value.rank is not None
