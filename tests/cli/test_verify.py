"""`meshweave verify`: right plans, wrong ones, and what cannot be checked."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshweave.algorithms.matmul2d import Matmul2dConfig, Matmul2dProblem
from meshweave.algorithms.matmul2d.collective import CollectiveProduct
from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.base.errors import RankLostError
from meshweave.check import Verification, verifier
from meshweave.check.reduced import reduce_products
from meshweave.cli.app import run_app
from meshweave.ir.program import Program
from meshweave.ir.program.parse import parse
from meshweave.ir.program.text import to_text
from meshweave.tune import load_plan
from meshweave.tune.selection import select_products
from sampling import mostly_slow

QUICK = ("--max-dim", "64", "--layer", "ff1")


@pytest.fixture(scope="module")
def plan_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-3 with every algorithm of the table that can use 16 chips."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    assert (
        run_app(["plan", "gpt3", "--products", "--cluster", "tpu-v4-pod:16", "--out", str(path), "--json"])
        == 0
    )
    return path


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier, "verify_on_processes", lambda *args: "not in this test")


def verified(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    status = run_app(["verify", *args, "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("ranks", mostly_slow([4, 6], 1))
def test_every_planned_algorithm_is_right_in_process(
    capsys: pytest.CaptureFixture[str], plan_path: Path, in_process: None, ranks: int
) -> None:
    """All of the plan, on meshes of a power of two and not: checked, or skipped for a reason."""
    status, report = verified(capsys, str(plan_path), "--ranks", str(ranks), *QUICK)
    assert status == 0 and report["wrong"] == 0
    assert all(product["max_abs_error_in_process"] == 0 for product in report["products"])
    seen = {(p["algorithm"], p["pass"]) for p in report["products"] + report["skipped"]}
    planned = json.loads(plan_path.read_text())["candidates"]
    assert seen == {
        (c["algorithm"], name) for c in planned for name in ("forward", "backward_data", "backward_weight")
    }
    assert all(product["reason"] for product in report["skipped"])


class SquareOnly(CollectiveProduct):
    def mesh_shapes(self, num_chips: int) -> tuple[tuple[int, ...], ...]:
        return ((4, 4),) if num_chips == 16 else ()


def test_algorithms_without_such_a_mesh_are_skipped_aloud(
    capsys: pytest.CaptureFixture[str], plan_path: Path, in_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    square = SquareOnly()
    monkeypatch.setitem(PRODUCTS_2D.entries, "collective", square)
    names = ["--algorithm", "collective,meshslice"]
    assert run_app(["verify", str(plan_path), "--ranks", "2", *QUICK, *names]) == 0
    out = capsys.readouterr().out
    assert "skipped: collective (3 products): collective has no mesh of 2 ranks" in out
    assert "3 products right, 0 wrong, 3 skipped" in out
    assert run_app(["verify", str(plan_path), "--ranks", "2", *QUICK, "--algorithm", "collective"]) == 2
    assert "nothing to check on 2 ranks" in capsys.readouterr().err


class Damaged(CollectiveProduct):
    """Collective, with one of its ops left out: the all-gather or reduce-scatter that comes first."""

    def program(self, problem: Matmul2dProblem, config: Matmul2dConfig) -> Program:
        lines = to_text(super().program(problem, config)).splitlines()
        at = next(i for i, line in enumerate(lines) if "all_gather(" in line or "reduce_scatter(" in line)
        return parse("\n".join(lines[:at] + lines[at + 1 :]) + "\n")


def test_an_unsound_program_is_status_1(
    capsys: pytest.CaptureFixture[str], plan_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PRODUCTS_2D.entries, "collective", Damaged())
    status, report = verified(capsys, str(plan_path), *QUICK, "--algorithm", "collective")
    assert status == 1 and report["wrong"] == 3
    assert all("in process" in product["failed"] for product in report["products"])
    assert report["processes"] == "no product is sound in process"


def test_a_wrong_number_is_status_1(
    capsys: pytest.CaptureFixture[str], plan_path: Path, in_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = verifier.run_numpy

    def off_by_one(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        result.outputs["C"][0, 0] += 1 if kwargs["seed"] == 2 else 0
        return result

    monkeypatch.setattr(verifier, "run_numpy", off_by_one)
    assert run_app(["verify", str(plan_path), *QUICK, "--algorithm", "collective"]) == 1
    out = capsys.readouterr().out
    assert out.count("WRONG by 1") == 3 and "0 products right, 3 wrong" in out


def test_what_ranks_logged_is_told_apart(plan_path: Path) -> None:
    """Three products: all ranks right, one rank wrong, one rank gone; what comes later did not run."""
    selected = select_products(load_plan(plan_path), layers=["ff1", "ff2"], algorithms=["collective"])
    verifications = [
        Verification(product.title, product.program, product)
        for product in reduce_products(selected, 4, 64)
        if product.program is not None
    ]
    logs = [[{"number": 0, "error": 0.0}, {"number": 1, "error": 2.0 * (rank == 3)}] for rank in range(4)]
    logs[0].append({"number": 2, "error": 0.0})
    verifier.set_process_results(verifications, logs, str(RankLostError("rank 3 was killed by SIGKILL", [3])))
    assert [item.error_on_processes for item in verifications[:2]] == [0.0, 2.0]
    assert "rank 3 was killed" in verifications[2].failed
    assert all("not run" in item.failed for item in verifications[3:])
    assert [item.is_wrong for item in verifications] == [False, True, True, True, True, True]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--layer", "ff3"], "did you mean 'ff"),
        (["--layer", ","], "list of names is empty"),
        (["--algorithm", "meshslise"], "meshslice"),
        (["--ranks", "0"], "give 1 to 64"),
        (["--max-dim", "7"], "8 to 4096"),
        (["--rings", "3"], "1 or 2 directions"),
        (["--timeout", "nan"], "positive seconds"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], plan_path: Path, args: list[str], message: str) -> None:
    capsys.readouterr()
    assert run_app(["verify", str(plan_path), *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert message in captured.err


def test_a_config_without_a_program_is_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["verify", "1f1b", "--set", "micro_batches=100000000"]) == 0
    out = capsys.readouterr().out
    assert "no program: 1f1b: has 200,000,000 forwards" in out
    assert out.endswith("0 configs right, 0 wrong, 2 skipped\n")


def test_a_plan_that_contradicts_itself_is_refused(
    capsys: pytest.CaptureFixture[str], plan_path: Path, tmp_path: Path
) -> None:
    data = json.loads(plan_path.read_text())
    data["num_chips"] = 32
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    assert run_app(["verify", str(path)]) == 2
    assert "is not a mesh of the 32 chips planned" in capsys.readouterr().err


def test_without_torch_the_rest_still_runs(plan_path: Path, tmp_path: Path) -> None:
    """torch is hidden by a module that refuses to be imported."""
    (tmp_path / "torch.py").write_text("raise ImportError('hidden')")
    args = ["verify", str(plan_path), *QUICK, "--algorithm", "collective"]
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nfrom meshweave.cli import main\nmain({args!r})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "skipped: all products on processes: torch is missing" in done.stdout
    assert "3 products right" in done.stdout


@pytest.mark.gloo
@pytest.mark.parametrize(
    "algorithms",
    [["--algorithm", "collective,meshslice"], pytest.param([], marks=pytest.mark.slow, id="all")],
)
def test_processes_start_once_and_agree(
    capsys: pytest.CaptureFixture[str], plan_path: Path, algorithms: list[str]
) -> None:
    pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
    status, report = verified(capsys, str(plan_path), "--ranks", "2", *QUICK, *algorithms)
    assert status == 0 and report["processes"] == "ran"
    errors = {(p["max_abs_error_in_process"], p["max_abs_error_on_processes"]) for p in report["products"]}
    assert errors == {(0.0, 0.0)}
    assert len(report["products"]) >= 6


@pytest.mark.gloo
def test_a_rank_that_fails_is_told_by_product(
    capsys: pytest.CaptureFixture[str], plan_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that the ranks cannot bind: the product is named, and those after it did not run."""
    pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
    real = verifier.program_run
    programs = []

    def second_is_damaged(program: Program, *args: Any) -> Any:
        programs.append(program)
        run = real(program, *args)
        if len(programs) == 2:
            return replace(run, program=run.program.replace("output(C", "output(D"))
        return run

    monkeypatch.setattr(verifier, "program_run", second_is_damaged)
    args = ["--ranks", "2", "--algorithm", "collective", *QUICK]
    status, report = verified(capsys, str(plan_path), *args)
    assert status == 1
    first, second, third = report["products"]
    assert first["max_abs_error_on_processes"] == 0 and first["failed"] == ""
    assert "on processes" in second["failed"] and "D" in second["failed"]
    assert "not run" in third["failed"]
