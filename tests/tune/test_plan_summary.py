"""A plan as text: what the command prints, and one line where Python shows it."""

from __future__ import annotations

import pytest

import meshweave as mw
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
    plan = mw.tune.plan_model(mw.load_model("gpt3"), mw.load_cluster("tpu-v4-pod:16"), mw.Workload(8, 2048))
    first, *rest = plan.summary().splitlines()
    assert first.startswith("gpt3 on 16 chips") and len(rest) == len(plan.candidates)
    assert "nothing that fits" in repr(plan.model_copy(update={"candidates": ()}))
