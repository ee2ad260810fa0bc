"""The examples run as their docstrings say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_program_of_ones_own() -> None:
    out = run(sys.executable, str(EXAMPLES / "your_own_program.py"))
    assert "equal to numpy's product: True" in out
    assert "found before anything runs" in out


def test_the_picture_of_overlap(tmp_path: Path) -> None:
    out = run(sys.executable, str(EXAMPLES / "overlap_picture.py"), str(tmp_path / "timeline.svg"))
    assert "MeshSlice" in out
    assert (tmp_path / "timeline.svg").read_text().startswith("<svg")


@pytest.mark.gloo
def test_training_with_matmul2d() -> None:
    pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    out = run(*torchrun, str(EXAMPLES / "matmul2d_training.py"))
    assert "step 2: loss" in out


@pytest.mark.gloo
def test_products_in_any_layout() -> None:
    pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
    out = run(sys.executable, str(EXAMPLES / "any_layout.py"))
    assert out.rstrip().endswith("products and gradients equal the dense ones")


@pytest.mark.gloo
def test_a_tensor_between_meshes() -> None:
    pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
    out = run(sys.executable, str(EXAMPLES / "reshard.py"))
    assert out.rstrip().endswith("values and gradients are the dense ones")
