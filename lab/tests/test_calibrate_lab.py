"""`meshweave calibrate --lab`: mistakes on one line, and the rates of real links."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshweave.cli.app import run_app
from meshweave.describe.machine.cluster import load_cluster

LAB = str(Path(__file__).parents[2] / "examples" / "labs" / "torus-2x2.toml")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--lab", "no-such.toml"], "no-such.toml"),
        (["--lab", LAB, "--mesh", "1x3"], "mesh 1x3 does not have the 4 ranks"),
        (["--lab", LAB, "--flops-per-s", "-1"], "give 1e3 to 1e15"),
    ],
)
def test_mistakes_are_one_line(args, said, tmp_path, capsys):
    out = tmp_path / "cluster.toml"
    assert run_app(["calibrate", *args, "--out", str(out)]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1 and not captured.out
    assert not out.exists()


@pytest.mark.slow
@pytest.mark.lab
@pytest.mark.gloo
@pytest.mark.parametrize("shape", [(1, 2), (2, 2)])
def test_a_lab_has_the_rates_that_it_is_shaped_to(shape, tmp_path, capfd):
    pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
    lab, out = tmp_path / "lab.toml", tmp_path / "cluster.toml"
    axis = "[[network.axes]]\nlink_bits_per_s = 50e6\n"
    lab.write_text(f'name = "x"\n[network]\nkind = "torus"\nshape = {list(shape)}\n{axis}{axis}')
    sizes = ["--sizes", "32768,49152,65536,98304", "--repeat", "1", "--timeout", "150"]
    args = ["calibrate", "--lab", str(lab), *sizes, "--flops-per-s", "5e8", "--accept-misfit"]
    assert run_app([*args, "--out", str(out)]) == 0
    assert "written: " in capfd.readouterr().out
    cluster = load_cluster(out)
    assert cluster.network.shape == shape and [axis.name for axis in cluster.network.axes] == ["row", "col"]
    for axis, size in zip(cluster.network.axes, shape, strict=True):
        assert axis.link_bytes_per_s == 6_250_000
        assert bool(axis.constants) == (size > 1)
        for _, constants in axis.constants:
            assert 0.7 * 6.25e6 < constants.bytes_per_s <= 6.25e6
    assert 0.8 * 5e8 < cluster.chip.effective_flops_per_s <= 5e8
