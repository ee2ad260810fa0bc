"""Ring attention as a torch op: the program of `algorithms.block.sites.ring_parts` on this rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from meshweave.algorithms.block import BlockProblem
from meshweave.algorithms.block.folds import functions_of
from meshweave.algorithms.block.functions import Functions
from meshweave.algorithms.block.parts import BlockParts
from meshweave.algorithms.block.ring_equations import POSITIONS
from meshweave.algorithms.block.sites import ring_parts
from meshweave.describe.model.dense import DenseForm, dense_layer
from meshweave.execute.torch import compat
from meshweave.execute.torch.bind import BoundProgram
from meshweave.ir.program import Program
from meshweave.nn.custom_ops import value_of
from meshweave.nn.parallel.moves import keep_order
from meshweave.nn.parallel.programs import PARTS_KEPT, bound_program, on_device
from meshweave.nn.parallel.strategy import LayerStrategy
from meshweave.nn.products import DTYPES


@dataclass(frozen=True)
class PlacedRing:
    """Ring attention on the ranks of a strategy: keys and values go around, queries stay.

    Scores are divided by the square root of `width`.

    Attributes:
        strategy: the strategy on its ranks.
        groups: the number of heads of keys and values, over all ranks.
        per_group: the number of query heads that share one head of keys and values.
        width: features of a head.
        window: how many keys a query attends to, its own among them; None for all up to its own.
    """

    strategy: LayerStrategy
    groups: int
    per_group: int
    width: int
    window: int | None

    def problem(self, batch: int, sequence: int, dtype: torch.dtype) -> BlockProblem:
        """Return the block problem that has this attention and nothing else of a layer.

        `batch` sequences of `sequence` tokens are global numbers. Queries and keys are given after their rotation.
        Sizes of other parts of a layer are 1.
        """
        heads = self.groups * self.per_group
        form = DenseForm(gated=False, norm="layer", window=self.window)
        layer = dense_layer(1, heads, self.groups, self.width, 1, form)
        return BlockProblem(
            batch,
            sequence,
            1,
            heads,
            self.groups,
            self.width,
            1,
            self.strategy.mesh.shape,
            dtype=DTYPES[dtype],
            graph=layer,
        )


@dataclass(frozen=True, eq=False)
class SizedRing:
    """The programs of ring attention for the tokens and dtype of `problem`."""

    ring: PlacedRing
    problem: BlockProblem

    @property
    def parts(self) -> BlockParts:
        """Return the forward and the backward program."""
        return _ring_parts(self)

    @cached_property
    def calls(self) -> Functions:
        """Return the functions that the `Call` ops of the ring's programs run, by name."""
        return functions_of(self.problem)

    def bound(self, is_backward: bool, device: torch.device) -> BoundProgram:
        """Return the forward or the backward program, bound on this rank, with its input of positions filled.

        Collective at its first use.
        """

        def written() -> Program:
            return on_device(self.parts.backward if is_backward else self.parts.forward, device)

        bound = bound_program((self, is_backward), written, self.ring.strategy, device, self.calls)
        positions = bound.inputs.get(POSITIONS.lower())
        if positions is not None:
            positions.copy_(torch.arange(self.problem.sequence, device=device))
        return bound

    def kept_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return {name: shape on this rank} of the buffers that the forward program saves for the backward one."""
        program, rank = self.parts.forward, self.ring.strategy.rank
        return {name: program.local_shape(name, rank) for name in self.parts.kept}


@lru_cache(PARTS_KEPT)
def _ring_parts(sized: SizedRing) -> BlockParts:
    own = sized.ring.strategy
    return ring_parts(sized.problem, own.config, own.roles, own.mesh)


@lru_cache(1024)
def _sized(number: int, batch: int, sequence: int, dtype: torch.dtype) -> SizedRing:
    ring = value_of(number, PlacedRing)
    return SizedRing(ring, ring.problem(batch, sequence, dtype))


@torch.library.custom_op("meshweave::ring_attention", mutates_args=())  # type: ignore[untyped-decorator]
def ring_attention(qkv: Tensor, number: int, batch: int, sequence: int) -> list[Tensor]:
    """Return [attention, log-sum-exp of the scores] for this rank's tokens and query heads. Collective.

    The attention is (batch, sequence, features), with `width` features for each query head; the log-sum-exp has
    one number for each query head and token.

    Args:
        qkv: this rank's shard (batch, sequence, features): for each group its queries, its key and its value.
        number: what `number_of` returns for the ring, a `PlacedRing`.
        batch, sequence: global sizes: the number of sequences, and the tokens of each.
    """
    sized = _sized(number, batch, sequence, qkv.dtype)
    bound = sized.bound(False, qkv.device)
    bound.inputs["qkv0"].copy_(qkv)
    bound.run(bound.inputs)
    return [bound.outputs[name].clone() for name in ("a0", "l0")]


@ring_attention.register_fake  # type: ignore[untyped-decorator]
def _(qkv: Tensor, number: int, batch: int, sequence: int) -> list[Tensor]:
    keep_order(torch.ops.meshweave.ring_attention)
    sized = _sized(number, int(batch), int(sequence), qkv.dtype)
    shapes = sized.kept_shapes()
    real = getattr(torch, sized.problem.statistics_dtype)
    return [qkv.new_empty(shapes["a0"]), qkv.new_empty(shapes["l0"], dtype=real)]


@torch.library.custom_op("meshweave::ring_attention_back", mutates_args=())  # type: ignore[untyped-decorator]
def ring_attention_back(
    arriving: Tensor, qkv: Tensor, out: Tensor, log_sums: Tensor, number: int, batch: int, sequence: int
) -> Tensor:
    """Return this rank's shard of the gradient of `qkv`. Collective.

    Args:
        arriving: the gradient of the attention, as `out`.
        out, log_sums: the results of `ring_attention`.
        qkv, number, batch, sequence: the arguments of `ring_attention`.
    """
    sized = _sized(number, batch, sequence, qkv.dtype)
    bound = sized.bound(True, qkv.device)
    for name, value in (("qkv0", qkv), ("a0", out), ("l0", log_sums), ("da0", arriving)):
        if name in bound.inputs:
            bound.inputs[name].copy_(value)
    bound.run(bound.inputs)
    return bound.outputs["dqkv0"].clone()


@ring_attention_back.register_fake  # type: ignore[untyped-decorator]
def _(
    arriving: Tensor, qkv: Tensor, out: Tensor, log_sums: Tensor, number: int, batch: int, sequence: int
) -> Tensor:
    keep_order(torch.ops.meshweave.ring_attention_back)
    return torch.empty_like(qkv)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    qkv, *ctx.sizes = inputs
    ctx.save_for_backward(qkv, *output)


def _gradient(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    qkv, out, log_sums = ctx.saved_tensors
    return ring_attention_back(grads[0].contiguous(), qkv, out, log_sums, *ctx.sizes), None, None, None


ring_attention.register_autograd(_gradient, setup_context=_keep)
for _op in (torch.ops.meshweave.ring_attention, torch.ops.meshweave.ring_attention_back):
    compat.keep_in_order(_op.default)
