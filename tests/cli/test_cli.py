"""The command line as a user meets it: in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import meshweave as mw
from meshweave.algorithms.table import ALGORITHMS
from meshweave.base.errors import ProgramError
from meshweave.cli.app import run_app
from meshweave.cli.options import read_program
from meshweave.ir.program.parse import parse


def meshweave(*args: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "meshweave", *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def called(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """As `meshweave`, in this process: quicker."""
    status = run_app(list(args))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture(scope="module")
def plan_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    args = [
        "--cluster",
        "tpu-v4-pod:16",
        "--algorithms",
        "meshslice,collective",
        "--out",
        str(path),
        "--json",
    ]
    assert run_app(["plan", "gpt3", "--products", *args]) == 0
    return path


def test_plan_prints_a_ranked_table(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = called(capsys, "plan", "gpt3", "--products", "--cluster", "tpu-v4-pod:16")
    assert status == 0
    assert out.index("meshslice") < out.index("collective")
    assert "is the largest matrix" in out


def test_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = called(
        capsys,
        "plan",
        "gpt3",
        "--products",
        "--cluster",
        "tpu-v4-pod:16",
        "--json",
        "--algorithms",
        "collective",
    )
    assert status == 0
    assert [c["algorithm"] for c in json.loads(out)["candidates"]] == ["collective"]


def test_show_prints_what_parses_back(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = called(
        capsys, "show", "meshslice", "--mesh", "2x3", "--m", "20", "--slices", "1:2:1", "--rings", "2"
    )
    assert status == 0
    assert parse(out).name == "meshslice"
    assert "valid" in err


def test_show_prints_what_a_plan_chose(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    made = mw.plan("llama-2-7b", "dgx-h100:8", batch=16, sequence=2048, tp=8, strategy="megatron_sp")
    made.save(path)
    status, out, _ = called(capsys, "show", str(path))
    assert (status, out) == (0, f"{made.summary()}\n")
    status, out, _ = called(capsys, "show", str(path), "--json")
    assert (status, json.loads(out)) == (0, json.loads(path.read_text()))
    status, _, err = called(capsys, "show", str(path), "--rings", "1")
    assert status == 2 and "has no options but --json" in err
    with pytest.raises(ProgramError, match="is a plan, and no program: meshweave show prints"):
        read_program(str(path))


def test_show_reads_a_file_and_one_rank(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, text, _ = called(capsys, "show", "collective")
    path = tmp_path / "program.txt"
    path.write_text(text)
    status, out, _ = called(capsys, "show", str(path), "--rank", "3")
    assert status == 0
    assert "over=(2, 3)" in out
    status, out, _ = called(capsys, "show", str(path), "--json")
    assert json.loads(out)["verdict"] == "valid"
    assert json.loads(out)["ranks"]["0"]["traffic_bytes"] == {"tp.col": 262144, "tp.row": 262144}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["plan", "gpt33", "--cluster", "tpu-v4-pod"], "did you mean 'gpt3'"),
        (["plan", "gpt3", "--cluster", "tpu-v5-pod"], "did you mean 'tpu-v4-pod'"),
        (
            ["plan", "gpt3", "--products", "--cluster", "tpu-v4-pod:256", "--algorithms", "meshslise"],
            "did you mean 'meshslice'",
        ),
        (["plan", "gpt3"], "cluster"),
        (["plan", "gpt3", "--cluster", "tpu-v4-pod", "--batch", "-3"], "batch"),
        (["plan", "gpt3", "--cluster", "tpu-v4-pod", "--dtype", "float7"], "float7"),
        (["plan", "gpt3", "--cluster", "tpu-v4-pod", "--out", "/nonexistent/plan.json"], "cannot write"),
        (["show", "meshslice", "--mesh", "2by2"], "ROWSxCOLS"),
        (["show", "meshslice", "--slices", "0"], "slices '0'"),
        (["show", "tp1d", "--mesh", "2x2x2"], "one ring needs a mesh of two axes"),
        (["show", "meshslice", "--slices", "600"], "at most 512"),
        (["show", "meshslice", "--dataflow", "ws"], "none of os, ls, rs"),
        (["show", "meshslice", "--rank", "9"], "not 9"),
        (["show", "meshslice", "--rings", "3"], "1 or 2 directions"),
        (["show", "nowhere.txt"], "no such file"),
        (["run", "nowhere.json"], "no such file"),
        (["shwo"], "shwo"),
        (["plan", "gpt3", "--cluster", "tpu-v4-pod", "--bach", "3"], "bach"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    status, out, err = called(capsys, *args)
    assert status == 2
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--layer", "ff3"], "did you mean 'ff"),
        (["--pass", "forwards"], "did you mean 'forward'"),
        (["--algorithm", "wang"], "it has meshslice, collective"),
        (["--ranks", "0"], "give 1 to 64"),
        (["--machine", "abacus"], "abacus"),
    ],
)
def test_mistakes_around_a_plan(
    capsys: pytest.CaptureFixture[str], plan_path: Path, change: list[str], message: str
) -> None:
    status, _, err = called(capsys, "run", str(plan_path), *change)
    assert status == 2
    assert message in err and err.count("\n") == 1


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"{", b"[1, 2]", b"{}"])
def test_a_broken_plan_is_a_line_a_problem(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    status, _, err = called(capsys, "run", str(path))
    assert status == 2
    first, *others = err.splitlines()
    assert str(path) in first and all(line.startswith("  ") for line in others)


def test_the_command_itself(tmp_path: Path) -> None:
    """In its own process: exit status, help, and no traceback."""
    assert meshweave("plan", "gpt33", "--cluster", "tpu-v4-pod").returncode == 2
    shown = meshweave("--help")
    assert shown.returncode == 0 and "one program, three readings" in " ".join(shown.stdout.split())


@pytest.mark.gloo
def test_run_executes_checks_and_writes_both_timelines(
    plan_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A planned layer on four processes, all three products of both algorithms."""
    pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
    trace, svg = tmp_path / "trace.json", tmp_path / "timeline.svg"
    args = [
        "--algorithm",
        "all",
        "--max-dim",
        "256",
        "--repeat",
        "2",
        "--trace",
        str(trace),
        "--svg",
        str(svg),
        "--json",
    ]
    assert run_app(["run", str(plan_path), "--layer", "out", "--pass", "backward_weight", *args]) == 0
    outcomes = json.loads(capsys.readouterr().out)
    assert len(outcomes) == 2
    for outcome in outcomes:
        assert outcome["max_abs_error"] == 0
        assert outcome["orderings_checked"] > 50
        assert len(outcome["measured_s"]) == 2
        assert outcome["predicted_s"] > 0
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert len(names) == 4 * 2 * 2  # ranks, programs, predicted and measured
    assert svg.read_text().startswith("<svg")


@pytest.mark.gloo
def test_planning_and_showing_need_no_torch(tmp_path: Path) -> None:
    """torch is hidden by a module that refuses to be imported."""
    (tmp_path / "torch.py").write_text("raise ImportError('hidden')")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from meshweave.cli.app import run_app\n"
        "assert run_app(['plan', 'gpt3', '--products', '--cluster', 'tpu-v4-pod:16', '--json']) == 0\n"
        "assert run_app(['show', 'meshslice', '--json']) == 0\n"
        "import meshweave.simulate\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_a_dtype_that_there_is_not_is_refused_by_every_algorithm(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(["show", name, "--set", "dtype=a\nb"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
