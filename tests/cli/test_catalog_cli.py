"""`meshweave catalog` lists what there is, with its sources."""

from __future__ import annotations

import json

import pytest

from meshweave.cli.app import run_app
from meshweave.describe.catalog import cluster_names, model_names


def called(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    status = run_app(["catalog", *args])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_all_entries_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = called(capsys)
    assert status == 0
    assert all(name in out for name in (*model_names(), *cluster_names()))


@pytest.mark.parametrize("kind", ["models", "clusters"])
def test_one_kind(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    _, out, _ = called(capsys, kind)
    assert ("gpt3" in out) == (kind == "models")
    assert ("tpu-v4-pod" in out) == (kind == "clusters")


@pytest.mark.parametrize("name", model_names())
def test_a_model_in_full(capsys: pytest.CaptureFixture[str], name: str) -> None:
    status, out, _ = called(capsys, "models", name)
    assert status == 0 and "source" in out and "num_parameters" in out and "adam_bytes" in out


@pytest.mark.parametrize("name", cluster_names())
def test_a_cluster_in_full(capsys: pytest.CaptureFixture[str], name: str) -> None:
    status, out, _ = called(capsys, "clusters", name)
    assert status == 0
    assert out.count("source") >= 2 and "bytes_per_s" in out and "mesh_shapes" in out


def test_a_name_alone_will_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert called(capsys, "gpt3") == called(capsys, "models", "gpt3")


def test_json_of_everything(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = called(capsys, "--json")
    data = json.loads(out)
    assert [entry["name"] for entry in data["models"]] == list(model_names())
    assert all(entry["file"]["source"] for kind in data.values() for entry in kind)
    gpt3 = next(entry for entry in data["models"] if entry["name"] == "gpt3")
    assert gpt3["derived"]["adam_bytes"] == 12 * gpt3["derived"]["num_parameters"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["model"], "did you mean 'models'"),
        (["gpt33"], "did you mean 'gpt3'"),
        (["models", "gpt33"], "did you mean 'gpt3'"),
        (["clusters", "gpt3"], "the catalog's clusters are"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], args: list[str], message: str) -> None:
    status, out, err = called(capsys, *args)
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert message in err
