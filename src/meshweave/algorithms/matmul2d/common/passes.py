"""The three products of training one fully connected layer Y = X W, and how they fit together.

MeshSlice's Table 1: the dataflow of the forward product fixes those of both backward products, such that
the same matrix stays put in all three, each matrix and its gradient move along the same mesh axis, and no
matrix is ever transposed. X' and W' are the gradients; (T, I, O) are tokens, in and out features.

    stays  stored as                 forward            backward data       backward weight
    Y      X (T, I)  W (I, O)        Y  = OS(X, W)      X'  = LS(Y', W)     W'  = RS(X, Y')
    X      X (T, I)  Wt (O, I)       Y  = LS(X, Wt)     X'  = OS(Y', Wt)    Wt' = RS(Y', X)
    W      Xt (I, T) W (I, O)        Y  = RS(Xt, W)     Xt' = LS(W, Y')     W'  = OS(Xt, Y')

In the transposed version of a row every matrix is stored the other way round: operands swap, and with them M and
N, os stays os, ls and rs change places, and the two moving matrices swap mesh axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshweave.algorithms.matmul2d.common.problem import Dataflow, Matmul2dProblem

Stationary = Literal["y", "x", "w"]
PassName = Literal["forward", "backward_data", "backward_weight"]
Role = Literal["x", "w", "dy"]

PASSES: tuple[PassName, ...] = ("forward", "backward_data", "backward_weight")
STATIONARY_OF: dict[Dataflow, Stationary] = {"os": "y", "ls": "x", "rs": "w"}


@dataclass(frozen=True)
class PassRule:
    """How one product of training a linear layer Y = X W is computed (an entry of MeshSlice's Table 1).

    Attributes:
        dataflow: "os", "ls" or "rs".
        operands: which of "x", "w" and "dy" (the gradient of Y) its operands A and B are.
        sizes: what its M, N and K are: "t" tokens, "i" in features, "o" out features.
    """

    dataflow: Dataflow
    operands: tuple[Role, Role]
    sizes: tuple[str, str, str]


TABLE: dict[Stationary, dict[PassName, PassRule]] = {
    "y": {
        "forward": PassRule("os", ("x", "w"), ("t", "o", "i")),
        "backward_data": PassRule("ls", ("dy", "w"), ("t", "i", "o")),
        "backward_weight": PassRule("rs", ("x", "dy"), ("i", "o", "t")),
    },
    "x": {
        "forward": PassRule("ls", ("x", "w"), ("t", "o", "i")),
        "backward_data": PassRule("os", ("dy", "w"), ("t", "i", "o")),
        "backward_weight": PassRule("rs", ("dy", "x"), ("o", "i", "t")),
    },
    "w": {
        "forward": PassRule("rs", ("x", "w"), ("t", "o", "i")),
        "backward_data": PassRule("ls", ("w", "dy"), ("i", "t", "o")),
        "backward_weight": PassRule("os", ("x", "dy"), ("i", "o", "t")),
    },
}


_TRANSPOSED: dict[Dataflow, Dataflow] = {"os": "os", "ls": "rs", "rs": "ls"}


def pass_rule(stationary: Stationary, name: PassName, transposed: bool = False) -> PassRule:
    """Return how a pass of a linear layer Y = X W is computed if one matrix stays in place in all passes.

    Args:
        stationary: the matrix that stays: "y", "x" or "w".
        name: the pass: "forward", "backward_data" (gradient of X) or "backward_weight" (gradient of W).
        transposed: whether each matrix is stored as the transpose of what `pass_problem` lists. Then operands
            swap, and with them M and N, and dataflows "ls" and "rs" change places.
    """
    rule = TABLE[stationary][name]
    if not transposed:
        return rule
    (a, b), (m, n, k) = rule.operands, rule.sizes
    return PassRule(_TRANSPOSED[rule.dataflow], (b, a), (n, m, k))


def pass_problem(
    stationary: Stationary,
    name: PassName,
    tokens: int,
    in_features: int,
    out_features: int,
    mesh_shape: tuple[int, ...],
    dtype: str,
    ranks: tuple[int, ...] | None = None,
    transposed: bool = False,
) -> Matmul2dProblem:
    """Return the product of one pass of a linear layer Y = X W, as a row of MeshSlice's Table 1 has it.

    `pass_rule` of the same arguments says which of X, W and dY are its A and B. Their global shapes as stored
    are as follows; a gradient has the shape of what it is the gradient of:

        stationary  X                    W                          Y
        "y"         (tokens, in)         (in, out)                  (tokens, out)
        "x"         (tokens, in)         (out, in)                  (tokens, out)
        "w"         (in, tokens)         (in, out)                  (tokens, out)

    Args:
        stationary: the matrix that does not move in any pass: "y", "x" or "w".
        name: "forward", "backward_data" or "backward_weight".
        tokens, in_features, out_features: sizes of the layer on all ranks together.
        mesh_shape: sizes of the mesh axes: (rows, columns) or (rows, columns, depth).
        dtype: of all matrices.
        ranks: global ranks of the mesh in row-major order; None means 0, 1, 2, ...
        transposed: whether each matrix is stored as the transpose of what the table says.

    Raises:
        LayoutError: sizes, mesh or dtype fit no `Matmul2dProblem`.
    """
    rule = pass_rule(stationary, name, transposed)
    size = {"t": tokens, "i": in_features, "o": out_features}
    m, n, k = (size[letter] for letter in rule.sizes)
    return Matmul2dProblem(m, n, k, mesh_shape, rule.dataflow, dtype, ranks)
