"""The page about GPUs is that of the saved results, and these hold what the code predicts."""

from __future__ import annotations

import importlib
import json
import runpy
import statistics
import sys
from types import ModuleType

import pages
import pytest

from meshweave.describe.machine.cluster import load_cluster
from meshweave.execute.cuda.tiling import ADDING_PROGRAMS

GPU = pages.ROOT / "benchmarks" / "gpu"
SAVED = pages.ROOT / "benchmarks" / "results" / "gpu"


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(GPU))
    return importlib.import_module("steps")


def test_the_page_about_gpus_is_generated() -> None:
    tables = runpy.run_path(str(pages.ROOT / "docs" / "measured_gpu.py"))
    assert tables["page"]() == tables["PAGE"].read_text("utf-8"), "run python docs/measured_gpu.py"


def test_bytes_of_the_optimizer_and_of_logits() -> None:
    rows = json.loads((SAVED / "steps.json").read_text())["rows"]
    bandwidth = load_cluster("dgx-h100:1").chip.kernels.elementwise[1]
    moved, kept = [], set()
    for row in rows:
        run, of = row["run"], row["measured"]
        if run["gradients"] == "float32":
            moved.append(of["phases_s"]["optimizer"] * bandwidth / of["memory"]["parameters"])
        logits = run["micro_batch"] * run["seq"] * run["vocab"]
        after = of["memory"]["peak_backward"] - of["memory"]["after_forward"]
        if not run["compiled"]:  # two gradients in fp32, of the same size as the logarithms that are kept
            kept.add(round(after / logits / 2))
    text = (pages.ROOT / "docs" / "guide" / "gpu.md").read_text()
    assert f"as long as {statistics.median(moved):.0f} bytes a parameter" in text
    assert kept == {4}


def test_multiprocessors_that_products_leave() -> None:
    for page in ("guide/gpu.md", "decisions/0057-a-counter-for-each-region.md"):
        text = (pages.ROOT / "docs" / page).read_text()
        assert f"{ADDING_PROGRAMS} multiprocessors" in text, page


def test_saved_steps_are_predicted_as_now(steps: ModuleType) -> None:
    row = json.loads((SAVED / "steps.json").read_text())["rows"][0]
    predicted = steps.predict(steps.TrainingRun(**row["run"]))
    why = "run python benchmarks/gpu/steps.py --predict and python docs/measured_gpu.py"
    assert predicted["step_s"] == pytest.approx(row["predicted"]["step_s"], rel=1e-3), why
    assert predicted["memory"]["total"] == pytest.approx(row["predicted"]["memory"]["total"], rel=1e-3), why


def test_kinds_of_work_are_the_step(steps: ModuleType) -> None:
    for run in (steps.RUNS[0], next(run for run in steps.RUNS if run.recompute == "full")):
        predicted = steps.predict(run)
        assert min(predicted["kinds_s"].values()) > 0
        assert sum(predicted["kinds_s"].values()) == pytest.approx(predicted["step_s"], rel=0.01)


def test_without_a_device_it_says_what_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["run.py", "--no-interpreter"])
    assert runpy.run_path(str(GPU / "run.py"))["main"]() == 0
    assert (
        "left out tests marked gpu (tests), products that count their tiles (tracked)"
        in capsys.readouterr().out
    )
    monkeypatch.setattr(sys, "argv", ["run.py", "--stage", "tests,none"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(GPU / "run.py"))["main"]()
    assert "no stage 'none'; give all or some of tests, tracked" in capsys.readouterr().err
