"""`matmul2d` on real processes against dense autograd."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
from meshweave.base.errors import BindError
from meshweave.execute.ranks.launch import launch
from meshweave.nn.matmul2d_programs import slice_widths

HERE = {"PYTHONPATH": str(Path(__file__).parent)}


@pytest.mark.gloo
@pytest.mark.parametrize("mesh", [(1, 2), (2, 2)], ids=["two", "four"])
def test_forward_and_backward_equal_dense_autograd(mesh: tuple[int, int]) -> None:
    """By default every fifth case, which has each size, dataflow and variant twice or more."""
    num_ranks = mesh[0] * mesh[1]
    payload = {"mesh": list(mesh), "every": 1 if settings().max_examples > 100 else 5}
    results = launch("nn_rank_functions:forward_and_backward", num_ranks, payload, timeout_s=120, env=HERE)
    assert results == [[]] * num_ranks


@pytest.mark.gloo
def test_replicas_with_meshes_of_their_own_do_not_wait_for_each_other() -> None:
    assert launch("nn_rank_functions:separate_meshes", 4, {}, timeout_s=180, env=HERE) == [0.0] * 4


@pytest.mark.gloo
def test_a_mesh_of_some_ranks_before_one_of_all() -> None:
    results = launch("nn_rank_functions:sub_mesh_then_whole", 4, {}, timeout_s=180, env=HERE)
    assert results == [[0.0, 0.0], [0.0, 0.0], [0.0], [0.0]]


@pytest.mark.gloo
def test_a_second_derivative_is_refused() -> None:
    (told,) = launch("nn_rank_functions:second_derivative", 1, {}, timeout_s=180, env=HERE)
    assert "a 2D product is differentiable once" in told


def test_slices_may_be_any_integers() -> None:
    assert slice_widths(np.int64(3)) == (1, 1, 1) and slice_widths(np.array([1, 2])) == (1, 2)  # type: ignore[arg-type]
    for wrong in ([], 2.5, [1, 0], None):
        with pytest.raises(BindError, match="neither a positive count nor a sequence of positive widths"):
            slice_widths(wrong)  # type: ignore[arg-type]
