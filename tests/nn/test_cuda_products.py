"""Products, linear layers, pipelines and reshards on CUDA tensors, of ranks that share one device."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
sys.path.insert(0, str(Path(__file__).parents[1] / "execute"))
from cuda_world import ENV, needs_cuda, places

from meshweave.execute.ranks.launch import launch


def on_one_device(function: str, num_ranks: int, **payload: Any) -> None:
    """Check that no rank returns anything wrong."""
    needs_cuda()
    target = f"cuda_nn_rank_functions:{function}"
    found = launch(target, num_ranks, payload, timeout_s=180, env=ENV, places=places(num_ranks))
    assert found == [[]] * num_ranks


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("transport", ["messages", "symmetric"])
def test_products_of_dtensors(num_ranks: int, transport: str) -> None:
    on_one_device("products", num_ranks, transport=transport)


@pytest.mark.gpu
@pytest.mark.parametrize("mesh", [(1, 1), (1, 2), (2, 2)], ids=["one", "two", "four"])
def test_products_of_a_2d_mesh(mesh: tuple[int, int]) -> None:
    on_one_device("two_d", mesh[0] * mesh[1], mesh=list(mesh))


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_linear_layers(num_ranks: int) -> None:
    on_one_device("linear", num_ranks, transport="auto")


@pytest.mark.gpu
def test_fused_layers_that_count_their_tiles() -> None:
    pytest.importorskip("triton", reason="needs triton: pip install triton")
    on_one_device("fused", 2)


@pytest.mark.gpu
def test_pipelines_of_two_ranks() -> None:
    on_one_device("pipelines", 2)


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_reshards(num_ranks: int) -> None:
    on_one_device("reshards", num_ranks)
