"""The dense reference of a block: its equations on whole arrays in numpy, without a program."""

from __future__ import annotations

from meshweave.algorithms.block.functions import functions_of
from meshweave.algorithms.block.halves import Half, halves_of
from meshweave.algorithms.block.problem import BlockProblem
from meshweave.algorithms.contract import Array, Arrays


def reference(problem: BlockProblem, inputs: Arrays) -> dict[str, Array]:
    """Return Z, and for training DX and the gradients of all weights, from X, DZ and the weights."""
    halves = [half for layer in range(problem.layers) for half in halves_of(problem, layer)]
    known = dict(inputs)
    for half in halves:
        _forward(half, known)
    outputs = {"Z": known["Z"]}
    if problem.is_training:
        for half in reversed(halves):
            _backward(half, known)
        weights = (name for half in halves for name in (half.gain, half.w_in, half.w_out))
        outputs |= {f"D{name}": known[f"D{name}"] for name in ("X", *weights)}
    return outputs


def _forward(half: Half, known: dict[str, Array]) -> None:
    functions = functions_of(half.problem)
    stream = known[half.stream]
    normal = known[half.normal] = functions.norm(stream, known[half.gain])
    inner = known[half.inner] = normal @ known[half.w_in]
    if half.is_attention:
        known[half.core], known[half.log_sums] = functions.attention(inner)
    else:
        known[half.core] = functions.activation(inner)
    known[half.result] = stream + known[half.core] @ known[half.w_out]


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
    of_normal = of_inner @ known[half.w_in].T
    gain = known[half.gain]
    known[f"D{half.gain}"] = functions.norm_weight_grad(of_normal, stream, 0 * gain)
    known[f"D{half.stream}"] = arriving + functions.norm_grad(of_normal, stream, gain)


def _weight_gradient(x: Array, dy: Array) -> Array:
    """Return the sum over tokens of the outer products of rows."""
    return x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1])
