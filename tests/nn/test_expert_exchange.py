"""Layers of experts over gloo: equal to one process that loops over experts, forward and backward."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from meshweave.execute.ranks.launch import launch  # noqa: E402
from meshweave.nn import grouped_product  # noqa: E402

ENV = {"PYTHONPATH": str(Path(__file__).parent)}
ENTRIES = ("experts_direct", "experts_pairwise", "experts_put", "experts_fused")
CASES = [
    (2, "experts_direct", "uneven", None),
    (4, "experts_direct", "one", None),
    (2, "experts_pairwise", "uneven", 2),
    (4, "experts_put", "balanced", None),
]


def ranks(function, num_ranks, **payload):
    return launch(f"experts_rank_functions:{function}", num_ranks, payload, timeout_s=120.0, env=ENV)


@pytest.mark.gloo
@pytest.mark.parametrize(("num_ranks", "entry", "routing", "capacity"), CASES)
def test_dispatch_and_combine_train_a_layer_as_one_process_does(num_ranks, entry, routing, capacity):
    said = ranks("layer_by_exchange", num_ranks, entry=entry, routing=routing, capacity=capacity)
    for one in said:
        assert max(one["differences"].values()) < 1e-12, one
    if routing == "one":
        assert sorted(one["rows"] for one in said) == [0] * (num_ranks - 1) + [9 * num_ranks]


@pytest.mark.gloo
@pytest.mark.parametrize("sizes", [(6, 5), (8, 4)], ids=["by loop", "grouped"])
def test_in_single_precision_the_difference_is_that_of_rounding(sizes):
    said = ranks(
        "layer_by_exchange", 2, entry="experts_direct", routing="uneven", dtype="float32", sizes=sizes
    )
    assert all(max(one["differences"].values()) < 1e-5 for one in said)


def test_groups_of_rows_are_multiplied_by_matrices_of_their_own():
    """Also none, also with a gradient that is one number for all."""
    for dtype, k, n in ((torch.float32, 16, 8), (torch.float32, 5, 3), (torch.float64, 16, 8)):
        rows = torch.randn(10, k, dtype=dtype, requires_grad=True)
        weights = torch.randn(4, k, n, dtype=dtype, requires_grad=True)
        product = grouped_product(rows, weights, [4, 0, 6, 0])
        expected = torch.cat([rows[:4] @ weights[0], rows[4:] @ weights[2]])
        torch.testing.assert_close(product, expected)
        gradients = torch.autograd.grad(product.sum(), (rows, weights))
        torch.testing.assert_close(gradients, torch.autograd.grad(expected.sum(), (rows, weights)))
        assert grouped_product(rows[:0], weights, [0, 0, 0, 0]).shape == (0, n)
        assert grouped_product(rows, weights[..., :0], [4, 0, 6, 0]).shape == (10, 0)
        assert torch.equal(grouped_product(rows[:, :0], weights[:, :0], [4, 0, 6, 0]), rows.new_zeros(10, n))
        no_groups = grouped_product(rows[:0], weights[:0], [])
        assert no_groups.shape == (0, n) and no_groups.dtype == dtype and no_groups.requires_grad
        with torch.autocast("cpu", dtype=torch.bfloat16):  # by one kernel or by many
            assert grouped_product(rows, weights, [4, 0, 6, 0]).dtype == dtype


@pytest.mark.gloo
def test_hosts_train_a_layer_too():
    said = ranks("layer_by_program", 4, entry="experts_hierarchical", routing="uneven", mesh=[2, 2])
    assert all(max(one["differences"].values()) < 1e-12 for one in said)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("entry", ENTRIES)
def test_eight_ranks_train_a_layer(entry):
    for routing in ("uneven", "one"):
        said = ranks("layer_by_program", 8, entry=entry, routing=routing)
        assert all(max(one["differences"].values()) < 1e-12 for one in said)


@pytest.mark.gloo
@pytest.mark.parametrize("entry", ENTRIES)
def test_one_program_trains_a_layer_at_one_routing_after_another(entry):
    turns = ["uneven", "balanced", "uneven"]
    for one in ranks("layer_by_program", 4, entry=entry, routing="uneven", turns=turns):
        assert max(one["differences"].values()) < 1e-12, one
