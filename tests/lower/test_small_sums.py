"""Small all-reduces become gathers of all terms: fewer steps, the same sums, the same bits on every member."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave.algorithms.block import BlockConfig, BlockProblem
from meshweave.algorithms.block.roles import Side
from meshweave.algorithms.block.sites import MoveSite, move_program
from meshweave.algorithms.table import algorithm
from meshweave.describe.layout.mesh import Mesh
from meshweave.execute.numpy import run_numpy
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program import Buffer, Program
from meshweave.ir.program.ops import Add, AllReduce, Copy, Permute
from meshweave.ir.program.parse import parse
from meshweave.ir.program.text import to_text
from meshweave.lower import lower_small_sums
from meshweave.lower.small_sums import EXCHANGED_BYTES, SMALL_SUM_BYTES


def sum_program(count: int, size: int, op: str = "sum") -> Program:
    """Return the program of a sum of vectors of `count` ranks."""
    mesh = Mesh("tp", (2, count), ("row", "col"), tuple(range(2 * count)))
    site = MoveSite((Side("", size),), ("", "partial"), ("", ""), op=op)  # type: ignore[arg-type]
    return move_program(site, mesh, "float32")


@given(st.integers(2, 9), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_members_have_the_same_bits_and_those_of_the_terms_in_their_order(
    count: int, size: int, seed: int
) -> None:
    program = sum_program(count, size)
    lowered = lower_small_sums(program)
    assert not any(isinstance(op, AllReduce) for op in lowered.ops())
    assert sum(isinstance(op, Permute) for op in lowered.ops()) == math.ceil(math.log2(count))
    assert validate(lowered).skipped == ()
    assert parse(to_text(lowered)) == lowered
    # Of so much more than the other terms, 1, 2, ..., in which it is divided, that their order shows.
    value = 1e8 * np.random.default_rng(seed).standard_normal(size, np.float32)
    memory = run_numpy(lowered, {"X": value}).memory
    rows = [[memory[row * count + at, "x", 0] for at in range(count)] for row in range(2)]
    for row, terms in enumerate(rows):
        expected = terms[0].copy()
        for term in terms[1:]:
            expected += term
        for at in range(count):
            assert memory[row * count + at, "y", 0].tobytes() == expected.tobytes()


@given(
    st.sampled_from(["atp", "collective_block", "megatron", "meshslice_block"]),
    st.sampled_from([(1, 3), (2, 2), (3, 2), (2, 4), (1, 5)]),
    st.integers(1, 2),
)
def test_layers_compute_what_they_did(name: str, shape: tuple[int, int], layers: int) -> None:
    strategy = algorithm(name)
    mesh = (shape[0] * shape[1], 1) if name == "megatron" else shape
    problem = BlockProblem(4, 3, 10, 10, 10, 2, 10, mesh, layers=layers, exact=True)
    lowered = lower_small_sums(strategy.program(problem, BlockConfig(slices=1 if "slice" in name else 0)))
    assert any(op.name and op.name.endswith("_step0") for op in lowered.ops() if isinstance(op, Permute))
    assert validate(lowered).skipped == ()
    inputs = strategy.random_inputs(problem)
    outputs = run_numpy(lowered, inputs, calls=strategy.functions(problem)).outputs
    for tensor, value in strategy.reference(problem, inputs).items():
        np.testing.assert_array_equal(outputs[tensor], value)


def test_ranks_on_cpus_run_them_so_and_cuda_the_backends_own() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: no device runs programs")
    from meshweave.nn.parallel.programs import on_device

    program = sum_program(4, 8)
    assert on_device(program, torch.device("cpu")) == lower_small_sums(program) != program
    assert on_device(program, torch.device("cuda")) == program


def test_what_is_large_or_no_sum_stays() -> None:
    most = SMALL_SUM_BYTES // 4 // 3
    kinds = [type(op) for op in lower_small_sums(sum_program(4, most)).ops()]
    assert kinds == [Copy, Copy, Permute, Permute, Copy, Add, Add, Add]
    two = EXCHANGED_BYTES // 4
    assert [type(op) for op in lower_small_sums(sum_program(2, two)).ops()] == [Copy, Permute, Add]
    for program in (sum_program(4, most + 1), sum_program(2, two + 1), sum_program(4, 1, op="max")):
        assert lower_small_sums(program) == program
    assert lower_small_sums(sum_program(4, 8), most_bytes=95) == sum_program(4, 8)


def test_a_buffer_has_a_name_that_is_not_taken() -> None:
    program = sum_program(3, 2)
    (inbox,) = {buffer.name for buffer in lower_small_sums(program).buffers} - {"x", "y"}
    taken = Buffer(inbox, "scratch", program.buffers[0].mesh, "float32", shape=(1,))
    lowered = lower_small_sums(replace(program, buffers=(*program.buffers, taken)))
    assert validate(lowered).skipped == () and len(lowered.buffers) == 4
