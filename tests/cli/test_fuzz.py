"""Damaged files and command lines: a mistake is a line a problem on stderr and status 2, no more.

There are a thousand by default, ten thousand under `make slow`. Each input is made from a good one by one or two
random changes, the same ones in every run. What a change leaves right ends with status 0; nothing ends in an
exception, a traceback, a hang or a file written.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from damage import CLUSTER, CONFIG, HOSTS, MODEL, RUBBISH, TREE, changed_json, changed_lines, changed_program

from meshweave.base.errors import UnsupportedError
from meshweave.check import runner, verifier
from meshweave.cli.app import run_app
from sampling import scaled

CASE_S = 10
"""No single input may take longer; a hundredth is usual."""


class Case:
    """Runs command lines in this process, each under an alarm, and judges what comes of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.counts: dict[int, int] = {}

    def check(self, args: list[str], allowed: tuple[int, ...] = (0, 2)) -> str:
        out, err = io.StringIO(), io.StringIO()
        before = sorted(self.folder.iterdir())
        shown = " ".join(arg[:80] for arg in args)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _alarm(shown):
            try:
                status = run_app(args)
            except (Exception, SystemExit) as error:
                raise AssertionError(f"{shown}: {type(error).__name__}: {error}") from error
        said = err.getvalue()
        assert status in allowed, f"{shown}: status {status}: {said}"
        if status == 2:
            lines = said.splitlines()
            problems = re.search(r"(\d+) problems$", lines[0])  # a description file has a line for each
            assert said.startswith("error: ") and len(lines) == 1 + int(problems[1] if problems else 0), said
            assert len(said) < 2000 * len(lines), f"{shown}: {said[:300]}"
            assert out.getvalue() == "", shown
            assert sorted(self.folder.iterdir()) == before, f"{shown}: wrote a file"
        self.counts[status] = self.counts.get(status, 0) + 1
        return said

    def file(self, name: str, content: str | bytes) -> str:
        path = self.folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode(errors="replace"))
        return str(path)

    def judge(self, at_least: int) -> None:
        """So many inputs, and both outcomes among them: else the changes are too mild or too wild."""
        assert sum(self.counts.values()) >= at_least
        assert self.counts.get(2, 0) > at_least // 4 and self.counts.get(0, 0) > 0, self.counts


@contextlib.contextmanager
def _alarm(what: str) -> Iterator[None]:
    def late(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"{what}: not done after {CASE_S} s")

    previous = signal.signal(signal.SIGALRM, late)
    signal.alarm(CASE_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


# --- files ----------------------------------------------------------------------------------------------


def plan_args(model: str, cluster: str) -> list[str]:
    sizes = "--batch", "2", "--sequence", "64"
    return ["plan", model, "--products", "--cluster", cluster, "--algorithms", "collective", *sizes]


@pytest.mark.parametrize("text", [CLUSTER, HOSTS, TREE], ids=["torus", "hosts", "tree"])
def test_damaged_clusters(case: Case, text: str) -> None:
    model, rng = case.file("model.toml", MODEL), random.Random(1)
    for _ in range(scaled(250)):
        path = case.file("cluster.toml", changed_lines(rng, text))
        case.check([*plan_args(model, path), "--json"])
    for content in RUBBISH:
        assert "cluster.toml" in case.check(plan_args(model, case.file("cluster.toml", content)))
    case.judge(scaled(250))


def test_damaged_models(case: Case) -> None:
    cluster, rng = case.file("cluster.toml", CLUSTER), random.Random(2)
    for _ in range(scaled(300)):
        path = case.file("model.toml", changed_lines(rng, MODEL))
        case.check([*plan_args(path, cluster), "--json"])
    for content in RUBBISH:
        assert "model.toml" in case.check(plan_args(case.file("model.toml", content), cluster))
    case.judge(scaled(300))


def test_damaged_hugging_face_configs(case: Case) -> None:
    cluster, rng = case.file("cluster.toml", CLUSTER), random.Random(3)
    for _ in range(scaled(300)):
        path = case.file("config.json", changed_json(rng, CONFIG))
        case.check([*plan_args(path, cluster), "--json"])
    for content in RUBBISH:
        assert "config.json" in case.check(plan_args(case.file("config.json", content), cluster))
    case.judge(scaled(300))


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`verify` and `run` do all but start processes."""

    def refuse(*args: Any) -> Any:
        raise UnsupportedError("no processes in this test")

    monkeypatch.setattr(runner, "measure", refuse)
    monkeypatch.setattr(verifier, "verify_on_processes", lambda *args: "no processes in this test")


def test_damaged_plans(case: Case, no_processes: None) -> None:
    good = case.folder / "good.json"
    files = case.file("model.toml", MODEL), case.file("cluster.toml", CLUSTER)
    args = [
        "plan",
        files[0],
        "--products",
        "--cluster",
        files[1],
        "--batch",
        "2",
        "--sequence",
        "64",
        "--out",
        str(good),
    ]
    assert run_app([*args, "--algorithms", "meshslice,collective", "--json"]) == 0
    data, rng = json.loads(good.read_text()), random.Random(4)
    few = ["--layer", "out", "--algorithm", "collective", "--max-dim", "16", "--json"]
    for number in range(scaled(400)):
        path = case.file("plan.json", changed_json(rng, data))
        if number % 2:
            case.check(["verify", path, "--ranks", "2", *few], allowed=(0, 1, 2))
        else:
            case.check(["run", path, "--ranks", "4", "--layer", "out", "--max-dim", "64"])
    for content in RUBBISH:
        assert "plan.json" in case.check(["verify", case.file("plan.json", content)])
    case.judge(scaled(400))


def test_damaged_programs(case: Case) -> None:
    texts = []
    sliced = "meshslice --dataflow ls --slices 1:2:1 --block 1 --rings 1"
    for args in (["collective"], sliced.split()):
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            assert run_app(["show", *args, "--m", "16", "--n", "16", "--k", "16"]) == 0
        texts.append(out.getvalue())
    rng = random.Random(5)
    for number in range(scaled(500)):
        path = case.file("program.txt", changed_program(rng, texts[number % len(texts)]))
        said = case.check(["show", path])
        assert not said.startswith("error") or "program.txt" in said, said
    for content in RUBBISH:
        case.check(["show", case.file("program.txt", content)])
    case.judge(scaled(500))


# --- command lines --------------------------------------------------------------------------------------


OPTIONS: dict[str, tuple[str, ...]] = {
    "plan": (
        *("--cluster", "--batch", "--sequence", "--dtype", "--algorithms", "--out", "--report", "--json"),
        *("--products", "--fix", "--memory", "--price", "--table"),
    ),
    "run": ("--layer", "--pass", "--algorithm", "--ranks", "--max-dim", "--repeat", "--rings", "--machine"),
    "verify": ("--layer", "--algorithm", "--ranks", "--max-dim", "--rings", "--seed", "--timeout", "--json"),
    "show": (
        "--dataflow",
        "--m",
        "--n",
        "--k",
        "--mesh",
        "--slices",
        "--block",
        "--dtype",
        "--rings",
        "--rank",
    ),
    "catalog": ("--json",),
    "reshard": (
        "--from",
        "--to",
        "--cluster",
        "--shape",
        "--dtype",
        "--at",
        "--to-at",
        "--strategy",
        "--order",
        "--ranks",
        "--json",
    ),
}
VALUES = (
    *(
        "-1",
        "0",
        "1",
        "2",
        "5",
        "1e9",
        "9" * 30,
        "nan",
        "",
        "x",
        "all",
        "os",
        "float32",
        "float7",
        "2x2",
        "0x4",
    ),
    *("1x1000000", "2x2x2", "axb", "1:2:1", "1:0", "9999999", "meshslise", "collective", ",", "tpu-v4-pod:4"),
    *(
        "tpu-v4-pod:0",
        "tpu-v4-pod:7",
        "nowhere/plan.json",
        "\x00",
        "é",
        "--",
        "--help me",
        "-",
        "ff1",
        "int8",
    ),
)


def test_damaged_command_lines(case: Case, no_processes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(case.folder)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    rng = random.Random(6)
    first = {
        "plan": ("gpt3", "gpt33", "model.toml", "", "é", "."),
        "run": ("nowhere.json", "", ".", "model.toml"),
        "verify": ("nowhere.json", "", ".", "model.toml"),
        "show": ("collective", "meshslice", "nowhere.txt", ".", "", "model.toml"),
        "catalog": ("models", "clusters", "gpt3", "model", "", "é"),
        "reshard": ("gpt3", "model.toml", "model.toml", "nowhere.toml", ".", ""),
    }
    case.file("model.toml", MODEL)
    verbs = list(OPTIONS)
    for number in range(scaled(720)):
        verb = verbs[number % len(verbs)]
        args = [rng.choice(first[verb])] if rng.random() < 0.9 else []
        for _ in range(rng.randrange(1, 4)):
            option = rng.choice((*OPTIONS[verb], "--bogus"))
            args += (
                [option] if option in ("--json", "--products", "--table") else [option, rng.choice(VALUES)]
            )
        if verb == "plan" and "--cluster" not in args:
            args += ["--cluster", "tpu-v4-pod:4"]
        if verb == "plan":
            args = [a for a in args if a != "all"]
            args += rng.choice((["--algorithms", "collective", "--products"], ["--fix", "tp=1,pp=4,zero=1"]))
        if verb == "reshard":
            args = ["--from", "2x2", "--to", "1x2", "--cluster", "p3.8xlarge", *args]
        if verb == "show":  # without proving what is right, which takes its time
            args.append("--no-check")
        case.check([verb if rng.random() < 0.98 else f"{verb}s", *args])
    case.judge(scaled(720))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["show", "collective", "--m", "9" * 30], "m"),
        (["show", "collective", "--mesh", "100000x100000"], "mesh"),
        (["show", "meshslice", "--slices", "9" * 30], "slices"),
        (["plan", "gpt3", "--cluster", "tpu-v4-pod:4", "--batch", "9" * 30], "batch"),
        (["plan", "gpt3", "--cluster", "tpu-v4-pod:4", "--sequence", "9" * 30], "seq"),
    ],
)
def test_huge_numbers_are_refused(case: Case, args: list[str], message: str) -> None:
    assert message in case.check(args, allowed=(2,))


CHANGES: list[tuple[Callable[[str], str], str]] = [
    (lambda text: text.replace("link_latency_s", "link_latncy_s"), "did you mean 'link_latency_s'"),
    (lambda text: text.replace("5e9", "-5e9"), "at least 1"),
    (lambda text: text.replace("[2, 2]", "[2, 2, 2]"), "does not fit 2 axes"),
    (lambda text: text.replace('"torus"', '"tours"'), "did you mean 'torus'"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_a_mistake_in_a_cluster_is_named(case: Case, change: Callable[[str], str], message: str) -> None:
    model, cluster = case.file("model.toml", MODEL), case.file("cluster.toml", change(CLUSTER))
    said = case.check(plan_args(model, cluster), allowed=(2,))
    assert message in said and "cluster.toml" in said
