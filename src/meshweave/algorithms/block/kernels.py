"""The kernels of a layer on a rank, by the roles of a strategy alone: no program is written.

They are products, attention, norms, activations and sums with the residual. A program computes them one after the
other, so that a layer takes at least their sum: searches rule layers out by that. What else computes is small:
gains and statistics of norms, sums over ring steps, copies. Strategies that include 2D products cut each product
along the features of its operand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from meshweave.algorithms.block.halves import Half, halves_of
from meshweave.algorithms.block.problem import BlockProblem
from meshweave.algorithms.block.roles import AxisDims, Roles, Side
from meshweave.algorithms.block.sides import largest_extent
from meshweave.base.units import dtype_bytes
from meshweave.ir.work import Compute, matmul_work, move_work

PassPart = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel of the first rank, which has the largest shards.

    Attributes:
        part: the part of the layer that it belongs to.
        times: how often it runs.
        sliced: of a product, which of its dims m, n and k has the features of the operand; 0 of others.
    """

    work: Compute
    part: PassPart
    times: int = 1
    sliced: int = 0


def kernels_of(problem: BlockProblem, roles: Roles) -> Iterator[Kernel]:
    """Yield the kernels of the forward and the backward part of a layer."""
    sizes = _Sizes(problem)
    for half in halves_of(problem, 0):
        for is_first in (True, False):
            yield from _products(sizes, roles, half, is_first)
        yield from _attention(sizes, roles, half) if half.is_attention else _activation(sizes, roles, half)
        yield from _norm(sizes, roles)


class _Sizes:
    """Elements of the dims of tensors on the first rank."""

    def __init__(self, problem: BlockProblem) -> None:
        self.problem, self._mesh = problem, problem.mesh
        self._batch, self._sequence = Side("batch", problem.batch), Side("sequence", problem.sequence)
        self.item = dtype_bytes(problem.dtype)

    def batch(self, dims: AxisDims) -> int:
        """Return sequences of a tensor whose batch lies so on the mesh."""
        return largest_extent(self._mesh, self._batch, dims)

    def sequence(self, dims: AxisDims) -> int:
        """Return tokens of a sequence."""
        return largest_extent(self._mesh, self._sequence, dims)

    def tokens(self, dims: AxisDims) -> int:
        """Return tokens of all sequences."""
        return self.batch(dims) * self.sequence(dims)

    def hidden(self, dims: AxisDims) -> int:
        """Return elements of the residual of a token."""
        return largest_extent(self._mesh, Side("hidden", self.problem.hidden), dims)

    def inner(self, half: Half, unit: int, dims: AxisDims) -> int:
        """Return elements of a half's inner dim, which is divided in whole units."""
        return largest_extent(self._mesh, Side("inner", half.units, unit), dims)

    def ring(self, roles: Roles) -> int:
        """Return the ranks of a ring of attention; 1 without one."""
        return 1 if roles.ring_axis is None else self._mesh.shape[roles.ring_axis]


def _products(sizes: _Sizes, roles: Roles, half: Half, is_first: bool) -> Iterator[Kernel]:
    tokens, weight, dtype = sizes.tokens(roles.operand(is_first)), roles.weight(is_first), sizes.problem.dtype
    hidden = sizes.hidden(weight)
    inner = sizes.inner(half, half.in_unit if is_first else half.out_unit, weight)
    k, n = (hidden, inner) if is_first else (inner, hidden)
    yield Kernel(matmul_work(tokens, n, k, dtype), "forward", sliced=2)
    yield Kernel(matmul_work(tokens, k, n, dtype), "backward", sliced=1)
    yield Kernel(matmul_work(k, n, tokens, dtype), "backward", sliced=0)


def _attention(sizes: _Sizes, roles: Roles, half: Half) -> Iterator[Kernel]:
    problem, core = sizes.problem, roles.core(True)
    queries, heads = sizes.sequence(core), sizes.inner(half, problem.queries_per_group, core)
    shape = sizes.batch(core), heads, queries, problem.priced_keys(queries), problem.head_dim
    for part, name in _PARTS:
        work = Compute("call", 0, 1, dtype=problem.dtype, call="attention", shape=shape, part=name)  # type: ignore[arg-type]
        yield Kernel(work, part, sizes.ring(roles))


def _activation(sizes: _Sizes, roles: Roles, half: Half) -> Iterator[Kernel]:
    core = roles.core(False)
    elements = sizes.tokens(core) * sizes.inner(half, half.out_unit, core)
    for (part, name), passes in zip(_PARTS, (1 + half.in_unit, 1 + 2 * half.in_unit), strict=True):
        yield _streamed(sizes, "elementwise", (elements,), passes, part, name)


def _norm(sizes: _Sizes, roles: Roles) -> Iterator[Kernel]:
    """Yield norms with their gradients, and sums with the residual."""
    shape = sizes.tokens(roles.residual), sizes.hidden(roles.residual)
    for (part, name), passes in zip(_PARTS, (2, 3), strict=True):
        yield _streamed(sizes, "norm", shape, passes, part, name)
        yield Kernel(move_work(shape[0] * shape[1], sizes.problem.dtype, "add"), part)
        if roles.two_step_norms:
            yield _streamed(sizes, "reduction", (shape[0] * shape[1],), passes - 1, part, "")
    yield _streamed(sizes, "norm", shape, 2, "backward", "weight_grad")


def _streamed(
    sizes: _Sizes, call: str, shape: tuple[int, ...], passes: int, part: PassPart, name: str
) -> Kernel:
    """Return a call that moves some passes over as many elements through memory."""
    elements = shape[0] * (shape[1] if len(shape) > 1 else 1)
    moved = passes * elements * sizes.item
    return Kernel(
        Compute("call", 0, moved, dtype=sizes.problem.dtype, call=call, shape=shape, part=name), part
    )


_PARTS: tuple[tuple[PassPart, str], ...] = (("forward", ""), ("backward", "input_grad"))
"""The parts of a layer, and what `Compute.part` is called in them."""
