"""What every verb writes: refused before work where it cannot be, or is an input or another output."""

from __future__ import annotations

import inspect
import os
import shlex
import typing
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from damage import CLUSTER, MODEL
from forked import Outcome, run_forked
from sweep import PROGRAM
from typer.models import OptionInfo
from verb_commands import COMMANDS, leaves

from meshweave.base import outputs
from meshweave.base.errors import DescriptionError
from meshweave.cli.app import run_app
from sampling import mostly_slow


def options_of(command: Any) -> Iterator[tuple[str, Any, OptionInfo]]:
    """Yield the flag, the type and the declaration of each option, from the signature of the verb's function."""
    function = inspect.unwrap(command.callback)
    for name, hint in typing.get_type_hints(function, include_extras=True).items():
        for info in getattr(hint, "__metadata__", ()):
            if isinstance(info, OptionInfo):
                flags = [text for text in (info.param_decls or ()) if text.startswith("--")]
                yield (flags or [f"--{name.replace('_', '-')}"])[0], typing.get_args(hint)[0], info


def outputs_of(command: Any) -> list[str]:
    """Return the options of a verb that name files to write: paths whose help says that they are written."""
    return [
        flag
        for flag, kind, info in options_of(command)
        if (kind is Path or Path in typing.get_args(kind))
        and (info.help or "").startswith(("Write", "Draw"))
        and "directory" not in (info.help or "")
    ]


WRITING = {name: found for name, command in leaves() if (found := outputs_of(command))}


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


def words(name: str, folder: Path) -> list[str]:
    """Return the first command of a verb; its files need not be there."""
    if name.startswith("reproduce"):
        return name.split()
    return [word.replace("{", f"{folder}/").replace("}", ".toml") for word in shlex.split(COMMANDS[name][0])]


def said(args: list[str], folder: Path, most_s: float = 12) -> Outcome:
    def action() -> int:
        os.chdir(folder)
        return run_app(args)

    return run_forked(action, most_s)


def without(args: list[str], option: str) -> list[str]:
    if option not in args:
        return args
    at = args.index(option)
    return [*args[:at], *args[at + 2 :]]


WRONG = {
    "nowhere/x": "there is no directory",
    ".": "is a directory",
    "x" * 300: "longer than 255 bytes",
    "/proc/x": "annot",
}


@pytest.mark.parametrize(
    "case", mostly_slow(product(WRITING, WRONG), len(WRITING) + 2), ids=lambda case: " ".join(case)[:40]
)
def test_outputs_are_refused_before_anything_is_read(case: tuple[str, str], tmp_path: Path) -> None:
    """Inputs are not even there: what is said is of the output alone."""
    name, path = case
    first = WRITING[name][0]
    outcome = said([*without(words(name, tmp_path), first), first, path], tmp_path)
    assert outcome.status == 2 and (WRONG[path] in outcome.err or "cannot write" in outcome.err), outcome
    assert outcome.err.startswith("error: ") and not outcome.fault(), outcome
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", mostly_slow((name for name in WRITING if len(WRITING[name]) > 1), 4))
def test_two_outputs_are_two_files(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    first, *others = WRITING[name]
    for other in others:
        for pair in (("./file", "file"), (str(tmp_path / "New"), "nEW")):
            args = without(without(words(name, tmp_path), first), other)
            outcome = said([*args, first, pair[0], other, pair[1]], tmp_path)
            assert "same file" in outcome.err and not outcome.fault((2,)), outcome
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]
    assert (tmp_path / "file").read_text() == "old"


READING = {
    "plan": "plan {model} --cluster {cluster} --batch 4 --sequence 64 --products",
    "simulate": "simulate {program} --cluster {cluster}",
    "reshard": "reshard {model} --from 2x2 --to 1x4 --cluster {cluster}",
    "pipeline": "pipeline {schedule}",
    "tune block": "tune block {model} --cluster {cluster}",
    "run": "run {plan}",
    "compile": "compile {plan}",
    "calibrate": "calibrate --lab {lab} --force",
    "bench matmul": "bench matmul --lab {lab}",
    "reproduce meshslice": "reproduce meshslice --cluster {cluster} --rows flops",
    "reproduce published": "reproduce published --cases {cases}",
}


@pytest.mark.parametrize("name", READING)
@pytest.mark.parametrize("how", ["itself", pytest.param("link", marks=pytest.mark.slow), "hard link"])
def test_no_output_is_an_input(name: str, how: str, tmp_path: Path) -> None:
    texts = {"model": MODEL, "cluster": CLUSTER, "program": PROGRAM, "schedule": "0F0,0B0\n"}
    kinds = {
        "model": "m.toml",
        "cluster": "c.toml",
        "program": "p.txt",
        "schedule": "s.csv",
        "plan": "p.json",
    }
    kinds |= {"lab": "l.toml", "cases": "r.csv"}
    for kind, file in kinds.items():
        (tmp_path / file).write_text(texts.get(kind, "{}"))
    for kind, file in kinds.items():
        if f"{{{kind}}}" not in READING[name]:
            continue
        if kind == "cluster" and name in ("plan", "simulate", "reshard", "tune block") and how == "itself":
            continue  # read in another order; the links below are tried
        out = tmp_path / "out"
        out.unlink(missing_ok=True)
        if how == "link":
            out.symlink_to(file)
        elif how == "hard link":
            os.link(tmp_path / file, out)
        else:
            out = tmp_path / file
        words = [word.format(**kinds) for word in shlex.split(READING[name])]
        outcome = said([*words, WRITING[name][0], str(out)], tmp_path)
        assert "would write over it" in outcome.err and not outcome.fault((2,)), (kind, outcome)
        assert (tmp_path / file).read_text() == texts.get(kind, "{}")


def test_a_configuration_in_a_folder_is_an_input_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    args = ["plan", str(tmp_path), "--cluster", "tpu-v4-pod:4", "--batch", "4"]
    outcome = said([*args, "--out", "config.json"], tmp_path)
    assert "would write over it" in outcome.err, outcome


def test_a_failed_write_leaves_the_old_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    outputs.write_file(link, "new")
    assert path.read_text() == "new" and link.is_symlink() and path.stat().st_mode & 0o777 == 0o640

    def full(descriptor: int, data: bytes) -> None:
        os.write(descriptor, data[:2])
        os.close(descriptor)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(outputs, "_write_to", full)
    with pytest.raises(DescriptionError, match="cannot write: No space left on device"):
        outputs.write_file(path, "newer")
    assert path.read_text() == "new" and sorted(tmp_path.iterdir()) == [path, link]


def test_devices_and_pipes_are_written(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    outputs.write_file(pipe, "through")
    assert os.read(reader, 100) == b"through" and pipe.is_fifo()
    os.close(reader)
    outputs.write_file(Path("/dev/null"), "gone")
    for path, message in ((Path("/dev/full"), "No space left"), (pipe, "No such device")):  # nobody reads
        with pytest.raises(DescriptionError, match=message):
            outputs.write_file(path, "lost")


def test_ctrl_c_says_what_was_written_and_what_was_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where an older file with the name of an output is there, or the words `--out`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "--out").write_text("")
    (tmp_path / "program.txt").write_text(PROGRAM)
    Path("a.svg").write_text("old")

    def interrupt(path: Path, content: object) -> None:
        raise KeyboardInterrupt

    args = ["simulate", "program.txt", "--cluster", "tpu-v4-pod", "--trace", "t.json", "--svg", "a.svg"]
    with monkeypatch.context() as patch:
        patch.setattr("meshweave.cli.simulate.write_file", interrupt)
        assert run_app(args) == 130
    said = capsys.readouterr().err.strip()
    assert said == f"interrupted; written: t.json; not written: {tmp_path / 'a.svg'} (--svg)"
    monkeypatch.setattr("meshweave.cli.simulate.write_chrome", interrupt)
    assert run_app(args) == 130
    assert capsys.readouterr().err.strip() == "interrupted; nothing was written"
