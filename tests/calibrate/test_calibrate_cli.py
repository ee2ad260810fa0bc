"""`meshweave calibrate` as a user meets it: mistakes on one line, and real runs at tiny sizes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshweave.cli.app import run_app
from meshweave.describe.machine.cluster import load_cluster

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
