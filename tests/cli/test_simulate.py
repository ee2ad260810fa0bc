"""`meshweave simulate`: every option, its files, and its mistakes in one line."""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from damage import CLUSTER, RUBBISH, TREE, changed_json, changed_lines, changed_program
from test_fuzz import VALUES, Case

from meshweave.cli.app import run_app
from sampling import scaled


def called(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    status = run_app(["simulate", *args])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def found(capsys: pytest.CaptureFixture[str], *args: str) -> list[dict[str, Any]]:
    status, out, err = called(capsys, *args, "--json")
    assert (status, err) == (0, "")
    data: list[dict[str, Any]] = json.loads(out)
    return data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan and a program."""
    folder = tmp_path_factory.mktemp("simulate")
    args = ["--cluster", "tpu-v4-pod:16", "--out", str(folder / "plan.json"), "--json"]
    assert (
        run_app(["plan", "gpt3", "--products", *args, "--algorithms", "meshslice,wang,collective,cannon"])
        == 0
    )
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        assert run_app(["show", "meshslice", "--mesh", "2x4", "--slices", "2"]) == 0
    (folder / "program.txt").write_text(out.getvalue())
    return folder


@pytest.fixture
def plan(folder: Path) -> str:
    return str(folder / "plan.json")


@pytest.fixture
def text(folder: Path) -> str:
    return str(folder / "program.txt")


def test_the_best_of_a_plan_is_told_of(capsys: pytest.CaptureFixture[str], plan: str) -> None:
    status, out, err = called(capsys, plan, "--pass", "forward", "--against", "estimate")
    assert (status, err) == (0, "")
    for words in (
        "ff1 forward, meshslice",
        "16 ranks",
        "closed form",
        "bound by",
        "critical path:",
        "mean of all",
    ):
        assert words in out, words
    assert "axis 0, forwards" in out and "link of chip" in out and "exposed" in out


def test_json_holds_all_of_it(capsys: pytest.CaptureFixture[str], plan: str) -> None:
    runs = found(capsys, plan, "--algorithm", "wang,collective", "--against", "estimate", "--ranks", "1,5")
    assert len(runs) == 6 and {run["cluster"] for run in runs} == {"tpu-v4-pod"}
    for run in runs:
        path = run["critical_path"]
        assert sum(path["parts_s"].values()) == pytest.approx(run["duration_s"], rel=1e-12)
        assert path["steps"][-1]["end_s"] == run["duration_s"] and path["over_bound"] >= 1
        assert list(run["ranks"]) == ["1", "5"] and 0 < run["ranks"]["1"]["compute_s"] <= run["duration_s"]
        assert run["links"][0]["utilisation"] <= 1 and run["num_chips"] == 16
    collective = next(run for run in runs if "collective" in run["title"] and "forward" in run["title"])
    assert collective["duration_s"] == pytest.approx(collective["estimate_s"], rel=1e-3)


def test_another_mesh_has_slices_of_its_own(capsys: pytest.CaptureFixture[str], plan: str) -> None:
    runs = found(capsys, plan, "--algorithm", "cannon,meshslice", "--mesh", "4x4", "--pass", "forward")
    assert all("4x4 mesh" in run["what"] for run in runs)
    (large,) = found(capsys, plan, "--mesh", "8x4", "--pass", "forward")
    assert large["num_ranks"] == large["num_chips"] == 32
    assert (
        len(found(capsys, plan, "--mesh", "8x2", "--algorithm", "all", "--pass", "forward")) == 4
    )  # no Cannon


def test_a_plan_is_one_by_what_it_begins_with(
    capsys: pytest.CaptureFixture[str], plan: str, tmp_path: Path
) -> None:
    named = tmp_path / "planned"
    named.write_text(Path(plan).read_text())
    args = ("--pass", "forward", "--algorithm", "collective")
    assert found(capsys, str(named), *args)[0]["duration_s"] == found(capsys, plan, *args)[0]["duration_s"]


def test_the_step_of_a_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(tmp_path / "step.json")
    model = ("llama-2-7b", "--cluster", "dgx-a100:8", "--batch", "16", "--sequence", "512")
    fixed = "tp=4,pp=2,zero=1,micro_batch=1,strategy=megatron_sp,recompute=none,schedule=1f1b"
    assert run_app(["plan", *model, "--fix", fixed, "--out", path]) == 0
    code, out, _ = called(capsys, path, "--against", "estimate")
    assert code == 0
    assert "llama-2-7b, a step: pipeline 2, data 1, context 1, tensor 4" in out and "closed form" in out
    code, _, err = called(capsys, path, "--place", "1000")
    assert code == 2 and "has no place 1000" in err


def test_layers_and_passes(capsys: pytest.CaptureFixture[str], plan: str) -> None:
    (run,) = found(capsys, plan, "--layer", "out", "--pass", "backward_weight")
    assert run["title"].startswith("out backward weight, meshslice")


def test_a_program_on_a_cluster_of_its_size(
    capsys: pytest.CaptureFixture[str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run,) = found(capsys, text, "--cluster", "tpu-v4-pod", "--against", "estimate")
    assert run["num_chips"] == 8 and run["estimate_s"] == pytest.approx(run["duration_s"], rel=0.02)
    (given,) = found(capsys, text, "--cluster", "dgx-h100:16")
    assert given["num_chips"] == 16 and given["num_ranks"] == 8
    monkeypatch.setattr(sys, "stdin", io.StringIO(Path(text).read_text()))
    (piped,) = found(capsys, "-", "--cluster", "tpu-v4-pod")
    assert piped["duration_s"] == run["duration_s"]


def test_lowered_to_rings_it_takes_about_as_long(capsys: pytest.CaptureFixture[str], text: str) -> None:
    whole, rings, chains = (
        found(capsys, text, "--cluster", "tpu-v4-pod", "--lower", lower)[0]
        for lower in ("none", "rings", "chains")
    )
    assert rings["num_ops"] > whole["num_ops"] == chains["num_ops"]
    assert rings["duration_s"] == pytest.approx(whole["duration_s"], rel=0.05)


def test_a_logical_mesh(capsys: pytest.CaptureFixture[str], plan: str) -> None:
    """2x8 on a torus of 4x4: refused, or simulated over the links that there are."""
    args = (plan, "--mesh", "2x8", "--pass", "forward", "--cluster", "tpu-v4-4x4")
    status, _, err = called(capsys, *args)
    assert status == 2 and "logical" in err and err.count("\n") == 1
    (run,) = found(capsys, *args, "--logical")
    assert run["logical"] and run["critical_path"]["slowed_s"] > 0


def test_files(capsys: pytest.CaptureFixture[str], plan: str, tmp_path: Path) -> None:
    trace, svg, report = tmp_path / "trace.json", tmp_path / "lines.svg", tmp_path / "report.html"
    status, out, _ = called(
        *(
            capsys,
            plan,
            "--algorithm",
            "cannon,meshslice",
            "--mesh",
            "4x4",
            "--pass",
            "forward",
            "--ranks",
            "5,0",
        ),
        *("--trace", str(trace), "--svg", str(svg), "--report", str(report)),
    )
    assert status == 0 and out.count("written: ") == 3
    events = json.loads(trace.read_text())["traceEvents"]
    shown = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert len(shown) == 4 and any(name.startswith("rank 5: ff1 forward, cannon") for name in shown)
    picture = svg.read_text()
    ElementTree.fromstring(picture)
    assert "chip (1, 1)" in picture and ">Cannon" in picture and ">MeshSlice" in picture
    page = report.read_text()
    for heading in ("Parts of a rank", "Links", "Critical path", "All runs"):
        assert heading in page, heading
    assert "src=" not in page and "href=" not in page


def test_one_run_draws_every_rank(capsys: pytest.CaptureFixture[str], text: str, tmp_path: Path) -> None:
    svg = tmp_path / "lines.svg"
    assert called(capsys, text, "--cluster", "tpu-v4-pod", "--ranks", "0,2", "--svg", str(svg))[0] == 0
    assert ">rank 0<" in svg.read_text() and ">rank 2<" in svg.read_text()


def test_png(
    capsys: pytest.CaptureFixture[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lines.png"
    args = (text, "--cluster", "tpu-v4-pod", "--png", str(path))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "resvg_py", None)
        status, _, err = called(capsys, *args)
        assert status == 2 and "pip install 'meshweave[png]'" in err and not path.exists()
    pytest.importorskip("resvg_py", reason="resvg-py is not installed: no PNG pictures here")
    assert called(capsys, *args)[0] == 0 and path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere.json"], "no such file"),
        (["nowhere.txt", "--cluster", "tpu-v4-pod"], "no such file"),
        (["TEXT"], "give --cluster"),
        (["TEXT", "--cluster", "tpu-v5-pod"], "did you mean 'tpu-v4-pod'"),
        (["TEXT", "--cluster", "tpu-v4-pod:4"], "do not fit"),
        (["TEXT", "--cluster", "tpu-v4-pod", "--ranks", "9"], "not 9"),
        (["TEXT", "--cluster", "tpu-v4-pod", "--ranks", "x"], "whole numbers"),
        (["TEXT", "--cluster", "tpu-v4-pod", "--lower", "trees"], "trees"),
        (["TEXT", "--cluster", "tpu-v4-pod", "--against", "life"], "life"),
        (["TEXT", "--cluster", "tpu-v4-pod", "--svg", "/nonexistent/x.svg"], "cannot write"),
        (["TEXT", "--cluster", "tpu-v4-pod", "--report", "/"], "it is a directory"),
        (["PLAN", "--layer", "ff3"], "did you mean 'ff"),
        (["PLAN", "--pass", "forwards"], "did you mean 'forward'"),
        (["PLAN", "--algorithm", "summa"], "it has meshslice"),
        (["PLAN", "--algorithm", "cannon", "--mesh", "8x2"], "no 8x2 mesh"),
        (["PLAN", "--mesh", "8"], "ROWSxCOLS"),
        ([], "what"),
    ],
)
def test_mistakes(
    capsys: pytest.CaptureFixture[str], text: str, plan: str, args: list[str], message: str
) -> None:
    named = [{"TEXT": text, "PLAN": plan}.get(arg, arg) for arg in args]
    status, out, err = called(capsys, *named)
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err.lower() + err


def test_sizes_below_nothing_are_refused_and_take_no_time_in_silence(
    capsys: pytest.CaptureFixture[str], text: str, tmp_path: Path
) -> None:
    path = tmp_path / "negative.txt"
    path.write_text(re.sub(r"C = tensor\(\((\d+), \d+\)", r"C = tensor((\1, -1)", Path(text).read_text()))
    status, out, err = called(capsys, str(path), "--cluster", "tpu-v4-pod")
    assert (status, out) == (2, "") and re.search(r"tensor C has shape \(\d+, -1\)", err)


def test_a_plan_for_a_cluster_that_is_a_file(
    capsys: pytest.CaptureFixture[str], plan: str, tmp_path: Path
) -> None:
    data = json.loads(Path(plan).read_text()) | {"cluster": "mine", "format": "meshweave-plan-2"}
    del data["description"]  # as files of before have none
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    status, _, err = called(capsys, str(path))
    assert status == 2 and "give --cluster FILE" in err
    assert called(capsys, str(path), "--cluster", "tpu-v4-pod", "--pass", "forward")[0] == 0


def test_a_deadlock_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "stuck.txt"
    path.write_text("""
program("stuck")
tp = mesh((2,), ("x",))
s = scratch((8,), "float32", on=tp, slots=2)
one = lane()
with tp:
    recv(s, peer=1 - rank, tag=0, lane=one)
    send(s(1), peer=1 - rank, tag=0, lane=one)
""")
    status, _, err = called(capsys, str(path), "--cluster", "local-cpu:2")
    assert status == 2 and "deadlock" in err and err.count("\n") == 1


# --- damage ---------------------------------------------------------------------------------------------


def test_damaged_programs(tmp_path: Path, text: str) -> None:
    case, rng, good = Case(tmp_path), random.Random(11), Path(text).read_text()
    for _ in range(scaled(300)):
        path = case.file("program.txt", changed_program(rng, good))
        case.check(["simulate", path, "--cluster", "tpu-v4-pod", "--json"])
    for content in RUBBISH:
        case.check(["simulate", case.file("program.txt", content), "--cluster", "tpu-v4-pod"])
    case.judge(scaled(300))


def test_damaged_plans(tmp_path: Path, plan: str) -> None:
    case, rng, data = Case(tmp_path), random.Random(12), json.loads(Path(plan).read_text())
    data["candidates"] = [c for c in data["candidates"] if c["algorithm"] in ("meshslice", "collective")]
    for _ in range(scaled(200)):
        path = case.file("plan.json", changed_json(rng, data))
        case.check(["simulate", path, "--algorithm", "all", "--layer", "ff1", "--pass", "forward", "--json"])
    case.judge(scaled(200))


@pytest.mark.parametrize(
    "cluster",
    [CLUSTER.replace("[2, 2]", "[2, 4]"), TREE.replace("fanout = 2", "fanout = 4", 1)],
    ids=["torus", "tree"],
)
def test_damaged_clusters(tmp_path: Path, text: str, cluster: str) -> None:
    case, rng = Case(tmp_path), random.Random(13)
    for _ in range(scaled(150)):
        path = case.file("cluster.toml", changed_lines(rng, cluster))
        case.check(["simulate", text, "--cluster", path, "--logical"])
    case.judge(scaled(150))


def test_damaged_command_lines(tmp_path: Path, text: str, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    case, rng = Case(tmp_path), random.Random(14)
    options = ("--cluster", "--layer", "--pass", "--algorithm", "--mesh", "--lower", "--against", "--ranks")
    for number in range(scaled(300)):
        args = [rng.choice((text, plan, plan, "nowhere.json", "", "-"))]
        for _ in range(rng.randrange(0, 3)):
            option = rng.choice((*options, "--logical", "--json", "--bogus"))
            args += [option] if option in ("--logical", "--json") else [option, rng.choice(VALUES)]
        if args[0] == text:
            args += ["--cluster", "tpu-v4-pod:8"]
        if number % 2:
            args += ["--pass", "forward"]
        case.check(["simulate", *args])
    case.judge(scaled(300))


def test_a_number_of_a_config_beyond_what_a_machine_counts_to_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    number = str(2**63)
    options = ["--cluster", "dgx-h100:16", "--config", number]
    assert run_app(["simulate", "experts_hierarchical", *options]) == 2
    assert f"--config {number}: experts_hierarchical has 1 configs" in capsys.readouterr().err


def test_a_program_of_ranks_from_4_on_gets_a_chip_for_each(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "high.txt"
    path.write_text(
        'program("x")\ntp = mesh((2,), ("x",), 4)\np = scratch((64,), "float32", on=tp)\n'
        'q = scratch((64,), "float32", on=tp)\ng = lane()\nwith tp:\n    permute(q, p, over="tp.x", lane=g)\n'
    )
    (run,) = found(capsys, str(path), "--cluster", "dgx-h100")
    assert (run["num_chips"], run["num_ranks"]) == (6, 2)
