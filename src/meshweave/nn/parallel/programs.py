"""The programs of sites for sizes of activations, bound once for each on this rank."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from meshweave.algorithms.block.parts import BlockParts
from meshweave.algorithms.block.roles import AxisDims, Side, Sides
from meshweave.algorithms.block.sites import MoveSite, ProductSite, move_program, product_parts, site_problem
from meshweave.execute.torch.bind import BoundProgram, bind
from meshweave.execute.torch.cache import program_bytes
from meshweave.execute.torch.call_order import call_order
from meshweave.ir.program import Program
from meshweave.ir.program.ops import COMPUTE_KINDS
from meshweave.lower import lower_rings, lower_small_sums
from meshweave.nn.parallel.strategy import LayerStrategy, chunked
from meshweave.nn.products import DTYPES

PARTS_KEPT = 32
"""Programs that are written and not bound: more than a layer and a head have products."""


def communicates(program: Program) -> bool:
    """Return whether any op of a program communicates with another rank."""
    return any(op.kind not in COMPUTE_KINDS for op, _ in program.expanded.ops_with_ranks())


def bound_program(
    key: Hashable,
    program: Callable[[], Program],
    strategy: LayerStrategy,
    device: torch.device,
    calls: Mapping[str, Callable[..., Any]] | None = None,
    meets: bool = True,
    memory: Callable[[Program], Mapping[str, Tensor]] | None = None,
) -> BoundProgram:
    """Return a program bound on this rank, from the context's cache under `key`, or bound now.

    All ranks of the strategy's mesh call it together.

    Args:
        key: stands for the program in the cache; equal keys are for equal programs.
        program: makes the program, where it is not bound yet.
        strategy: whose context and ranks run it.
        device: where its buffers lie.
        calls: by name, the functions that its `Call` ops run; None for none.
        meets: whether ranks exchange a message before the first of torch's own collectives in a run, so that
            collectives of two programs cannot match. False where the caller notices a mismatch from the data.
        memory: returns tensors for some of a program's buffers, by name; None where `bind` allocates all.

    Raises UnsupportedError where a run in the context is under way, as in another thread.
    """
    context, ranks = strategy.context(device), strategy.mesh.ranks
    context.lane_threads.check_free()  # before the caller writes its inputs over
    cached = context.programs.get(ranks, key)
    if cached is None:
        made = program()
        with call_order(context).titled(made.name):
            tensors = {} if memory is None else memory(made)
            bound = bind(made, strategy.rank, tensors, context=context, calls=calls, meets=meets)
        cached = context.programs.put(ranks, key, bound, program_bytes(made))
    value: BoundProgram = cached.value
    return value


def on_device(program: Program, device: torch.device) -> Program:
    """Return a program as it runs on `device`: a CPU has collectives written out as messages, CUDA keeps them."""
    return lower_small_sums(lower_rings(program)) if device.type == "cpu" else program


@dataclass(frozen=True, eq=False)
class ProductPrograms:
    """The forward and backward programs of a product of a layer.

    Attributes:
        site: which product of the layer it is, with its sizes.
        strategy: the strategy on its ranks.
        batch: the number of sequences, over all ranks.
        sequence: the number of tokens of each, over all ranks.
    """

    site: ProductSite
    strategy: LayerStrategy
    batch: int
    sequence: int
    dtype: torch.dtype

    @property
    def parts(self) -> BlockParts:
        """Return the forward and the backward program, with weights in memory as torch has them: (out, in).

        The last `PARTS_KEPT` are cached; others are written anew. The context keeps those that are bound.
        """
        return _product_parts(self)

    @cached_property
    def communicates(self) -> tuple[bool, bool]:
        """Return (forward, backward): whether each of the two programs communicates with another rank."""
        return communicates(self.parts.forward), communicates(self.parts.backward)

    @cached_property
    def kept(self) -> tuple[str, ...]:
        """Return the names of the buffers that the forward program saves for the backward one."""
        return self.parts.kept

    @cached_property
    def sides(self) -> tuple[Sides, Sides]:
        """Return (operand, result): the global dims (batch, sequence, features) of each."""
        own = self.site
        tokens = self.strategy.tokens(self.batch, self.sequence)
        hidden, inner = Side("hidden", own.hidden), Side("inner", own.units, own.unit)
        outer = (*tokens, hidden), (*tokens, inner)
        return outer if own.is_first else outer[::-1]

    @cached_property
    def dims(self) -> tuple[AxisDims, AxisDims]:
        """Return (operand, result): for each of them, which dim each mesh axis splits; "" for none."""
        outer = self.strategy.roles.residual, self.strategy.roles.core(self.site.is_attention)
        return outer if self.site.is_first else outer[::-1]

    @cached_property
    def result_shape(self) -> tuple[int, ...]:
        """Return the shape (batch, sequence, features) of this rank's shard of the result."""
        return self.strategy.local_shape(self.sides[1], self.dims[1])

    @cached_property
    def kept_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes, on this rank, of the buffers in `kept`, in the same order."""
        program = self.parts.forward
        return tuple(program.local_shape(name, self.strategy.rank) for name in self.kept)

    def bound(self, is_backward: bool, device: torch.device) -> BoundProgram:
        """Return the forward or the backward program, bound on this rank. Collective at its first use."""

        def written() -> Program:
            return on_device(self.parts.backward if is_backward else self.parts.forward, device)

        return bound_program((self, is_backward), written, self.strategy, device)


@lru_cache(PARTS_KEPT)
def _product_parts(product: ProductPrograms) -> BlockParts:
    own = product.strategy
    problem = site_problem(
        product.batch, product.sequence, product.site.hidden, own.mesh.shape, DTYPES[product.dtype]
    )
    most = product.batch
    for dim, size in zip(own.roles.residual, own.mesh.shape, strict=True):
        most = -(-most // size) if dim == "batch" else most
    parts = product_parts(product.site, problem, chunked(own.config, most), own.roles, own.mesh)
    return replace(parts, forward=_transposed(parts.forward), backward=_transposed(parts.backward))


def _transposed(program: Program) -> Program:
    """Return a program with weights and their gradients stored by columns."""
    buffers = (
        replace(buffer, order=(1, 0)) if buffer.name in ("w", "dw") else buffer for buffer in program.buffers
    )
    return replace(program, buffers=tuple(buffers))


@dataclass(frozen=True, eq=False)
class SizedMove:
    """The program of a move between two layouts, for one size and dtype.

    Attributes:
        site: the dims of the tensor, and how mesh axes split them before and after the move.
        strategy: the strategy on its ranks.
        is_whole: whether it is one collective of the backend, and not lowered to rings. Ranks then exchange no
            message before it: an element of its data says which program and call it is of. If it is a sum, terms
            and result are in the same memory.
    """

    site: MoveSite
    strategy: LayerStrategy
    dtype: torch.dtype
    is_whole: bool = False

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of this rank's shard after the move."""
        return self.strategy.local_shape(self.site.sides, self.site.after)

    def run(self, x: Tensor) -> Tensor:
        """Move `x`, this rank's shard before the move; return its shard after the move, in new memory.
        Collective.
        """
        bound = self.bound(x.device)
        bound.run({"x": x.detach()})
        return bound.outputs["y"].clone()

    def bound(self, device: torch.device) -> BoundProgram:
        """Return the program, bound on this rank and kept by the context. Collective at its first use."""
        memory = partial(self._memory, device) if self._is_in_place else None
        meets = not self.is_whole
        return bound_program(self, partial(self._written, device), self.strategy, device, None, meets, memory)

    def bound_apart(self, device: torch.device, twin: BoundProgram | None = None) -> BoundProgram:
        """Return the program bound to memory of its own, which the caller alone keeps. Collective.

        Args:
            twin: the program that `bound` returns: in each call a rank may run either of the two, whichever others
                run. None if this program is run by itself.
        """
        made = self._written(device)
        memory = self._memory(device, made) if self._is_in_place else {}
        context, rank = self.strategy.context(device), self.strategy.rank
        return bind(made, rank, memory, context=context, meets=not self.is_whole, twin=twin)

    @property
    def _is_in_place(self) -> bool:
        return self.is_whole and self.site.is_sum

    def _written(self, device: torch.device) -> Program:
        program = move_program(self.site, self.strategy.mesh, DTYPES[self.dtype])
        return program if self.is_whole else on_device(program, device)

    def _memory(self, device: torch.device, program: Program) -> Mapping[str, Tensor]:
        """Return memory in which a sum lies where its terms were."""
        shape = program.local_shape("y", self.strategy.rank)
        return dict.fromkeys("xy", torch.empty(shape, dtype=self.dtype, device=device))


@lru_cache(4096)
def sized_product(
    site: ProductSite, strategy: LayerStrategy, batch: int, sequence: int, dtype: torch.dtype
) -> ProductPrograms:
    """Return the programs of a product; equal arguments give the same object.

    `batch` is the number of sequences and `sequence` the number of tokens of each, over all ranks.
    """
    return ProductPrograms(site, strategy, batch, sequence, dtype)


@lru_cache(4096)
def sized_move(
    site: MoveSite, strategy: LayerStrategy, dtype: torch.dtype, is_whole: bool = False
) -> SizedMove:
    """Return the program of a move for tensors of `dtype`; equal arguments give the same object.

    `is_whole` is whether it is one collective of the backend, and not lowered to rings.
    """
    return SizedMove(site, strategy, dtype, is_whole)
