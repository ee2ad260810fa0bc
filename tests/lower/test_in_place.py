"""Remote operands read in place: the same numbers with fewer gets, and still proven free of races."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from meshweave.algorithms.universal import (
    UniversalConfig,
    UniversalProblem,
    universal_configs,
    universal_program,
)
from meshweave.base.errors import ProgramError, UnsupportedError
from meshweave.cost.machine import Machine
from meshweave.describe.layout import Layout, Partial, Placement, Replicate, Shard, Tile
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.cluster import load_cluster
from meshweave.execute.numpy import run_numpy
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program import Program
from meshweave.ir.program.ops import Get
from meshweave.ir.program.parse import parse
from meshweave.lower import lower_one_sided, read_in_place
from meshweave.simulate import simulate
from plain_simulator import reference

MESH = Mesh.of("tp", (2, 2), ("row", "col"))
KINDS: tuple[Placement, ...] = (Shard(0), Shard(1), Replicate(), Partial(), Tile(0, 2, 1))


def gets(program: Program) -> int:
    return sum(isinstance(op, Get) for op in program.ops())


@pytest.mark.parametrize("number", range(12))
def test_the_product_is_the_same(number: int) -> None:
    rng = np.random.default_rng(number)
    inputs = {
        name: rng.integers(-4, 5, shape).astype(float) for name, shape in (("A", (7, 5)), ("B", (5, 6)))
    }
    pairs = list(itertools.product(KINDS, KINDS))
    for _ in range(6):
        a, b, c = (Layout(MESH, pairs[int(rng.integers(len(pairs)))]) for _ in "abc")
        problem = UniversalProblem(7, 6, 5, a, b, c, "float64")
        configs = list(universal_configs(problem))
        program = universal_program(problem, configs[int(rng.integers(len(configs)))])
        direct = read_in_place(program)
        validate(direct)
        assert gets(direct) <= gets(program)
        for seed in (None, 3):
            np.testing.assert_array_equal(
                run_numpy(direct, inputs, seed=seed).outputs["C"], inputs["A"] @ inputs["B"]
            )


def test_aligned_tiles_need_no_get_at_all() -> None:
    tiles = Layout(MESH, (Shard(0), Shard(1)))
    program = universal_program(
        UniversalProblem(8, 8, 8, tiles, tiles, tiles), UniversalConfig("c", num_slices=1)
    )
    direct = read_in_place(program)
    assert gets(program) == 8 and gets(direct) == 0  # each rank lacks a tile of A and one of B
    assert [buffer.name for buffer in direct.buffers] == ["a", "b", "c"]


def test_messages_cannot_read_in_place() -> None:
    tiles = Layout(MESH, (Shard(0), Shard(1)))
    program = universal_program(UniversalProblem(8, 8, 8, tiles, tiles, tiles), UniversalConfig("c"))
    with pytest.raises(ProgramError, match="in place"):
        lower_one_sided(read_in_place(program))


def test_what_reads_in_place_is_not_timed_as_if_it_were_local() -> None:
    tiles = Layout(MESH, (Shard(0), Shard(1)))
    program = read_in_place(
        universal_program(UniversalProblem(8, 8, 8, tiles, tiles, tiles), UniversalConfig("c"))
    )
    machine = Machine.of(load_cluster("local-cpu"), program)
    for run in (simulate, reference.simulate):
        with pytest.raises(UnsupportedError, match="in place, which has no price"):
            run(program, machine)


def test_a_get_whose_target_others_read_stays() -> None:
    """Rank 1 gets from rank 0's scratch what rank 0 has got from rank 1: without the first get it is unwritten."""
    program = parse("""
program("hop")
tp = mesh((2,), ("x",))
A = tensor((4, 4), "float32")
D = tensor((8, 4), "float32")
a = input(A, tp[R])
s = scratch((4, 4), "float32", on=tp)
u = scratch((4, 4), "float32", on=tp)
v = scratch((4, 4), "float32", on=tp)
d = output(D, tp[S(0)])
net = lane()
with tp:
    get(s, at((tp.x + 1) % 2, a), lane=net)
    copy(u, s, lane=net)
    fence(over="tp", lane=net)
    get(v, at((tp.x + 1) % 2, s), lane=net)
    copy(d, v, lane=net)
    add(d, u, lane=net)
""")
    validate(program, labels=False)
    inputs = {"A": np.arange(16, dtype=np.float32).reshape(4, 4)}
    validate(read_in_place(program), labels=False)
    direct = run_numpy(read_in_place(program), inputs).outputs["D"]
    np.testing.assert_array_equal(direct, np.concatenate([2 * inputs["A"]] * 2))


KEPT = """
program("kept")
tp = mesh((2,), ("x",))
A = tensor((4, 4), "float32")
T = tensor((4, 4), "float32")
C = tensor((4, 4), "float32")
D = tensor((4, 4), "float32")
a = input(A, tp[S(0)])
t = temp(T, tp[S(0)])
c = output(C, tp[S(0)])
d = output(D, tp[S(0)])
s = scratch((2, 4), "{dtype}", on=tp)
x = lane()
with tp:
    copy(t, a, lane=x)
    fence(over="tp", lane=x)
    get(d, at(1 - tp.x, t), lane=x)
    fence(over="tp", lane=x)
    copy(s, t, lane=x)
    {between}
    copy(c, s, lane=x)
"""


@pytest.mark.parametrize(
    ("dtype", "between"),
    [("float32", "zero(t, lane=x)"), ("float32", "add(t, s, lane=x)"), ("int32", "zero(d, lane=x)")],
)
def test_a_copy_of_what_changes_meanwhile_or_of_another_dtype_stays(dtype: str, between: str) -> None:
    program = parse(KEPT.format(dtype=dtype, between=between))
    validate(program, labels=False)
    inputs = {"A": np.arange(16, dtype=np.float32).reshape(4, 4) / 4}
    expected = run_numpy(program, inputs).outputs["C"]
    np.testing.assert_array_equal(run_numpy(read_in_place(program), inputs).outputs["C"], expected)
