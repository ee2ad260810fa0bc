"""Attention has a rate that was fitted on its chip, or a plan says whose rate that is, or that there is none."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from html import unescape

import pytest

import meshweave as mw
from meshweave.algorithms.step import StepProblem, load_stack
from meshweave.algorithms.step.rates import with_rates
from meshweave.algorithms.step.stacks import IDEAL, KERNELS_OF_ATTENTION, stack_names, stack_table
from meshweave.cli.app import run_app
from meshweave.describe.catalog import clusters
from meshweave.describe.machine.cluster import Cluster
from meshweave.report.step_page import step_page
from meshweave.tune.support import support_of

STACKS = (*stack_names(), IDEAL)
DTYPE = "bfloat16"


@cache
def one_of_each_chip() -> tuple[Cluster, ...]:
    """Return a cluster of the catalog for each chip, with measured kernels and without, that has the dtype."""
    found: dict[tuple[str, bool], Cluster] = {}
    for name in clusters():
        cluster = mw.load_cluster(name)
        if DTYPE in dict(cluster.chip.peak_flops_per_s):
            found.setdefault((cluster.chip.name, cluster.chip.kernels is None), cluster)
    return tuple(found.values())


def problem_of(cluster: Cluster, stack: str, kind: str | None = None) -> StepProblem:
    software = load_stack(stack)
    return StepProblem(
        mw.load_model("llama-2-7b"), cluster, cluster.num_chips, 4096, DTYPE, stack=software, attention=kind
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("stack", STACKS)
def test_a_rate_is_fitted_on_the_chip_or_said_to_be_of_another_or_of_none(stack: str) -> None:
    """Over the chips of the catalog, with fused attention and with plain one."""
    fitted = stack_table()["attention"].get(KERNELS_OF_ATTENTION.get(stack, ""), {})
    seen = set()
    for cluster in one_of_each_chip():
        chip, problem = cluster.chip, problem_of(cluster, stack)
        assert problem_of(cluster, stack, "plain").attention_reading == ""
        assert problem_of(cluster, stack, "plain").attention_rate == 1
        if problem.attention_kind == "plain":
            assert problem.attention_reading == ""
            problem = problem_of(cluster, stack, "flash")
        assert replace(problem, attention_share=0.5).attention_reading == ""
        said, rate = problem.attention_reading, problem.attention_rate
        is_measured = chip.kernels is not None and chip.kernels.attention_of(DTYPE) is not None
        assert not said or ("kernels that were measured" in said) == is_measured
        own = [share for name, share in fitted.items() if chip.name.startswith(name)]
        others = [(n, share) for n, share in fitted.items() if n == chip.fitted_as]
        if own:
            assert rate == own[0] and bool(said) == (chip.kernels is None)
            seen.add("own")
        elif others:
            ((name, share),) = others
            assert rate == share and f"takes {name}'s share, {share:.3g}, " in said
            seen.add("other")
        else:
            assert rate == 1
            assert bool(said) == bool(fitted or not is_measured)
            assert not fitted or f"{stack} was fitted on no chip like {chip.name}" in said
            seen.add("none")
        assert problem.priced_cluster == with_rates(cluster, problem.dtype, rate, problem.stack.sustains)
        in_support = [
            each.why
            for each in support_of(problem.model, cluster, sequence=4096).stacks
            if each.subject == stack
        ]
        assert (
            problem_of(cluster, stack).attention_reading in in_support[0] or "does not run" in in_support[0]
        )
    assert seen == ({"own", "other", "none"} if fitted else {"none"})


def test_chips_that_lend_their_rates_are_of_the_catalog_and_lend_no_further() -> None:
    lenders = {cluster.chip.fitted_as for cluster in one_of_each_chip()} - {""}
    for lender in lenders:
        of = [each.chip for each in one_of_each_chip() if each.chip.name.startswith(lender)]
        assert of and not any(chip.fitted_as for chip in of), lender
    assert lenders == {"H100", "TPU v5e", "TPU v6e"}


@pytest.mark.parametrize(
    ("stack", "cluster", "said"),
    [
        ("torchtitan", "dgx-h200:8", "takes H100's share, 0.57, of the rate of the kernels"),
        ("maxtext", "tpu-v4:8", "takes TPU v5e's share, 0.388, of the rate of products"),
        ("maxtext", "tpu-v5p:8", "takes TPU v5e's share, 0.388, of the rate of products"),
        ("maxtext", "tpu-v7:8", "takes TPU v6e's share, 0.349, of the rate of products"),
        ("torchtitan", "dgx-b200:8", "torchtitan was fitted on no chip like B200-SXM: it has the rate of"),
    ],
)
def test_a_plan_says_whose_rate_its_attention_has_before_its_best(
    stack: str, cluster: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(["plan", "llama-2-7b", "--cluster", cluster, "--batch", "8", "--stack", stack]) == 0
    first = capsys.readouterr().out.split("\nbest")[0]
    assert said in " ".join(first.split()) and "\nnote: attention of " in first
    plan = mw.plan("llama-2-7b", cluster, batch=8, sequence=2048, stack=stack)
    assert said in str(plan).split("\nbest")[0]
    assert said in unescape(step_page(plan, str, "", "", [], []))  # type: ignore[arg-type]
    step = mw.step("llama-2-7b", cluster, 8, 2048, stack=stack, zero=3)
    assert said in str(step)


def test_the_rate_of_another_chip_is_what_a_step_takes() -> None:
    given = {"batch": 64, "sequence": 8192, "stack": "torchtitan", "zero": 3}
    own = mw.step("llama-2-7b", "dgx-h200:64", **given)  # type: ignore[arg-type]
    for share, relation in ((0.57, "equal"), (1.0, "slower")):
        other = mw.step("llama-2-7b", "dgx-h200:64", **given, attention_share=share)  # type: ignore[arg-type]
        assert (own.time_s == other.time_s) == (relation == "equal") and own.time_s >= other.time_s


def test_a_share_is_of_the_rate_in_the_dtype_of_the_step() -> None:
    """An A100 has no rate of attention kernels in float32: that of products, far below the one in 16 bits."""
    chip = mw.load_cluster("dgx-a100:8").chip
    problem = StepProblem(
        mw.load_model("llama-2-7b"), mw.load_cluster("dgx-a100:8"), 8, 2048, "float32", attention_share=0.5
    )
    priced = problem.priced_cluster.chip
    assert priced.flops_per_s("float32", "attention") == 0.5 * chip.flops_per_s("float32")
