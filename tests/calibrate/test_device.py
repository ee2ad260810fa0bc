"""Calibrating one device: seeded shapes, a fit to measured products, and the file that it writes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from meshweave.base.errors import DescriptionError, UnsupportedError
from meshweave.calibrate import device
from meshweave.cli.app import run_app
from meshweave.cost.products import product_seconds
from meshweave.describe.machine.kernels import CpuProductConstants
from meshweave.describe.machine.kernels_file import load_kernels


def test_shapes_follow_from_the_seed() -> None:
    shapes = device.draw_shapes(50, 7, 1e9)
    assert shapes == device.draw_shapes(50, 7, 1e9) and len(set(shapes)) == 50
    assert shapes != device.draw_shapes(50, 8, 1e9)
    assert all(2 * m * n * k <= 1e9 and min(m, n, k) >= 8 for m, n, k in shapes)
    assert any(m % 8 for m, _, _ in shapes) and sum(m % 8 == 0 for m, _, _ in shapes) > 25


def test_a_fit_predicts_products_that_it_has_not_seen() -> None:
    """Times of known constants with 3 % of noise, fitted on 150 shapes, scored on 60 others."""
    made = CpuProductConstants(9e10, 3e-6, 1e10, 4e6, 4e-12, 4e-12, 1e-11, 2e-11, 1e-10)
    shapes = device.draw_shapes(210, 1, 2e9)
    sizes = np.array(shapes, dtype=np.float64)
    noise = np.exp(np.random.default_rng(0).normal(0, 0.03, len(shapes)))
    seconds = product_seconds(made, *sizes.T, 4) * noise
    fitted = device.fit_device("c", "a test", "float32", shapes[:150], list(seconds[:150]), 1)
    assert fitted.mean_error < 0.04
    constants = fitted.kernels.product("float32")
    assert constants is not None
    errors = np.abs(product_seconds(constants, *sizes[150:].T, 4) / seconds[150:] - 1)
    assert errors.mean() < 0.05 and errors.max() < 0.2
    with pytest.raises(DescriptionError, match="too few"):
        device.fit_device("c", "a test", "float32", shapes[:9], list(seconds[:9]), 1)


def test_the_command_measures_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(device, "_MOST_FLOPS", {"cpu": 2e6})
    monkeypatch.setattr(device, "_LOOP_S", 1e-5)
    out = tmp_path / "mine.toml"
    command = ["calibrate", "--device", "cpu", "--products", "20", "--repeat", "1", "--out", str(out)]
    assert run_app([*command, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    kernels = load_kernels("mine.toml", tmp_path)
    assert kernels.product("float32") is not None and said["kernels"]["name"] == kernels.name
    assert run_app(command) == 2 and "is there already" in capsys.readouterr().err
    assert run_app([*command, "--force", "--ranks", "2"]) == 2
    assert run_app([*command, "--force", "--dtype", "int4"]) == 2
    with pytest.raises(UnsupportedError, match="cannot use the device 'nowhere'"):
        device.measure_products("nowhere", "float32", [(8, 8, 8)], 1)
    with pytest.raises(UnsupportedError, match="on cpu and cuda, and not on 'meta'"):
        device.measure_products("meta", "float32", [(8, 8, 8)], 1)  # torch has it, and no clock sees its work


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--device", "cpu", "--worst-error", "0.1"], "--worst-error changes nothing: --device cpu"),
        (["--device", "cpu", "--sizes", "1,2"], "--sizes changes nothing"),
        (["--device", "tpu-v5e", "--repeat", "5"], "--repeat changes nothing"),
        (["--ranks", "2", "--dtype", "bfloat16"], "--dtype changes nothing"),
        (["--ranks", "2", "--products", "30"], "--products changes nothing"),
    ],
)
def test_options_of_the_other_kind_are_refused(
    args: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(["calibrate", *args, "--out", str(tmp_path / "mine.toml")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {said}") and error.count("\n") == 1


def test_operands_are_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU multiplies ones faster than what models multiply."""
    torch = pytest.importorskip("torch")
    seen = []

    def loop_s(torch, a, b, loop_s):
        seen.extend((a, b))
        return 1e-6

    monkeypatch.setattr(device, "_best_loop_s", loop_s)
    assert device.measure_products("cpu", "bfloat16", [(64, 32, 48)], 1) == [1e-6]
    assert [tuple(x.shape) for x in seen] == [(64, 48), (48, 32)]
    assert all(x.dtype == torch.bfloat16 and 0.5 < x.float().std() < 1.5 for x in seen)


@pytest.mark.gpu
def test_a_cuda_device_is_calibrated_without_the_time_of_its_host(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    out = tmp_path / "mine.toml"
    command = ["calibrate", "--device", "cuda", "--products", "40", "--repeat", "1", "--out", str(out)]
    assert run_app(command) == 0
    constants = load_kernels("mine.toml", tmp_path).product("bfloat16")
    assert constants is not None and constants.launch_s < 5e-6
    shapes = [(4096, 4096, 4096), (64, 64, 64)]
    large_s, small_s = device.measure_products("cuda", "bfloat16", shapes, 2)
    assert small_s < 5e-6 and 2 * 4096**3 / large_s > 20 * 2 * 64**3 / small_s
