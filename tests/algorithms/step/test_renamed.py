"""Old names of a step's keywords work for one version, and say the new ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

import meshweave as mw
from meshweave.cli.app import run_app

CLUSTER = mw.load_cluster("dgx-h100:8")
MODEL = mw.load_model("llama-2-7b")


def test_a_problem_takes_and_gives_seq() -> None:
    problem = mw.algorithms.StepProblem(MODEL, CLUSTER, 16, 2048)
    with pytest.warns(DeprecationWarning, match="seq of StepProblem is sequence now") as told:
        old = mw.algorithms.StepProblem(MODEL, CLUSTER, 16, seq=2048)  # type: ignore[call-arg]
    assert old == problem and [warning.filename for warning in told] == [__file__]
    with pytest.warns(DeprecationWarning, match="seq of StepProblem is sequence now"):
        assert old.seq == 2048  # type: ignore[attr-defined]
    with pytest.warns(DeprecationWarning, match="seq of StepProblem is sequence now"):
        assert replace(problem, seq=1024).sequence == 1024  # type: ignore[call-arg]


@pytest.mark.parametrize("call", [mw.step, mw.plan])
def test_step_and_plan_take_seq(call: Callable[..., object]) -> None:
    of = {"batch": 16, "tp": 8, "pp": 1, "cp": 1, "strategy": "megatron_sp", "zero": 0, "recompute": "full"}
    with pytest.warns(DeprecationWarning, match=f"seq of mw.{call.__name__} is sequence now"):
        old = call(MODEL, CLUSTER, seq=2048, **of)
    new = call(MODEL, CLUSTER, sequence=2048, **of)
    assert str(old) == str(new)


def test_the_command_line_takes_seq(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "tune",
        "block",
        "llama-2-7b",
        "--cluster",
        "dgx-h100:8",
        "--batch",
        "8",
        "--algorithm",
        "megatron",
    ]
    shown = []
    for option in ("--seq", "--sequence"):
        assert run_app([*arguments, "--simulate", "0", "--json", option, "512"]) == 0
        shown.append(capsys.readouterr())
    assert shown[0].out == shown[1].out
    assert "--seq is --sequence now" in shown[0].err and not shown[1].err
