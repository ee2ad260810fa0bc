"""A plan as text: what the command prints, and one line where Python shows it."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

import meshweave as mw
from meshweave.algorithms.step import step_of
from meshweave.algorithms.step.stacks import stack_names
from meshweave.base.errors import UnsupportedError
from meshweave.cli.app import run_app
from meshweave.describe.scores import most_published_mfu
from meshweave.tune.step_search.reasons import advice, part_name

STEP = ("llama-2-7b", "dgx-h100:8")


@pytest.mark.parametrize(
    "options", [{}, {"memory_bytes": 60 * 10**9}, {"precision": "fp8-token", "stack": "ideal"}]
)
def test_the_text_of_a_plan_is_what_the_command_prints(options, capsys) -> None:
    plan = mw.plan(*STEP, batch=16, sequence=2048, tp=2, pp=1, cp=1, strategy="megatron_sp", **options)
    words = {"memory_bytes": "--memory 60GB", "precision": "--precision fp8-token --stack ideal"}
    given = " ".join(text for name, text in words.items() if name in options).split()
    fixed = ["--fix", "tp=2,pp=1,cp=1,strategy=megatron_sp"]
    command = ["plan", STEP[0], "--cluster", STEP[1], "--batch", "16", "--sequence", "2048", *fixed, *given]
    assert run_app(command) == 0
    assert capsys.readouterr().out.startswith(f"{plan.summary()}\n")
    assert str(plan) == plan.summary()
    assert len(repr(plan)) < 300 and "\n" not in repr(plan)


def test_a_plan_of_products_and_an_empty_one() -> None:
    plan = products()
    first, *rest = plan.summary().splitlines()
    assert first.startswith("gpt3 on 16 chips") and len(rest) == len(plan.candidates)
    assert "nothing that fits" in repr(plan.model_copy(update={"candidates": ()}))


def products() -> mw.Plan:
    return mw.tune.plan_model(mw.load_model("gpt3"), mw.load_cluster("tpu-v4-pod:16"), mw.Workload(8, 2048))


def test_a_plan_is_a_table_of_pandas() -> None:
    pytest.importorskip("pandas", reason="pandas is not installed: nothing needs it but this method")
    plan = mw.plan(
        "mixtral-8x7b", STEP[1] + "0", batch=80, sequence=2048, strategy="megatron_sp", dp=20, pp=1
    )
    table = plan.to_dataframe()
    assert len(table) == len(plan.step.ranked) and table.notna().all(axis=None)
    assert list(table["step_s"]) == [record.step_s for record in plan.step.ranked]
    parts = [f"{part}_s" for part in plan.step.best.parts_s]
    assert table[parts].sum(axis=1).to_numpy() == pytest.approx(table["step_s"].to_numpy(), rel=1e-6)
    assert set(table["expert"]) == {record.degrees.expert for record in plan.step.ranked}
    assert list(products().to_dataframe()["algorithm"]) == [each.algorithm for each in products().candidates]


def test_without_pandas_a_table_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedError) as told:
        products().to_dataframe()
    assert str(told.value) == "Plan.to_dataframe needs pandas, which is not installed: pip install pandas"


def test_a_plan_of_experts_is_judged_by_runs_of_models_with_experts() -> None:
    fixed = {
        "batch": 64,
        "sequence": 4096,
        "ep": 8,
        "dp": 8,
        "pp": 1,
        "tp": 1,
        "zero": 3,
        "recompute": "full",
    }
    for stack, whose in (
        ("megatron-core", " with megatron-core"),
        ("ideal", " (runs of megatron-core; none of kern"),
    ):
        text = mw.plan("mixtral-8x7b", "dgx-h100:8", stack=stack, memory_bytes=200 * 10**9, **fixed).summary()
        assert f"published runs of models with experts on H100-SXM5-80GB{whose}" in text, text
    text = mw.plan("mixtral-8x7b", "dgx-a100:8", memory_bytes=200 * 10**9, **fixed).summary()
    assert (
        "error      no published run of a model with experts on A100-SXM4-80GB has a saved score; those of"
        in text
    )


def test_what_is_called_tensor_parallel_with_one_tensor_rank_is_the_exchange_of_experts() -> None:
    """And what is advised lessens it."""
    fixed = {"batch": 64, "sequence": 4096, "dp": 8, "pp": 1, "tp": 1, "zero": 3, "recompute": "full"}
    taken = {}
    for ep in (8, 4, 2):
        step = mw.step("mixtral-8x7b", "dgx-h100:8", stack="megatron-core", **{**fixed, "ep": ep})
        taken[ep] = step.parts.tensor
    assert taken[8] > taken[4] > taken[2] > 0
    steps = mw.plan(
        "mixtral-8x7b", "dgx-h100:8", stack="megatron-core", ep=8, memory_bytes=200 * 10**9, **fixed
    ).step
    most = {**dict.fromkeys(steps.best.parts_s, 0.0), "compute": 1.0, "tensor": 1.0}
    best = steps.best.model_copy(update={"parts_s": most, "step_s": 2.0})
    said = advice(steps.model_copy(update={"ranked": (best,)}))
    assert (
        said
        == "exchange of tokens with experts takes 50 % of the step: ep below 8 exchanges less, where memory allows"
    )
    both = best.degrees.model_copy(update={"tensor": 2})
    assert (
        part_name("tensor", best.degrees, both)
        == "tensor-parallel communication and exchange of tokens with experts"
    )
    dense = best.degrees.model_copy(update={"expert": 1})
    assert part_name("tensor", dense) == "tensor-parallel communication"


@pytest.mark.parametrize(
    ("model", "cluster"),
    [("mixtral-8x7b", "dgx-h100:8"), ("llama-2-7b", "dgx-b200:8"), ("llama-2-7b", "dgx-a100:8")],
)
@pytest.mark.parametrize(
    "options", [{}, {"recompute": "full", "tp": 2, "strategy": "megatron_sp"}, {"pp": 2}]
)
def test_no_software_costs_less_than_nothing(model: str, cluster: str, options: dict[str, object]) -> None:
    tried = 0
    for stack in stack_names():
        try:
            step = mw.step(model, cluster, batch=64, sequence=4096, stack=stack, **options)
        except mw.MeshweaveError:
            continue
        alone = step_of(replace(step.problem, stack=step.problem.stack.kernels_alone), step.parallelism)
        assert alone.time_s <= step.time_s * (1 + 1e-12), stack
        tried += 1
    assert tried


def test_a_rate_of_a_datasheet_stands_beside_the_number_with_what_was_ever_shown() -> None:
    plan = mw.plan(
        "llama-2-7b", "mi300x-platform:8", batch=64, sequence=4096, tp=1, pp=1, cp=1, stack="ideal"
    )
    most = most_published_mfu()
    assert most is not None and 0.6 < most.mfu < plan.step.best.mfu
    lines = plan.summary().splitlines()
    (speed,) = (line for line in lines if " a step, " in line)
    assert "% MFU (causal pairs, at a datasheet's rate)" in speed
    assert (
        f"           above {100 * most.mfu:.1f} %, the most that a saved published run has" in plan.summary()
    )
    measured = mw.plan("llama-2-7b", "dgx-h100:8", batch=64, sequence=4096, dp=8, pp=1).summary()
    assert "datasheet" not in measured and "published run has" not in measured


@pytest.mark.parametrize(("sequence", "is_taken"), [(2047, False), (2048, True)])
def test_what_the_runtime_refuses_stands_beside_the_best(sequence: int, is_taken: bool) -> None:
    fixed = {"batch": 8, "sequence": sequence, "tp": 8, "pp": 1, "cp": 1, "dp": 1, "strategy": "megatron_sp"}
    said = "8 ranks have equal shares of a sequence, which 2047 tokens are not: give 2048"
    assert (said in mw.plan("llama-2-7b", "dgx-h100:8", **fixed).summary()) != is_taken
    assert said not in mw.plan("llama-2-7b", "dgx-h100:8", stack="megatron-core", **fixed).summary()
