"""Norms of the queries and keys of each head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from meshweave.algorithms.block.functions import Functions, Values, array_module, over_rows, small, widened
from meshweave.algorithms.block.node_writer import NodeWriter
from meshweave.algorithms.block.nodes.kernel import PARTS, Kernel, RankSizes
from meshweave.algorithms.block.nodes.norm import EPSILON
from meshweave.algorithms.block.nodes.record import Known, NodeRecord
from meshweave.algorithms.block.place import NodePlace
from meshweave.algorithms.block.problem import BlockProblem
from meshweave.algorithms.block.roles import Roles
from meshweave.describe.model.head_norm import HeadNorm
from meshweave.ir.program import Tensor
from meshweave.ir.program.meanings import Function, Meaning, PositionNames, Same, TensorPart

_UNIT: PositionNames = ("b", "s", "j", None)


class HeadNormRecord(NodeRecord[HeadNorm]):
    """A norm within heads, which no rank shares."""

    node_type = HeadNorm

    def tensors(self, at: NodePlace[HeadNorm], roles: Roles) -> Iterator[Tensor]:
        """Yield both edges by groups, and their gradients."""
        for name in (at.operand, at.out, f"D{at.operand}", f"D{at.out}"):
            yield at.units(f"{name}_heads", at.node.makes, whole=True)

    def meanings(self, at: NodePlace[HeadNorm], roles: Roles) -> Iterator[Meaning]:
        """Yield the norm of each group."""
        ins = TensorPart(f"{at.operand}_heads_units", _UNIT), TensorPart(at.own(at.node.gain), (None, None))
        yield Same(f"{at.operand}_heads_units", at.operand)
        yield Function(TensorPart(f"{at.out}_heads_units", _UNIT), at.fn("head_norm"), ins)
        yield Same(at.out, f"{at.out}_heads_units")

    def gradient_meanings(self, at: NodePlace[HeadNorm], roles: Roles) -> Iterator[Meaning]:
        """Yield the gradients by its input and its gains."""
        gain, of_gain = (TensorPart(f"{d}{at.own(at.node.gain)}", (None, None)) for d in ("", "D"))
        ins = TensorPart(f"D{at.out}_heads_units", _UNIT), TensorPart(f"{at.operand}_heads_units", _UNIT)
        yield Same(f"D{at.out}_heads_units", at.arriving)
        yield Function(TensorPart(f"D{at.operand}_heads_units", _UNIT), at.fn("head_norm_grad"), (*ins, gain))
        yield Same(at.contribution(at.node.ins[0]), f"D{at.operand}_heads_units")
        yield Function(of_gain, at.fn("head_norm_weight_grad"), (*ins, of_gain), reduce="sum")

    def functions(self, node: HeadNorm, problem: BlockProblem) -> Mapping[str, Callable[..., Any]]:
        """Return the norm and its gradients."""
        own = _HeadNorms(node, problem.exact)
        table: Functions = {
            "head_norm": own.norm,
            "head_norm_grad": own.gradient,
            "head_norm_weight_grad": own.weight_gradient,
        }
        return table if problem.exact else widened(table)

    def compute(self, at: NodePlace[HeadNorm], known: Known, functions: Functions) -> None:
        """Add the normalised heads."""
        known[at.out] = functions[at.fn("head_norm")](known[at.operand], known[at.own(at.node.gain)])

    def compute_gradient(self, at: NodePlace[HeadNorm], known: Known, functions: Functions) -> None:
        """Add the gradients by its input and its gains."""
        ins, gain = (known[at.arriving], known[at.operand]), at.own(at.node.gain)
        known[at.contribution(at.node.ins[0])] = functions[at.fn("head_norm_grad")](*ins, known[gain])
        known[f"D{gain}"] = functions[at.fn("head_norm_weight_grad")](*ins, 0 * known[gain])

    def kernels(self, at: NodePlace[HeadNorm], roles: Roles, sizes: RankSizes) -> Iterator[Kernel]:
        """Yield the norm and its gradient."""
        core = roles.core(at.node.group == "attention")
        shape = sizes.tokens(core), sizes.features(at.node.makes, core)
        for (part, name), passes in zip(PARTS, (2, 3), strict=True):
            yield sizes.streamed("norm", shape, passes, part, name)

    def write(self, at: NodePlace[HeadNorm], writer: NodeWriter) -> None:
        """Write the norm of the groups that a rank has."""
        edge, gain, out = writer.edge(at), writer.stored[at.own(at.node.gain)], writer.out(at)
        shape = writer.rows_and_features(edge)
        writer.writer.call(at.fn("head_norm"), (out,), (edge, gain), "norm", shape)

    def write_gradient(self, at: NodePlace[HeadNorm], writer: NodeWriter) -> None:
        """Write its gradient; that of the gains is not waited for."""
        edge, gain = at.node.ins[0], at.own(at.node.gain)
        ins, out = (writer.arriving(at), writer.edge(at)), writer.contribution(at, edge)
        shape, fn = writer.rows_and_features(ins[1]), at.fn("head_norm_weight_grad")
        grads = (*ins, writer.stored[gain])
        writer.writer.call(at.fn("head_norm_grad"), (out,), grads, "norm", shape, "input_grad")
        writer.contributed(at, edge)
        writer.postpone(lambda: writer.sum_tokens(gain, ins[0], fn, ins, "norm", shape))


class _HeadNorms:
    """The functions of a node: those of models, or of small integers that depend on the same elements."""

    def __init__(self, node: HeadNorm, is_exact: bool) -> None:
        self.queries, self.width, self.is_exact = node.per_group, node.head_dim, is_exact

    def _heads(self, x: Values) -> Values:
        """Return (batch, sequence, groups, heads of queries and two more, width)."""
        heads = self.queries + 2
        return x.reshape(*x.shape[:-1], x.shape[-1] // (heads * self.width), heads, self.width)

    def _gains(self, gain: Values) -> Values:
        return array_module(gain).stack([gain[0]] * self.queries + [gain[1]])

    def _scaled(self, heads: Values) -> tuple[Values, Values]:
        """Return normalised queries and keys, and what they are multiplied by for that."""
        if self.is_exact:
            return small(heads + heads.sum(-1)[..., None]), 1
        scale = ((heads * heads).sum(-1)[..., None] / self.width + EPSILON) ** -0.5
        return heads * scale, scale

    def _joined(self, heads: Values, values: Values, like: Values) -> Values:
        return array_module(like).concatenate((heads, values), -2).reshape(like.shape)

    def norm(self, x: Values, gain: Values) -> Values:
        heads = self._heads(x)
        out = self._scaled(heads[..., :-1, :])[0] * self._gains(gain)
        return self._joined(small(out) if self.is_exact else out, heads[..., -1:, :], x)

    def gradient(self, dy: Values, x: Values, gain: Values) -> Values:
        arriving = self._heads(dy)
        scaled, scale = self._scaled(self._heads(x)[..., :-1, :])
        change = arriving[..., :-1, :] * self._gains(gain)
        along = (change * scaled).sum(-1)[..., None]
        out = (
            small(change + scaled * along)
            if self.is_exact
            else scale * (change - scaled * along / self.width)
        )
        return self._joined(out, arriving[..., -1:, :], dy)

    def weight_gradient(self, dy: Values, x: Values, so_far: Values) -> Values:
        terms = self._heads(dy)[..., :-1, :] * self._scaled(self._heads(x)[..., :-1, :])[0]
        of_queries = over_rows(terms[..., :-1, :])
        return so_far + array_module(dy).stack((of_queries, over_rows(terms[..., -1, :])))
