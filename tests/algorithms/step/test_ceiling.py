"""Utilization: which pairs of tokens count, and nothing above what chips have shown without its reason."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

import meshweave as mw
from meshweave.algorithms.step import load_stack
from meshweave.algorithms.step.stack_runs import StackRuns
from meshweave.base.errors import MeshweaveError
from meshweave.cli.app import run_app
from meshweave.describe.catalog import clusters, models
from meshweave.describe.machine.left_out import best_product_rate, unmeasured_kernels
from meshweave.describe.model.routed import FeedForward, GroupedHeads, composed_layer
from sampling import mostly_slow

TPU = "tpu-v5p:64"
TORCHTITAN = replace(load_stack("torchtitan"), runs=StackRuns())


def some_steps(cluster: mw.Cluster, rng: random.Random, count: int) -> list[mw.algorithms.Step]:
    """Return so many priced steps of random models, lengths, dtypes and layouts on a cluster."""
    steps: list[mw.algorithms.Step] = []
    for _ in range(20 * count):
        chips = rng.choice([1, 2, 4, 8, 16])
        options = {
            "tp": rng.choice([1, 2, 4]),
            "cp": rng.choice([1, 1, 2]),
            "pp": rng.choice([1, 1, 2]),
            "zero": rng.choice([0, 1, 3]),
            "micro_batch": rng.choice([1, 2]),
            "recompute": rng.choice(["none", "selective", "full"]),
            "attention": rng.choice(["flash", "plain"]),
            "attention_share": rng.choice([1.0, 0.5, 2.0]),
            "dtype": rng.choice([dtype for dtype, _ in cluster.chip.peak_flops_per_s]),
            "precision": rng.choice([None, None, "fp8-token", "fp8-block"]),
            "stack": rng.choice(["ideal", TORCHTITAN]),
        }
        seq = rng.choice([512, 4096, 65536])
        try:
            laid = cluster.with_chips(chips)
            steps.append(mw.step(rng.choice(models()), laid, batch=16, sequence=seq, **options))
        except MeshweaveError:
            continue
        if len(steps) == count:
            break
    return steps


@pytest.mark.parametrize("seed", mostly_slow(range(12), keep=1))
def test_no_chip_of_the_catalog_is_above_what_it_has_shown_without_a_reason(seed: int) -> None:
    rng, priced, above = random.Random(seed), 0, 0
    for name in clusters():
        for step in some_steps(mw.load_cluster(name), rng, 3):
            priced += 1
            ceiling, peak = step.ceiling, step.problem.cluster.chip.peak(step.problem.dtype)
            assert 0 < ceiling.share <= 1 and step.mfu <= step.hfu
            for share in (step.mfu, step.hfu):
                reason = ceiling.reason(share)
                assert bool(reason) == (share > ceiling.share)
                if reason:
                    above += 1
                    assert ceiling.shown in reason and " at up to " in reason
            measured = best_product_rate(step.problem.cluster.chip, step.problem.dtype)
            assert measured is None or ceiling.share <= measured / peak
            no_kernels = unmeasured_kernels(step.problem.cluster.chip, step.problem.dtype)
            assert bool(no_kernels) == (measured is None)
    assert priced > 75 and above > 5


def test_a_step_at_a_long_sequence_counts_the_pairs_that_its_kernels_compute() -> None:
    """With all pairs, 64 chips at their peak would have 115.5 % of it: kernels compute half of the pairs."""
    step = mw.step("llama-3-8b", TPU, batch=64, sequence=32768, tp=2, cp=4, zero=1, stack="ideal")
    assert step.mfu_all_pairs > 1 > step.mfu
    model, pairs = step.problem.model, 32768 * 32769 // 2
    attention = 12 * 64 * pairs * model.num_layers * model.num_heads * model.head_dim
    weights = sum(layer.in_features * layer.out_features for layer in model.fc_layers()) * model.num_layers
    weights += model.hidden * (model.vocab_size or 0)
    assert step.flops() == attention + 6 * 64 * 32768 * weights
    assert step.flops("all") - step.flops() == pytest.approx(attention, rel=1e-4)


def test_products_of_another_dtype_and_rates_above_the_peak_are_said() -> None:
    eight = mw.step(
        "llama-2-7b", "dgx-h100:8", batch=64, sequence=4096, zero=1, precision="fp8-token", stack="ideal"
    )
    assert "products in fp8 at up to 192" in eight.ceiling.reason(eight.mfu)
    cluster = mw.load_cluster("tpu-v4:8")
    fast = replace(cluster, chip=replace(cluster.chip, dtype_flops_per_s=(("bfloat16", 500e12),)))
    step = mw.step("llama-2-7b", fast, batch=64, sequence=2048, zero=1, stack="ideal")
    assert step.mfu > 1 and "products in bfloat16 at up to 181.8 %" in step.ceiling.reason(step.mfu)


def test_a_dtype_without_a_rate_is_no_faster_than_its_peak() -> None:
    chip = mw.load_cluster("local-cpu").chip
    assert chip.flops_per_s("float64") == chip.peak("float64") < chip.flops_per_s("float32")
    assert chip.with_flops_per_s(1e12).flops_per_s("float64") == 1e12


def test_a_plan_says_first_that_kernels_were_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "llama-2-7b", "--batch", "16", "--fix", "tp=1,pp=1,cp=1,recompute=none", "--cluster"]
    assert run_app([*arguments, "tpu-v5p:16", "--sequence", "16384", "--memory", "400GB", "--table"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(
        "TPU v5p has no measured kernels for bfloat16: products of every size are priced"
    )
    assert lines[2].startswith("note: attention on TPU v5p has the rate of products")
    assert "% MFU (causal pairs, at a datasheet's rate)" in lines[6]
    assert "With all pairs, as PaLM counts" in "\n".join(lines)
    assert run_app([*arguments, "dgx-h100:16"]) == 0
    assert "no measured kernels" not in capsys.readouterr().out
    products = ["plan", "--products", "llama-2-7b", "--batch", "8", "--algorithms", "collective", "--cluster"]
    assert run_app([*products, "hgx-h20"]) == 0
    assert "has no measured kernels" in " ".join(capsys.readouterr().out.split()[:25])


def test_a_plan_above_the_ceiling_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    """Products of an H100 sustain less in training than in short runs, which price a plan without a stack."""
    options = {"batch": 128, "sequence": 4096, "tp": 1, "pp": 1, "cp": 1, "memory_bytes": 1 << 40}
    chosen = mw.plan("llama-2-7b", "dgx-h100:8", **options, stack="ideal")  # type: ignore[arg-type]
    steps = chosen.step
    assert steps.ceiling is not None and steps.best.mfu > steps.ceiling == pytest.approx(0.6265, abs=1e-3)
    assert "sustain in training" in steps.reason_above(steps.best.mfu) and not steps.reason_above(0.5)
    with_stack = mw.plan("llama-2-7b", "dgx-h100:8", stack="torchtitan", **options).step  # type: ignore[arg-type]
    assert with_stack.best.mfu < steps.ceiling and with_stack.pairs == "causal"


def test_what_a_stack_does_not_compute_again_is_no_hardware_flop() -> None:
    """PyTorch's checkpoints stop before the last product of a layer, which nothing needs."""
    of = {"batch": 8, "sequence": 4096, "zero": 3, "recompute": "full"}
    plain = mw.step("llama-2-7b", "dgx-h100:8", **of, stack="ideal")  # type: ignore[arg-type]
    early = mw.step("llama-2-7b", "dgx-h100:8", stack="torchtitan", **of)  # type: ignore[arg-type]
    model = plain.problem.model
    skipped = 2 * 8 * 4096 * model.num_layers * model.ffn_hidden * model.hidden
    assert plain.flops(recomputed=True) - early.flops(recomputed=True) == skipped
    assert plain.flops() == early.flops()
    narrow, wide = (
        composed_layer(4096, GroupedHeads(32, 32, 128), FeedForward(inner)) for inner in (64, 4096)
    )
    kinds = replace(model, num_layers=3, layers=((1, narrow), (2, wide)))
    plain, early = (replace(each, problem=replace(each.problem, model=kinds)) for each in (plain, early))
    skipped = 2 * 8 * 4096 * (64 + 2 * 4096) * model.hidden
    assert plain.flops(recomputed=True) - early.flops(recomputed=True) == skipped
