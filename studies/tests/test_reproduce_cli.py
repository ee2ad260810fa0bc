"""`meshweave reproduce` as a user meets it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from meshweave.base.errors import UnsupportedError
from meshweave.cli.app import run_app
from meshweave_studies import Selection, reproduce_meshslice, select

ESTIMATE = ("reproduce", "meshslice", "--by", "estimate")


def called(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    status = run_app(list(args))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_help_lists_papers(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = called(capsys, "reproduce", "--help")
    assert status == 0 and "meshslice" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("reproduce", "meshslic"), "meshslic"),
        ((*ESTIMATE, "--rows", "utilsation"), "did you mean 'utilisation'?"),
        ((*ESTIMATE, "--figures", "8"), "figures: 9, 10, 11, 12, 13, 14"),
        ((*ESTIMATE, "--png"), "--out"),
        ((*ESTIMATE, "--reading", "fixed-bach"), "did you mean 'fixed-batch'?"),
        (
            (*ESTIMATE, "--reading", "fixed-batch", "--rows", "utilisation"),
            "says nothing about row utilisation",
        ),
        ((*ESTIMATE, "--cluster", "tpu-v4-4x4", "--rows", "utilisation"), "cannot have 256 chips"),
        ((*ESTIMATE, "--report", "/nowhere/at/all.html"), "cannot write"),
        (("reproduce", "meshslice", "--by", "guess"), "estimate"),
        ((*ESTIMATE, "--rows", ","), "',' names nothing"),
        (("reproduce", "all", "--papers", "atp,meshslic", "--out", "x"), "did you mean 'meshslice'?"),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], args: tuple[str, ...], message: str
) -> None:
    status, out, err = called(capsys, *args)
    assert (status, out) == (2, "")
    assert message in err and err.startswith("error: ") and err.count("\n") == 1


def test_out_that_is_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    status, _, err = called(capsys, *ESTIMATE, "--out", str(tmp_path / "file"))
    assert status == 2 and "cannot be a directory" in err


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = called(capsys, *ESTIMATE, "--rows", "flops,picks_slices", "--figures", "13", "--json")
    assert status == 0
    data = json.loads(out)
    assert (data["paper"], data["by"], data["reading"]["name"]) == ("meshslice", "estimate", "public")
    assert [cluster["name"] for cluster in data["clusters"]] == ["tpu-v4-pod", "tpu-v4-4x4"]
    assert [(row["id"], row["model"]) for row in data["rows"]][:2] == [
        ("flops", "gpt3"),
        ("flops", "megatron-nlg"),
    ]
    assert data["rows"][0]["verdict"] == "holds" and data["rows"][2]["verdict"] == "not reproduced"
    (figure,) = data["figures"]
    assert figure["figure"] == 13 and figure["panels"][0]["columns"] == ["mesh", "estimate"]


def test_tables_pictures_and_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    args = ("--rows", "utilisation", "--figures", "9,14", "--out", str(tmp_path))
    status, out, _ = called(capsys, *ESTIMATE, *args, "--report", str(tmp_path / "page.html"))
    assert status == 0 and "utilisation" in out
    names = {path.name for path in tmp_path.iterdir()}
    assert {"page.html", "meshslice-public.md", "meshslice-public-figure-9-gpt3.svg"} <= names
    assert "67.4" in (tmp_path / "meshslice-public.md").read_text()
    assert (tmp_path / "page.html").read_text().count("<svg") == 4


def test_a_slash_in_the_name_of_a_machine_is_no_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, text, _ = called(capsys, "catalog", "tpu-v4-pod", "--toml")
    assert status == 0
    (tmp_path / "pod.toml").write_text(re.sub('name = ".*"', 'name = "a/b"', text, count=1))
    args = (
        *ESTIMATE,
        "--cluster",
        str(tmp_path / "pod.toml"),
        "--rows",
        "flops",
        "--out",
        str(tmp_path / "out"),
    )
    assert called(capsys, *args)[0] == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "meshslice-public-a-b.md",
        "meshslice-public-a-b.json",
    }


def test_png(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("resvg_py")
    status, _, _ = called(capsys, *ESTIMATE, "--figures", "13", "--out", str(tmp_path), "--png")
    assert status == 0
    picture = tmp_path / "meshslice-public-figure-13-gpt3.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_png_without_the_package(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "resvg_py", None)
    status, _, err = called(capsys, *ESTIMATE, "--out", str(tmp_path), "--png")
    assert status == 2 and "pip install 'meshweave[png]'" in err


def test_python_callers_get_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    reproduction = reproduce_meshslice(selection=select("meshslice", ["flops"], ["13"]), by="estimate")
    _, out, _ = called(capsys, *ESTIMATE, "--rows", "flops", "--figures", "13", "--json")
    assert json.loads(out) == json.loads(json.dumps(reproduction.to_json()))
    assert select("meshslice") == Selection() and select("slicing", ["leaders"]).figures is None
    with pytest.raises(UnsupportedError, match="figures: 2, 3"):
        select("slicing", (), ["9"])


@pytest.mark.slow
def test_every_paper_goes_into_one_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    args = "reproduce", "all", "--papers", "slicing", "--out", str(tmp_path), "--json"
    status, out, err = called(capsys, *args)
    assert status == 0 and err.count("written to") == len(json.loads(out)) == 3
    page = (tmp_path / "README.md").read_text()
    saved = json.loads((tmp_path / "slicing-cut.json").read_text())["rows"]
    holds = sum(row["counts"] and row["verdict"] == "holds" for row in saved)
    assert (
        f"| [slicing, cut](slicing-cut.md) | {len(saved)} | {sum(row['counts'] for row in saved)} | {holds} |"
        in page
    )
