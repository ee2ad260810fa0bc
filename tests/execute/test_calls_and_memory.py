"""What functions of calls find and return, and what tensors of a caller may share, where lanes run in threads."""

from __future__ import annotations

import os
import threading

import pytest

torch = pytest.importorskip("torch")

from meshweave.base.errors import BindError  # noqa: E402
from meshweave.execute.torch.bind import bind  # noqa: E402
from meshweave.execute.torch.context import TorchContext  # noqa: E402
from meshweave.ir.program.parse import parse  # noqa: E402

HEAD = """
program("{}")
q = mesh((1,), ("x",))
X = tensor((4,), "int64")
x = input(X, q[R])
y = output(X, q[R])
z = output(X, q[R])
first = lane()
second = lane()
with q:
"""
SWAP = """
    copy(y, x, lane=first)
    call(fn="double", outs=(z,), ins=(x,), lane=first)
    call(fn="swap", outs=(y, z), ins=(y, z), lane=first)
"""
SHIFT = """
    copy(y, x, lane=first)
    call(fn="shift", outs=(y[1:4],), ins=(y,), lane=first)
"""
MANY_COPIES = """
    copy(y, x, lane=first)
    copy(y, x, lane=first)
    call(fn="note", outs=(z,), ins=(x,), lane=second)
"""
TWO_CALLS = """
    call(fn="note", outs=(y,), ins=(x,), lane=first)
    call(fn="note", outs=(z,), ins=(x,), lane=second)
"""
READ_LATE = """
    call(fn="slow", outs=(z,), ins=(x,), lane=first)
    call(fn="ten", outs=(y,), ins=(x,), lane=second)
"""
TWO_WRITERS = """
    call(fn="slow", outs=(z,), ins=(x,), lane=first)
    zero(y[:2], lane=first)
    zero(y[2:4], lane=second)
"""
READ_FIRST = """
    copy(z, x, lane=first)
    add(z, x, lane=first)
    call(fn="ten", outs=(y,), ins=(x,), lane=first)
"""
CALLS = {
    "double": lambda x: 2 * x,
    "swap": lambda a, b: (b, a),
    "shift": lambda y: y[:3],
    "slow": lambda x: x + 1,
    "ten": lambda x: 10 * x,
}


def _bound(body, tensors=None, **calls):
    program = parse(HEAD.format("small") + body)
    tensors = {"x": torch.arange(4)} if tensors is None else tensors
    return bind(program, 0, tensors, context=TorchContext(), calls={**CALLS, **calls})


def test_a_call_may_return_what_it_was_given_in_another_place():
    bound = _bound(SWAP)
    bound.run()
    assert bound.outputs["y"].tolist() == [0, 2, 4, 6]
    assert bound.outputs["z"].tolist() == [0, 1, 2, 3]
    bound = _bound(SHIFT)
    bound.run()
    assert bound.outputs["y"].tolist() == [0, 0, 1, 2]


def test_inputs_may_be_given_each_others_values():
    text = HEAD.format("pair").replace("x = input(X, q[R])", "x = input(X, q[R])\nw = input(X, q[R])")
    given = {"x": torch.arange(4), "w": torch.ones(4, dtype=torch.int64)}
    body = "    copy(y, x, lane=first)\n    copy(z, w, lane=first)\n"
    bound = bind(parse(text + body), 0, given, context=TorchContext())
    bound.run({"x": bound.inputs["w"], "w": bound.inputs["x"]})
    assert bound.outputs["y"].tolist() == [1] * 4 and bound.outputs["z"].tolist() == [0, 1, 2, 3]
    bound.run({"x": bound.inputs["x"].flip(0), "w": bound.inputs["w"].expand(4)})
    assert bound.outputs["z"].tolist() == [0, 1, 2, 3]


def test_the_calling_thread_runs_the_lane_with_most_calls():
    threads = []

    def note(x):
        threads.append(threading.current_thread())
        return x + 0

    _bound(MANY_COPIES, note=note).run()
    assert threads == [threading.current_thread()]


def test_calls_of_all_lanes_find_the_autocast_of_the_caller():
    seen = set()

    def note(x):
        here = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        seen.add((threading.current_thread().name, *here))
        return x + 0

    bound = _bound(TWO_CALLS, note=note)
    with torch.autocast("cpu", torch.bfloat16):
        bound.run()
    assert len(seen) == 2 and {each[1:] for each in seen} == {(True, torch.bfloat16)}
    seen.clear()
    bound.run()
    assert {each[1] for each in seen} == {False}


@pytest.mark.parametrize("other", ["the same", "a part"])
def test_an_output_does_not_lie_where_an_input_is_still_read(other):
    memory = torch.arange(8)
    given = {"x": memory[:4], "y": memory[:4] if other == "the same" else memory[2:6]}
    with pytest.raises(BindError, match="y and x of program small are given memory in common, and call"):
        _bound(READ_LATE, given)
    with pytest.raises(BindError, match=r"memory in common, and zero 0\.2 writes y before x is done with"):
        _bound(TWO_WRITERS, given)
    with pytest.raises(BindError, match="memory in common"):
        _bound(READ_LATE, {"y": memory[:4], "z": memory[:4]})
    with pytest.raises(BindError, match="memory in common"):  # with gaps
        _bound(READ_LATE, {"x": memory[:7:2], "y": memory[2:6]})
    columns = memory.view(4, 2)
    bound = _bound(READ_LATE, {"x": columns[:, 0], "y": columns[:, 1]})
    bound.run()
    assert bound.outputs["y"].tolist() == [0, 20, 40, 60] and bound.outputs["z"].tolist() == [1, 3, 5, 7]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"y": torch.ones(1, dtype=torch.int64).expand(4)},
            r"y is given a tensor of strides \(0,\), whose elem",
        ),
        ({"x": torch.arange(4).to_sparse()}, "x is given a torch.sparse_coo tensor: give a dense one"),
        ({"x": torch.arange(4, device="meta")}, "x is given a meta tensor"),
        ({"x": [0, 1, 2, 3]}, "x is given a list: give a torch.Tensor"),
        ({"x": torch._neg_view(torch.arange(4))}, "x is given a lazily negated tensor"),
    ],
)
def test_memory_that_no_program_can_use_is_refused(given, says):
    with pytest.raises(BindError, match=f"buffer {says}"):
        _bound(READ_FIRST, given)


def test_new_values_are_checked_before_any_is_copied():
    bound = _bound(READ_FIRST, {"x": torch.tensor(3).expand(4)})
    bound.run()
    assert bound.outputs["z"].tolist() == [6] * 4
    with pytest.raises(BindError, match="x is bound to an expanded tensor"):
        bound.run({"x": torch.arange(4)})
    with pytest.raises(BindError, match=r"x is given a torch\.sparse_coo tensor"):
        bound.run({"x": torch.arange(4).to_sparse()})


def test_an_output_may_lie_where_an_input_was():
    memory = torch.arange(4)
    bound = _bound(READ_FIRST, {"x": memory, "y": memory})
    bound.run()
    assert memory.tolist() == [0, 10, 20, 30] and bound.outputs["z"].tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize(("x", "y"), [(0, 2), (2, 0)])
@pytest.mark.parametrize(
    "op", ["copy(y, x", 'all_gather(y, x, over="q.x", dim=0', 'all_reduce(y, x, over="q.x"']
)
def test_an_output_may_overlap_the_input_that_one_op_reads(op, x, y):
    memory = torch.arange(8)
    given = {"x": memory[x : x + 4], "y": memory[y : y + 4]}
    bound = _bound(f"    {op}, lane=first)\n    zero(z, lane=first)\n", given)
    bound.run()
    assert bound.outputs["y"].tolist() == [x, x + 1, x + 2, x + 3]


def test_a_fork_has_lanes_of_its_own():
    bound = bind(
        parse(HEAD.format("forked") + TWO_CALLS),
        0,
        {"x": torch.arange(4)},
        context=TorchContext(deadline_s=0.5),
        calls={"note": lambda x: x + 1},
    )
    bound.run()
    child = os.fork()
    if not child:
        status = 1
        try:
            bound.run({"x": torch.zeros(4, dtype=torch.int64)})
            status = 0 if bound.outputs["z"].tolist() == [1] * 4 else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert bound.outputs["z"].tolist() == [1, 2, 3, 4]
