"""Y = X W, or X W + b.

Backward, where D names gradients and T transposes: DX = DY W T, DW = X T DY, and Db the sum over tokens of DY.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from meshweave.algorithms.block.functions import Functions, Values, over_rows, small, widened
from meshweave.algorithms.block.node_writer import NodeWriter
from meshweave.algorithms.block.nodes.kernel import Kernel, RankSizes
from meshweave.algorithms.block.nodes.record import Known, NodeRecord
from meshweave.algorithms.block.place import NodePlace
from meshweave.algorithms.block.problem import BlockProblem
from meshweave.algorithms.block.roles import Roles
from meshweave.describe.model.nodes import Linear
from meshweave.ir.program import Tensor
from meshweave.ir.program.meanings import Function, Meaning, Product, TensorPart
from meshweave.ir.work import matmul_work


class LinearRecord(NodeRecord[Linear]):
    """A product of an activation with a weight, and perhaps the addition of a bias."""

    node_type = Linear

    def tensors(self, at: NodePlace[Linear], roles: Roles) -> Iterator[Tensor]:
        """Yield the tensor of the product before a bias is added, in its global shape; nothing without a bias."""
        if at.node.bias:
            edge = at.tensor(at.node.out)
            yield Tensor(f"{edge.name}_product", edge.shape, edge.dtype)

    def meanings(self, at: NodePlace[Linear], roles: Roles) -> Iterator[Meaning]:
        """Yield the equation of the product and, if there is a bias, of its addition."""
        weight = at.own(at.node.weight)
        if not at.node.bias:
            yield Product(at.out, at.operand, weight)
            return
        product = f"{at.out}_product"
        yield Product(product, at.operand, weight)
        terms = TensorPart(product, at.element), TensorPart(at.own(at.node.bias_name), ("j",))
        yield Function(TensorPart(at.out, at.element), "add_bias", terms)

    def gradient_meanings(self, at: NodePlace[Linear], roles: Roles) -> Iterator[Meaning]:
        """Yield the equations of the node's term of the operand's gradient, and of weight and bias gradients."""
        weight, edge = at.own(at.node.weight), at.node.ins[0]
        yield Product(at.contribution_name(edge), at.arriving, weight, transpose_b=True)
        yield Product(f"D{weight}", at.operand, at.arriving, transpose_a=True)
        if at.node.bias:
            of_bias = TensorPart(f"D{at.own(at.node.bias_name)}", ("j",))
            ins = TensorPart(at.arriving, at.element), of_bias
            yield Function(of_bias, "bias_grad", ins, reduce="sum")

    def functions(self, node: Linear, problem: BlockProblem) -> Mapping[str, Callable[..., Any]]:
        """Return the functions add_bias(x, bias) and bias_grad(gradient of the result, sum so far), by name.

        bias_grad returns the sum so far plus the sum over tokens. They give small integers if `problem.exact`.
        """
        if problem.exact:
            return {"add_bias": lambda x, bias: small(x + bias), "bias_grad": _small_bias_grad}
        return widened({"add_bias": lambda x, bias: x + bias, "bias_grad": _bias_grad})

    def compute(self, at: NodePlace[Linear], known: Known, functions: Functions) -> None:
        """Compute the product in one process, with the bias added, and store it in `known`.

        `known` has whole arrays by tensor name.
        """
        out = known[at.operand] @ known[at.own(at.node.weight)]
        known[at.out] = functions["add_bias"](out, known[at.own(at.node.bias_name)]) if at.node.bias else out

    def compute_gradient(self, at: NodePlace[Linear], known: Known, functions: Functions) -> None:
        """Store in `known` the node's term of the operand's gradient, and the gradients of weight and bias.

        `known` has whole arrays by tensor name.
        """
        weight, arriving, x = at.own(at.node.weight), known[at.arriving], known[at.operand]
        known[at.contribution_name(at.node.ins[0])] = arriving @ known[weight].T
        known[f"D{weight}"] = x.reshape(-1, x.shape[-1]).T @ arriving.reshape(-1, arriving.shape[-1])
        if at.node.bias:
            bias = at.own(at.node.bias_name)
            known[f"D{bias}"] = functions["bias_grad"](arriving, 0 * known[bias])

    def kernels(self, at: NodePlace[Linear], roles: Roles, sizes: RankSizes) -> Iterator[Kernel]:
        """Yield the first rank's three products: forward, for the operand's gradient, and for the weight's."""
        node, dtype = at.node, sizes.problem.dtype
        tokens, weight = sizes.tokens(roles.operand(node.reads_residual)), roles.weight(node.reads_residual)
        k, n = sizes.features(node.operand, weight), sizes.features(node.result, weight)
        yield Kernel(matmul_work(tokens, n, k, dtype), "forward", sliced=2)
        yield Kernel(matmul_work(tokens, k, n, dtype), "backward", sliced=1)
        yield Kernel(matmul_work(k, n, tokens, dtype), "backward", sliced=0)

    def write(self, at: NodePlace[Linear], writer: NodeWriter) -> None:
        """Write the product, and after its reduction over ranks the addition of the bias."""
        out = writer.multiply(at)
        if at.node.bias:
            ins = (out, writer.stored[at.own(at.node.bias_name)])
            writer.writer.call("add_bias", (out,), ins, "elementwise", (writer.writer.elements(out),))

    def write_gradient(self, at: NodePlace[Linear], writer: NodeWriter) -> None:
        """Write the product for the gradient of the operand X, and later those for the weight and the bias.

        The product for the weight is passed to `NodeWriter.write_beside`, to overlap with communication. The sum
        over tokens for the bias is passed to `NodeWriter.postpone`, until the products of the group of nodes are
        written.
        """
        writer.multiply_back(at)
        if at.node.bias:
            arriving, bias = writer.arriving(at), at.own(at.node.bias_name)
            elements = (writer.writer.elements(arriving),)
            writer.postpone(
                lambda: writer.sum_tokens(bias, arriving, "bias_grad", (arriving,), "reduction", elements)
            )


def _bias_grad(dy: Values, so_far: Values) -> Values:
    return so_far + over_rows(dy)


def _small_bias_grad(dy: Values, so_far: Values) -> Values:
    return so_far + over_rows(small(dy))
