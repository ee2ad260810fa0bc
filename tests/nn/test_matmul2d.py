"""`matmul2d` on real processes against dense autograd, and its rehearsals."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshweave.algorithms.matmul2d import MatmulProblem
from meshweave.algorithms.matmul2d.common.problem import two_d_meshes
from meshweave.nn.rehearse import Rehearsal, operand, reduced

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
from meshweave.execute.ranks.launch import launch

HERE = {"PYTHONPATH": str(Path(__file__).parent)}


@pytest.mark.gloo
@pytest.mark.parametrize("mesh", [(1, 2), (2, 2)], ids=["two", "four"])
def test_forward_and_backward_equal_dense_autograd(mesh: tuple[int, int]) -> None:
    num_ranks = mesh[0] * mesh[1]
    results = launch(
        "nn_rank_functions:forward_and_backward", num_ranks, {"mesh": list(mesh)}, timeout_s=120, env=HERE
    )
    assert results == [[]] * num_ranks


@pytest.mark.gloo
def test_replicas_with_meshes_of_their_own_do_not_wait_for_each_other() -> None:
    assert launch("nn_rank_functions:separate_meshes", 4, {}, timeout_s=60, env=HERE) == [0.0] * 4


@pytest.mark.gloo
def test_a_mesh_of_some_ranks_before_one_of_all() -> None:
    results = launch("nn_rank_functions:sub_mesh_then_whole", 4, {}, timeout_s=60, env=HERE)
    assert results == [[0.0, 0.0], [0.0, 0.0], [0.0], [0.0]]


@pytest.mark.gloo
def test_a_second_derivative_is_refused() -> None:
    (told,) = launch("nn_rank_functions:second_derivative", 1, {}, timeout_s=60, env=HERE)
    assert "once_differentiable" in told


def test_a_reduced_layer_keeps_the_proportions_of_its_shards() -> None:
    """GPT-3's ff1 on 32x8: shards of 8192 tokens by 1536 and 6144 features."""
    small = reduced((262144, 12288, 49152), (32, 8), two_d_meshes(4), 2048)
    assert small.mesh_shape == (2, 2)
    assert (small.tokens, small.in_features, small.out_features) == (2048, 384, 1536)


def test_a_small_layer_is_left_alone() -> None:
    small = reduced((64, 32, 48), (2, 2), two_d_meshes(4), 2048)
    assert (small.tokens, small.in_features, small.out_features) == (64, 32, 48)


def test_rehearsals_travel_as_json() -> None:
    rehearsal = Rehearsal("text", MatmulProblem(1, 2, 3, (1, 1), "ls"), 2, 5, 1.5)
    assert Rehearsal.from_json(rehearsal.to_json()) == rehearsal


def test_operands_are_the_same_on_every_rank_and_differ_from_each_other() -> None:
    problem = MatmulProblem(8, 8, 8, (2, 2))
    assert (operand(problem, "a", 1) == operand(problem, "a", 1)).all()
    assert (operand(problem, "a", 1) != operand(problem, "b", 1)).any()
