"""Nodes that are one call: a function of each unit of features, which no rank shares with another."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

from meshweave.algorithms.block.functions import Functions, widened
from meshweave.algorithms.block.node_writer import NodeWriter
from meshweave.algorithms.block.nodes.kernel import PARTS, Kernel, RankSizes
from meshweave.algorithms.block.nodes.record import AnyNode, Known, NodeRecord
from meshweave.algorithms.block.place import NodePlace
from meshweave.algorithms.block.problem import BlockProblem
from meshweave.algorithms.block.roles import Roles
from meshweave.algorithms.block.writer import Stored
from meshweave.describe.model.nodes import Features
from meshweave.ir.program import Tensor
from meshweave.ir.program.expressions import Index
from meshweave.ir.program.meanings import Function, Meaning, Same, TensorPart


class CallRecord(NodeRecord[AnyNode]):
    """A node with one function of its input, and perhaps of parameters.

    The function works on one unit of features at a time, such as a head; no rank has a part of a unit. A parameter
    that all units share, such as the gain of all heads, is whole on every rank. A parameter with features of the
    input, such as a gain per feature, is sharded as these are, and functions get a rank's shard.

    Attributes:
        fn: the name of the function; the name of its gradient with respect to the input ends in "_grad", that
            with respect to parameters in "_weight_grad".
        work: how it is priced: "elementwise", or "norm" of rows.
        view: what the names of tensors end in that show an activation as (tokens, units, features of a unit).
    """

    fn: ClassVar[str]
    work: ClassVar[str] = "elementwise"
    view: ClassVar[str] = "units"

    @abstractmethod
    def calls(self, node: AnyNode, is_exact: bool) -> tuple[Callable[..., Any], ...]:
        """Return the node's function, its gradient with respect to the input, and if any that of the parameters.

        The function takes (input, parameters); its gradient takes (gradient of the result, input, parameters). The
        gradient of the parameters takes (gradient of the result, input, sum so far), and returns the new sum. With
        `is_exact` all give small integers.
        """

    def functions(self, node: AnyNode, problem: BlockProblem) -> Mapping[str, Callable[..., Any]]:
        """Return the functions of `calls` by name: `fn`, and `fn` with "_grad" and "_weight_grad" added.

        The last one is there only for nodes with parameters. They give small integers if `problem.exact`.
        """
        names = self.fn, f"{self.fn}_grad", f"{self.fn}_weight_grad"
        table = dict(zip(names, self.calls(node, problem.exact), strict=False))
        return table if problem.exact else widened(table)

    def _parameters(self, at: NodePlace[AnyNode]) -> list[str]:
        return [at.own(weight.name) for weight in at.node.parameters]

    def _parameter_parts(self, at: NodePlace[AnyNode]) -> list[TensorPart]:
        """Return what of the parameters the function of a unit reads: of sides with features those of the unit."""
        return [
            TensorPart(at.own(weight.name), tuple("j" if side.dim else None for side in weight.sides))
            for weight in at.node.parameters
        ]

    def _units(self, name: str) -> str:
        return f"{name}_{self.view}"

    def _ends(self, at: NodePlace[AnyNode]) -> Iterator[tuple[str, Features]]:
        """Yield the edges that it has by units: its input, and its result where units have several features."""
        yield at.operand, at.node.takes[0]
        if at.node.makes.unit > 1:
            yield at.out, at.node.makes

    def _result(self, at: NodePlace[AnyNode], name: str) -> TensorPart:
        if at.node.makes.unit > 1:
            return TensorPart(self._units(name), at.unit)
        return TensorPart(name, at.element)

    def tensors(self, at: NodePlace[AnyNode], roles: Roles) -> Iterator[Tensor]:
        """Yield the input and its gradient as tensors (tokens, units, features of a unit), in global shapes.

        If units of the result have several features, as heads have, also the result and its gradient.
        """
        for name, features in self._ends(at):
            for prefix in ("", "D"):
                shape = (*at.layer.tokens, features.count, features.unit)
                yield Tensor(self._units(f"{prefix}{name}"), shape, at.problem.dtype)

    def meanings(self, at: NodePlace[AnyNode], roles: Roles) -> Iterator[Meaning]:
        """Yield the equations of the function, one for each unit such as a head."""
        yield Same(self._units(at.operand), at.operand)
        ins = (TensorPart(self._units(at.operand), at.unit), *self._parameter_parts(at))
        yield Function(self._result(at, at.out), at.fn(self.fn), ins)
        if at.node.makes.unit > 1:
            yield Same(at.out, self._units(at.out))

    def gradient_meanings(self, at: NodePlace[AnyNode], roles: Roles) -> Iterator[Meaning]:
        """Yield the equations of the node's term of the input's gradient, and of gradients of parameters."""
        arriving = at.arriving
        if at.node.makes.unit > 1:
            arriving = f"D{at.out}"
            yield Same(self._units(arriving), at.arriving)
        ins = self._result(at, arriving), TensorPart(self._units(at.operand), at.unit)
        parameters = self._parameter_parts(at)
        out = self._units(f"D{at.operand}")
        yield Function(TensorPart(out, at.unit), at.fn(f"{self.fn}_grad"), (*ins, *parameters))
        yield Same(at.contribution_name(at.node.ins[0]), out)
        for part in parameters:
            of = TensorPart(f"D{part.tensor}", part.dims)
            yield Function(of, at.fn(f"{self.fn}_weight_grad"), (*ins, of), reduce="sum")

    def compute(self, at: NodePlace[AnyNode], known: Known, functions: Functions) -> None:
        """Compute the node's result in one process and store it in `known`.

        `known` has whole arrays by tensor name.
        """
        parameters = (known[name] for name in self._parameters(at))
        known[at.out] = functions[at.fn(self.fn)](known[at.operand], *parameters)

    def compute_gradient(self, at: NodePlace[AnyNode], known: Known, functions: Functions) -> None:
        """Store in `known` the node's term of the input's gradient, and gradients of parameters.

        `known` has whole arrays by tensor name.
        """
        ins, names = (known[at.arriving], known[at.operand]), self._parameters(at)
        gradient = functions[at.fn(f"{self.fn}_grad")](*ins, *(known[name] for name in names))
        known[at.contribution_name(at.node.ins[0])] = gradient
        for name in names:
            known[f"D{name}"] = functions[at.fn(f"{self.fn}_weight_grad")](*ins, 0 * known[name])

    def kernels(self, at: NodePlace[AnyNode], roles: Roles, sizes: RankSizes) -> Iterator[Kernel]:
        """Yield the first rank's kernels of the function and of its gradient with respect to the input.

        Gradients of parameters are left out.
        """
        node, core = at.node, roles.core(at.node.group == "attention")
        if node.makes.dim == "hidden":
            core = roles.residual
        tokens, made = sizes.tokens(core), sizes.features(node.makes, core)
        columns = node.takes[0].size // node.makes.size
        shape = (tokens * made,) if self.work == "elementwise" else (tokens, made)
        for (part, name), passes in zip(PARTS, (1 + columns, 1 + 2 * columns), strict=True):
            yield sizes.streamed(self.work, shape, passes, part, name)

    def _shape(self, writer: NodeWriter, stored: Stored) -> tuple[Index, ...]:
        if self.work == "elementwise":
            return (writer.writer.elements(stored),)
        return writer.rows_and_features(stored)

    def write(self, at: NodePlace[AnyNode], writer: NodeWriter) -> None:
        """Write the call of the function, on the units of features that a rank has."""
        out, ins = writer.out(at), (writer.edge(at), *(writer.stored[name] for name in self._parameters(at)))
        writer.writer.call(at.fn(self.fn), (out,), ins, self.work, self._shape(writer, out))

    def write_gradient(self, at: NodePlace[AnyNode], writer: NodeWriter) -> None:
        """Write the call for the node's term of the input's gradient.

        The calls for the parameters are passed to `NodeWriter.postpone`, to be written later.
        """
        edge, names = at.node.ins[0], self._parameters(at)
        arriving, out = writer.arriving(at), writer.contribution(at, edge)
        ins, shape = (arriving, writer.edge(at)), self._shape(writer, arriving)
        grads = (*ins, *(writer.stored[name] for name in names))
        writer.writer.call(at.fn(f"{self.fn}_grad"), (out,), grads, self.work, shape, "input_grad")
        writer.sum_contributions(at, edge)
        fn = at.fn(f"{self.fn}_weight_grad")
        for name in names:
            writer.postpone(partial(writer.sum_tokens, name, arriving, fn, ins, self.work, shape))
