"""What is MeshSlice's own: its slices, and the closed form of the paper."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave.algorithms.matmul2d import Matmul2dConfig, Matmul2dProblem
from meshweave.algorithms.matmul2d.common.passes import PASSES, TABLE, pass_problem, pass_rule
from meshweave.algorithms.matmul2d.common.slices import slices_of
from meshweave.algorithms.matmul2d.meshslice import Slices
from meshweave.algorithms.matmul2d.replicated import MESHSLICE_DP
from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.base.errors import LayoutError
from meshweave.cost.machine import Machine
from meshweave.cost.price import price
from meshweave.describe.layout import chunk_bounds
from meshweave.describe.machine.cluster import load_cluster
from meshweave.estimate import skeleton_ps
from meshweave.ir.program.views import Blocked, selector_indices
from meshweave.ir.skeleton import Phase, Skeleton, Task
from meshweave.ir.work import Compute, Transfer
from sampling import examples


def test_even_slices_are_the_papers() -> None:
    """Algorithm 2 of the paper: reshape (R, C / (S B), S, B) and take entry s of the third dim."""
    size, parts, count, block = 96, 2, 4, 3
    slices = Slices(size, (1,) * count, block)
    local = np.arange(size // parts).reshape(-1, count, block)
    for number in range(count):
        start, stop = slices.bounds(number)
        _, selector = slices.part(parts, 1, start, stop - start)
        assert isinstance(selector, Blocked)
        resolved = Blocked(selector.first, selector.block, selector.stride, 0, size // parts)
        np.testing.assert_array_equal(selector_indices(resolved), local[:, number].reshape(-1))


@examples(100)
@given(
    st.integers(1, 80),
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.integers(1, 9),
    st.integers(1, 5),
)
def test_slices_cover_every_shard_once(size: int, widths: list[int], block: int, parts: int) -> None:
    """The slices of a shard partition it, and shards agree on which global elements form a slice."""
    slices = Slices(size, tuple(widths), block)
    of_slice: list[set[int]] = [set() for _ in widths]
    for coordinate in range(parts):
        begin, end = chunk_bounds(size, parts, coordinate)
        seen: list[int] = []
        for number in range(len(widths)):
            start, stop = slices.bounds(number)
            count, selector = slices.part(parts, coordinate, start, stop - start)
            assert isinstance(selector, Blocked)
            resolved = Blocked(selector.first, selector.block, selector.stride, 0, end - begin)
            indices = selector_indices(resolved).tolist()
            assert len(indices) == count
            seen += indices
            of_slice[number] |= {begin + i for i in indices}
        assert sorted(seen) == list(range(end - begin))
    for number, elements in enumerate(of_slice):
        assert len(elements) == slices.total(number)
        start, stop = slices.bounds(number)
        assert all(start <= element % slices.period < stop for element in elements)


def test_estimate_is_the_papers_closed_form() -> None:
    """prologue + (S - 1) x steady + epilogue (section 3.2.2), slicing copies aside."""
    problem = Matmul2dProblem(8192, 12288, 12288, (4, 4), "os", "bfloat16")
    program = PRODUCTS_2D["meshslice"].program(problem, Matmul2dConfig((1,) * 8))
    machine = Machine.of(load_cluster("tpu-v4-pod:16"), program)
    skeleton = PRODUCTS_2D["meshslice"].skeleton(problem, Matmul2dConfig((1,) * 8))

    def cost(work: Compute | Transfer) -> int:
        return 0 if isinstance(work, Compute) and not work.flops else price(work, machine).total_ps

    tasks = {task.name: cost(task.work) for task in skeleton.phases[0].tasks}
    gather = max(tasks["gather_a"], tasks["gather_b"])
    steady = max(gather, tasks["matmul"])
    assert skeleton_ps(skeleton, cost) == gather + 7 * steady + tasks["matmul"]


@examples(200)
@given(st.data())
def test_jumping_over_steady_turns_changes_nothing(data: st.DataObject) -> None:
    """A phase of n turns costs what n phases of one turn cost, which are followed one by one."""
    names = ["p", "q", "r"]
    lanes = data.draw(st.lists(st.sampled_from("xyz"), min_size=3, max_size=3))
    costs = {name: data.draw(st.integers(1, 50)) for name in names}
    tasks = []
    for i, name in enumerate(names):
        here = st.tuples(st.sampled_from(names[:i]), st.just(0)) if i else st.nothing()
        back = st.tuples(st.sampled_from(names), st.integers(1, 3))
        after = tuple(data.draw(st.lists(here | back, max_size=2)))
        tasks.append(Task(name, lanes[i], Compute("matmul", flops=costs[name]), after))
    turns = data.draw(st.integers(1, 60))

    def flops(work: Compute | Transfer) -> int:
        assert isinstance(work, Compute)
        return work.flops

    jumped = Skeleton((Phase(turns, tuple(tasks)),))
    followed = Skeleton(tuple(Phase(1, tuple(tasks)) for _ in range(turns)))
    assert skeleton_ps(jumped, flops) == skeleton_ps(followed, flops)


def test_backward_products_follow_table_1() -> None:
    """Operand shapes of all passes are those in which the forward pass stores them: nothing is transposed."""
    tokens, ins, outs = 24, 20, 28
    stored = {
        "y": {"x": (tokens, ins), "w": (ins, outs), "dy": (tokens, outs)},
        "x": {"x": (tokens, ins), "w": (outs, ins), "dy": (tokens, outs)},
        "w": {"x": (ins, tokens), "w": (ins, outs), "dy": (tokens, outs)},
    }
    for stationary, rules in TABLE.items():
        for name in PASSES:
            problem = pass_problem(stationary, name, tokens, ins, outs, (2, 2), "float32")
            for operand, role in zip("ab", rules[name].operands, strict=True):
                assert problem.stored_shape(operand) == stored[stationary][role]
            result = {"forward": "dy", "backward_data": "x", "backward_weight": "w"}[name]
            assert problem.stored_shape("c") == stored[stationary][result]


def test_slices_beyond_the_end_of_the_dim_are_left_out() -> None:
    """Three elements in slices of 2, 1 and 1: the last would be empty on every rank, and cost launches."""
    problem = Matmul2dProblem(3, 8, 8, (2, 4), "rs")
    entry = PRODUCTS_2D["meshslice"]
    wide, exact = (entry.program(problem, Matmul2dConfig(widths)) for widths in ((2, 1, 1), (2, 1)))
    assert wide == exact
    assert entry.skeleton(problem, Matmul2dConfig((2, 1, 1))) == entry.skeleton(
        problem, Matmul2dConfig((2, 1))
    )


def test_transposed_versions_store_every_matrix_the_other_way_round() -> None:
    """Same operands, shapes turned; and each multiplies to the turned result."""
    sizes = (24, 20, 28)
    for stationary in TABLE:
        for name in PASSES:
            plain = pass_problem(stationary, name, *sizes, (2, 3), "int64")
            turned = pass_problem(stationary, name, *sizes, (2, 3), "int64", transposed=True)
            rule, other = pass_rule(stationary, name), pass_rule(stationary, name, transposed=True)
            assert other.operands == rule.operands[::-1]
            for operand, same in (("a", "b"), ("b", "a"), ("c", "c")):
                assert turned.stored_shape(operand) == plain.stored_shape(same)[::-1]
            assert turned.flops == plain.flops


def test_a_mesh_without_depth_has_no_data_parallel_product() -> None:
    problem = Matmul2dProblem(8, 8, 8, (2, 2), "rs")
    for ask in (MESHSLICE_DP.program, MESHSLICE_DP.skeleton):
        with pytest.raises(LayoutError, match="needs a third axis"):
            ask(problem, Matmul2dConfig())


def test_blocks_stay_whole_however_deep_the_mesh_is() -> None:
    """Depth holds copies: the sliced dim is cut over rows and columns alone."""
    problem = Matmul2dProblem(64, 64, 64, (2, 2, 8))
    assert slices_of(problem, Matmul2dConfig((1, 1), 8)).block == 8


@pytest.mark.parametrize("given", [{"packets": 0}, {"overlap": "rows"}], ids=str)
def test_settings_that_no_product_has_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(LayoutError, match=r"packets is 0|no overlap along mesh axis 'rows'"):
        Matmul2dConfig(**given)
