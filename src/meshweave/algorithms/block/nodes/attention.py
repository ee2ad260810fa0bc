"""Attention over groups of heads, whole on each rank or in a ring of ranks that share sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshweave.algorithms.block.functions import Functions, widened
from meshweave.algorithms.block.node_writer import NodeWriter
from meshweave.algorithms.block.nodes.attention_functions import IntegerAttention, RealAttention
from meshweave.algorithms.block.nodes.kernel import PARTS, Kernel, RankSizes
from meshweave.algorithms.block.nodes.record import Known, NodeRecord
from meshweave.algorithms.block.place import NodePlace
from meshweave.algorithms.block.problem import BlockProblem
from meshweave.algorithms.block.ring_equations import (
    POSITIONS,
    ring_gradient_meanings,
    ring_gradient_tensors,
    ring_meanings,
    ring_names,
    ring_tensors,
)
from meshweave.algorithms.block.roles import Roles, Side, Sides
from meshweave.algorithms.block.writer import BlockWriter, SequenceWindow, Stored
from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.describe.model.head_norm import SinkAttention
from meshweave.describe.model.nodes import Attention, Features
from meshweave.ir.program import Tensor
from meshweave.ir.program.expressions import Index, equal
from meshweave.ir.program.meanings import Function, Meaning, PositionNames, Same, TensorPart
from meshweave.ir.work import Compute

# --- ring attention ---------------------------------------------------------------------------------------

# Writes attention whose keys and values go round a ring, and its gradient.
#
# A rank works on its own part of each sequence. In turn t it has the keys of the rank t places on, and passes
# them on while it works on them. Backward their gradients follow them one turn behind, and are home after the
# last.
#
# Every rank is priced as the last one, for which all wait: each query attends to its own rank's keys up to
# it, in turn 0, and to all keys of other ranks. Parts of sequences that interleave would share out what is
# masked (Brandon et al., Striped Attention, 2023).


@dataclass
class RingCore:
    """Writes one layer's ring attention along the mesh axis with index `axis`, with its buffers.

    Attributes:
        inner: buffer of the joint queries, keys and values, the input of attention.
        core: buffer of the heads, the output of attention.
        log_sums: buffer of the log-sum-exp of each token's scores in each head.
        positions: buffer of the positions of all tokens of a sequence, whole on every rank.
    """

    writer: BlockWriter
    at: NodePlace[Attention]
    axis: int
    inner: Stored
    core: Stored
    log_sums: Stored
    positions: Stored

    def __post_init__(self) -> None:
        self.count = self.writer.mesh.shape[self.axis]
        node, names = self.at.node, ring_names(self.at)
        width = node.per_group * node.width
        self.own_keys = self._scratch(names["keys"], 2 * node.width)
        self.queries = self._scratch(names["queries"], width)

    def _scratch(self, tensor: str, width: int, dtype: str = "", buffer: str = "") -> Stored:
        """Return scratch for what this rank has of a tensor of so many columns per group of heads."""
        sides: Sides = (*self.inner.sides[:2], Side("inner", self.at.node.groups, width))
        stored = Stored(buffer or tensor.lower(), tensor, sides, self.inner.dims, dtype or self.inner.dtype)
        return self.writer.scratch(stored)

    def _travelling(self, tensor: str, turn: Index) -> Stored:
        """Return what is here in a turn of something that goes round: one of two slots."""
        site = tensor.removesuffix(self.at.layer.suffix).lower()
        width = 2 * self.at.node.width
        window = SequenceWindow(self.inner.dims, self.axis, turn)
        sides: Sides = (*self.inner.sides[:2], Side("inner", self.at.node.groups, width))
        stored = Stored(f"{site}_ring", tensor, sides, self.inner.dims, self.inner.dtype, turn % 2, window)
        return self.writer.scratch(stored, 2)

    def _positions(self, turn: Index = 0) -> Stored:
        """Return the positions of the keys of a turn, or of this rank's queries."""
        return replace(self.positions, window=SequenceWindow(self.inner.dims, self.axis, turn, is_whole=True))

    def _shape(self, keys: Stored, turn: Index) -> tuple[Index, ...]:
        """Return the sizes of attention of this rank's queries to the keys of a turn, as they are priced."""
        batch, queries, heads = (self.writer.extent_of(self.log_sums, number) for number in range(3))
        count = self.writer.extent_of(keys, 1)
        if not self.at.problem.counts_masked:
            count = count - equal(turn, 0) * (count - (count // 2 + 1))
        return batch, heads, queries, count, self.at.node.width

    def forward(self) -> None:
        """Write ring attention forward: from queries, keys and values in `inner` to `core` and `log_sums`."""
        writer, names, node, fn = self.writer, ring_names(self.at), self.at.node, self.at.fn
        elements = (writer.elements(self.inner),)
        ins: tuple[Stored, ...] = (self.inner, self._positions())
        writer.call(fn("split_heads"), (self.queries, self.own_keys), ins, "elementwise", elements)
        r = node.per_group
        widths = {"so_far": r * node.width, "greatest": r, "weights": r}
        running = tuple(
            self._scratch(names[key], width, self.at.problem.statistics_dtype, f"ring_{key}")
            for key, width in widths.items()
        )
        for stored in running:
            writer.zero(stored)
        writer.copy(self._travelling(names["keys"], 0), self.own_keys)
        for turn in writer.turns(self.count):
            keys = self._travelling(names["keys"], turn)
            ins = (self.queries, keys, self._positions(), self._positions(turn), *running)
            writer.call(fn("attend"), running, ins, "attention", self._shape(keys, turn))
            self._pass_on(names["keys"], turn, when=turn < self.count - 1)
        elements = (writer.elements(self.core),)
        writer.call(fn("finish_attention"), (self.core, self.log_sums), running, "elementwise", elements)

    def backward(self, of_core: Stored, of_inner: Stored) -> None:
        """Write ring attention backward: from `of_core`, the gradient of the heads, to `of_inner`.

        `of_inner` is the buffer of the gradient of the joint queries, keys and values.
        """
        writer, names, node, fn = self.writer, ring_names(self.at), self.at.node, self.at.fn
        width = node.per_group * node.width
        names = {**names, **{f"of {key}": f"D{names[key]}" for key in ("queries", "keys")}}
        of_queries = self._scratch(names["of queries"], width, "", "ring_of_queries")
        part_of_queries = self._scratch(names["of queries"], width, "", "ring_of_queries_part")
        writer.copy(self._travelling(names["keys"], 0), self.own_keys)
        writer.zero(of_queries)
        writer.zero(self._travelling(names["of keys"], 0))
        for turn in writer.turns(self.count):
            keys, of_keys = (self._travelling(names[key], turn) for key in ("keys", "of keys"))
            part = writer.scratch(replace(of_keys, buffer="dkv_part", slot=0))
            outs = (part_of_queries, part)
            ins: tuple[Stored, ...] = (
                of_core,
                self.queries,
                self.core,
                self.log_sums,
                keys,
                self._positions(),
                self._positions(turn),
            )
            writer.call(fn("attend_grad"), outs, ins, "attention", self._shape(keys, turn), "input_grad")
            writer.add(of_queries, part_of_queries)
            writer.add(of_keys, part)
            self._pass_on(names["keys"], turn, when=turn < self.count - 1)
            self._pass_on(names["of keys"], turn, "back")
        home = self._travelling(names["of keys"], self.count)
        elements = (writer.elements(of_inner),)
        ins = (of_queries, home, self._positions())
        writer.call(fn("merge_heads"), (of_inner,), ins, "elementwise", elements, "input_grad")

    def _pass_on(self, tensor: str, turn: Index, lane: str = "", when: Index = 1) -> None:
        src, out = self._travelling(tensor, turn), self._travelling(tensor, turn + 1)
        self.writer.pass_on(out, src, self.axis, lane, when=when)


# --- attention --------------------------------------------------------------------------------------------

GROUP: PositionNames = ("b", None, "g", None)
"""All positions of a group of heads, of a tensor (batch, sequence, groups, width)."""


class AttentionRecord(NodeRecord[Attention]):
    """Causal attention."""

    node_type = Attention

    def tensors(self, at: NodePlace[Attention], roles: Roles) -> Iterator[Tensor]:
        """Yield the tensors that only the equations of attention name, in global shapes.

        They are the log-sum-exp of scores (tokens, heads); log-sum-exp, operand and result as (batch, sequence,
        groups of heads, columns of a group), with gradients of operand and result; and for ring attention the
        tensors of its steps and the positions (sequence,).
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
        """Yield the equations of the heads and of the log-sum-exp of their scores, for each group of heads.

        If an axis shards the sequence in attention, they are those of ring attention.
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
        """Yield the equations of the node's term of the gradient of the joint queries, keys and values.

        They are for each group of heads; if an axis shards the sequence in attention, those of ring attention.
        """
        if roles.ring_axis is not None:
            yield from ring_gradient_meanings(at)
            return
        names = (f"D{at.out}", at.operand, at.out, at.own(at.node.sums))
        yield Same(f"D{at.out}_units", at.arriving)
        ins = tuple(TensorPart(f"{name}_units", GROUP) for name in names)
        yield Function(TensorPart(f"D{at.operand}_units", GROUP), at.fn("attention_grad"), ins)
        yield Same(at.contribution_name(at.node.ins[0]), f"D{at.operand}_units")

    def functions(self, node: Attention, problem: BlockProblem) -> Mapping[str, Callable[..., Any]]:
        """Return the functions of attention and its gradient, by name: for whole sequences, and for ring steps.

        They give small integers if `problem.exact`; else they compute attention, 16-bit arguments in single
        precision.
        """
        if problem.exact:
            return IntegerAttention(node, problem.sequence).table()
        return widened(RealAttention(node, problem.sequence).table())

    def compute(self, at: NodePlace[Attention], known: Known, functions: Functions) -> None:
        """Compute the heads and the log-sum-exp of their scores in one process, and store them in `known`.

        `known` has whole arrays by tensor name.
        """
        known[at.out], known[at.own(at.node.sums)] = functions[at.fn("attention")](known[at.operand])

    def compute_gradient(self, at: NodePlace[Attention], known: Known, functions: Functions) -> None:
        """Store in `known` the node's term of the gradient of the joint queries, keys and values.

        `known` has whole arrays by tensor name.
        """
        ins = (known[name] for name in (at.arriving, at.operand, at.out, at.own(at.node.sums)))
        known[at.contribution_name(at.node.ins[0])] = functions[at.fn("attention_grad")](*ins)

    def kernels(self, at: NodePlace[Attention], roles: Roles, sizes: RankSizes) -> Iterator[Kernel]:
        """Yield the first rank's kernels of attention and its gradient; with a ring each runs once per rank.

        In a ring each is priced for as many keys as the first step has, fewer than other steps have if masked keys
        are not counted.
        """
        node, core, dtype = at.node, roles.core(at.node.group == "attention"), at.problem.dtype
        queries = sizes.sequence(core)
        heads = sizes.features(Features("heads", node.groups, node.per_group), core)
        shape = sizes.batch(core), heads, queries, priced_keys(at, queries), node.width
        for part, name in PARTS:
            work = Compute("call", 0, 1, dtype=dtype, call="attention", shape=shape, part=name)
            yield Kernel(work, part, sizes.ring(roles))

    def write(self, at: NodePlace[Attention], writer: NodeWriter) -> None:
        """Write attention of a rank's heads, or ring attention if an axis shards the sequence in attention.

        Raises:
            LayoutError: it is ring attention, and the layer has several attention nodes.
        """
        if writer.roles.ring_axis is not None and len(at.layer.graph.attentions) > 1:
            raise LayoutError("a layer with several attentions has no ring yet; give context=1")
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
        """Write the gradient of attention: one call, or the steps of ring attention."""
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
    """Attention with sinks, priced like attention without them. It has no functions: programs cannot run."""

    node_type = SinkAttention

    def functions(self, node: Attention, problem: BlockProblem) -> Mapping[str, Callable[..., Any]]:
        """Raise UnsupportedError, always: attention with sinks has no functions yet."""
        raise UnsupportedError("programs of attention with sinks are not written yet")


def priced_keys(at: NodePlace[Attention], sequence: int) -> int:
    """Return the number of keys per query for which attention over `sequence` positions is priced.

    It is `sequence` if the problem `counts_masked` pairs, else the mean number that mask and window leave.
    """
    return sequence if at.problem.counts_masked else at.node.mean_keys(sequence)


def _shape(at: NodePlace[Attention], writer: NodeWriter, sums: Stored) -> tuple[Index, ...]:
    tokens, heads = writer.rows_and_features(sums)
    sequence = at.problem.sequence
    return tokens // sequence, heads, sequence, priced_keys(at, sequence), at.node.width
