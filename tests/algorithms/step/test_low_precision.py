"""Recipes below 16 bits: priced by measured constants of the chip, or refused; what they keep, gather and cast."""

from __future__ import annotations

from dataclasses import replace

import pytest

import meshweave as mw
from meshweave.algorithms.step import memory_of
from meshweave.algorithms.step.block_time import layer_block
from meshweave.algorithms.step.compose import update_times_s
from meshweave.algorithms.step.data_parallel import data_parallel_time
from meshweave.algorithms.step.layers import layer_time
from meshweave.algorithms.step.memory import ShardedParameters
from meshweave.algorithms.step.precision import PRECISIONS, ProductDtypes, precision_named
from meshweave.algorithms.step.quantizing import AddedPasses, cast_weight_bytes, quantizing
from meshweave.base.errors import DescriptionError, UnsupportedError
from meshweave.cli.app import run_app
from meshweave.describe.catalog import clusters
from meshweave.describe.machine.measured_file import LOW_PRECISIONS

MODEL = "llama-2-7b"
FAST = "dgx-b200:8"


def problem_of(precision: str | None, cluster: str = FAST) -> mw.algorithms.StepProblem:
    machine = mw.load_cluster(cluster)
    dtype = machine.chip.peak_flops_per_s[0][0]
    return mw.algorithms.StepProblem(mw.load_model(MODEL), machine, 8, 2048, dtype, precision=precision)


@pytest.mark.parametrize("name", clusters())
def test_a_precision_is_measured_on_the_chip_or_refused(name: str) -> None:
    cluster = mw.load_cluster(name)
    kernels = cluster.chip.kernels
    measured = {dtype for dtype, _ in kernels.products} if kernels else set()
    for recipe in PRECISIONS.values():
        if measured.intersection(recipe.kernels):
            priced = problem_of(recipe.name, name)
            assert priced.products is not None and priced.recipe is recipe
            dtype = next(each for each in recipe.kernels if each in measured)
            parts = ("forward", "dgrad", "wgrad")
            assert priced.products == tuple(dtype if part in recipe.parts else None for part in parts)
            assert (dtype == recipe.own) == (priced.precision_reading == "")
            assert dtype == recipe.own or f"priced as {dtype}" in priced.precision_reading
        else:
            with pytest.raises(
                DescriptionError, match=f"precision {recipe.name}: its products were not measured on chip"
            ):
                problem_of(recipe.name, name)


def test_every_measured_dtype_is_the_own_of_a_recipe() -> None:
    assert {precision_named(dtype).own for dtype in LOW_PRECISIONS} == set(LOW_PRECISIONS)
    with pytest.raises(DescriptionError, match=r"no precision 'mxfp9'.*mxfp8"):
        precision_named("mxfp9")
    with pytest.raises(DescriptionError, match="no precision ''"):
        precision_named("")
    with pytest.warns(DeprecationWarning, match="product_dtype of StepProblem is precision now"):
        old = mw.algorithms.StepProblem(
            mw.load_model(MODEL),
            mw.load_cluster(FAST),
            8,
            2048,
            product_dtype="nvfp4",  # type: ignore[call-arg]
        )
    assert old.recipe is PRECISIONS["nvfp4"]


@pytest.mark.parametrize("name", ["dgx-h100:8", "dgx-b200:8", "dgx-b300:8", "gb300-nvl72:8"])
def test_fewer_bits_take_less_time(name: str) -> None:
    """Of a layer with large products on one chip."""
    times = {None: mw.step(MODEL, name, 8, 4096, tp=8, micro_batch=8, stack="ideal").time_s}
    for recipe in PRECISIONS:
        try:
            step = mw.step(MODEL, name, 8, 4096, tp=8, micro_batch=8, precision=recipe, stack="ideal")
        except DescriptionError:
            continue
        times[recipe] = step.time_s  # type: ignore[index]
    assert len(times) >= 4
    assert max(times, key=lambda recipe: times[recipe]) is None


def test_parts_that_stay_in_16_bits_are_priced_so() -> None:
    """MXFP4 in both gradients, at NVFP4's rate: more than all three in it, less than none."""
    one = mw.Parallelism(data=8)
    seconds = {}
    for name in (None, "nvfp4", "mxfp4"):
        problem = problem_of(name)
        forward = layer_block(problem, one).whole.part.compute_s
        seconds[name] = forward
    assert seconds["nvfp4"] < seconds["mxfp4"] < seconds[None]
    problem = problem_of("mxfp4")
    assert problem.products == ProductDtypes(None, "nvfp4", "nvfp4")
    shares = (seconds["mxfp4"] - seconds["nvfp4"]) / (seconds[None] - seconds["nvfp4"])  # type: ignore[operator]
    assert shares == pytest.approx(1 / 3, abs=0.05)


def test_what_quantizing_moves() -> None:
    """Llama 2 7B: operands of 4 products 3 x 4096 + 11008, results 3 x 4096 + 4096 + 2 x 11008 + 4096 features."""
    one = mw.Parallelism(data=8, micro_batch=1)
    operands, results = 3 * 4096 + 11008, 3 * 4096 + 4096 + 2 * 11008 + 4096
    tokens = 2048
    for name, read, item in (("fp8-delayed", 2, 1.0), ("fp8-current", 4, 1.0), ("fp8-block", 2, 1 + 1 / 32)):
        problem = problem_of(name)
        forward, backward = (quantizing(problem, one, part) for part in ("forward", "backward"))
        assert forward.num_bytes == pytest.approx((read + 2 * item) * tokens * operands)
        assert backward.num_bytes == pytest.approx((read + 2 * item) * tokens * results)
        assert forward.kernels == backward.kernels == 4 * read // 2
    forward, backward = (quantizing(problem_of("mxfp4"), one, part) for part in ("forward", "backward"))
    item = 0.5 + 1 / 32
    assert forward == AddedPasses()
    assert backward.num_bytes == pytest.approx(tokens * ((2 + item) * operands + (2 + 2 * item) * results))
    assert quantizing(problem_of(None), one, "forward") == AddedPasses()


def test_ranks_cast_their_part_of_the_residual_before_they_gather_it() -> None:
    problem, tokens = problem_of("fp8-delayed"), 2048
    inner = (4096 + 11008) / 2
    for strategy, residual in (("megatron_sp", 2 * 4096 / 2), ("megatron", 2 * 4096)):
        halves = mw.Parallelism(data=4, tensor=2, strategy=strategy)
        moved = quantizing(problem, halves, "forward").num_bytes
        assert moved == pytest.approx(4 * tokens * (residual + inner)), strategy


def test_the_cast_in_measured_times_is_not_counted_twice() -> None:
    """Products cost what constants without `prepare_s` say; those of the cluster keep it."""
    problem = problem_of("fp8-block")
    kernels, priced = problem.cluster.chip.kernels, problem.priced_cluster.chip.kernels
    assert kernels is not None and priced is not None
    assert kernels.product("fp8_block").prepare_s > 0 == priced.product("fp8_block").prepare_s  # type: ignore[union-attr]
    assert problem_of(None).priced_cluster == problem.cluster


def test_weights_are_gathered_and_cast_as_the_recipe_says() -> None:
    sharded, whole = mw.Parallelism(data=8, zero=1), mw.Parallelism(data=8)
    bare, tensor, blocks = (
        data_parallel_time(problem_of(name), sharded).gather_s for name in (None, "fp8-delayed", "mxfp8")
    )
    assert bare == blocks > 1.7 * tensor
    assert cast_weight_bytes(problem_of("fp8-delayed"), sharded, ShardedParameters(800)) == 100 * 4
    assert cast_weight_bytes(problem_of("fp8-delayed"), whole, ShardedParameters(800)) == 800 * 4
    assert cast_weight_bytes(problem_of("mxfp8"), sharded, ShardedParameters(800)) == round(
        800 * (2 + 2 * (1 + 1 / 32))
    )
    assert cast_weight_bytes(problem_of(None), sharded, ShardedParameters(800)) == 0


def test_tables_are_not_cast_and_experts_are_cast_in_their_shards() -> None:
    """Tables of any size leave what casts add as it is; experts are cast in shards over their own replicas."""
    model = mw.load_model(MODEL)
    added = []
    for words in (32_000, 256_000):
        sized = replace(model, vocab_size=words)
        with_casts, without = (
            update_times_s(replace(problem_of(name), model=sized), mw.Parallelism(pipeline=2, data=4))
            for name in ("fp8-block", None)
        )
        added.append([cast_s - bare_s for cast_s, bare_s in zip(with_casts, without, strict=True)])
    assert added[0] == pytest.approx(added[1]) and min(added[0]) > 0
    counts, sharded = ShardedParameters(800, 1600), mw.Parallelism(data=8, expert=4, zero=1)
    assert cast_weight_bytes(problem_of("fp8-delayed"), sharded, counts) == (100 + 800) * 4


def test_memory_of_a_recipe() -> None:
    """Of a layer the operands of products are kept by columns; that of W_o in 16 bits too, for attention."""
    one = mw.Parallelism(data=8, zero=1)
    peaks = {name: memory_of(problem_of(name), one).peak for name in (None, "fp8-delayed", "nvfp4")}
    tokens, model = 2048, mw.load_model(MODEL)
    bare, eight, four = (peaks[name] for name in (None, "fp8-delayed", "nvfp4"))
    saved = tokens * model.num_layers * ((2 - 1) * (2 * 4096 + 11008) - 4096)
    assert bare.activations - eight.activations == saved
    assert eight.weights == bare.weights and eight.activations > four.activations
    of_layers = model.num_layers * model.layer.num_weights
    assert four.weights - bare.weights == round(of_layers * 2 * (0.5 + 1 / 16))


def test_copies_in_low_precision_are_counted_by_kind_of_layer() -> None:
    """The first rank of DeepSeek-V3 has three dense layers, with fewer weights than those with experts."""
    of = mw.algorithms.StepProblem(mw.load_model("deepseek-v3"), mw.load_cluster("dgx-b200:64"), 64, 4096)
    laid = mw.Parallelism(data=16, pipeline=4, expert=16, zero=1)
    bare, four = (memory_of(replace(of, precision=name), laid).ranks for name in (None, "nvfp4"))
    table = 129280 * 7168
    for rank, (few, more) in enumerate(zip(bare, four, strict=True)):
        of_layers = few.weights - 2 * table * (rank in (0, 3))
        assert more.weights - few.weights == pytest.approx(of_layers * (0.5 + 1 / 16), rel=1e-6)


@pytest.mark.parametrize(("optimizer", "num_bytes"), [("adam", 12), ("adam-bf16", 8), ("adam-8bit", 6)])
def test_states_of_optimizers(optimizer: str, num_bytes: int) -> None:
    problem = replace(problem_of(None), optimizer=optimizer)
    memory = memory_of(problem, mw.Parallelism(data=8)).peak
    assert memory.optimizer == num_bytes * memory.weights // 2


def test_plans_by_a_precision(capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        "plan",
        MODEL,
        "--cluster",
        FAST,
        "--batch",
        "8",
        "--fix",
        "tp=1,pp=1,cp=1,micro_batch=1,recompute=none",
    ]
    assert run_app([*given, "--precision", "mxfp8", "--stack", "torchtitan"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "bfloat16, products of layers in mxfp8" in out
    assert "note: mxfp8 was measured nowhere: its products are priced as fp8_block" in out
    assert run_app([*given, "--precision", "mxfp8"]) == 2
    assert "stack meshweave does not run the precision mxfp8; it runs none" in capsys.readouterr().err
    with pytest.raises(UnsupportedError, match="stack nanotron does not run the precision fp8-block"):
        mw.step(MODEL, FAST, 8, 2048, precision="fp8-block", stack="nanotron")


def test_recomputation_that_stops_early_leaves_out_a_product_in_its_own_dtype() -> None:
    left_out = {}
    for name in (None, "fp8-token"):
        of = replace(problem_of(name, "dgx-h100:8"), stack=mw.SoftwareStack(stops_early=True))
        time = layer_time(of, mw.Parallelism(data=8, recompute="full"))
        left_out[name] = time.forward.total_s - time.recompute.total_s
    assert 0.4 < left_out["fp8-token"] / left_out[None] < 0.8
