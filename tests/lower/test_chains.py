"""Broadcasts and reduces as chains of packets: the same numbers, in P + D - 2 steps, without deadlock."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from meshweave.algorithms.matmul2d import Matmul2dConfig, Matmul2dProblem
from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.base.errors import ProgramError
from meshweave.cost.machine import Machine
from meshweave.cost.price import price
from meshweave.describe.machine.cluster import load_cluster
from meshweave.execute.numpy import run_numpy
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program import Program
from meshweave.ir.program.ops import Broadcast, Recv, Reduce, Send
from meshweave.ir.program.parse import parse
from meshweave.ir.program.text import to_text
from meshweave.ir.work import work_of
from meshweave.lower import lower_chains
from plain_simulator.reference import simulate
from sampling import examples

quick = examples(24, suppress_health_check=[HealthCheck.too_slow])


def check(program: Program, seed: int, *, meaning: bool) -> Program:
    """Lowers a program, proves the result, and compares it with the original in two legal orders."""
    lowered = lower_chains(program)
    assert not any(isinstance(op, (Broadcast, Reduce)) for op in lowered.ops())
    assert parse(to_text(lowered)) == lowered
    assert validate(lowered, labels=meaning).skipped == (() if meaning else ("index labels: not asked for",))
    rng = np.random.default_rng(seed)
    names = {b.tensor for b in program.buffers if b.kind == "input"}
    inputs = {t.name: rng.integers(-9, 9, t.shape) for t in program.tensors if t.name in names}
    expected = run_numpy(program, inputs).memory
    for order in (None, seed):
        memory = run_numpy(lowered, inputs, seed=order).memory
        for key, value in expected.items():
            np.testing.assert_array_equal(memory[key], value)
    return lowered


@quick
@given(st.data())
def test_summa_runs_step_by_step(data: st.DataObject) -> None:
    size = st.integers(1, 24)
    problem = Matmul2dProblem(
        *data.draw(st.tuples(size, size, size)),
        data.draw(st.tuples(st.integers(1, 5), st.integers(1, 4))),
        data.draw(st.sampled_from(["os", "ls", "rs"])),
        "int64",
    )
    turns = data.draw(st.integers(1, min(7, problem.sliced_size)))
    config = Matmul2dConfig((1,) * turns, packets=data.draw(st.integers(1, 5)))
    program = PRODUCTS_2D["summa"].program(problem, config)
    check(program, data.draw(st.integers(0, 99)), meaning=True)


# Uneven shards, ranks that are not in order, views inside slots, loops over the root, memory by columns, both
# kinds in one lane, in place, and blocks where no box is.
MIXED = """
program("mixed")
q = mesh({shape}, ("x", "y"), ranks={ranks})
X = tensor((17, 13), "int64")
Y = tensor((9, 17), "int64")
Z = tensor((9, 17), "int64")
x = input(X, q[S(1), S(0)])
y = input(Y, q[R, S(1)])
s = temp(X, q[S(1), S(0)])
z = temp(Z, q[R, S(1)])
b = temp(Z, q[R, S(1)], order=(1, 0))
w = scratch((6, 8), "int64", on=q, slots=2, order=(1, 0))
v = temp(Y, q[R, S(1)])
compute = lane()
net = lane(order="{order}", width={width})
other = lane()
with q:
    copy(v, y, lane=compute)
    zero(b, lane=compute)
    zero(z, lane=compute)
    zero(s, lane=compute)
    zero(w, lane=compute)
    zero(w(1), lane=compute)
    for i in range({turns}):
        broadcast(b, y, over="q.x", root=i % {nx}, packets={packets}, lane=net)
        add(v, b, lane=compute)
        reduce(z, v, over="q.x", root=(i + 1) % {nx}, packets={packets}, lane=net, name="sum up")
        broadcast(z, z, over="q.x", root=(i + 1) % {nx}, packets=2, lane={lane})
        for packet in range(2):
            add(w(packet)[1:5, 2:4], z[blocked(packet, 2, 4, 0, 8), :2], lane=compute)
            reduce(w(packet)[:, 2:7], w(1 - packet)[:, 1:6], over="q.y", root={ny} - 1, packets=3, lane=other)
            broadcast(w(packet)[1:5, blocked(0, 1, 2)], w(1 - packet)[1:5, 4:8], over="q.y", root=0, lane=other)
        reduce(s, x, over="q.y", root={ny} // 2, packets={packets}, lane=net)
        broadcast(v, z, over="q.x", root=0, packets={packets}, lane=net)
"""


@quick
@given(st.data())
def test_any_broadcast_and_reduce(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 4)))
    text = MIXED
    if shape[1] > 1:  # shards of x differ between the members: only a group of one can reduce them
        text = "\n".join(line for line in text.splitlines() if "reduce(s, x" not in line)
    text = text.format(
        shape=shape,
        nx=shape[0],
        ny=shape[1],
        ranks=tuple(data.draw(st.permutations(range(shape[0] * shape[1])))),
        turns=data.draw(st.integers(1, 3)),
        packets=data.draw(st.integers(1, 6)),
        order=data.draw(st.sampled_from(["fifo", "ready"])),
        width=data.draw(st.integers(1, 2)),
        lane=data.draw(st.sampled_from(["net", "other"])),
    )
    check(parse(text), data.draw(st.integers(0, 99)), meaning=False)


ONE = """
program("one {kind}")
tp = mesh((2, {count}), ("row", "col"))
X = tensor((64, 96), "float32")
x = output(X, tp[R, R])
net = lane()
compute = lane()
with tp:
    zero(x[:, :0], lane=compute)
    for i in range({times}):
        {kind}(x, x, over="tp.col", root=(i + 1) % {count}, packets={packets}, lane=net)
"""


def both(kind: str, count: int, packets: int, times: int = 1) -> tuple[int, int]:
    """Picoseconds of a collective in closed form and of its chain step by step, on links of its own."""
    program = parse(ONE.format(kind=kind, count=count, packets=packets, times=times))
    machine = Machine.of(load_cluster("tpu-v4-4x4"), program)
    op = program.ops_on_rank(0)[1].op
    trace = simulate(lower_chains(program), machine, contention=False)
    return times * price(work_of(program, op), machine).total_ps, max(span.end_ps for span in trace.spans)


@pytest.mark.parametrize("count", [2, 3, 4, 7])
@pytest.mark.parametrize("packets", [1, 2, 8, 32])
def test_a_chain_takes_as_long_as_its_closed_form(count: int, packets: int) -> None:
    """launch + (P + D - 2) (sync + packet / bandwidth), at the constants of its axis, rounded up per step."""
    closed, stepped = both("broadcast", count, packets)
    assert 0 <= stepped - closed <= count + packets - 2


def test_a_reduce_adds_no_step() -> None:
    closed, stepped = both("reduce", 4, 8)
    assert stepped == pytest.approx(closed, rel=0.01)  # and the copy of what is added to


def test_chains_from_one_root_after_the_other_overlap() -> None:
    """In one lane: a member that has passed on its last packet goes on with the next chain."""
    closed, stepped = both("broadcast", 7, 4, times=6)
    assert stepped < 0.9 * closed


def test_a_member_sends_and_receives_at_once() -> None:
    program = lower_chains(parse(ONE.format(kind="broadcast", count=4, packets=8, times=3)))
    for rank in program.ranks:
        lanes = {Send: set(), Recv: set()}  # type: ignore[var-annotated]
        for bound in program.ops_on_rank(rank):
            if bound.key[1:3] == (1, 0) and isinstance(bound.op, (Send, Recv)):  # the first chain
                lanes[type(bound.op)].add(bound.op.lane)
        assert not lanes[Send] & lanes[Recv]


def test_only_wanted_collectives_are_lowered() -> None:
    program = PRODUCTS_2D["summa"].program(Matmul2dProblem(8, 8, 8, (2, 2)), Matmul2dConfig())
    lowered = lower_chains(program, should_lower=lambda op: op.lane == "row")
    assert {op.lane for op in lowered.ops() if isinstance(op, Broadcast)} == {"col"}
    assert {op.lane for op in lowered.ops() if isinstance(op, Send)} == {"row"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('reduce(x, x, over="tp.col", root=0, op="max", lane=net)', "a chain adds, it knows no 'max'"),
        (
            'broadcast(x[blocked(0, 1, 2), blocked(0, 1, 2)], x[:32, :48], over="tp.col", root=0, lane=net)',
            "a chain moves boxes, not",
        ),
    ],
)
def test_what_a_chain_cannot_do_is_refused(line: str, message: str) -> None:
    head = ONE.format(kind="broadcast", count=2, packets=1, times=1).splitlines()[:-2]
    with pytest.raises(ProgramError, match=message):
        lower_chains(parse("\n".join([*head, f"    {line}"])))


@pytest.mark.parametrize("kind", ["broadcast", "reduce"])
def test_a_chain_of_nothing_has_no_packets(kind: str) -> None:
    program = parse(f"""
program("nothing")
tp = mesh((3,), ("x",))
A = tensor((0, 8), "float32")
a = input(A, tp[R])
b = output(A, tp[R])
net = lane()
with tp:
    {kind}(b, a, over="tp.x", root=1, packets=2, lane=net)
""")
    lowered = lower_chains(program)
    validate(lowered, labels=False)
    assert not any(isinstance(op, Send) for op in lowered.ops())
