"""The dense reference of a block: its equations on whole arrays in numpy, without a program."""

from __future__ import annotations

import numpy as np

from meshweave.algorithms.block.folds import compute, compute_gradients, functions_of
from meshweave.algorithms.block.place import head_of, layers_of
from meshweave.algorithms.block.problem import BlockProblem
from meshweave.algorithms.contract import Array, Arrays


def reference(problem: BlockProblem, inputs: Arrays) -> dict[str, Array]:
    """Return the whole outputs of a problem by name, computed by numpy in one process from whole `inputs`.

    They are Z, and for training DX and the gradients of all weights; with a vocabulary LOSS in place of Z, and
    DE in place of DX.

    Raises:
        UnsupportedError: a layer has experts, latent attention or other nodes without functions.
    """
    known, functions, layers = dict(inputs), functions_of(problem), layers_of(problem)
    head = head_of(problem) if problem.vocabulary else None
    names = ["Z"] if head is None else ["LOSS"]
    if head is not None:
        known["X"] = functions["embed"](known["TOKENS"], known["IDS_IN"], known["E"])
    for layer in layers:
        compute(layer, known, functions)
    if head is not None:
        compute(head, known, functions)
        logits, targets = known["LOGITS"], (known["TARGETS"], known["IDS_OUT"])
        greatest = functions["row_max"](logits)
        sums = functions["softmax_sums"](logits, greatest, *targets)
        known["LOSS"] = functions["loss"](sums, greatest, np.zeros(1, sums.dtype))
    if not problem.training:
        return {name: known[name] for name in names}
    if head is not None:
        known["DLOGITS"] = functions["loss_grad"](logits, greatest, sums, *targets)
        compute_gradients(head, known, functions)
    for layer in reversed(layers):
        compute_gradients(layer, known, functions)
    if head is not None:
        ends = known["TOKENS"], known["IDS_IN"], known["DX"], 0 * known["E"]
        known["DE"] = functions["embed_grad"](*ends)
    names += ["DX"] if head is None else ["DE"]
    parameters = (each for layer in (*layers, *([head] if head else [])) for each in layer.parameters())
    names += [f"D{parameter.name}" for parameter in parameters]
    return {name: known[name] for name in names}
