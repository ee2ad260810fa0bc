"""Phase 1 of the MeshSlice autotuner: which matrix stays put (section 3.2.1).

The largest of X (tokens x in), W (in x out) and Y (tokens x out) should not move. An algorithm with a layout of
its own (1D tensor parallelism, FSDP) comes first: its authors choose by layer and not by size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshweave.algorithms.matmul2d import Matmul2d
from meshweave.algorithms.matmul2d.common.passes import PASSES, Stationary, pass_problem
from meshweave.algorithms.matmul2d.common.problem import Matmul2dProblem
from meshweave.describe.model import FcLayer


@dataclass(frozen=True)
class LayerDataflow:
    """The matrix that stays put in a layer, whether its matrices are stored transposed, and why, in words."""

    stationary: Stationary
    transposed: bool
    reason: str


def layer_dataflows(entry: Matmul2d, layers: Sequence[FcLayer], tokens: int) -> list[LayerDataflow]:
    """Return the dataflow of each layer of a block: the algorithm's own, or the one chosen by size (phase 1).

    `tokens` is the number of rows of X: the tokens of the batch.
    """
    own = entry.own_stationary
    if own:
        reason = f"the layout of {entry.title}, whatever the sizes"
        return [LayerDataflow(own[number % len(own)], False, reason) for number in range(len(layers))]
    chosen = [choose_stationary(tokens, layer.in_features, layer.out_features) for layer in layers]
    flipped = choose_transposed([which for which, _ in chosen])
    return [LayerDataflow(which, flip, why) for (which, why), flip in zip(chosen, flipped, strict=True)]


def block_products(
    layers: Sequence[FcLayer],
    dataflows: Sequence[LayerDataflow],
    tokens: int,
    mesh_shape: tuple[int, ...],
    dtype: str,
) -> list[Matmul2dProblem]:
    """Return the products of a block on a mesh, layer by layer: forward, backward data, backward weight of each.

    `dataflows` has one entry for each layer.

    Raises:
        LayoutError: a size, the mesh or the dtype fits no `Matmul2dProblem`.
    """
    return [
        pass_problem(
            flow.stationary,
            name,
            tokens,
            layer.in_features,
            layer.out_features,
            mesh_shape,
            dtype,
            transposed=flow.transposed,
        )
        for layer, flow in zip(layers, dataflows, strict=True)
        for name in PASSES
    ]


def choose_transposed(stationary: Sequence[Stationary]) -> list[bool]:
    """Return for each layer of a chain whether to transpose it, so that no activation needs a transpose.

    A layer takes the plain version unless its input would have to be transposed for it (section 3.2.1). Only a
    W-stationary layer hands activations on the other way round than it takes them: its plain version takes
    X stored (features, tokens) and gives Y stored (tokens, features).
    """
    out, flipped = [], False
    for which in stationary:
        out.append(flipped if which != "w" else not flipped)
        flipped = not flipped if which == "w" else flipped
    return out


def choose_stationary(tokens: int, in_features: int, out_features: int) -> tuple[Stationary, str]:
    """Return the matrix ("x", "w" or "y") that no product of a layer moves, and why, in a few words.

    Ties between X and Y go to X when in = out, as in the paper's public code.
    """
    if out_features > in_features and tokens >= in_features:
        return "y", f"Y ({tokens} x {out_features}) is the largest matrix"
    if in_features >= out_features and tokens >= out_features:
        return "x", f"X ({tokens} x {in_features}) is the largest matrix"
    return "w", f"W ({in_features} x {out_features}) is the largest matrix"
