"""Collectives of tensor ranks inside of products, and what products sustain in a dtype of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest

import meshweave as mw
from meshweave.algorithms.block.sized import FlatTask
from meshweave.algorithms.step import Parallelism, StepProblem, load_stack
from meshweave.algorithms.step.block_tasks import PricedTasks, compute_ps
from meshweave.algorithms.step.layers import layer_time
from meshweave.algorithms.step.placement import machine_of
from meshweave.algorithms.step.rates import with_rates
from meshweave.base.errors import DescriptionError, UnsupportedError
from meshweave.describe.machine.kernels import ProductConstants
from meshweave.ir.work import Compute, Transfer

ROWS, HIDDEN = 8192, 4096


def problem_of(hides: bool = True, model: str = "llama-2-7b", **options: object) -> StepProblem:
    stack = replace(load_stack("megatron-core"), hides_tensor=hides)
    cluster = mw.load_cluster("dgx-h100:8")
    return StepProblem(mw.load_model(model), cluster, 8, 4096, stack=stack, **options)  # type: ignore[arg-type]


def product(rows: int) -> Compute:
    flops = 2 * rows * HIDDEN * HIDDEN
    return Compute("matmul", flops, dims=(rows, HIDDEN, HIDDEN), item_bytes=2, dtype="bfloat16")


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("rows", [64, ROWS])
def test_of_a_collective_what_the_product_beside_it_does_not_cover_stays(ranks: int, rows: int) -> None:
    """By hand: (n - 1) / n of a product run beside the n - 1 transfers of its ring."""
    problem = problem_of()
    gathered = Transfer("all_gather", "tp.row", ranks, 2 * ROWS * HIDDEN // ranks)
    scattered = replace(gathered, kind="reduce_scatter")
    steps = [
        FlatTask("network", gathered, ()),
        FlatTask("computing", product(rows), (0,)),
        FlatTask("network", scattered, (1,)),
    ]
    machine = machine_of(problem, (("row", ranks, 1),))
    times = {}
    for hides in (True, False):
        known: dict[Transfer, int] = {}
        priced = PricedTasks(steps, None, problem_of(hides))
        times[hides] = priced.time(machine, known, waits=False).part
    product_s = compute_ps(problem, product(rows)) * 1e-12
    covered_s = product_s * (ranks - 1) / ranks
    left_s = sum(max(known[each] * 1e-12 - covered_s, 0) for each in (gathered, scattered))
    assert times[False].tensor_s == pytest.approx(sum(known.values()) * 1e-12)
    assert times[True].tensor_s == pytest.approx(left_s, abs=2e-12)
    assert times[True].compute_s == pytest.approx(product_s) == times[False].compute_s
    assert (left_s > 0) == (rows == 64)


def test_a_dense_layer_in_8_bits_or_more_hides_and_no_other_does() -> None:
    """Recipes of models with experts and in NVFP4 have none; nor has a simulation, which refuses."""
    p = Parallelism(tensor=8)
    cluster = mw.load_cluster("dgx-b200:8")
    for precision, hides in ((None, True), ("mxfp8", True), ("nvfp4", False)):
        own, plain = (
            replace(problem_of(each, precision=None), cluster=cluster, precision=precision)
            for each in (True, False)
        )
        assert own.hides_tensor == hides and not plain.hides_tensor
        own_s, plain_s = (layer_time(each, p).backward.tensor_s for each in (own, plain))
        assert (own_s < plain_s) == hides and own_s <= plain_s
    assert not problem_of(model="qwen3-30b-a3b").hides_tensor
    names = [name for name in ("megatron-core", "torchtitan", "nanotron") if load_stack(name).hides_tensor]
    assert names == ["megatron-core"]


def test_a_simulation_refuses_collectives_inside_of_products() -> None:
    options = {"tp": 2, "stack": "megatron-core"}
    step = mw.step("llama-2-7b", "dgx-h100:2", 2, 1024, **options)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="beside its products and not inside of them"):
        mw.simulation.simulate_step(step)


def test_products_of_a_dtype_sustain_their_own_share_or_that_of_their_chip() -> None:
    cluster = mw.load_cluster("dgx-b200:8")
    kernels = cluster.chip.kernels
    assert kernels is not None
    own = {name: of.sustained_share for name, of in kernels.products if isinstance(of, ProductConstants)}
    assert {name for name, share in own.items() if share is not None} == {"fp8", "nvfp4"}
    steps = with_rates(cluster, "bfloat16", 1.0, sustains=True).chip.kernels
    assert steps is not None and steps.grouped_share == kernels.sustained_share < 1
    for name, before in kernels.products:
        after = steps.product(name)
        assert isinstance(before, ProductConstants) and isinstance(after, ProductConstants)
        share = kernels.sustained_share if own[name] is None else own[name]
        assert after.flops_per_s == pytest.approx(share * before.flops_per_s), name
        assert after.unit_bytes_per_s == pytest.approx(share * before.unit_bytes_per_s), name
        assert kernels.sustained_of(name) == share and steps.sustained_of(name) == 1
    assert with_rates(cluster, "bfloat16", 1.0, sustains=False) == cluster
    sustained = with_rates(cluster, "bfloat16", 1.0, sustains=True)
    again = with_rates(sustained, "bfloat16", 1.0, sustains=True).chip.kernels
    assert again is not None and again.products == steps.products
    with pytest.raises(DescriptionError, match=r"sustained_share is 1\.5"):
        replace(kernels.products[0][1], sustained_share=1.5)  # type: ignore[arg-type]
