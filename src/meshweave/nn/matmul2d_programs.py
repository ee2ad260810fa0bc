"""The programs that `matmul2d` runs, in torch and in jax: forward and backward, slices as users give them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from meshweave.algorithms.matmul2d import Matmul2dConfig, Matmul2dProblem
from meshweave.algorithms.matmul2d.common.passes import STATIONARY_OF, TABLE, PassName
from meshweave.algorithms.matmul2d.common.problem import two_d_placements
from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.base.errors import BindError, LayoutError
from meshweave.ir.program import Program
from meshweave.lower import lower_rings

Slices = int | Sequence[int]

MOST_SLICES = 1 << 16
"""The most slices that a count asks for: more is a slip of the keyboard, and takes its memory."""
_INTEGERS = (int, np.integer)


def slice_widths(slices: Slices) -> tuple[int, ...]:
    """Return the relative widths of slices: 3 -> (1, 1, 1); a sequence of positive integers becomes a tuple.

    Raises BindError for anything else.
    """
    if isinstance(slices, _INTEGERS) and int(slices) > MOST_SLICES:
        raise BindError(f"{slices} slices are more than the {MOST_SLICES} that make sense")
    if isinstance(slices, _INTEGERS) and int(slices) > 0:
        return (1,) * int(slices)
    widths = tuple(slices) if isinstance(slices, Iterable) else ()
    if not widths or not all(isinstance(width, _INTEGERS) and int(width) > 0 for width in widths):
        raise BindError(f"slices {slices!r} is neither a positive count nor a sequence of positive widths")
    return tuple(map(int, widths))


def backward_problem(forward: Matmul2dProblem, name: PassName) -> Matmul2dProblem:
    """Return the product for the gradient of A ("backward_data") or of B ("backward_weight") of `forward`.

    Its m, n, k and dataflow are those of MeshSlice's Table 1 (`passes.TABLE`) for the matrix that `forward`
    keeps in place.
    """
    rule = TABLE[STATIONARY_OF[forward.dataflow]][name]
    size = {"t": forward.m, "o": forward.n, "i": forward.k}
    m, n, k = (size[letter] for letter in rule.sizes)
    return replace(forward, m=m, n=n, k=k, dataflow=rule.dataflow)


def product_program(problem: Matmul2dProblem, name: str, config: Matmul2dConfig, ring_ways: int) -> Program:
    """Return the program that `matmul2d` runs for the algorithm `name`.

    It has at most as many slices as the sliced dim has elements; those of `config` after them are dropped. With
    `ring_ways` 1 or 2, each collective is written out as a ring in that many directions; with 0 collectives stay
    collectives.

    Raises LayoutError where the algorithm shards otherwise than [Shard(0), Shard(1)], UnsupportedError where there
    is none of that name.
    """
    if config.slice_count > problem.sliced_size:
        config = replace(config, slices=config.slices[: problem.sliced_size])
    entry = PRODUCTS_2D.named(name)
    if entry.operand_placements(problem) != two_d_placements(problem):
        known = [
            n for n, e in PRODUCTS_2D.items() if e.operand_placements(problem) == two_d_placements(problem)
        ]
        raise LayoutError(
            f"{name} shards otherwise than [Shard(0), Shard(1)]; take one of {', '.join(known)}"
        )
    program = entry.program(problem, config)
    if ring_ways == 0:
        return program
    return lower_rings(program, 1 if ring_ways == 1 else 2)
