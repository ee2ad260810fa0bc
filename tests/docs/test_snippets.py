"""Every Python block and every command of README, CONTRIBUTING and guide runs."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stdout
from itertools import groupby
from pathlib import Path

import pages
import pytest

from meshweave import launch
from meshweave.cli.app import run_app

LANGUAGES = ("python", "sh", "console", "text", "toml")
OTHER_PROGRAMS = ("make", "pip", "bash", "git")
"""What CI or the reader runs as it is; `make test` is how these tests were started."""


def marked(language: tuple[str, ...], marker: str = "") -> list[pytest.param]:
    """Return the pages that have blocks of a language with a marker."""
    found = []
    for page in pages.RUN_PAGES:
        chosen = [
            block for block in pages.blocks(page) if block.language in language and block.marker == marker
        ]
        if chosen:
            found.append(pytest.param(chosen, id=str(page.relative_to(pages.ROOT))))
    return found


@pytest.fixture
def in_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to run commands in, with the examples beside."""
    (tmp_path / "examples").symlink_to(pages.ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    yield tmp_path


@pytest.mark.parametrize("page", pages.RUN_PAGES, ids=lambda page: str(page.relative_to(pages.ROOT)))
def test_blocks_say_what_they_are(page: Path) -> None:
    """A block without a language, or skipped without a reason, is tested by nobody."""
    for block in pages.blocks(page):
        assert block.language in LANGUAGES, f"{block.place}: language {block.language or 'missing'}"
        assert block.marker != "skip" or len(block.value) > 8, f"{block.place}: skipped without a reason"
        if block.language == "toml":
            tomllib.loads(block.text)


@pytest.mark.parametrize("blocks", marked(("python",)))
def test_python(blocks: list[pages.Block], in_a_copy: Path) -> None:
    """Blocks of a page share one namespace, as for a reader who types them in."""
    names: dict[str, object] = {"__name__": "snippet"}
    for block in blocks:
        exec(compile(block.text, block.place, "exec", dont_inherit=True), names)


@pytest.mark.gloo
@pytest.mark.parametrize("blocks", marked(("python",), "run"))
def test_python_on_ranks(blocks: list[pages.Block]) -> None:
    pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
    for num_ranks, group in groupby(blocks, key=lambda block: block.num_ranks):
        snippets = [(block.place, f"{block.setup}\n{block.text}") for block in group]
        here = {"PYTHONPATH": str(Path(__file__).parent)}
        launch("snippet_ranks:run_snippets", num_ranks, {"snippets": snippets}, timeout_s=120, env=here)


@pytest.mark.parametrize("blocks", marked(("sh", "console")))
def test_commands(blocks: list[pages.Block], in_a_copy: Path) -> None:
    run_commands(blocks)


@pytest.mark.gloo
@pytest.mark.parametrize("blocks", marked(("sh", "console"), "gloo"))
def test_commands_that_start_processes(blocks: list[pages.Block], in_a_copy: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
    run_commands(blocks)


@pytest.mark.lab
@pytest.mark.parametrize("blocks", marked(("sh", "console"), "lab"))
def test_commands_of_the_lab(blocks: list[pages.Block], in_a_copy: Path) -> None:
    from meshweave_lab import abilities

    if not abilities().can_build:
        pytest.skip("no lab here: it needs root, ip, and tc with tbf")
    run_commands(blocks)


def run_commands(blocks: list[pages.Block]) -> None:
    """Run commands in order, in this process where they are of meshweave or Python; each must end with 0."""
    for block in blocks:
        for command in block.commands():
            words = shlex.split(command, comments=True)
            assert run(words) == 0, f"{block.place}: {command}"


def run(words: list[str]) -> int:
    """Run one command and return its exit status."""
    output = None
    if ">" in words:
        output, words = words[words.index(">") + 1], words[: words.index(">")]
    if words[0] in OTHER_PROGRAMS:
        return 0
    if words[0] == "meshweave":
        if output is None:
            return run_app(words[1:])
        with Path(output).open("w") as file, redirect_stdout(file):
            return run_app(words[1:])
    if words[0] == "python" and words[1].endswith(".py"):
        previous, sys.argv = sys.argv, words[1:]
        try:
            runpy.run_path(words[1], run_name="__main__")
        finally:
            sys.argv = previous
        return 0
    if words[0] == "torchrun":
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words[1:]]
    elif words[0] == "python":
        words = [sys.executable, *words[1:]]
    assert re.match(r".*python", words[0]), f"unknown command {words[0]}"
    return subprocess.run(words, timeout=120, check=False).returncode
