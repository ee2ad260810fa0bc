"""What passes declare has names of its own, whatever a program has declared."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from meshweave.execute.numpy import run_numpy
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program import Program
from meshweave.ir.program.parse import parse
from meshweave.lower import (
    lower_chains,
    lower_one_sided,
    lower_rings,
    lower_small_sums,
    lower_to_shared_memory,
    write_out_tiles,
)

HEAD = """
program("taken")
tp = mesh((3,), ("x",))
A = tensor((6, 4), "int64")
C = tensor((6, 4), "int64")
a = input(A, tp[S(0)])
{taken}
"""
CASES: dict[str, tuple[Callable[[Program], Program], str, str]] = {
    "chains": (
        lower_chains,
        'a_sum = tensor((3, 3), "int64")\nnet_odd = scratch((1, 1), "int64", on=tp)',
        'reduce(c, a, over="tp.x", root=1, lane=net)',
    ),
    "rings": (
        lambda program: lower_rings(program, 2),
        'p_ring = tensor((3, 3), "int64")\nnet_back = scratch((1, 1), "int64", on=tp)',
        'reduce_scatter(c, p, over="tp.x", dim=0, lane=net)',
    ),
    "small sums": (
        lower_small_sums,
        'a_terms = tensor((3, 3), "int64")',
        'all_reduce(c, a, over="tp.x", lane=net)',
    ),
    "messages": (
        lower_one_sided,
        'net_0 = tensor((3, 3), "int64")\nnet_1 = scratch((1, 1), "int64", on=tp)',
        "put(at((tp.x + 1) % 3, c), a, lane=net)",
    ),
    "products sent": (
        lower_one_sided,
        'c_out = scratch((2, 4), "int64", on=tp)',
        "zero(c_out, lane=net)\n    matmul(at((tp.x + 1) % 3, c), a, e, release=release(), lane=net)\n"
        "    add(c, c_out, lane=net)",
    ),
    "tiles": (
        write_out_tiles,
        'c_tiles = scratch((2, 4), "int64", on=tp)\nstores = scratch((1, 1), "int64", on=tp)',
        "zero(c_tiles, lane=net)\n    zero(c, lane=net)\n"
        "    matmul(c, a, e, release=release(tile=(1, 2), update=True), lane=net)\n    add(c, c_tiles, lane=net)",
    ),
    "shared memory": (
        lower_to_shared_memory,
        't_given = scratch((2, 4), "int64", on=tp)\na_shared = tensor((3, 3), "int64")\n'
        't = scratch((2, 4), "int64", on=tp)\ns = scratch((2, 4), "int64", on=tp)',
        'zero(c, lane=net)\n    zero(t_given, lane=net)\n    fence(over="tp", lane=net)\n'
        "    get(s, at((tp.x + 1) % 3, a), lane=net)\n    matmul(t, s, e, lane=net)\n"
        '    accumulate(at((tp.x + 1) % 3, c), t, lane=net)\n    fence(over="tp", lane=net)\n'
        "    add(c, t_given, lane=net)",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_names_that_a_program_has_declared_stay_its_own(name: str) -> None:
    lowered_by, taken, op = CASES[name]
    text = HEAD.format(taken=taken)
    text += 'c = output(C, tp[S(0)])\nE = tensor((4, 4), "int64")\ne = input(E, tp[R])\n'
    text += (
        'P = tensor((6, 4), "int64")\np = input(P, tp[R])\nnet = lane()\nwith tp:\n    zero(c, lane=net)\n'
    )
    program = parse(f"{text}    {op}\n")
    draw = np.random.default_rng(1)
    inputs = {name: draw.integers(-4, 5, program.tensor_of[name].shape) for name in ("A", "E", "P")}
    expected = run_numpy(program, inputs).outputs["C"]
    lowered = lowered_by(program)
    validate(lowered, labels=False)
    for seed in (None, 1, 2):
        np.testing.assert_array_equal(run_numpy(lowered, inputs, seed=seed).outputs["C"], expected)
