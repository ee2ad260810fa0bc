"""`meshweave compile`: what it says of a compiled program, and of what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import meshweave as mw
from meshweave.cli.app import run_app
from meshweave_studies.tpu import compiled as compiled_module
from meshweave_studies.tpu import targets as tpu
from meshweave_studies.tpu.compiled import CompiledProgram, Emission, target_cluster
from meshweave_studies.tpu.targets import TPU_TARGETS, TpuTarget

MODULE = Path(__file__).parent / "modules" / "fused_gathers_v5e.txt"


@pytest.fixture
def plan(tmp_path: Path) -> str:
    out = tmp_path / "plan.json"
    made = mw.tune.plan_model(
        mw.load_model("gpt3"), mw.load_cluster("tpu-v5e:16"), mw.Workload(16, 2048), ["meshslice"]
    )
    made.save(out)
    return str(out)


def test_what_is_said(plan: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The saved module stands in for a compilation; sizes, cycles and modes are read from it."""

    def saved(program: mw.Program, target: TpuTarget, emission: Emission) -> CompiledProgram:
        memory = {"arguments": 2**20, "results": 2**20, "temporaries": 0}
        cluster = target_cluster(target, 16)
        return CompiledProgram(program, emission, target, cluster, MODULE.read_text(), 1.5, memory)

    monkeypatch.setattr(compiled_module, "compile_program", saved)
    command = ["compile", plan, "--topology", "v5e:4x4", "--algorithm", "meshslice", "--emission", "fused"]
    assert run_app([*command, "--json"]) == 0
    (said,) = json.loads(capsys.readouterr().out)
    assert said["topology"] == "v5e:4x4" and said["emission"] == "fused" and said["products"] == 4
    assert [one["mode"] for one in said["collectives"]] == ["synchronous"] * 5 + ["fused"] * 3
    assert said["beside"] == 3 and said["exposed_within"] == 0 and said["peak_bytes"] == 2**21
    assert said["expected_s"] == pytest.approx(said["product_s"] + said["other_s"] + said["exposed_s"])
    assert said["predicted_s"] > 0
    assert run_app(command) == 0
    printed = capsys.readouterr().out
    assert "all_gather" in printed and "synchronous" in printed and "16,640" in printed
    said_of = " ".join(printed.split())
    assert "3 of 8 collectives have a product beside them, 0 between products have none" in said_of


def test_what_is_missing_is_said(
    plan: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tpu, "has_tpu_compiler", lambda: False)
    assert run_app(["compile", plan]) == 2
    assert "pip install 'meshweave[tpu]'" in capsys.readouterr().err
    assert run_app(["compile", plan, "--topology", "v6:4x4"]) == 2
    assert "give one of v4:4x4x1, v5e:4x4" in capsys.readouterr().err
    assert run_app(["compile", plan, "--emission", "ring"]) == 2
    assert "did you mean 'rings'" in capsys.readouterr().err


def test_targets_that_are_compiled_for_have_kernels() -> None:
    for name in ("tpu-v4-core", "tpu-v5e"):
        chip = target_cluster(TPU_TARGETS[name], 16).chip
        assert chip.kernels is not None and chip.kernels.name == TPU_TARGETS[name].name
