"""N = norm(R): layer norm with a gain and a bias, or root-mean-square norm with a gain.

A norm comes in two forms. In one a call sees whole rows. In two steps, statistics of each row are sums over
features, which ranks that share the features add up; its gradient has sums of this kind as well. Eq. 2 of the ATP
paper leaves both out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from meshweave.algorithms.block.functions import Functions, Values, array_module, over_rows, small, widened
from meshweave.algorithms.block.node_writer import NodeWriter
from meshweave.algorithms.block.nodes.kernel import PARTS, Kernel, RankSizes
from meshweave.algorithms.block.nodes.record import Known, NodeRecord
from meshweave.algorithms.block.place import NodePlace
from meshweave.algorithms.block.problem import BlockProblem
from meshweave.algorithms.block.roles import Roles
from meshweave.describe.model.nodes import Norm
from meshweave.ir.program import Tensor
from meshweave.ir.program.meanings import Function, Meaning, TensorPart

EPSILON = 1e-5
"""What a norm adds to a variance before its root."""


class NormRecord(NodeRecord[Norm]):
    """A norm over the features of each token of the residual stream.

    If a mesh axis shards these features, a norm has two steps: sums over a rank's features (statistics), which are
    added up over ranks, and then the normalisation. The gradient of the input has two steps, too.
    """

    node_type = Norm

    def tensors(self, at: NodePlace[Norm], roles: Roles) -> Iterator[Tensor]:
        """Yield the tensors of sums over features, of a norm and of its gradient, in global shapes.

        They are (tokens, 2) for layer norm, else (tokens, 1). They are yielded also for a norm in one step.
        """
        for prefix in ("", "D"):
            name, shape = f"{prefix}{at.own(at.node.statistics)}", (*at.layer.tokens, at.node.rows)
            yield Tensor(name, shape, at.problem.statistics_dtype)

    def meanings(self, at: NodePlace[Norm], roles: Roles) -> Iterator[Meaning]:
        """Yield the equations of the norm: in one step, or in two if an axis shards the features."""
        gain = at.own(at.node.gain)
        if not roles.two_step_norms:
            whole = TensorPart(at.operand, at.row), TensorPart(gain, (None, None))
            yield Function(TensorPart(at.out, at.row), at.fn("norm"), whole)
            return
        element, sums = TensorPart(at.operand, at.element), TensorPart(at.own(at.node.statistics), at.row)
        yield Function(sums, at.fn("statistics"), (element,), reduce="sum")
        ins = (element, sums, TensorPart(gain, (None, "j")))
        yield Function(TensorPart(at.out, at.element), at.fn("normalize"), ins)

    def gradient_meanings(self, at: NodePlace[Norm], roles: Roles) -> Iterator[Meaning]:
        """Yield the equations of the node's term of the input's gradient, and of the parameters' gradient."""
        two_steps, name = roles.two_step_norms, at.own(at.node.statistics)
        dims = at.element if two_steps else at.row
        gain = TensorPart(at.own(at.node.gain), (None, "j" if two_steps else None))
        ins = TensorPart(at.arriving, dims), TensorPart(at.operand, dims)
        out = TensorPart(at.contribution_name(at.node.ins[0]), dims)
        of_gain = TensorPart(f"D{at.own(at.node.gain)}", (None, dims[-1]))
        if not two_steps:
            yield Function(out, at.fn("norm_grad"), (*ins, gain))
            yield Function(of_gain, at.fn("norm_weight_grad"), (*ins, of_gain), reduce="sum")
            return
        statistics, sums = TensorPart(name, at.row), TensorPart(f"D{name}", at.row)
        yield Function(sums, at.fn("norm_grad_sums"), (*ins, statistics, gain), reduce="sum")
        yield Function(out, at.fn("normalize_grad"), (*ins, statistics, sums, gain))
        yield Function(of_gain, at.fn("normalize_weight_grad"), (*ins, statistics, of_gain), reduce="sum")

    def functions(self, node: Norm, problem: BlockProblem) -> Mapping[str, Callable[..., Any]]:
        """Return the functions of the norm and its gradients, by name, for one step and for two.

        They give small integers if the problem is `exact`.
        """
        return IntegerNorm(node).table() if problem.exact else widened(RealNorm(node).table())

    def compute(self, at: NodePlace[Norm], known: Known, functions: Functions) -> None:
        """Compute the normalised rows, with gain and bias, in one process, and store them in `known`.

        `known` has whole arrays by tensor name.
        """
        known[at.out] = functions[at.fn("norm")](known[at.operand], known[at.own(at.node.gain)])

    def compute_gradient(self, at: NodePlace[Norm], known: Known, functions: Functions) -> None:
        """Store in `known` the node's term of the input's gradient, and the parameters' gradient.

        `known` has whole arrays by tensor name.
        """
        gain, ins = known[at.own(at.node.gain)], (known[at.arriving], known[at.operand])
        known[at.contribution_name(at.node.ins[0])] = functions[at.fn("norm_grad")](*ins, gain)
        known[f"D{at.own(at.node.gain)}"] = functions[at.fn("norm_weight_grad")](*ins, 0 * gain)

    def kernels(self, at: NodePlace[Norm], roles: Roles, sizes: RankSizes) -> Iterator[Kernel]:
        """Yield the first rank's kernels of the norm and its gradients; in two steps, also those of the sums."""
        shape = sizes.tokens(roles.residual), sizes.features(at.node.features, roles.residual)
        for (part, name), passes in zip(PARTS, (2, 3), strict=True):
            yield sizes.streamed("norm", shape, passes, part, name)
            if roles.two_step_norms:
                yield sizes.streamed("reduction", (shape[0] * shape[1],), passes - 1, part)
        yield sizes.streamed("norm", shape, 2, "backward", "weight_grad")

    def write(self, at: NodePlace[Norm], writer: NodeWriter) -> None:
        """Write the norm; if an axis shards the features, in two steps with an all-reduce of sums between them."""
        stream, gain, out = writer.edge(at), writer.stored[at.own(at.node.gain)], writer.out(at)
        ins, fn = (stream, gain), "norm"
        if writer.roles.two_step_norms:
            name = at.own(at.node.statistics)
            sums = writer.row_sums(name, at.node.rows, at.fn("statistics"), (stream,))
            ins, fn = (stream, sums, gain), "normalize"  # type: ignore[assignment]
        writer.writer.call(at.fn(fn), (out,), ins, "norm", writer.rows_and_features(stream))

    def write_gradient(self, at: NodePlace[Norm], writer: NodeWriter) -> None:
        """Write what was postponed, and the input's gradient.

        The gradient of the parameters is passed to `NodeWriter.write_beside`, to overlap with communication.
        """
        writer.write_postponed()
        edge, arriving, stream = at.node.ins[0], writer.arriving(at), writer.edge(at)
        gain = writer.stored[at.own(at.node.gain)]
        shape, fn, ins = writer.rows_and_features(stream), "norm_grad", (arriving, stream, gain)
        of_gain, read = "norm_weight_grad", (arriving, stream)

        def gain_gradient() -> None:
            writer.sum_tokens(at.own(at.node.gain), arriving, at.fn(of_gain), read, "norm", shape)

        out = writer.contribution(at, edge)
        if writer.roles.two_step_norms:
            name = at.own(at.node.statistics)
            read, of_gain = (*read, writer.stored[name]), "normalize_weight_grad"  # type: ignore[assignment]
            sums = writer.row_sums(f"D{name}", at.node.rows, at.fn("norm_grad_sums"), (*read, gain))
            writer.write_beside(gain_gradient)
            fn, ins = "normalize_grad", (*read, sums, gain)  # type: ignore[assignment]
        writer.writer.call(at.fn(fn), (out,), ins, "norm", shape, "input_grad")
        writer.sum_contributions(at, edge)
        if not writer.roles.two_step_norms:
            writer.write_beside(gain_gradient)


class NormFunctions(ABC):
    """The functions of a norm over features, the last dim of `x` (..., features); a row is one token's features.

    Arguments `statistics` and `sums` are complete: they are over all features of a token. `gain` has the
    parameters: (1, features), or with a bias, which is its second row, (2, features). `rows` is 1 or 2
    accordingly.
    """

    def __init__(self, node: Norm) -> None:
        self.hidden, self.rows = node.features.size, node.rows

    def table(self) -> dict[str, Callable[..., Any]]:
        """Return the functions by the names of the methods here: those of whole rows, and those of two steps."""
        names = ("statistics", "normalize", "norm_grad_sums", "normalize_grad", "normalize_weight_grad")
        own = {name: getattr(self, name) for name in names}
        return {
            **own,
            "norm": self.norm,
            "norm_grad": self.norm_grad,
            "norm_weight_grad": self.norm_weight_grad,
        }

    @abstractmethod
    def statistics(self, x: Values) -> Values:
        """Return the sums over the features of `x` that the norm needs, (..., `rows`).

        If ranks have parts of the features, their sums add up to those of all features.
        """

    @abstractmethod
    def normalize(self, x: Values, statistics: Values, gain: Values) -> Values:
        """Return the features `x` normalised, with gain and bias; `statistics` are over whole rows."""

    @abstractmethod
    def norm_grad_sums(self, dy: Values, x: Values, statistics: Values, gain: Values) -> Values:
        """Return the sums over the features of `x` that the gradient needs, (..., `rows`).

        If ranks have parts of the features, their sums add up to those of all features. `dy` is the gradient of
        the result, in the shape of `x`.
        """

    @abstractmethod
    def normalize_grad(self, dy: Values, x: Values, statistics: Values, sums: Values, gain: Values) -> Values:
        """Return the gradient with respect to the features `x`; `statistics` and `sums` are over whole rows."""

    @abstractmethod
    def normalize_weight_grad(self, dy: Values, x: Values, statistics: Values, so_far: Values) -> Values:
        """Return `so_far` plus the gradient of the parameters that the tokens `x` add, (`rows`, features).

        `dy` is the gradient of the result; `statistics` are over whole rows.
        """

    def norm(self, x: Values, gain: Values) -> Values:
        """Return whole rows `x` normalised, with gain and bias."""
        return self.normalize(x, self.statistics(x), gain)

    def norm_grad(self, dy: Values, x: Values, gain: Values) -> Values:
        """Return the gradient with respect to whole rows `x`, from that of the result, `dy`."""
        statistics = self.statistics(x)
        return self.normalize_grad(dy, x, statistics, self.norm_grad_sums(dy, x, statistics, gain), gain)

    def norm_weight_grad(self, dy: Values, x: Values, so_far: Values) -> Values:
        """Return `so_far` plus the gradient of the parameters, (`rows`, features), that whole rows `x` add."""
        return self.normalize_weight_grad(dy, x, self.statistics(x), so_far)


class RealNorm(NormFunctions):
    """A layer norm (if it has a bias) or root-mean-square norm as models compute it.

    Whole rows are centred before they are summed. In two steps a variance is the mean square less the squared
    mean, and at least 0: where the squared mean is far greater than the variance, last digits are lost.
    """

    def norm(self, x: Values, gain: Values) -> Values:
        """Return whole rows `x` normalised, with gain and bias."""
        return super().norm(self._moved(x), gain)

    def norm_grad(self, dy: Values, x: Values, gain: Values) -> Values:
        """Return the gradient with respect to whole rows `x`, from that of the result, `dy`."""
        return super().norm_grad(dy, self._moved(x), gain)

    def norm_weight_grad(self, dy: Values, x: Values, so_far: Values) -> Values:
        """Return `so_far` plus the gradient of the parameters, (`rows`, features), that whole rows `x` add."""
        return super().norm_weight_grad(dy, self._moved(x), so_far)

    def _moved(self, x: Values) -> Values:
        """Return rows less their means, which a layer norm takes away anyway; of another norm as they are."""
        return x if self.rows == 1 else x - x.sum(-1)[..., None] / self.hidden

    def _centred(self, x: Values, statistics: Values) -> tuple[Values, Values]:
        """Return the features before gain and bias, and the reciprocal of their deviation."""
        means = statistics / self.hidden
        if self.rows == 1:
            scale = (means + EPSILON) ** -0.5
            return x * scale, scale
        mean = means[..., :1]
        scale = ((means[..., 1:] - mean * mean).clip(0) + EPSILON) ** -0.5
        return (x - mean) * scale, scale

    def statistics(self, x: Values) -> Values:
        """Return the sums of squares over features, (..., 1); with a bias (..., 2), with sums of x before them."""
        squares = (x * x).sum(-1)[..., None]
        if self.rows == 1:
            return squares
        return array_module(x).concatenate((x.sum(-1)[..., None], squares), -1)

    def normalize(self, x: Values, statistics: Values, gain: Values) -> Values:
        """Return (x - mean) / deviation * gain + bias, or x / root mean square * gain."""
        scaled = self._centred(x, statistics)[0] * gain[0]
        return scaled if self.rows == 1 else scaled + gain[1]

    def norm_grad_sums(self, dy: Values, x: Values, statistics: Values, gain: Values) -> Values:
        """Return the sums over features of dy * gain * normalised x, (..., 1).

        With a bias the result is (..., 2), with sums of dy * gain before them.
        """
        arriving = dy * gain[0]
        along = (arriving * self._centred(x, statistics)[0]).sum(-1)[..., None]
        if self.rows == 1:
            return along
        return array_module(x).concatenate((arriving.sum(-1)[..., None], along), -1)

    def normalize_grad(self, dy: Values, x: Values, statistics: Values, sums: Values, gain: Values) -> Values:
        """Return the gradient with respect to `x` of a layer norm or root-mean-square norm, in its shape."""
        centred, scale = self._centred(x, statistics)
        means = sums / self.hidden
        change = dy * gain[0] - centred * means[..., -1:]
        return scale * (change if self.rows == 1 else change - means[..., :1])

    def normalize_weight_grad(self, dy: Values, x: Values, statistics: Values, so_far: Values) -> Values:
        """Return `so_far`, (1, features), plus sums over tokens of dy * normalised x, the gradient of the gain.

        With a bias the result is (2, features); its second row has sums over tokens of dy, the bias's gradient.
        """
        of_gain = over_rows(dy * self._centred(x, statistics)[0])
        rows = (of_gain,) if self.rows == 1 else (of_gain, over_rows(dy))
        return so_far + array_module(x).stack(rows)


class IntegerNorm(NormFunctions):
    """Functions that give small integers in place of a norm, so that results compare with `==`.

    They depend on the same elements as a norm, and have its shapes. Their "gradients" are no derivatives.
    """

    def statistics(self, x: Values) -> Values:
        """Return sums of small integers over the features, (..., `rows`), in place of a norm's sums."""
        kept = small(x)
        return array_module(x).stack([row.sum(-1) for row in (kept, kept * kept)[: self.rows]], -1)

    def normalize(self, x: Values, statistics: Values, gain: Values) -> Values:
        """Return small integers in place of the normalised features."""
        scaled = small(x + statistics.sum(-1)[..., None]) * gain[0]
        return small(scaled if self.rows == 1 else scaled + gain[1])

    def norm_grad_sums(self, dy: Values, x: Values, statistics: Values, gain: Values) -> Values:
        """Return sums of small integers over the features, (..., `rows`), in place of a norm gradient's sums."""
        sums = small(dy * gain[0] + x), small(dy - x + statistics[..., :1])
        return array_module(x).stack([row.sum(-1) for row in sums[: self.rows]], -1)

    def normalize_grad(self, dy: Values, x: Values, statistics: Values, sums: Values, gain: Values) -> Values:
        """Return small integers in place of the gradient of a norm with respect to `x`, in the shape of `x`."""
        of_row = statistics.sum(-1)[..., None] + sums.sum(-1)[..., None]
        return small(dy * gain[0] + x * of_row)

    def normalize_weight_grad(self, dy: Values, x: Values, statistics: Values, so_far: Values) -> Values:
        """Return `so_far`, (rows, features), plus small integers in place of the gradient of gain and bias."""
        of_gain = over_rows(small(dy * small(x + statistics[..., :1])))
        rows = (of_gain, over_rows(small(dy)))[: self.rows]
        return so_far + array_module(x).stack(rows)
