"""The two halves of a layer, attention and feed-forward: names of their tensors, widths, and their equations.

Both halves are out = in + core(norm(in) W_in) W_out. The equations stand here once, for all strategies:

    N = norm(R)    Y = N W_in    A = core(Y)    P = A W_out    R' = R + P

and backward, where D names gradients and T transposes:

    DA = DR' W_out T    DW_out = A T DR'    DY = core'(DA, Y, ...)    DN = DY W_in T    DW_in = N T DY
    DI = norm'(DN, R)   DR = DR' + DI

A norm comes in two forms. In one a call sees whole rows. In two steps, statistics of each row are sums over
features, which ranks that share the features add up; its gradient has sums of this kind as well. Eq. 2 of the ATP
paper leaves both out.

With biases, Y = N W_in + b_in and P = A W_out + b_out. Their gradients are sums over tokens of DY and DR'.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshweave.algorithms.block.problem import BlockProblem
from meshweave.algorithms.block.roles import Dim
from meshweave.ir.program import Tensor
from meshweave.ir.program.meanings import Function, Meaning, PositionNames, Product, Same, Sum, TensorPart

GROUP: PositionNames = ("b", None, "g", None)
"""All positions of a group of heads, of a tensor (batch, sequence, groups, width)."""


@dataclass(frozen=True)
class Half:
    """One half of a layer; every name ends in the number of the layer.

    Attributes:
        stream, result: the residual before and after.
        gain, statistics, normal: parameters, statistics and result of the norm.
        w_in, inner, core, w_out, product: the tensors Y, A, P of the module docstring and the two weights.
        units: what is dealt out to ranks that share the inner features: groups of heads, or features.
        in_unit, out_unit: columns of W_in and rows of W_out per unit.
        is_flat: whether tokens are one dim, batch times sequence, and not two.
    """

    problem: BlockProblem
    is_attention: bool
    layer: int
    stream: str
    result: str
    gain: str
    statistics: str
    normal: str
    w_in: str
    inner: str
    core: str
    w_out: str
    product: str
    units: int
    in_unit: int
    out_unit: int
    is_flat: bool

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return the sizes of the dims of tokens."""
        return token_sizes(self.problem, self.is_flat)

    @property
    def token_names(self) -> PositionNames:
        """Return names for the positions of tokens."""
        return ("i",) if self.is_flat else ("b", "s")

    @property
    def _row(self) -> PositionNames:
        return (*self.token_names, None)

    @property
    def _element(self) -> PositionNames:
        return (*self.token_names, "j")

    @property
    def _unit(self) -> PositionNames:
        return (*self.token_names, "j", None)

    @property
    def biases(self) -> tuple[tuple[str, str, str], ...]:
        """Return per bias its name, that of the product before it, and that of the gradient of their sum."""
        return (
            (_bias_of(self.w_in), f"{self.inner}_product", f"D{self.inner}"),
            (_bias_of(self.w_out), f"{self.product}_product", f"D{self.result}"),
        )

    @property
    def log_sums(self) -> str:
        """Return the name of the logarithms of the sums of softmax, which attention keeps for its gradient."""
        return f"L{self.layer}"

    @property
    def norm_gradient_sums(self) -> str:
        """Return the name of the sums over features that the gradient of the norm needs."""
        return f"D{self.statistics}"

    @property
    def norm_gradient(self) -> str:
        """Return the name of what the gradient of the norm adds to that of the residual."""
        return f"DI{self.statistics[1:]}"

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of the forward part but for the residual before; one shape for every strategy."""
        p, tokens = self.problem, self.tokens
        yield Tensor(self.gain, (p.norm_rows, p.hidden), p.dtype)
        yield Tensor(self.w_in, (p.hidden, self.units * self.in_unit), p.dtype)
        yield Tensor(self.w_out, (self.units * self.out_unit, p.hidden), p.dtype)
        yield Tensor(self.statistics, (*tokens, p.norm_rows), p.statistics_dtype)
        yield Tensor(self.normal, (*tokens, p.hidden), p.dtype)
        yield Tensor(self.inner, (*tokens, self.units * self.in_unit), p.dtype)
        of_units = (p.batch, p.sequence) if self.is_attention else tokens
        yield Tensor(f"{self.inner}_units", (*of_units, self.units, self.in_unit), p.dtype)
        yield Tensor(self.core, (*tokens, self.units * self.out_unit), p.dtype)
        if self.is_attention:
            group = p.queries_per_group
            yield Tensor(f"{self.core}_units", (*of_units, self.units, self.out_unit), p.dtype)
            yield Tensor(self.log_sums, (*tokens, self.units * group), p.statistics_dtype)
            yield Tensor(f"{self.log_sums}_units", (*of_units, self.units, group), p.statistics_dtype)
        if p.biases:
            widths = self.units * self.in_unit, p.hidden
            for (bias, product, _), width in zip(self.biases, widths, strict=True):
                yield Tensor(bias, (width,), p.dtype)
                yield Tensor(product, (*tokens, width), p.dtype)
        yield Tensor(self.product, (*tokens, p.hidden), p.dtype)
        yield Tensor(self.result, (*tokens, p.hidden), p.dtype)

    def gradient_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of the backward part but for the gradient that arrives."""
        p, tokens = self.problem, self.tokens
        same = {tensor.name: tensor for tensor in self.tensors()}
        names = [self.core, self.inner, f"{self.inner}_units", self.normal, self.w_in, self.w_out, self.gain]
        if self.is_attention:
            names.append(f"{self.core}_units")
        if self.problem.biases:
            names += [bias for bias, *_ in self.biases]
        for name in names:
            yield Tensor(f"D{name}", same[name].shape, same[name].dtype)
        yield Tensor(self.norm_gradient_sums, (*tokens, p.norm_rows), p.statistics_dtype)
        yield Tensor(self.norm_gradient, (*tokens, p.hidden), p.dtype)
        yield Tensor(f"D{self.stream}", (*tokens, p.hidden), p.dtype)

    # --- equations ----------------------------------------------------------------------------------------------

    def meanings(self, two_steps: bool, core: Iterator[Meaning] | None = None) -> Iterator[Meaning]:
        """Yield the equations of the forward part, with a norm in one step or two, and its core as given."""
        yield from self.norm_meanings(two_steps)
        yield from self._product(0, self.inner, self.normal, self.w_in)
        yield Same(f"{self.inner}_units", self.inner)
        yield from self._core() if core is None else core
        yield from self._product(1, self.product, self.core, self.w_out)
        yield Sum(self.result, (self.stream, self.product))

    def _product(self, number: int, out: str, operand: str, weight: str) -> Iterator[Meaning]:
        """Yield the equations of a product, and of its bias if it has one."""
        if not self.problem.biases:
            yield Product(out, operand, weight)
            return
        bias, product, _ = self.biases[number]
        yield Product(product, operand, weight)
        terms = TensorPart(product, self._element), TensorPart(bias, ("j",))
        yield Function(TensorPart(out, self._element), "add_bias", terms)

    def norm_meanings(self, two_steps: bool) -> Iterator[Meaning]:
        """Yield the equations of the norm."""
        stream, gain = self.stream, self.gain
        if two_steps:
            element, sums = TensorPart(stream, self._element), TensorPart(self.statistics, self._row)
            yield Function(sums, "statistics", (element,), reduce="sum")
            yield Function(
                TensorPart(self.normal, self._element),
                "normalize",
                (element, sums, TensorPart(gain, (None, "j"))),
            )
        else:
            ins = (TensorPart(stream, self._row), TensorPart(gain, (None, None)))
            yield Function(TensorPart(self.normal, self._row), "norm", ins)

    def _core(self) -> Iterator[Meaning]:
        if not self.is_attention:
            unit = TensorPart(f"{self.inner}_units", self._unit)
            yield Function(TensorPart(self.core, self._element), "activation", (unit,))
            return
        group = TensorPart(f"{self.inner}_units", GROUP)
        for number, name in enumerate((self.core, self.log_sums)):
            yield Function(TensorPart(f"{name}_units", GROUP), "attention", (group,), output=number)
            yield Same(name, f"{name}_units")

    def gradient_meanings(self, two_steps: bool, core: Iterator[Meaning] | None = None) -> Iterator[Meaning]:
        """Yield the equations of the backward part; the arguments are those of `meanings`."""
        arriving = f"D{self.result}"
        yield Product(f"D{self.core}", arriving, self.w_out, transpose_b=True)
        yield Product(f"D{self.w_out}", self.core, arriving, transpose_a=True)
        yield from self._core_gradient() if core is None else core
        yield Product(f"D{self.normal}", f"D{self.inner}", self.w_in, transpose_b=True)
        yield Product(f"D{self.w_in}", self.normal, f"D{self.inner}", transpose_a=True)
        for bias, _, arriving_there in self.biases if self.problem.biases else ():
            of_bias = TensorPart(f"D{bias}", ("j",))
            ins = TensorPart(arriving_there, self._element), of_bias
            yield Function(of_bias, "bias_grad", ins, reduce="sum")
        yield from self.norm_gradient_meanings(two_steps)
        yield Sum(f"D{self.stream}", (arriving, self.norm_gradient))

    def _core_gradient(self) -> Iterator[Meaning]:
        units = f"D{self.inner}_units"
        if self.is_attention:
            names = (f"D{self.core}", self.inner, self.core, self.log_sums)
            yield Same(f"D{self.core}_units", f"D{self.core}")
            ins = tuple(TensorPart(f"{name}_units", GROUP) for name in names)
            yield Function(TensorPart(units, GROUP), "attention_grad", ins)
        else:
            unit = self._unit
            ins = (TensorPart(f"D{self.core}", self._element), TensorPart(f"{self.inner}_units", unit))
            yield Function(TensorPart(units, unit), "activation_grad", ins)
        yield Same(f"D{self.inner}", units)

    def norm_gradient_meanings(self, two_steps: bool) -> Iterator[Meaning]:
        """Yield the equations of the gradient of the norm."""
        normal, gain = f"D{self.normal}", TensorPart(self.gain, (None, "j" if two_steps else None))
        dims = self._element if two_steps else self._row
        ins = TensorPart(normal, dims), TensorPart(self.stream, dims)
        out = TensorPart(self.norm_gradient, dims)
        of_gain = TensorPart(f"D{self.gain}", (None, dims[-1]))
        if not two_steps:
            yield Function(out, "norm_grad", (*ins, gain))
            yield Function(of_gain, "norm_weight_grad", (*ins, of_gain), reduce="sum")
            return
        statistics, sums = (
            TensorPart(self.statistics, self._row),
            TensorPart(self.norm_gradient_sums, self._row),
        )
        yield Function(sums, "norm_grad_sums", (*ins, statistics, gain), reduce="sum")
        yield Function(out, "normalize_grad", (*ins, statistics, sums, gain))
        yield Function(of_gain, "normalize_weight_grad", (*ins, statistics, of_gain), reduce="sum")


@dataclass(frozen=True)
class Site:
    """One of the two products of a half, with its gradients."""

    half: Half
    is_first: bool

    @property
    def weight(self) -> str:
        """Return the name of the weight."""
        return self.half.w_in if self.is_first else self.half.w_out

    @property
    def bias(self) -> str:
        """Return the name of the bias."""
        return _bias_of(self.weight)

    @property
    def operand(self) -> str:
        """Return the name of what is multiplied by the weight."""
        return self.half.normal if self.is_first else self.half.core

    @property
    def k(self) -> Dim:
        """Return the dim over which the product sums."""
        return "hidden" if self.is_first else "inner"

    @property
    def other_k(self) -> Dim:
        """Return the dim over which the gradient of the operand sums."""
        return "inner" if self.is_first else "hidden"


def _bias_of(weight: str) -> str:
    """Return the name of the bias that belongs to a weight: BQKV0 to WQKV0."""
    return f"B{weight[1:]}"


def token_sizes(problem: BlockProblem, is_flat: bool) -> tuple[int, ...]:
    """Return the sizes of the dims of tokens: batch and sequence, or both as one."""
    return (problem.batch * problem.sequence,) if is_flat else (problem.batch, problem.sequence)


def halves_of(problem: BlockProblem, layer: int, is_flat: bool = False) -> tuple[Half, Half]:
    """Return attention and feed-forward of a layer. The residual is X first, then M0, X1, M1, ..., and Z last."""
    start = "X" if layer == 0 else f"X{layer}"
    end = "Z" if layer == problem.layers - 1 else f"X{layer + 1}"
    r, d = problem.queries_per_group, problem.head_dim
    attention = Half(
        problem, True, layer, start, f"M{layer}",
        f"GA{layer}", f"SA{layer}", f"NA{layer}",
        f"WQKV{layer}", f"QKV{layer}", f"A{layer}", f"WO{layer}", f"O{layer}",
        problem.kv_heads, problem.group_width, r * d, is_flat,
    )  # fmt: skip
    feed_forward = Half(
        problem, False, layer, f"M{layer}", end,
        f"GF{layer}", f"SF{layer}", f"NF{layer}",
        f"W1_{layer}", f"Y{layer}", f"H{layer}", f"W2_{layer}", f"F{layer}",
        problem.ffn, problem.gates, 1, is_flat,
    )  # fmt: skip
    return attention, feed_forward


def halves_of_layers(problem: BlockProblem, is_flat: bool = False) -> list[Half]:
    """Return the halves of all layers in the order of the forward part."""
    return [half for layer in range(problem.layers) for half in halves_of(problem, layer, is_flat)]
