"""Attention over groups of heads, whole on each rank or in a ring of ranks that share sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from meshweave.algorithms.block.functions import Functions, widened
from meshweave.algorithms.block.node_writer import NodeWriter
from meshweave.algorithms.block.nodes.attention_functions import IntegerAttention, RealAttention
from meshweave.algorithms.block.nodes.kernel import PARTS, Kernel, RankSizes
from meshweave.algorithms.block.nodes.record import Known, NodeRecord
from meshweave.algorithms.block.place import NodePlace
from meshweave.algorithms.block.problem import BlockProblem
from meshweave.algorithms.block.ring_core import RingCore
from meshweave.algorithms.block.ring_equations import (
    POSITIONS,
    ring_gradient_meanings,
    ring_gradient_tensors,
    ring_meanings,
    ring_tensors,
)
from meshweave.algorithms.block.roles import Roles
from meshweave.algorithms.block.writer import Stored
from meshweave.base.errors import UnsupportedError
from meshweave.describe.model.head_norm import SinkAttention
from meshweave.describe.model.nodes import Attention, Features
from meshweave.ir.program import Tensor
from meshweave.ir.program.expressions import Index
from meshweave.ir.program.meanings import Function, Meaning, PositionNames, Same, TensorPart
from meshweave.ir.work import Compute

GROUP: PositionNames = ("b", None, "g", None)
"""All positions of a group of heads, of a tensor (batch, sequence, groups, width)."""


class AttentionRecord(NodeRecord[Attention]):
    """Causal attention."""

    node_type = Attention

    def tensors(self, at: NodePlace[Attention], roles: Roles) -> Iterator[Tensor]:
        """Yield the tensors that the equations of attention name.

        They are the log-sum-exp of scores (tokens, heads); it, the operand and the result as (batch, sequence,
        groups of heads, columns of a group), with gradients of the last two; and with a ring its own tensors,
        and the positions (sequence,).
        """
        node, real = at.node, at.problem.statistics_dtype
        sums = at.own(node.sums)
        yield Tensor(sums, (*at.layer.tokens, node.heads), real)
        yield at.units(sums, Features("heads", node.groups, node.per_group), real, whole=True)
        for prefix in ("", "D"):
            yield at.units(f"{prefix}{at.operand}", node.takes[0], whole=True)
            yield at.units(f"{prefix}{at.out}", node.makes, whole=True)
        if roles.ring_axis is not None:
            yield from ring_tensors(at)
            yield from ring_gradient_tensors(at)
            yield Tensor(POSITIONS, (at.problem.sequence,), real)

    def meanings(self, at: NodePlace[Attention], roles: Roles) -> Iterator[Meaning]:
        """Yield the equations of the heads and their log-sum-exp: attention within each group of heads.

        Where ranks divide the sequence, they are those of attention in a ring.
        """
        yield Same(f"{at.operand}_units", at.operand)
        if roles.ring_axis is not None:
            yield from ring_meanings(at)
            return
        group = TensorPart(f"{at.operand}_units", GROUP)
        for number, name in enumerate((at.out, at.own(at.node.sums))):
            yield Function(TensorPart(f"{name}_units", GROUP), at.fn("attention"), (group,), output=number)
            yield Same(name, f"{name}_units")

    def gradient_meanings(self, at: NodePlace[Attention], roles: Roles) -> Iterator[Meaning]:
        """Yield the equations of the contribution to the gradient of the joint queries, keys and values.

        They are of each group of heads; where ranks divide the sequence, those of attention in a ring.
        """
        if roles.ring_axis is not None:
            yield from ring_gradient_meanings(at)
            return
        names = (f"D{at.out}", at.operand, at.out, at.own(at.node.sums))
        yield Same(f"D{at.out}_units", at.arriving)
        ins = tuple(TensorPart(f"{name}_units", GROUP) for name in names)
        yield Function(TensorPart(f"D{at.operand}_units", GROUP), at.fn("attention_grad"), ins)
        yield Same(at.contribution(at.node.ins[0]), f"D{at.operand}_units")

    def functions(self, node: Attention, problem: BlockProblem) -> Mapping[str, Callable[..., Any]]:
        """Return the functions of attention and its gradient by name: whole, and in steps of a ring.

        They are those of small integers if `problem.exact`; else real ones, which compute 16-bit arguments in
        single precision.
        """
        if problem.exact:
            return IntegerAttention(node, problem.sequence).table()
        return widened(RealAttention(node, problem.sequence).table())

    def compute(self, at: NodePlace[Attention], known: Known, functions: Functions) -> None:
        """Compute the heads and the log-sum-exp of their scores without sharding and store them in `known`."""
        known[at.out], known[at.own(at.node.sums)] = functions[at.fn("attention")](known[at.operand])

    def compute_gradient(self, at: NodePlace[Attention], known: Known, functions: Functions) -> None:
        """Store in `known` the contribution to the gradient of the joint queries, keys and values."""
        ins = (known[name] for name in (at.arriving, at.operand, at.out, at.own(at.node.sums)))
        known[at.contribution(at.node.ins[0])] = functions[at.fn("attention_grad")](*ins)

    def kernels(self, at: NodePlace[Attention], roles: Roles, sizes: RankSizes) -> Iterator[Kernel]:
        """Yield the first rank's kernels of attention and its gradient; each runs once per rank of a ring."""
        node, core, dtype = at.node, roles.core(at.node.group == "attention"), at.problem.dtype
        queries = sizes.sequence(core)
        heads = sizes.features(Features("heads", node.groups, node.per_group), core)
        shape = sizes.batch(core), heads, queries, priced_keys(at, queries), node.width
        for part, name in PARTS:
            work = Compute("call", 0, 1, dtype=dtype, call="attention", shape=shape, part=name)
            yield Kernel(work, part, sizes.ring(roles))

    def write(self, at: NodePlace[Attention], writer: NodeWriter) -> None:
        """Write attention of the heads of a rank, or the ring over ranks that divide the sequence."""
        out, inner = writer.out(at), writer.edge(at)
        rows = writer.sides(Features("heads", at.node.groups, at.node.per_group))
        sums = writer.new(at.own(at.node.sums), rows, inner.dims, at.problem.statistics_dtype)
        if writer.roles.ring_axis is not None:
            self._ring(at, writer).forward()
            writer.writer.cut()
            writer.end_site()
            return
        shape = _shape(at, writer, sums)
        writer.writer.call(at.fn("attention"), (out, sums), (inner,), "attention", shape)

    def write_gradient(self, at: NodePlace[Attention], writer: NodeWriter) -> None:
        """Write the gradient of attention: one call, or the steps of a ring."""
        edge, arriving = at.node.ins[0], writer.arriving(at)
        out = writer.contribution(at, edge)
        if writer.roles.ring_axis is not None:
            self._ring(at, writer).backward(arriving, out)
            writer.writer.cut()
            writer.end_site()
        else:
            sums = writer.stored[at.own(at.node.sums)]
            ins = arriving, writer.edge(at), writer.stored[at.out], sums
            shape = _shape(at, writer, sums)
            writer.writer.call(at.fn("attention_grad"), (out,), ins, "attention", shape, "input_grad")
        writer.sum_contributions(at, edge)

    def _ring(self, at: NodePlace[Attention], writer: NodeWriter) -> RingCore:
        axis, stored = writer.roles.ring_axis, writer.stored
        assert axis is not None
        sums = stored[at.own(at.node.sums)]
        return RingCore(writer.writer, at, axis, writer.edge(at), stored[at.out], sums, stored[POSITIONS])


class SinkAttentionRecord(AttentionRecord):
    """Attention with sinks, priced as attention without them; it has no functions, so its programs do not run."""

    node_type = SinkAttention

    def functions(self, node: Attention, problem: BlockProblem) -> Mapping[str, Callable[..., Any]]:
        """Raise UnsupportedError, always: attention with sinks has no functions yet."""
        raise UnsupportedError("programs of attention with sinks are not written yet")


def priced_keys(at: NodePlace[Attention], sequence: int) -> int:
    """Return the keys per query for which attention over `sequence` positions is priced.

    All of them if the problem counts masked pairs, else the mean number that mask and window leave.
    """
    return sequence if at.problem.counts_masked else at.node.mean_keys(sequence)


def _shape(at: NodePlace[Attention], writer: NodeWriter, sums: Stored) -> tuple[Index, ...]:
    tokens, heads = writer.rows_and_features(sums)
    sequence = at.problem.sequence
    return tokens // sequence, heads, sequence, priced_keys(at, sequence), at.node.width
