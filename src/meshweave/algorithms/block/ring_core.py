"""Writes attention whose keys and values go round a ring, and its gradient.

A rank works on its own part of each sequence. In turn t it has the keys of the rank t places on, and passes them
on while it works on them. Backward their gradients follow them one turn behind, and are home after the last.

Every rank is priced as the last one, for which all wait: each query attends to its own rank's keys up to it, in
turn 0, and to all keys of other ranks. Parts of sequences that interleave would share out what is masked (Brandon
et al., Striped Attention, 2023).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshweave.algorithms.block.place import NodePlace
from meshweave.algorithms.block.ring_equations import ring_names
from meshweave.algorithms.block.roles import Side, Sides
from meshweave.algorithms.block.writer import BlockWriter, SequenceWindow, Stored
from meshweave.describe.model.nodes import Attention
from meshweave.ir.program.expressions import Index, equal


@dataclass
class RingCore:
    """Writes one layer's ring attention along the mesh axis with index `axis`, with its buffers.

    Attributes:
        inner: the joint queries, keys and values, the input of attention.
        core: its output, the heads.
        log_sums: the log-sum-exp of each head's scores.
        positions: the positions of all tokens of a sequence, whole on every rank.
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
        """Write ring attention: from the joint queries, keys and values into the heads `core` and `log_sums`."""
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
        """Write the gradient of queries, keys and values, `of_inner`, from that of the heads, `of_core`."""
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
