"""The dense reference of a block: its equations on whole arrays in numpy, without a program."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshweave.algorithms.block.function_table import functions_of
from meshweave.algorithms.block.halves import Half, halves_of
from meshweave.algorithms.block.problem import BlockProblem
from meshweave.algorithms.contract import Array, Arrays


def reference(problem: BlockProblem, inputs: Arrays) -> dict[str, Array]:
    """Return Z, and for training DX and the gradients of all weights; with a vocabulary LOSS and no Z and DX."""
    halves = [half for layer in range(problem.layers) for half in halves_of(problem, layer)]
    known = dict(inputs)
    ends = _Ends(problem, known) if problem.vocabulary else None
    if ends is not None:
        ends.before()
    for half in halves:
        _forward(half, known)
    if ends is not None:
        ends.after()
    names = ["LOSS"] if ends is not None else ["Z"]
    if problem.training:
        if ends is not None:
            ends.before_backward()
        for half in reversed(halves):
            _backward(half, known)
        if ends is not None:
            ends.after_backward()
        names += ["DE", "DGN", "DWV"] if ends is not None else ["DX"]
        names += [f"D{name}" for half in halves for name in (half.gain, half.w_in, half.w_out)]
        if problem.biases:
            names += [f"D{bias}" for half in halves for bias, *_ in half.biases]
    return {name: known[name] for name in names}


@dataclass
class _Ends:
    """The embedding and the loss, on all tensors that are known so far."""

    problem: BlockProblem
    known: dict[str, Array]

    def before(self) -> None:
        known = self.known
        known["X"] = functions_of(self.problem).embed(known["TOKENS"], known["IDS_IN"], known["E"])

    def after(self) -> None:
        functions, known = functions_of(self.problem), self.known
        known["NN"] = functions.norm(known["Z"], known["GN"])
        logits = known["LOGITS"] = known["NN"] @ known["WV"]
        greatest = known["greatest"] = functions.row_max(logits)
        sums = functions.softmax_sums(logits, greatest, known["TARGETS"], known["IDS_OUT"])
        known["sums"], known["LOSS"] = sums, functions.loss(sums, greatest, np.zeros(1, sums.dtype))

    def before_backward(self) -> None:
        functions, known = functions_of(self.problem), self.known
        names = ("LOGITS", "greatest", "sums", "TARGETS", "IDS_OUT")
        of_logits = functions.loss_grad(*(known[name] for name in names))
        known["DWV"] = _weight_gradient(known["NN"], of_logits)
        of_normal = of_logits @ known["WV"].T
        known["DGN"] = functions.norm_weight_grad(of_normal, known["Z"], 0 * known["GN"])
        known["DZ"] = functions.norm_grad(of_normal, known["Z"], known["GN"])

    def after_backward(self) -> None:
        known, nothing = self.known, 0 * self.known["E"]
        known["DE"] = functions_of(self.problem).embed_grad(
            known["TOKENS"], known["IDS_IN"], known["DX"], nothing
        )


def _forward(half: Half, known: dict[str, Array]) -> None:
    functions = functions_of(half.problem)
    stream = known[half.stream]
    normal = known[half.normal] = functions.norm(stream, known[half.gain])
    inner = known[half.inner] = _biased(half, 0, normal @ known[half.w_in], known)
    if half.is_attention:
        known[half.core], known[half.log_sums] = functions.attention(inner)
    else:
        known[half.core] = functions.activation(inner)
    known[half.result] = stream + _biased(half, 1, known[half.core] @ known[half.w_out], known)


def _biased(half: Half, number: int, product: Array, known: dict[str, Array]) -> Array:
    """Return the first or second product of a half with its bias, if it has one."""
    if not half.problem.biases:
        return product
    biased: Array = functions_of(half.problem).add_bias(product, known[half.biases[number][0]])
    return biased


def _backward(half: Half, known: dict[str, Array]) -> None:
    functions = functions_of(half.problem)
    arriving, stream, inner = known[f"D{half.result}"], known[half.stream], known[half.inner]
    of_core = arriving @ known[half.w_out].T
    known[f"D{half.w_out}"] = _weight_gradient(known[half.core], arriving)
    if half.is_attention:
        of_inner = functions.attention_grad(of_core, inner, known[half.core], known[half.log_sums])
    else:
        of_inner = functions.activation_grad(of_core, inner)
    known[f"D{half.w_in}"] = _weight_gradient(known[half.normal], of_inner)
    if half.problem.biases:
        for (bias, *_), dy in zip(half.biases, (of_inner, arriving), strict=True):
            known[f"D{bias}"] = functions.bias_grad(dy, 0 * known[bias])
    of_normal = of_inner @ known[half.w_in].T
    gain = known[half.gain]
    known[f"D{half.gain}"] = functions.norm_weight_grad(of_normal, stream, 0 * gain)
    known[f"D{half.stream}"] = arriving + functions.norm_grad(of_normal, stream, gain)


def _weight_gradient(x: Array, dy: Array) -> Array:
    """Return the sum over tokens of the outer products of rows."""
    return x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1])
