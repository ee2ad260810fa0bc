"""MeshSlice with tiles of C: each tile is computed once, and panels of any widths give the product."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave.algorithms.matmul2d import Matmul2dConfig, Matmul2dProblem
from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.base.errors import LayoutError
from meshweave.cost.machine import Machine
from meshweave.describe.machine.cluster import load_cluster
from meshweave.estimate import estimate_skeleton
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program.ops import AllGather, Matmul
from meshweave.ir.skeleton import skeleton_of
from sampling import examples

TILED = PRODUCTS_2D["meshslice_tiled"]


@examples(60)
@given(
    st.tuples(*[st.integers(1, 40)] * 3),
    st.sampled_from([(1, 1), (2, 2), (1, 3), (3, 2), (4, 1)]),
    st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple),
)
def test_panels_of_any_widths_give_each_tile_once(
    sizes: tuple[int, int, int], mesh: tuple[int, int], widths: tuple[int, ...]
) -> None:
    problem, config = Matmul2dProblem(*sizes, mesh), Matmul2dConfig(widths)
    least = min(-(-problem.m // mesh[0]), -(-problem.n // mesh[1]))
    if sum(widths) > least:
        with pytest.raises(LayoutError, match="more panels"):
            TILED.program(problem, config)
        return
    program = TILED.program(problem, config)
    assert not validate(program).skipped
    ops = [bound.op for bound in program.expanded.ops_on_rank(0)]
    products = [op for op in ops if isinstance(op, Matmul)]
    assert len(products) == len(widths) ** 2 and not any(op.accumulate for op in products)
    assert sum(isinstance(op, AllGather) for op in ops) == len(widths) * sum(size > 1 for size in mesh)


def test_each_product_follows_the_gathers_of_its_panels_and_no_later_ones() -> None:
    """Panel s of A makes the tiles (s, 0) to (s, s - 1) possible, panel s of B then (0, s) to (s, s)."""
    program = TILED.program(Matmul2dProblem(64, 64, 64, (2, 2)), Matmul2dConfig((1, 1, 1)))
    listed = [bound.op.name or bound.op.kind for bound in program.expanded.ops_on_rank(0)]
    at = [number for number, name in enumerate(listed) if name == "matmul"]
    counts = [tuple(listed[:number].count(f"gather_{operand}") for operand in "ab") for number in at]
    assert counts == [(1, 1), (2, 1), (2, 2), (2, 2), (3, 2), (3, 2), (3, 3), (3, 3), (3, 3)]


@pytest.mark.parametrize(
    ("widths", "dataflow"), list(product([(1,), (1, 1, 1, 1), (1, 3)], ["os", "ls", "rs"]))
)
def test_the_skeleton_is_that_of_the_program(widths: tuple[int, ...], dataflow: str) -> None:
    problem = Matmul2dProblem(4096, 2048, 1024, (4, 4), dataflow, "bfloat16")  # type: ignore[arg-type]
    config = Matmul2dConfig(widths)
    program = TILED.program(problem, config)
    machine = Machine.of(load_cluster("tpu-v5e:16"), program)
    skeletons = TILED.skeleton(problem, config), skeleton_of(program)
    own, read = (estimate_skeleton(skeleton, machine) for skeleton in skeletons)
    assert own.total_s == read.total_s
