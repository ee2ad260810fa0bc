"""Programs for ranks that share memory: the same numbers, proven free of races, without updates from afar."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from meshweave.algorithms.universal import UniversalProblem, universal_configs, universal_program
from meshweave.base.errors import ProgramError
from meshweave.describe.layout import Layout, Partial, Placement, Replicate, Shard, Tile
from meshweave.describe.layout.mesh import Mesh
from meshweave.execute.numpy import run_numpy
from meshweave.ir.analysis.edges import exposed_buffers
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program import Program
from meshweave.ir.program.ops import Accumulate, Fence, Get, Put
from meshweave.ir.program.parse import parse
from meshweave.lower import lower_to_shared_memory
from sampling import mostly_slow

MESH = Mesh.of("tp", (2, 2), ("row", "col"))
KINDS: tuple[Placement, ...] = (Shard(0), Shard(1), Replicate(), Partial(), Tile(0, 2, 1))
PAIRS = list(itertools.product(KINDS, KINDS))


def check(program: Program, inputs: dict[str, np.ndarray]) -> Program:
    lowered = lower_to_shared_memory(program)
    validate(lowered)
    assert not any(isinstance(op, (Accumulate, Put, Get)) and op.out.rank is not None for op in lowered.ops())
    kinds = {lowered.buffer_of[name].kind for name in exposed_buffers(lowered)}
    assert kinds <= {"scratch", "temp"}, "the caller's tensors are exposed"
    for seed in (None, 3):
        result = run_numpy(lowered, inputs, seed=seed).outputs["C"]
        np.testing.assert_array_equal(result, inputs["A"] @ inputs["B"])
    return lowered


@pytest.mark.parametrize("number", mostly_slow(range(24), 8))
def test_the_product_is_the_same(number: int) -> None:
    rng = np.random.default_rng(number)
    inputs = {
        name: rng.integers(-4, 5, shape).astype(float) for name, shape in (("A", (7, 5)), ("B", (5, 6)))
    }
    for _ in range(6):
        a, b, c = (Layout(MESH, PAIRS[int(rng.integers(len(PAIRS)))]) for _ in "abc")
        problem = UniversalProblem(7, 6, 5, a, b, c, "float64")
        listed = list(universal_configs(problem))
        check(universal_program(problem, listed[int(rng.integers(len(listed)))]), inputs)


def test_what_moves_nothing_has_no_fence() -> None:
    rows, copies = Layout(MESH, (Shard(0), Replicate())), Layout(MESH, (Replicate(), Shard(1)))
    problem = UniversalProblem(8, 8, 8, rows, copies, Layout(MESH, (Shard(0), Shard(1))), "float64")
    inputs = {"A": np.arange(64.0).reshape(8, 8), "B": np.ones((8, 8))}
    program = next(config for config in universal_configs(problem) if config.stationary == "c")
    lowered = check(universal_program(problem, program), inputs)
    assert not exposed_buffers(lowered) and not any(isinstance(op, Fence) for op in lowered.ops())


def test_terms_are_added_to_what_their_owner_has_computed() -> None:
    """The first term of a box replaces zeros only: here each owner has a product of its own there."""
    program = parse("""
program("kept")
tp = mesh((2,), ("x",))
A = tensor((4, 4), "float32")
C = tensor((8, 4), "float32")
a = input(A, tp[R])
t = scratch((4, 4), "float32", on=tp)
c = output(C, tp[S(0)])
compute = lane()
with tp:
    matmul(c, a, a, lane=compute)
    fence(over="tp", lane=compute)
    matmul(t, a, a, lane=compute)
    accumulate(at((tp.x + 1) % 2, c), t, lane=compute)
""")
    inputs = {"A": np.arange(16, dtype=np.float32).reshape(4, 4)}
    wanted = 2 * inputs["A"] @ inputs["A"]
    outputs = run_numpy(lower_to_shared_memory(program), inputs).outputs
    np.testing.assert_array_equal(outputs["C"], np.concatenate([wanted, wanted]))


SUMS = """
program("sums")
tp = mesh((2,), ("x",))
A = tensor((4, 4), "int64")
B = tensor((4, 4), "int64")
C = tensor((4, 2), "int64")
D = tensor((4, 2), "int64")
a = input(A, tp[S(0)])
b = input(B, tp[R])
c = output(C, tp[S(0)])
d = output(D, tp[S(0)])
t = scratch((2, 2), "int64", on=tp, slots=2)
u = scratch((2, 2), "int64", on=tp)
x = lane()
with tp:
    zero(c, lane=x)
    zero(d, lane=x)
    fence(over="tp", lane=x)
"""


def lines(*ops: str) -> Program:
    return parse(SUMS + "".join(f"    {op}, lane=x)\n" for op in ops))


LEFT, RIGHT = "matmul(t(0), a, b[:, :2]", "matmul(t(1), a, b[:, 2:]"
FENCE = 'fence(over="tp"'


@pytest.mark.parametrize(
    "ops",
    [
        # the same box of two outputs, the first for the second product
        (LEFT, RIGHT, "accumulate(at(1 - tp.x, c), t(1)", "accumulate(at(1 - tp.x, d), t(0)"),
        # a put replaces what its owner has computed
        ("matmul(c, a, b[:, 2:]", FENCE, LEFT, "put(at(1 - tp.x, c), t(0)"),
        # zeros are read before terms replace them
        ("copy(d, c", FENCE, LEFT, "accumulate(at(1 - tp.x, c), t(0)"),
        # a product for its own rank and for another
        (LEFT, "accumulate(at(tp.x, c), t(0)", "accumulate(at(1 - tp.x, d), t(0)"),
        (LEFT, "accumulate(at(tp.x, c), t(0)", "copy(u, t(0)", "add(d, u"),
        (
            *(LEFT, RIGHT, "accumulate(at(tp.x, c), t(1)", "accumulate(at(tp.x, c), t(0)"),
            "accumulate(at(1 - tp.x, d), t(0)",
        ),
    ],
)
def test_what_owners_add_and_store(ops: tuple[str, ...]) -> None:
    program = lines(*ops)
    validate(program, labels=False)
    draw = np.random.default_rng(2)
    inputs = {name: draw.integers(-4, 5, (4, 4)) for name in "AB"}
    expected = run_numpy(program, inputs).outputs
    lowered = lower_to_shared_memory(program)
    validate(lowered, labels=False)
    for seed in (None, 1, 2):
        outputs = run_numpy(lowered, inputs, seed=seed).outputs
        for name in "CD":
            np.testing.assert_array_equal(outputs[name], expected[name])


def test_memory_that_others_have_read_is_written_after_a_fence() -> None:
    read = "matmul(c, at(1 - tp.x, u), b[:2, :2]"
    program = lines("matmul(u, a, b[:, :2]", FENCE, read, FENCE, "matmul(u, a, b[:, 2:]", "copy(d, u")
    validate(program, labels=False)
    lowered = lower_to_shared_memory(program)
    validate(lowered, labels=False)
    assert sum(isinstance(op, Fence) for op in lowered.ops()) == 2


@pytest.mark.parametrize(
    ("ops", "reason"),
    [
        (("matmul(at(1 - tp.x, c), a, b[:, :2], release=release()",), "fences alone"),
        (("matmul(at(1 - tp.x, c), a, b[:, :2]",), "no put"),
        (
            (LEFT, "matmul(t(0), a, b[:, 2:], accumulate=1", "accumulate(at(1 - tp.x, c), t(0)"),
            "a matmul uses it",
        ),
        ((LEFT, "add(c, t(0)", "accumulate(at(1 - tp.x, d), t(0)"), "an? add uses it"),
        ((LEFT, FENCE, "copy(u, at(1 - tp.x, t(0))", FENCE, "put(at(1 - tp.x, c), t(0)"), "a copy uses it"),
        (
            (
                "matmul(t(0)[:1, :], a[:1, :], b[:, :2]",
                "matmul(t(0)[1:, :], a[1:, :], b[:, :2]",
                "accumulate(at(1 - tp.x, c), t(0)",
            ),
            "no product of this rank",
        ),
    ],
)
def test_what_has_no_form_in_shared_memory_is_refused(ops: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ProgramError, match=reason):
        lower_to_shared_memory(lines(*ops))
