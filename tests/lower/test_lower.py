"""Lowering changes how a program communicates, never what it computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from meshweave.algorithms.block import BlockConfig, BlockProblem
from meshweave.algorithms.block.roles import Side
from meshweave.algorithms.block.sites import MoveSite, move_program
from meshweave.algorithms.matmul2d import Matmul2dConfig, Matmul2dProblem
from meshweave.algorithms.table import PRODUCTS_2D, algorithm
from meshweave.base.errors import ProgramError
from meshweave.describe.layout.mesh import Mesh
from meshweave.execute.numpy import run_numpy
from meshweave.ir.analysis.dataflow import analyse
from meshweave.ir.analysis.edges import is_one_sided
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program import Program
from meshweave.ir.program.ops import AllGather, Copy, Fence, Permute, ReduceScatter
from meshweave.ir.program.parse import parse
from meshweave.ir.program.text import to_text
from meshweave.lower import linearise, lower_one_sided, lower_rings, write_out_per_rank, write_out_tiles

GOLDEN = Path(__file__).parents[1] / "golden"
ONE_SIDED = ["universal_c", "universal_b", "t3_ring"]


def golden(name: str) -> Program:
    return parse((GOLDEN / f"{name}.txt").read_text())


def inputs_of(program: Program) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    names = {b.tensor for b in program.buffers if b.kind == "input"}
    return {t.name: rng.integers(-5, 5, t.shape).astype(t.dtype) for t in program.tensors if t.name in names}


@pytest.mark.parametrize("batch", [4, 5])
@pytest.mark.parametrize("name", ["megatron_sp", "collective_block", "atp"])
def test_rings_inside_loops_over_chunks(name: str, batch: int) -> None:
    """The last chunk of 5 sequences is smaller, which makes extents of what is sent depend on the loop."""
    strategy = algorithm(name)
    mesh = (3, 1) if name == "megatron_sp" else (2, 2)
    problem = BlockProblem(batch, 3, 5, 3, 3, 2, 5, mesh, exact=True)
    program = strategy.program(problem, BlockConfig(2))
    lowered = lower_rings(program)
    assert not any(isinstance(op, (AllGather, ReduceScatter)) for op in lowered.ops())
    assert validate(lowered).skipped == ()
    inputs = strategy.random_inputs(problem)
    outputs = run_numpy(lowered, inputs, calls=strategy.functions(problem)).outputs
    for tensor, value in strategy.reference(problem, inputs).items():
        np.testing.assert_array_equal(outputs[tensor], value)


@pytest.mark.parametrize("name", ONE_SIDED)
def test_one_sided_becomes_send_and_recv(name: str) -> None:
    program = golden(name)
    lowered = lower_one_sided(program)
    assert not any(is_one_sided(op) or isinstance(op, Fence) for op in lowered.ops())
    assert validate(lowered).skipped == ()
    assert parse(to_text(lowered)) == lowered
    inputs = inputs_of(program)
    for seed in (None, 1, 2):
        before, after = run_numpy(program, inputs, seed=seed), run_numpy(lowered, inputs, seed=seed)
        for tensor, value in before.outputs.items():
            np.testing.assert_array_equal(after.outputs[tensor], value)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.txt")), ids=lambda path: path.stem)
def test_written_out_per_rank_is_the_same_program(path: Path) -> None:
    program = parse(path.read_text())
    written = write_out_per_rank(program)
    assert validate(written).skipped == ()
    for rank in program.ranks:
        assert [b.op for b in written.ops_on_rank(rank)] == [b.op for b in program.ops_on_rank(rank)]


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.txt")), ids=lambda path: path.stem)
def test_linearised_order_is_one_that_all_ranks_share(path: Path) -> None:
    """Each rank issues all of its ops once, after what they wait for, and partners meet in one order."""
    flow = analyse(parse(path.read_text()))
    order = linearise(flow)
    place = {}
    for rank, listed in order.items():
        assert sorted(listed) == list(range(len(flow.matched.ops[rank])))
        place.update({(rank, index): at for at, index in enumerate(listed)})
    for rank, index in flow.nodes():
        assert all(place[rank, other] < place[rank, index] for other in flow.predecessors[rank][index])
    joints = flow.matched.joints
    for one in joints:
        for two in joints:
            ends = [
                place[a] < place[b]
                for a in one.members
                for b in two.members
                if a[0] == b[0] and one is not two
            ]
            assert all(ends) or not any(ends)


CROSSING = """
program("crossing messages")
q = mesh((2,), ("x",))
x = scratch((4,), "float32", on=q)
y = scratch((4,), "float32", on=q)
there = lane()
back = lane()
with q:
    zero(x, lane=there)
    if q.x == 0:
        send(x, peer=1, lane=there)
        recv(y, peer=1, lane=back)
    if q.x == 1:
        send(x, peer=0, lane=back)
        recv(y, peer=0, lane=there)
"""


def test_messages_that_cross_are_issued_in_one_order() -> None:
    """Both ranks send before they receive in program order; issued in one order, one of them receives first."""
    assert linearise(parse(CROSSING)) == {0: (0, 1, 2), 1: (0, 2, 1)}


@pytest.mark.parametrize(
    ("num_directions", "lanes"), [(1, {"row", "col"}), (2, {"row", "col", "row_back", "col_back"})]
)
def test_rings_take_one_step_less_than_members(num_directions: int, lanes: set[str]) -> None:
    problem = Matmul2dProblem(48, 48, 48, (3, 4), "ls")
    program = lower_rings(PRODUCTS_2D["collective"].program(problem, Matmul2dConfig()), num_directions)  # type: ignore[arg-type]
    steps = [op for op in program.ops() if isinstance(op, Permute)]
    assert not any(isinstance(op, (AllGather, ReduceScatter)) for op in program.ops())
    assert len(steps) == num_directions * (2 + 3)
    assert {op.lane for op in steps} == lanes
    assert [op.step.index for op in steps if op.step and op.lane == "row"] == [0, 1]


@pytest.mark.parametrize("slices", [(1,) * 4, (1, 2, 3, 2)])
def test_a_slice_goes_straight_to_its_place_in_what_is_gathered(slices: tuple[int, ...]) -> None:
    program = PRODUCTS_2D["meshslice"].program(Matmul2dProblem(96, 96, 96, (2, 2)), Matmul2dConfig(slices))
    assert {"a_s", "b_s"} <= set(program.buffer_of)
    lowered = lower_rings(program)
    assert not {"a_s", "b_s"} & set(lowered.buffer_of)
    assert {op.out.buffer for op in lowered.ops() if isinstance(op, Copy)} == {"a_g", "b_g"}
    kept = lower_rings(
        program, should_lower=lambda op: op.lane == "row"
    )  # the other is still gathered from it
    assert len({"a_s", "b_s"} & set(kept.buffer_of)) == 1


def test_only_wanted_collectives_are_lowered() -> None:
    program = PRODUCTS_2D["collective"].program(Matmul2dProblem(8, 8, 8, (2, 2)), Matmul2dConfig())
    lowered = lower_rings(program, should_lower=lambda op: op.lane == "row")
    assert [op.lane for op in lowered.ops() if isinstance(op, AllGather)] == ["col"]


@pytest.mark.parametrize("sizes", ["", "sizes=4, "])
@pytest.mark.parametrize("dim", [-1, 2, 1 << 32])
@pytest.mark.parametrize("num_directions", [1, 2])
def test_a_ring_along_no_dim_is_refused(sizes: str, dim: int, num_directions: Literal[1, 2]) -> None:
    program = parse(f"""program("p")
tp = mesh((2, 2), ("row", "col"))
A = tensor((8, 8), "float32")
a = input(A, tp[S(0), S(1)])
whole = scratch((8, 4), "float32", on=tp)
compute = lane()
with tp:
    all_gather(whole, a, over="tp.row", {sizes}dim={dim}, lane=compute, name="gather")
""")
    with pytest.raises(ProgramError, match=rf"has 2 dims, and no dim {dim} \(op gather, buffer a\)"):
        lower_rings(program, num_directions)


def test_a_ring_without_sizes_over_uneven_shards_is_refused() -> None:
    text = """
program("uneven")
tp = mesh((1, 3), ("row", "col"))
A = tensor((4, 7), "float32")
a = input(A, tp[S(0), S(1)])
g = scratch((4, 7), "float32", on=tp)
col = lane()
with tp:
    all_gather(g, a, over="tp.col", dim=1, lane=col)
"""
    with pytest.raises(ProgramError, match="uneven"):
        lower_rings(parse(text))


def test_a_reduce_scatter_that_is_no_sum_stays() -> None:
    site = MoveSite((Side("batch", 4), Side("hidden", 4)), ("partial", ""), ("hidden", ""), "max")
    program = move_program(site, Mesh.of("tp", (2, 1), ("row", "col")), "float32")
    (op,) = [op for op in program.ops() if isinstance(op, ReduceScatter)]
    assert op.op == "max" and [*lower_rings(program).ops()] == [*program.ops()]


def test_a_ring_along_blocks_is_refused() -> None:
    text = """
program("blocks")
q = mesh((2,), ("x",))
a = scratch((8, 3), "int32", on=q)
b = scratch((2, 3), "int32", on=q)
net = lane()
with q:
    zero(a, lane=net)
    reduce_scatter(b, a[blocked(0, 1, 2), :], over="q.x", dim=0, lane=net)
"""
    with pytest.raises(ProgramError, match=r"a ring moves boxes, not a\[blocked.*buffer a\)"):
        lower_rings(parse(text))


@pytest.mark.parametrize(
    ("part", "dim", "shape"),
    [("a[0:2, :]", 1, (2, 8)), ("a[:, 0:2]", 0, (8, 2))],
    ids=["shorter", "other dim"],
)
@pytest.mark.parametrize("num_directions", [1, 2])
def test_rings_of_one_buffer_have_inboxes_of_their_shapes(
    part: str, dim: int, shape: tuple[int, ...], num_directions: Literal[1, 2]
) -> None:
    program = parse(f"""
program("two scatters")
tp = mesh((4,), ("x",))
A = tensor((8, 8), "float32")
B = tensor((8, 8), "float32")
C = tensor({shape}, "float32")
a = input(A, tp[R])
a_ring = scratch((1,), "float32", on=tp)
b = output(B, tp[S(1)])
c = output(C, tp[S({dim})])
net = lane()
with tp:
    reduce_scatter(b, a, dim=1, over="tp.x", lane=net)
    reduce_scatter(c, {part}, dim={dim}, over="tp.x", lane=net)
""")
    inputs = {"A": np.arange(64, dtype=np.float32).reshape(8, 8)}
    lowered = lower_rings(program, num_directions)
    validate(lowered, labels=False)
    outputs = run_numpy(lowered, inputs).outputs
    np.testing.assert_array_equal(outputs["B"], 4 * inputs["A"])
    np.testing.assert_array_equal(outputs["C"], 4 * inputs["A"][: shape[0], : shape[1]])


def test_a_message_adds_and_takes_no_maximum() -> None:
    program = parse("""
program("largest")
tp = mesh((2,), ("x",))
A = tensor((4, 4), "float32")
a = input(A, tp[R])
b = output(A, tp[R])
net = lane()
with tp:
    copy(b, a, lane=net)
    fence(over="tp", lane=net)
    accumulate(at((tp.x + 1) % 2, b), a, op="max", lane=net)
""")
    with pytest.raises(ProgramError, match="accumulates by 'max'"):
        lower_one_sided(program)


@pytest.mark.parametrize(
    "lower", [lower_one_sided, lambda program: lower_one_sided(write_out_tiles(program))]
)
def test_a_result_for_another_mesh_is_staged_where_it_is_computed(
    lower: Callable[[Program], Program],
) -> None:
    """Ranks 0 and 1 compute what lies on ranks 2 and 3: the mesh of the result has none of the former."""
    program = parse("""
program("away")
left = mesh((2,), ("x",))
right = mesh((2,), ("x",), ranks=(2, 3))
A = tensor((4, 4), "float32")
B = tensor((4, 4), "float32")
C = tensor((4, 4), "float32")
computes(C, product(A, B))
a = input(A, left[S(0)])
b = input(B, left[R])
c = output(C, right[S(0)])
compute = lane()
with left:
    matmul(at(left.x + 2, c), a, b, lane=compute, release=release())
""")
    inputs = inputs_of(program)
    assert not validate(lower(program)).skipped
    outputs = run_numpy(lower(program), inputs).outputs
    np.testing.assert_array_equal(outputs["C"], inputs["A"] @ inputs["B"])


@pytest.mark.parametrize("update", [False, True])
def test_what_is_copied_into_another_dtype_is_sent_in_that(update: bool) -> None:
    program = parse(f"""
program("cast")
tp = mesh((2,), ("x",))
A = tensor((4, 2), "float32")
C = tensor((4, 2), "float16")
a = input(A, tp[S(0)])
c = output(C, tp[S(0)])
net = lane()
with tp:
    zero(c, lane=net)
    fence(over="tp", lane=net)
    copy(at(1 - tp.x, c), a, release=release(update={update}), lane=net)
""")
    lowered = lower_one_sided(program)
    validate(lowered, labels=False)
    inputs = {"A": np.arange(8, dtype=np.float32).reshape(4, 2)}
    expected = np.concatenate([inputs["A"][2:], inputs["A"][:2]])
    np.testing.assert_array_equal(run_numpy(lowered, inputs).outputs["C"], expected)
