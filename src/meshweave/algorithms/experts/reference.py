"""A layer of experts in one process: a loop over experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshweave.algorithms.contract import number_dtype
from meshweave.algorithms.experts.functions import layer_functions
from meshweave.algorithms.experts.problem import ExpertsProblem
from meshweave.execute.numpy import poisoned

Arrays = Mapping[str, NDArray[Any]]


def layer_reference(problem: ExpertsProblem, inputs: Arrays) -> dict[str, NDArray[Any]]:
    """Return the outputs of a layer of experts, computed in one process, expert by expert.

    Args:
        inputs: whole arrays by name: X, Choices, Gates, W1, W2, and dY where `problem.part` is "training".

    Returns:
        By name Y, in the shape of X, and for training dX, dGates, dW1 and dW2, each in the shape of its input.
    """
    functions = layer_functions(problem.activation)
    x, choices, gates, w1, w2 = (inputs[name] for name in ("X", "Choices", "Gates", "W1", "W2"))
    out = {"Y": np.zeros_like(x)}
    is_training = problem.part == "training"
    if is_training:
        out |= {f"d{name}": np.zeros_like(inputs[name]) for name in ("X", "Gates", "W1", "W2")}
    for expert in range(problem.num_experts):
        tokens, place = np.nonzero(choices == expert)
        gate, rows = gates[tokens, place][:, None], x[tokens]
        h = rows @ w1[expert]
        a = functions["activate"](h)
        z = a @ w2[expert]
        np.add.at(out["Y"], tokens, gate * z)
        if is_training:
            dy = inputs["dY"][tokens]
            out["dGates"][tokens, place] = (z * dy).sum(-1)
            dz = gate * dy
            out["dW2"][expert] = a.T @ dz
            dh = functions["activate_gradient"](h, dz @ w2[expert].T)
            out["dW1"][expert] = rows.T @ dh
            np.add.at(out["dX"], tokens, dh @ w1[expert].T)
    return out


def cells_reference(
    problem: ExpertsProblem, inputs: Arrays, source_order: Sequence[int]
) -> dict[str, NDArray[Any]]:
    """Return the output of a dispatch or a combine alone, by name: {"Q0": rows} or {"Y": (tokens, hidden)}.

    Rows at experts, Q0 or the input Z0 of a combine, are (1, ranks * most, hidden): the rows of one rank after
    another, each padded to `most`, the most rows of any rank (in Q0 with NaN, if floats). On a rank they are
    ordered by expert, then source rank in `source_order`, then token.

    Args:
        inputs: whole arrays by name: Choices, and X for a dispatch, dY and Gates for a weighted dispatch, Z0 and
            Gates for a combine.
        source_order: positions on the mesh of all ranks.
    """
    choices, dtype = inputs["Choices"], number_dtype(problem.dtype)
    sources = np.repeat(np.arange(problem.num_ranks), problem.tokens)
    listed: list[list[tuple[int, int]]] = [[] for _ in range(problem.num_ranks)]
    for expert in range(problem.num_experts):
        for source in source_order:
            tokens, places = np.nonzero((choices == expert) & (sources == source)[:, None])
            listed[expert // problem.local_experts] += zip(tokens.tolist(), places.tolist(), strict=True)
    most = max(map(len, listed))
    if problem.part == "combine":
        z, y = inputs["Z0"], np.zeros((len(choices), problem.hidden), dtype)
        for rank, rows in enumerate(listed):
            for row, (token, place) in enumerate(rows):
                y[token] += inputs["Gates"][token, place] * z[0, rank * most + row]
        return {"Y": y}
    out = poisoned((1, problem.num_ranks * most, problem.hidden), dtype)
    for rank, rows in enumerate(listed):
        for row, (token, place) in enumerate(rows):
            weighted = problem.part == "weighted_dispatch"
            value = inputs["dY"][token] * inputs["Gates"][token, place] if weighted else inputs["X"][token]
            out[0, rank * most + row] = value
    return {"Q0": out}
