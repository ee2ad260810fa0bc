"""`meshweave catalog` lists what there is, with its sources."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshweave.cli.app import run_app
from meshweave.describe.catalog import catalog_text, clusters, models
from meshweave.describe.machine.cluster import load_cluster
from meshweave.describe.model import load_model


def called(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    status = run_app(["catalog", *args])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_all_entries_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = called(capsys)
    assert status == 0
    assert all(name in out for name in (*models(), *clusters()))
    sources = {load_model(name).source for name in models()}
    assert not any(source[:20] in out for source in sources if source)  # those of one entry stand with it


@pytest.mark.parametrize("kind", ["models", "clusters"])
def test_one_kind(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    _, out, _ = called(capsys, kind)
    assert ("gpt3" in out) == (kind == "models")
    assert ("tpu-v4-pod" in out) == (kind == "clusters")


@pytest.mark.parametrize("name", models())
def test_a_model_in_full(capsys: pytest.CaptureFixture[str], name: str) -> None:
    status, out, _ = called(capsys, "models", name)
    assert status == 0 and "source" in out and "num_parameters" in out and "adam_bytes" in out


@pytest.mark.parametrize("name", clusters())
def test_a_cluster_in_full(capsys: pytest.CaptureFixture[str], name: str) -> None:
    status, out, _ = called(capsys, "clusters", name)
    assert status == 0
    assert out.count("source") >= 2 and "bytes_per_s" in out and "mesh_shapes" in out


def test_a_name_alone_will_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert called(capsys, "gpt3") == called(capsys, "models", "gpt3")


def test_json_of_everything(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = called(capsys, "--json")
    data = json.loads(out)
    assert [entry["name"] for entry in data["models"]] == list(models())
    assert all(entry["file"]["source"] for kind in data.values() for entry in kind)
    gpt3 = next(entry for entry in data["models"] if entry["name"] == "gpt3")
    assert gpt3["derived"]["adam_bytes"] == 12 * gpt3["derived"]["num_parameters"]


@pytest.mark.parametrize("args", [["gpt3"], ["models", "gpt3"], ["tpu-v4-pod"]])
def test_toml_is_the_file_of_the_entry(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, args: list[str]
) -> None:
    status, out, err = called(capsys, *args, "--toml")
    assert (status, err) == (0, "")
    kind, load = ("clusters", load_cluster) if args[-1] in clusters() else ("models", load_model)
    assert out == catalog_text(kind, args[-1])
    path = tmp_path / "mine.toml"
    path.write_text(out)
    assert replace(load(path), source="") == replace(load(args[-1]), source="")  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--toml"], "--toml prints one entry; give its name"),
        (["models", "--toml"], "--toml prints one entry; give its name"),
        (["gpt3", "--toml", "--json"], "and not --json"),
        (["gpt33", "--toml"], "did you mean 'gpt3'"),
        (["model"], "did you mean 'models'"),
        (["gpt33"], "did you mean 'gpt3'"),
        (["models", "gpt33"], "did you mean 'gpt3'"),
        (["clusters", "gpt3"], "clusters of the catalog: "),
        (["gpt3", "llama-2-7b"], "the catalog has no kind 'gpt3' (did you mean 'gpus'?)"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], args: list[str], message: str) -> None:
    status, out, err = called(capsys, *args)
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert message in err
