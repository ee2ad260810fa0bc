"""`meshweave.matmul` and `meshweave.nn.universal_linear` on real processes against dense autograd."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
from sections import launched

from meshweave.base.errors import RankLostError
from meshweave.execute.memory.shared import why_unavailable
from meshweave.execute.ranks.launch import launch
from meshweave.execute.torch.context import TorchContext
from meshweave.nn.matmul_plans import MatmulOptions
from shared_launch import SharedLaunch

HERE = {"PYTHONPATH": str(Path(__file__).parent)}
SHARED = pytest.param(
    "shared", marks=pytest.mark.skipif(bool(why_unavailable()), reason=f"shared memory {why_unavailable()}")
)


def every_pair(mesh: tuple[int, int], kinds: int, transport: str, step: int, timeout_s: float) -> None:
    """`step` is coprime to the number of placements, so that each takes every place."""
    num_ranks = mesh[0] * mesh[1]
    payload = {"mesh": mesh, "sizes": (5, 7, 6), "kinds": kinds, "transport": transport, "step": step}
    target = "matmul_rank_functions:every_pair"
    assert launch(target, num_ranks, payload, timeout_s=timeout_s, env=HERE) == [[]] * num_ranks


@pytest.mark.gloo
def test_pairs_of_placements_with_partial_sums_on_four_ranks() -> None:
    every_pair((2, 2), 4, "messages", 101, 200)


def test_plans_for_clusters_of_equal_rates_are_kept_apart() -> None:
    """Fused products are simulated on the cluster, of which the rates do not say all."""
    few, many = (
        MatmulOptions.of("cpu", "auto", "messages", cluster, TorchContext())
        for cluster in ("dgx-h100:16", "dgx-h100:32")
    )
    assert few.rates == many.rates and few != many


@pytest.mark.slow
@pytest.mark.gloo
def test_pairs_of_placements_on_six_ranks() -> None:
    every_pair((2, 3), 3, "messages", 23, 200)


@pytest.mark.gloo
@pytest.mark.skipif(bool(why_unavailable()), reason=f"shared memory {why_unavailable()}")
def test_pairs_of_placements_in_shared_memory() -> None:
    every_pair((2, 2), 4, "shared", 91, 200)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(700)
@pytest.mark.parametrize("transport", ["messages", SHARED])
@pytest.mark.parametrize(("mesh", "kinds"), [((2, 2), 4), ((2, 3), 3)], ids=["four", "six"])
def test_all_pairs_of_placements(mesh: tuple[int, int], kinds: int, transport: str) -> None:
    every_pair(mesh, kinds, transport, 1, 600)


SECTIONS = {
    "operands on different meshes": "meshes",
    "strided shards and shard orders": "orders",
    "a contracted dim cut in two orders": "inconsistent_orders",
    "left operands of other than two dims": "batched",
    "operands that lie the other way round": "transposed",
    "dtypes": "dtypes",
    "empty shards": "empty",
    "what stays and where the result goes": "chosen",
    "2D algorithms": "two_d",
    "what 2D algorithms do not take": "two_d_refused",
    "gradients": "linear_rank_functions:gradients",
    "biases": "linear_rank_functions:biases",
    "training": "linear_rank_functions:training",
    "where linear layers are ours": "linear_rank_functions:scope",
    "wrong arguments": "linear_rank_functions:refusals",
}


@pytest.fixture(scope="module")
def found(launch_once: SharedLaunch) -> list[dict[str, list[str]]]:
    """One launch for all that ends well: starting processes is what takes time."""
    return launched(launch_once, "matmul_rank_functions:sections", SECTIONS, HERE)


@pytest.mark.gloo
@pytest.mark.parametrize("section", SECTIONS)
def test_products_and_layers_equal_dense_ones(section: str, found: list[dict[str, list[str]]]) -> None:
    assert [answer[SECTIONS[section]] for answer in found] == [[]] * 4


@pytest.mark.gloo
@pytest.mark.skipif(bool(why_unavailable()), reason=f"shared memory {why_unavailable()}")
def test_ranks_that_ask_for_different_products_are_all_told() -> None:
    answers: list[Any] = launch("linear_rank_functions:disagreements", 4, {}, timeout_s=100, env=HERE)
    for *said, last in answers:
        assert last == "right"
        for words in said:
            assert re.fullmatch(
                r"BindError: ranks are about to run different programs: "
                r"ranks 0, 1 and 2 '.*' \(\w+\), rank 3 '.*' \(\w+\)",
                words,
            ), words


@pytest.mark.gloo
@pytest.mark.parametrize("transport", ["messages", SHARED])
def test_a_rank_that_is_killed_among_products_is_named_by_all_and_leaves_nothing(transport: str) -> None:
    with pytest.raises(RankLostError, match=r"^rank 2 was killed by SIGKILL$") as caught:
        launch(
            "linear_rank_functions:dies", 4, {"transport": transport}, timeout_s=180, env=HERE, stale_s=1.0
        )
    assert caught.value.missing == (2,)
    for rank in (0, 1, 3):
        said = caught.value.reports[rank]
        assert said.startswith("rank 2 stopped answering while waiting for "), said
    if Path("/dev/shm").is_dir():
        assert not [path for path in Path("/dev/shm").iterdir() if "meshweave" in path.name]
