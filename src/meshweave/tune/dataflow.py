"""Phase 1 of the MeshSlice autotuner: which matrix stays put (section 3.2.1).

The largest of X (tokens x in), W (in x out) and Y (tokens x out) should not move.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshweave.algorithms.matmul2d.common.passes import Stationary


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
    """Return the matrix that does not move in any of a layer's three products, and why, in a few words.

    Ties between X and Y go to X when in = out, as in the paper's public code.
    """
    if out_features > in_features and tokens >= in_features:
        return "y", f"Y ({tokens} x {out_features}) is the largest matrix"
    if in_features >= out_features and tokens >= out_features:
        return "x", f"X ({tokens} x {in_features}) is the largest matrix"
    return "w", f"W ({in_features} x {out_features}) is the largest matrix"
