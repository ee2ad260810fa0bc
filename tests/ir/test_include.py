"""Includes: golden programs, names kept apart, loops, sub-meshes, and what each reading makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from including import NAMES, golden_include, text_of

from meshweave.base.errors import ProgramError
from meshweave.cost.machine import Machine
from meshweave.describe.machine.cluster import load_cluster
from meshweave.estimate import estimate
from meshweave.execute.numpy import run_numpy
from meshweave.ir.analysis import validate as validate_module
from meshweave.ir.analysis.dataflow import analyse
from meshweave.ir.analysis.lifetimes import peak_bytes
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program import Program
from meshweave.ir.program.parse import parse
from meshweave.ir.program.text import to_text
from meshweave.ir.work import traffic
from meshweave.simulate import simulate
from plain_simulator.reference import simulate as reference_simulate

Array = Any

COPY = """def move():
    program("every rank gives its rows to the next one")
    tp = mesh((2,), ("x",))
    A = tensor((4, 2), "float32")
    a = input(A, tp[S(0)])
    b = output(A, tp[S(0)])
    net = lane()
    with tp:
        {body}
"""


def inputs_of(program: Program) -> dict[str, Array]:
    draw = np.random.default_rng(1)
    names = {buffer.tensor for buffer in program.buffers if buffer.kind == "input" and buffer.tensor}
    return {
        name: draw.integers(-1, 2, program.tensor_of[name].shape).astype("float32") for name in sorted(names)
    }


def block(x: Array, w: Array, v: Array) -> Array:
    return (x @ w) ** 2 @ v


def expected(name: str, values: dict[str, Array]) -> Array:
    if name == "feed_forward":
        return values["X"] @ values["W1"] @ values["W2"]
    return block(block(values["X"], values["W0"], values["V0"]), values["W1"], values["V1"])


def machine_for(program: Program) -> Machine:
    return Machine.of(load_cluster("dgx-h100:8"), program)


# --- golden programs ------------------------------------------------------------------------------------


def test_there_is_a_pipeline_and_a_feed_forward() -> None:
    assert NAMES == ("feed_forward", "pipeline")


@pytest.mark.parametrize("name", NAMES)
def test_golden_program_prints_is_proved_and_computes_in_any_order(name: str) -> None:
    program = golden_include(name)
    assert to_text(program) == text_of(name) and parse(to_text(program)) == program
    assert validate(program).skipped == ()
    values = inputs_of(program)
    for seed in (None, *range(6)):
        outputs = run_numpy(program, values, seed=seed, calls={"gelu": lambda h, m: h**2}).outputs
        (output,) = outputs.values()
        np.testing.assert_array_equal(output, expected(name, values))
    machine = machine_for(program)
    assert simulate(program, machine).trace() == reference_simulate(program, machine)
    assert estimate(program, machine).total_s > 0


def test_expanded_program_has_no_includes_and_names_the_path() -> None:
    program = golden_include("pipeline")
    expanded = program.expanded
    assert expanded.includes == () and expanded is program.expanded and expanded.expanded is expanded
    labels = {op.name for op in expanded.ops() if op.kind == "matmul"}
    assert labels == {"stage 0 > block > matmul", "stage 1 > block > matmul"}
    assert parse(to_text(expanded)) == expanded
    assert len(list(expanded.ops())) == 2 * 4 + 2, "a loop is not unrolled"


def test_each_reading_sees_the_ops_of_both_stages() -> None:
    program = golden_include("pipeline")
    part_bytes, message_bytes = 2 * 4 * 4, 2 * 4 * 4
    for rank in program.ranks:
        assert traffic(program, rank)["grid.tp"] == 4 * part_bytes
        assert traffic(program, rank).get("", 0) == (4 * message_bytes if rank >= 2 else 0)
        assert peak_bytes(program, rank) > sum(
            program.buffer_bytes(buffer.name, rank)
            for buffer in program.buffers
            if buffer.kind != "scratch" and rank in program.mesh_of[buffer.mesh]
        )


def test_stages_overlap() -> None:
    """The second stage works on one micro-batch while the first works on the next."""
    program = golden_include("pipeline")
    spans = [span for span in simulate(program, machine_for(program)).trace().spans if span.kind == "matmul"]
    ends = sorted(span.end_ps for span in spans if span.rank == 0)
    starts = sorted(span.start_ps for span in spans if span.rank == 2)
    assert starts[0] < ends[-1]


def test_sub_program_is_proved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    proved: list[str] = []

    def prove(program: Program, *rest: Any) -> Any:
        proved.append(program.name)
        return validate_one(program, *rest)

    validate_one = validate_module._validate
    monkeypatch.setattr(validate_module, "_validate", prove)
    validate(golden_include("pipeline"))
    assert proved == [
        "block: two products with their sum over tp",
        "pipeline of two stages, four micro-batches",
    ]


def test_micro_batch_is_an_argument_of_calls() -> None:
    seen: list[int] = []

    def gelu(h: Array, batch: int) -> Array:
        seen.append(batch)
        return h

    program = golden_include("pipeline")
    run_numpy(program, inputs_of(program), calls={"gelu": gelu})
    assert sorted(seen) == sorted([0, 1, 2, 3] * 4)


# --- names ----------------------------------------------------------------------------------------------


def moved(body: str, main: str) -> Program:
    """A program over ranks 0 to 3 that includes one over two ranks, whose tensor has four rows."""
    declared = """grid = mesh((2, 2), ("row", "col"))
top = mesh((2,), ("x",))
low = mesh((2,), ("x",), first=2)
X = tensor((4, 2), "float32")
x = input(X, top[S(0)])
y = output(X, top[S(0)])
net = lane()
"""
    return parse('program("main")\n' + COPY.format(body=body.replace("\n", "\n        ")) + declared + main)


def test_loop_index_of_the_sub_program_does_not_capture_that_of_the_program() -> None:
    program = parse(
        """program("main")
def rows():
    program("one row after another")
    s = mesh((1,), ("x",))
    A = tensor((2, 2), "float32")
    B = tensor((2, 2), "float32")
    computes(B, same(A))
    a = input(A, s[R])
    b = output(B, s[R])
    net = lane()
    with s:
        for m in range(2):
            copy(b[m:m + 1, :], a[m:m + 1, :], lane=net)
s = mesh((1,), ("x",))
X = tensor((6, 2), "float32")
Y = tensor((6, 2), "float32")
computes(Y, same(X))
x = input(X, s[R])
y = output(Y, s[R])
for m in range(3):
    include(rows, s=s, a=x[2 * m:2 * m + 2, :], b=y[2 * m:2 * m + 2, :])
"""
    )
    assert validate(program).skipped == ()
    values = inputs_of(program)
    np.testing.assert_array_equal(run_numpy(program, values).outputs["Y"], values["X"])


def test_own_lanes_scratch_and_stashes_are_apart_and_given_ones_are_shared() -> None:
    text = text_of("pipeline")
    expanded = parse(text).expanded
    assert [lane.name for lane in expanded.lanes] == ["forward", "block_compute", "block_comm"]
    shared = parse(text.replace("w1=w0,", "w1=w0, comm=forward,")).expanded
    assert {op.lane for op in shared.ops() if op.kind == "all_reduce"} == {"forward", "block_comm"}
    stash = 'args=(batch,), stash="kept", part="forward", stash_bytes=8'
    kept = text.replace("args=(batch,)", stash)
    assert {op.stash for op in parse(kept).expanded.ops() if op.kind == "call"} == {"block_kept"}
    renamed = kept.replace('name="stage 0"', 'stashes=(("kept", "first"),), name="stage 0"')
    assert to_text(parse(renamed)) != to_text(parse(kept)) and parse(to_text(parse(renamed))) == parse(
        renamed
    )
    assert {op.stash for op in parse(renamed).expanded.ops() if op.kind == "call"} == {"first", "block_kept"}


def test_copies_of_scratch_let_turns_overlap() -> None:
    """With one set of scratch, a micro-batch of a stage waits until the one before has left it."""
    text = text_of("pipeline")
    doubled = parse(text.replace("batch=m, name", "batch=m, copies=2, copy=m % 2, name"))
    assert parse(to_text(doubled)) == doubled and validate(doubled).skipped == ()
    assert {b.name: b.slots for b in doubled.expanded.buffers if b.name.startswith("block_h")} == {
        "block_h": 2,
        "block_h_": 2,
    }
    values = inputs_of(doubled)
    output = run_numpy(doubled, values, seed=3, calls={"gelu": lambda h, m: h**2}).outputs["Y1"]
    np.testing.assert_array_equal(output, expected("pipeline", values))
    waiting = {}
    for program in (parse(text), doubled):
        flow = analyse(program)
        ops = [bound.op.kind for bound in flow.matched.ops[0]]
        second_turn = ops.index("matmul", ops.index("send"))
        waiting[program] = ops.index("call") in flow.predecessors[0][second_turn]
    assert list(waiting.values()) == [True, False]


def test_ranks_may_depend_on_a_loop_or_on_coordinates() -> None:
    """A row after another in a loop, and all rows at once: the same ops on the same ranks."""
    text = """program("rows")
def total():
    program("sum over a row")
    tp = mesh((2,), ("x",))
    A = tensor((2, 2), "float32")
    a = input(A, tp[P])
    b = output(A, tp[R])
    net = lane()
    with tp:
        all_reduce(b, a, over="tp.x", lane=net)
grid = mesh((3, 2), ("row", "col"))
X = tensor((6, 2), "float32")
Y = tensor((6, 2), "float32")
computes(Y, same(X))
x = input(X, grid[S(0), P])
y = output(Y, grid[S(0), R])
"""
    looped = parse(text + "for r in range(3):\n    include(total, tp=grid[r, :], a=x, b=y)\n")
    at_once = parse(text + "include(total, tp=grid[grid.row, :], a=x, b=y)\n")
    values = {"X": np.arange(12, dtype="float32").reshape(6, 2)}
    machine = machine_for(looped)
    for program in (looped, at_once):
        assert parse(to_text(program)) == program
        np.testing.assert_array_equal(run_numpy(program, values).outputs["Y"], values["X"])
        assert [traffic(program, rank) for rank in program.ranks] == [{"grid.col": 16}] * 6
        assert simulate(program, machine).duration_s == simulate(looped, machine).duration_s
    assert "values of Y of total: not declared" not in validate(looped).skipped


def test_part_of_a_mesh_and_axes_in_another_order() -> None:
    program = parse(
        """program("quarters")
def gather():
    program("gather rows, then columns")
    tp = mesh((2, 2), ("x", "y"))
    A = tensor((4, 4), "float32")
    B = tensor((4, 4), "float32")
    computes(B, same(A))
    a = input(A, tp[S(0), S(1)])
    b = output(B, tp[R, R])
    rows = scratch((4, 2), "float32", on=tp)
    net = lane()
    with tp:
        all_gather(rows, a, over="tp.x", dim=0, lane=net)
        all_gather(b, rows, over="tp.y", dim=1, lane=net)
grid = mesh((2, 4), ("row", "col"))
left = mesh((2, 2), ("row", "col"), ranks=(0, 1, 4, 5))
right = mesh((2, 2), ("col", "row"), ranks=(2, 6, 3, 7))
X = tensor((4, 4), "float32")
Z = tensor((4, 4), "float32")
Y = tensor((4, 4), "float32")
V = tensor((4, 4), "float32")
computes(Y, same(X))
computes(V, same(Z))
x = input(X, left[S(0), S(1)])
y = output(Y, left[R, R])
z = input(Z, right[S(0), S(1)])
v = output(V, right[R, R])
include(gather, tp=grid[:, :2], a=x, b=y)
include(gather, tp=transpose(grid[:, 2:4], 1, 0), a=z, b=v)
"""
    )
    assert parse(to_text(program)) == program and validate(program).skipped == ()
    assert {mesh.name for mesh in program.expanded.meshes} == {"grid", "left", "right"}
    values = inputs_of(program)
    outputs = run_numpy(program, values).outputs
    np.testing.assert_array_equal(outputs["Y"], values["X"])
    np.testing.assert_array_equal(outputs["V"], values["Z"])
    assert traffic(program, 2) == {"right.col": 16, "grid.row": 32}


def test_one_sided_programs_keep_their_fences_where_something_else_touches_what_they_guard() -> None:
    body = 'put(at((tp.x + 1) % 2, b), a, lane=net)\nfence(over="tp", lane=net)'
    once = moved(body, "include(move, tp=grid[0, :], a=x, b=y)\n")
    assert sum(op.kind == "fence" for op in once.expanded.ops()) == 1
    after = "include(move, tp=grid[0, :], a=x, b=y)\nwith top:\n    copy(kept, y, lane=net)\n"
    read = moved(body, 'kept = scratch((2, 2), "float32", on=top)\n' + after)
    assert sum(op.kind == "fence" for op in read.expanded.ops()) == 3
    for program in (once, read):
        validate(program)
        validate(program.expanded)
        value = inputs_of(program)["X"]
        for seed in range(4):
            output = run_numpy(program, {"X": value}, seed=seed).outputs["X"]
            np.testing.assert_array_equal(output, np.roll(value, 2, axis=0))


def test_includes_nest() -> None:
    text = text_of("pipeline")
    stage = """def stage():
    program("a block and what is around it")
    s = mesh((2,), ("x",))
    X = tensor((2, 4), "float32")
    W1 = tensor((4, 5), "float32")
    W2 = tensor((5, 4), "float32")
    H = tensor((2, 5), "float32")
    A = tensor((2, 5), "float32")
    Y = tensor((2, 4), "float32")
    computes(H, product(X, W1))
    computes(A[i, j], call("gelu", H[i, j]))
    computes(Y, product(A, W2))
    x = input(X, s[R])
    w1 = input(W1, s[S(1)])
    w2 = input(W2, s[S(0)])
    y = output(Y, s[R])
    batch = index()
    include(block, tp=s, x=x, w1=w1, w2=w2, y=y, batch=batch)
"""
    nested = text.replace("grid = mesh", stage + "grid = mesh", 1)
    nested = nested.replace("include(block, tp=grid", "include(stage, s=grid")
    program, flat = parse(nested), parse(text)
    assert list(program.parts) == ["block", "stage"] and to_text(program) == nested
    assert validate(program).skipped == ()
    machine = machine_for(flat)
    assert simulate(program, machine).duration_s == simulate(flat, machine).duration_s
    labels = {op.name for op in program.expanded.ops() if op.kind == "matmul"}
    assert labels == {f"stage {n} > stage > block > matmul" for n in (0, 1)}
    broken = nested.replace("w2=w2, y=y, batch=batch", "w2=w1, y=y, batch=batch")
    with pytest.raises(
        ProgramError, match=r"^stage > block: w2 has shape \(3, 4\) on rank 0, w1\[:4, :3\] has \(4, 3\)"
    ):
        validate(parse(broken))
