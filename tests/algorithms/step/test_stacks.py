"""What stacks execute: plans search only that, steps outside of it are refused, and defaults are the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import meshweave as mw
from meshweave.algorithms.block.roles import DATA_ROLES
from meshweave.algorithms.step import layer_time, load_stack, stack_names
from meshweave.algorithms.step.compose import update_times_s
from meshweave.algorithms.step.space import SpaceOptions, StepSpace
from meshweave.algorithms.step.stack_checks import check_parallelism
from meshweave.algorithms.step.stack_runs import ALL_DEGREES, StackRuns
from meshweave.algorithms.step.stacks import DEFAULT_STACK, IDEAL
from meshweave.algorithms.table import SCHEDULES, STRATEGIES
from meshweave.base.errors import DescriptionError, UnsupportedError
from meshweave.cli.app import run_app
from meshweave.tune.plan_description import planned_problem
from meshweave.tune.step_search.planner import parallelism_of

ASKED = ("llama-2-7b", "dgx-h100:8")
SIZES = {"batch": 16, "sequence": 2048}


@pytest.mark.parametrize("name", stack_names())
def test_what_a_stack_runs_is_in_the_tables(name: str) -> None:
    runs = load_stack(name).runs
    assert set(runs.strategies or ()) <= set(STRATEGIES) and set(runs.schedules or ()) <= set(SCHEDULES)
    assert set(runs.degrees) <= set(ALL_DEGREES) and set(runs.zero) <= set(range(len(DATA_ROLES)))


def test_the_own_runtime_runs_the_tables_but_for_attention_computed_again_low_precision_and_experts() -> None:
    own, bare = (load_stack(name).runs for name in (DEFAULT_STACK, IDEAL))
    assert replace(own, recompute=bare.recompute, precisions=None, experts=True) == bare == StackRuns()
    assert own.recompute == ("none", "full") and own.precisions == () and not own.experts
    options = SpaceOptions.of_stack(load_stack(DEFAULT_STACK))
    assert replace(options, recompute=bare.recompute) == SpaceOptions()


@pytest.mark.parametrize("name", [*stack_names(), IDEAL])
def test_a_plan_for_a_stack_searches_what_it_runs(name: str) -> None:
    plan = mw.plan(*ASKED, **SIZES, stack=name)  # type: ignore[arg-type]
    assert plan.step.stack == name
    for record in (*plan.step.ranked, *plan.step.front):
        check_parallelism(load_stack(name), parallelism_of(record))
    assert (plan.step.ideal is None) == (name == IDEAL)


@pytest.mark.parametrize(
    ("stack", "fixed", "words"),
    [
        ("torchtitan", {"strategy": "atp", "tp": 2}, "the strategy atp; it runs megatron_sp"),
        ("torchtitan", {"zero": 1}, "ZeRO level 1; it runs 0, 2, 3"),
        ("llm-foundry", {"tp": 2}, "the degree tensor; it runs data"),
        ("nanotron", {"pp": 2, "schedule": "zbv", "vp": 2}, "the schedule zbv; it runs gpipe, 1f1b"),
        ("nanotron", {"pp": 2, "vp": 2}, "the schedule interleaved-1f1b; it runs gpipe, 1f1b"),
        (
            "nanotron",
            {"pp": 2, "schedule": "gpipe", "vp": 2},
            "the schedule gpipe x 2 stages a rank; .*",
        ),
        ("meshweave", {"recompute": "selective"}, "recomputation selective; it runs none, full"),
    ],
)
def test_what_a_stack_does_not_run_is_refused(stack: str, fixed: dict[str, object], words: str) -> None:
    for of in (mw.step, mw.plan):
        with pytest.raises(
            UnsupportedError, match=f"stack {stack} does not run {words}. Stack ideal prices any"
        ):
            of(*ASKED, **SIZES, stack=stack, **fixed)  # type: ignore[operator]
    assert mw.step(*ASKED, **SIZES, stack=IDEAL, **fixed).time_s > 0  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["torchtitan", "meshweave"])
def test_what_replicas_add_to_a_layer_does_not_depend_on_what_was_priced_before(name: str) -> None:
    """FSDP2 copies gathered weights under ZeRO-3; the own runtime copies operands where products communicate."""
    problem = mw.step(*ASKED, **SIZES, stack=name, zero=3).problem  # type: ignore[arg-type]
    levels = [mw.Parallelism(data=8, zero=zero) for zero in (0, 2, 3)]
    forwards = [
        [layer_time(problem, each).forward.total_s for each in order] for order in (levels, levels[::-1])
    ]
    alone = [layer_time(replace(problem), each) for each in levels]
    assert forwards[0] == forwards[1][::-1] == [each.forward.total_s for each in alone]
    last = [layer_time(problem, each).backward.total_s for each in levels]
    assert last == [each.backward.total_s for each in alone]
    assert (last[2] > last[0]) if name == "torchtitan" else (forwards[0][2] > forwards[0][0])


def test_options_of_one_rank_need_no_stack_that_runs_them() -> None:
    problem = mw.step(*ASKED, **SIZES, stack="llm-foundry", zero=3).problem  # type: ignore[arg-type]
    options = StepSpace(problem).options
    assert (options.tensor, options.pipeline, options.context, options.zero) == ((1,), (1,), (1,), (0, 2, 3))
    assert SpaceOptions.of_stack(problem.stack, tensor=(1,)).tensor == (1,)


def test_steps_and_plans_have_the_same_stack_by_default() -> None:
    best = mw.plan(*ASKED, **SIZES).step.best  # type: ignore[arg-type]
    degrees = best.degrees.model_dump()
    step = mw.step(*ASKED, **SIZES, **degrees)  # type: ignore[arg-type]
    assert step.problem.stack == load_stack(DEFAULT_STACK) and step.time_s == best.step_s
    bare = mw.step(*ASKED, **SIZES, **degrees, stack=IDEAL)  # type: ignore[arg-type]
    assert bare.time_s < step.time_s


def test_by_default_a_plan_is_as_fast_as_stacks_are(capsys: pytest.CaptureFixture[str]) -> None:
    """PyTorch stacks publish 38 to 45 % of the peak for models of 7B on H100, all pairs of tokens counted."""
    plan = mw.plan(*ASKED, **SIZES)  # type: ignore[arg-type]
    assert plan.step.best.mfu_all_pairs is not None and plan.step.ideal is not None
    assert 0.38 < plan.step.best.mfu_all_pairs < 0.45 < plan.step.ideal.mfu
    assert run_app(["plan", *ASKED[:1], "--cluster", ASKED[1], "--batch", "16"]) == 0
    assert "MFU (causal pairs) on meshweave; kernels and links alone " in capsys.readouterr().out


def test_a_step_attends_at_the_rate_and_has_the_loss_of_its_stack_unless_it_says_others() -> None:
    def seconds(cluster: str, **options: object) -> float:
        return mw.step("llama-2-7b", cluster, 256, 8192, zero=3, **options).time_s  # type: ignore[arg-type]

    for stack, cluster, share in (
        ("maxtext", "tpu-v6e:256", 0.349),
        ("torchtitan", "dgx-h100:64", 0.57),
        ("llm-foundry", "dgx-a100:64", 0.468),
        ("megatron-core", "dgx-b200:64", 1.08),
    ):
        own, other = (seconds(cluster, stack=stack, attention_share=each) for each in (share, 1.0))
        assert seconds(cluster, stack=stack) == own and (own > other) == (share < 1)
        loss = load_stack(stack).loss
        assert seconds(cluster, stack=stack, loss=loss) == own
    for stack in (DEFAULT_STACK, IDEAL):  # kernels that PyTorch chooses, and measured ones
        assert seconds("dgx-h100:64", stack=stack) == seconds("dgx-h100:64", stack=stack, attention_share=1.0)
    fused = seconds("dgx-h100:64", stack="torchtitan", loss="fused")
    assert fused < seconds("dgx-h100:64", stack="torchtitan")
    plain = {"batch": 64, "sequence": 2048, "tp": 8, "stack": "megatron-2021"}
    steps = [mw.step(*ASKED, **plain, attention=each) for each in (None, "plain", "flash")]  # type: ignore[arg-type]
    assert steps[0].time_s == steps[1].time_s > steps[2].time_s
    with_stack = mw.step(*ASKED, **SIZES, stack="torchtitan", zero=3)  # type: ignore[arg-type]
    assert "attention flash, attention_share 0.57, loss eager" in str(with_stack)
    # the rate is of one fused kernel
    steps = [
        mw.step(*ASKED, **SIZES, stack="torchtitan", zero=3, attention="plain", attention_share=each)  # type: ignore[arg-type]
        for each in (None, 1.0)
    ]
    assert steps[0].time_s == steps[1].time_s


def test_a_plan_keeps_a_stack_that_somebody_changed(tmp_path: Path) -> None:
    for name in ("megatron-core", "maxtext"):
        stack = replace(load_stack(name), step_s=0.01)
        cluster = "tpu-v6e:8" if name == "maxtext" else "dgx-b200:8"
        plan = mw.plan("llama-2-7b", cluster, batch=16, sequence=2048, stack=stack)
        plan.save(tmp_path / name)
        assert planned_problem(mw.tune.load_plan(tmp_path / name)).stack == stack


def test_the_old_name_of_the_ideal_stack_is_taken() -> None:
    with pytest.warns(DeprecationWarning, match='stack "none" is "ideal" now'):
        assert load_stack("none") == load_stack(IDEAL)


def test_more_layers_than_the_limit_are_refused() -> None:
    """A plan of them held a name for each layer, until there was no memory."""
    model = replace(mw.load_model("llama-2-7b"), num_layers=167_772_162)
    with pytest.raises(DescriptionError, match="has 167,772,162 layers, over the limit of 16,384"):
        mw.plan(model, "dgx-h100:8", batch=8, sequence=64, dp=8)
    with pytest.raises(DescriptionError, match="over the limit of 16,384"):
        mw.step(model, "dgx-h100:8", batch=8, sequence=64)


def test_ranks_with_layers_by_cost_update_the_weights_that_they_have() -> None:
    degrees = {"batch": 16, "sequence": 4096, "tp": 2, "pp": 4, "zero": 1, "stack": "nanotron"}
    step = mw.step("llama-3-8b", "dgx-h100:16", **degrees)  # type: ignore[arg-type]
    assert len(set(step.stage_layers)) > 1
    update_s = update_times_s(step.problem, step.parallelism)
    shares = [rank.optimizer / seconds for rank, seconds in zip(step.memory.ranks, update_s, strict=True)]
    assert shares == pytest.approx([shares[0]] * 4, rel=0.01)
