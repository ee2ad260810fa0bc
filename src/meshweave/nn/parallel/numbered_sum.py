"""Sums of numbers over ranks, and the number beside data by which ranks notice that their calls differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshweave.algorithms.block.roles import AxisDims, Side
from meshweave.algorithms.block.sites import MoveSite
from meshweave.base.errors import BindError
from meshweave.execute.torch.bind import BoundProgram
from meshweave.nn.parallel.moves import Mover, PlacedMove
from meshweave.nn.parallel.programs import sized_move
from meshweave.nn.parallel.strategy import LayerStrategy

_EXACT_BYTES = 4
"""The least item size whose numbers count to 65,521 and add up exactly."""
_EXACT_TERMS = 256
"""How many equal powers of two add up exactly, in any order, in a type of 2 bytes."""


class NumberedSum:
    """A sum over ranks of `count` numbers; in the backward pass each rank's term gets the gradient of the sum.

    Beside the numbers ranks sum the number of their call, by which they see that they are in the same call.

    Args:
        strategy: the strategy on its ranks.
        count: how many numbers each rank has.
        terms: "partial" for each mesh axis along which ranks have terms, "" for others.
    """

    def __init__(self, strategy: LayerStrategy, count: int, terms: AxisDims) -> None:
        self._strategy, self._terms = strategy, terms
        self._summed = terms_of(strategy, [axis for axis, dim in enumerate(terms) if dim == "partial"])
        self._site = MoveSite((Side("", count + 1),), terms, strategy.roles.replicated)
        site = PlacedMove(strategy, (Side("", count),), terms, strategy.roles.replicated, has_tokens=False)
        self._traced = Mover(site)

    def __call__(self, values: Tensor) -> Tensor:
        """Return the sums over ranks of `values` (count,), differentiably. Collective. Raises as `run` does."""
        if torch.compiler.is_compiling() or not self._traced.is_needed:
            return self._traced(values, 1, 1)
        total: Tensor = _SameGradient.apply(self, values)
        return total

    def run(self, values: Tensor) -> Tensor:
        """Return the sums over ranks of `values`, (count,), without a gradient. Collective.

        Raises BindError, on CPUs, where ranks are in different calls.
        """
        bound = sized_move(self._site, self._strategy, values.dtype, True).bound(values.device)
        own, expected = summed_number(bound, values.dtype, *self._summed)
        bound.inputs["x"][:-1].copy_(values)
        bound.inputs["x"][-1:].fill_(own)
        bound.run(bound.inputs)
        *_, arrived = total = bound.outputs["y"].clone()
        check_number(arrived, expected)
        return total[:-1]


class _SameGradient(torch.autograd.Function):  # type: ignore[misc]
    """A `NumberedSum` in eager code."""

    @staticmethod
    def forward(ctx: Any, total: NumberedSum, values: Tensor) -> Tensor:
        """Return the sums."""
        return total.run(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of each term."""
        return None, grads[0]


def terms_of(strategy: LayerStrategy, axes: Sequence[int]) -> tuple[int, int]:
    """Return (how many ranks have terms of a sum along the mesh `axes`, the index of this rank among them)."""
    shape, at = strategy.mesh.shape, strategy.coordinates
    count, place = 1, 0
    for axis in axes:
        count, place = count * shape[axis], place * shape[axis] + at[axis]
    return count, place


def summed_number(bound: BoundProgram, dtype: torch.dtype, count: int, place: int) -> tuple[float, float]:
    """Return (added, expected): the number that a rank adds to its data in the next run, and all ranks' sum.

    The rank is at index `place` of the `count` ranks that have terms. In a `dtype` of 2 bytes only the first
    `_EXACT_TERMS` ranks add a number, the others 0. Ranks give `check_number` the sum that arrives and `expected`.
    """
    number = call_number(bound, dtype, count)
    added = count if dtype.itemsize >= _EXACT_BYTES else min(count, _EXACT_TERMS)
    return number if place < added else 0.0, added * number


def call_number(bound: BoundProgram, dtype: torch.dtype, count: int = 1) -> float:
    """Return a number that stands for the next run of a program; `dtype` holds it, and `count` times it, exactly.

    It is the same on all ranks that are in the same run. Numbers repeat: after 16 runs in a type of 2 bytes, after
    some 2**24 / `count` in others.
    """
    if dtype.itemsize < _EXACT_BYTES:
        return float(2.0 ** (bound.next_run % 16 - 8))
    return float(1 + bound.next_run % (2**24 // count - 1))


def check_number(arrived: Tensor, expected: float) -> None:
    """Raise BindError where an element of `arrived` is not `expected`: its data are of another call.

    On CUDA nothing is checked, since the host would wait.
    """
    if arrived.device.type == "cpu" and any(value != expected for value in arrived.flatten().tolist()):
        raise BindError(
            "ranks are out of step: what arrived for parameters of a bucket is of another program or call; let "
            "all ranks run the same forward and backward passes, in the same order"
        )
