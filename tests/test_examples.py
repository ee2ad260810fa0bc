"""The examples run as their docstrings say, in this process where they start their own ranks."""

from __future__ import annotations

import json
import runpy
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshweave import launch

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Run an example as a script; return what it and its ranks print. Warnings are part of that."""

    def run_example(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        out, errors = capfd.readouterr()
        assert not errors, errors
        return out

    return run_example


def test_a_program_of_ones_own(run) -> None:
    out = run("your_own_program.py")
    assert "equal to numpy's product: True" in out
    assert "found before anything runs" in out


def test_the_picture_of_overlap(run, tmp_path: Path) -> None:
    out = run("overlap_picture.py", str(tmp_path / "timeline.svg"))
    assert "MeshSlice" in out
    assert (tmp_path / "timeline.svg").read_text().startswith("<svg")


@pytest.mark.slow
def test_training_in_jax() -> None:
    pytest.importorskip("jax", reason="jax is not installed: the jax rung cannot run here")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "jax_training.py")],
        capture_output=True, text=True, timeout=180, check=True,
    )  # fmt: skip
    assert done.stdout.count("on 8 devices") == 6


@pytest.mark.slow  # tests/docs run it in a lab
@pytest.mark.gloo
def test_training_with_matmul2d() -> None:
    pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    done = subprocess.run(
        [*torchrun, str(EXAMPLES / "matmul2d_training.py")],
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "step 2: loss" in done.stdout


@pytest.mark.slow  # tests/docs train the same on the lines that the README shows
@pytest.mark.gloo
def test_training_a_model_of_transformers() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    done = subprocess.run(
        [*torchrun, str(EXAMPLES / "train_llama.py")],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 10 and losses[-1] < losses[0] - 1


@pytest.mark.gloo
def test_products_in_any_layout(run) -> None:
    pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
    assert run("any_layout.py").rstrip().endswith("products and gradients equal the dense ones")


@pytest.mark.gloo
def test_a_tensor_between_meshes(run) -> None:
    pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
    assert run("reshard.py").rstrip().endswith("values and gradients are the dense ones")


@pytest.mark.gloo
@pytest.mark.slow
def test_a_pipeline(run) -> None:
    pytest.importorskip("torch")
    out = run("pipeline.py")
    assert "rank 0: 0F 0F" in out
    assert "gradients are those of the whole model" in out


@pytest.mark.gloo
@pytest.mark.slow
def test_a_training_of_a_gpt_that_is_resumed_on_fewer_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("tensorboard")

    def trained(num_ranks: int, *arguments: str) -> dict[str, Any]:
        torchrun = (
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            f"{num_ranks}",
        )
        script = (
            str(EXAMPLES / "train_gpt.py"),
            "--hidden",
            "32",
            "--sequence",
            "16",
            "--folder",
            str(tmp_path),
            "--json",
        )
        done = subprocess.run(
            [*torchrun, *script, *arguments], capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    first = trained(4, "--parallel", "tp=2,pp=2", "--steps", "6", "--save-every", "4", "--predict")
    assert first["steps"] == [1, 2, 3, 4, 5, 6]
    assert first["predicted_step_s"] > 0
    second = trained(1, "--steps", "8", "--resume")
    assert second["steps"] == [7, 8]
    assert second["losses"][0] < first["losses"][0]
    assert {"events", "step-00000006", "step-00000008"} <= {path.name for path in tmp_path.iterdir()}


def _trained_experts(folder: Path, num_ranks: int, *arguments: str) -> str:
    """Return what the training of a routed model by so many ranks prints."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    payload = {
        "port": port,
        "script": str(EXAMPLES / "train_experts.py"),
        "arguments": ["--folder", str(folder), *arguments],
    }
    here = {"PYTHONPATH": str(Path(__file__).parent)}
    return str(launch("example_ranks:run_script", num_ranks, payload, timeout_s=140, env=here)[0])


@pytest.mark.gloo
def test_training_of_experts(tmp_path: Path) -> None:
    out = _trained_experts(tmp_path, 2, "--steps", "2", "--data", "2", "--tensor", "1", "--expert", "2")
    assert "step 2 saved; transformers reads it" in out


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_training_of_experts_that_goes_on_at_another_layout(tmp_path: Path) -> None:
    _trained_experts(tmp_path, 4, "--steps", "2")
    out = _trained_experts(
        tmp_path, 4, "--steps", "4", "--resume", "--data", "4", "--tensor", "1", "--expert", "2"
    )
    assert "step 3: loss" in out
    assert "step 4 saved; transformers reads it" in out
