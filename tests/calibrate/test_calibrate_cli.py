"""`meshweave calibrate` as a user meets it: mistakes on one line, and real runs at tiny sizes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshweave.cli.app import run_app
from meshweave.describe.machine.cluster import load_cluster
from meshweave_lab.network.check import lab_problem

LABS = Path(__file__).parents[2] / "examples" / "labs"
LAB = str(LABS / "torus-2x2.toml")
TINY = ["--sizes", "4096,65536", "--repeat", "1", "--timeout", "100", "--accept-misfit"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "give --lab LAB.toml or --ranks N"),
        (["--lab", LAB, "--ranks", "2"], "give one of them"),
        (["--ranks", "1"], "give 2 to 1024"),
        (["--ranks", "2", "--flops-per-s", "1e9"], "give --lab too"),
        (["--ranks", "2", "--mesh", "3x1"], "mesh 3x1 does not have the 2 ranks"),
        (["--ranks", "2", "--mesh", "two"], "is not written ROWSxCOLS"),
        (["--ranks", "2", "--sizes", "1k,2k"], "are not whole bytes"),
        (["--ranks", "2", "--sizes", "4096"], "one size cannot tell a bandwidth"),
        (["--ranks", "2", "--sizes", "8,4096"], "a part of 8 bytes"),
        (["--ranks", "2", "--repeat", "0"], "repeat must be 1 to 100"),
        (["--ranks", "2", "--worst-error", "0"], "relative errors"),
        (["--lab", "no-such.toml"], "no-such.toml"),
        (["--lab", LAB, "--mesh", "1x3"], "mesh 1x3 does not have the 4 ranks"),
        (["--lab", LAB, "--flops-per-s", "-1"], "give 1e3 to 1e15"),
    ],
)
def test_mistakes_are_one_line(args, said, tmp_path, capsys, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    out = tmp_path / "cluster.toml"
    assert run_app(["calibrate", *args, "--out", str(out)]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1 and not captured.out
    assert not out.exists()


def test_a_file_that_is_there_is_kept(tmp_path, capsys):
    out = tmp_path / "cluster.toml"
    out.write_text("mine")
    assert run_app(["calibrate", "--ranks", "2", "--out", str(out)]) == 2
    assert "--force" in capsys.readouterr().err and out.read_text() == "mine"
    assert run_app(["calibrate", "--ranks", "2", "--out", str(tmp_path / "no" / "where.toml")]) == 2
    assert "there is no directory" in capsys.readouterr().err


@pytest.mark.gloo
def test_local_processes(tmp_path, capfd):
    pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
    out = tmp_path / "cluster.toml"
    assert run_app(["calibrate", "--ranks", "2", *TINY, "--out", str(out), "--json"]) == 0
    captured = capfd.readouterr()
    result = json.loads(captured.out)
    assert result["written"] == str(out) and "repetition 1 of 1" in captured.err
    cluster = load_cluster(out)
    assert cluster.num_chips == 2 and "2 local processes" in cluster.source
    constants = dict(cluster.network.link.constants)
    assert set(constants) - {"broadcast", "reduce"} == {"all_gather", "reduce_scatter", "send_recv"}
    assert cluster.send_buffer_bytes > 0
    assert cluster.chip.effective_flops_per_s > 1e8
    for line in result["problems"]:  # whatever did not fit is said in the file too
        assert line in out.read_text()


def test_what_does_not_fit_is_refused(tmp_path, capfd, monkeypatch):
    pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")

    def times_that_do_not_grow(target, num_ranks, payload, **options):
        runs = [
            [[1e-3, 1e-3] if kind == "compute" else [1e-3] for kind, *_ in case["loops"]]
            for case in payload["cases"]
        ]
        versions = {"torch": "2", "python": "3"}
        return [{"times": [[run] for run in runs], "versions": versions, "send_buffer_bytes": 0}] * num_ranks

    monkeypatch.setattr("meshweave.execute.ranks.launch.launch", times_that_do_not_grow)
    out = tmp_path / "cluster.toml"
    args = ["calibrate", "--ranks", "2", "--sizes", "1024,4096,16384,65536", "--out", str(out)]
    assert run_app(args) == 2
    captured = capfd.readouterr()
    assert "does not fit what was measured" in captured.err and "misfit: " in captured.out
    assert not out.exists()


@pytest.mark.slow
@pytest.mark.gloo
def test_under_torchrun(tmp_path):
    pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
    out = tmp_path / "cluster.toml"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "meshweave", "calibrate", *TINY, "--out", str(out)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("written: ") == 1
    assert "2 ranks of torchrun" in load_cluster(out).source


@pytest.mark.slow
@pytest.mark.lab
@pytest.mark.gloo
@pytest.mark.parametrize("shape", [(1, 2), (2, 2)])
def test_a_lab_has_the_rates_that_it_is_shaped_to(shape, tmp_path, capfd):
    pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
    if lab_problem():
        pytest.skip(f"no lab on this machine: {lab_problem()}")
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
