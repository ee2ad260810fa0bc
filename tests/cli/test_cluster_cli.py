"""`meshweave cluster new` writes what `--cluster` reads, and words mean the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshweave.cli.app import run_app
from meshweave.describe.machine.cluster import load_cluster


def test_a_new_file_is_the_cluster_of_the_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.toml"
    arguments = ["--chip", "H100", "--hosts", "4", "--per-host", "4", "--nics", "2", "--nic", "200Gb"]
    assert run_app(["cluster", "new", *arguments, "--name", "mine", "--out", str(file)]) == 0
    assert capsys.readouterr().out == f"written: {file}\n"
    words = load_cluster("16 x H100, 4 a host, 2 x 200Gb")
    assert load_cluster(file) == replace(words, name="mine")
    assert (
        run_app(
            ["plan", "llama-2-7b", "--cluster", str(file), "--batch", "16", "--sequence", "2048", "--json"]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["description"]["cluster"]["name"] == "mine"


def test_without_a_file_the_text_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["cluster", "new", "--chip", "mi300x"]) == 0
    assert 'name = "MI300X"' in capsys.readouterr().out
    assert run_app(["cluster", "new", "--chip", "mi300x", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cluster"]["network"]["num_hosts"] == 1


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--chip", "h1000"], "no usual host"),
        (["--chip", "h100", "--nics", "2"], "give --nic too"),
        (["--chip", "tpu v6e"], "in a torus"),
        (["--chip", "h100", "--nic", "fast"], "neither chips a host nor NICs"),
        (["--chip", "h100", "--hosts", "0"], "hosts"),
        (["--chip", "h100", "--name", "a\nb = 3"], "--name 'a\\nb = 3' is not valid"),
        (["--chip", "h100", "--name", "x" * 201], "printable characters, 200 at most"),
    ],
)
def test_mistakes_are_told_in_a_line(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(["cluster", "new", *arguments]) == 2
    error = capsys.readouterr().err
    assert why in error and error.count("\n") == 1
