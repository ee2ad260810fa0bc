"""A plan as text: what the command prints, and one line where Python shows it."""

from __future__ import annotations

import sys

import pytest

import meshweave as mw
from meshweave.base.errors import UnsupportedError
from meshweave.cli.app import run_app

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
