"""Verbs of installed packages: those that are there join the command line, those that are not are named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import pytest

import meshweave
from meshweave.base.installed import OFFERED

ROOT = Path(__file__).parents[2]
SOURCE = Path(meshweave.__file__).parents[1]
MODULE = """
import typer

def hail(name: str) -> None:
    \"\"\"Hail somebody.\"\"\"
    print("hail", name)

more = typer.Typer(no_args_is_help=True, help="Two verbs.")
more.command()(hail)
more.command("greet")(hail)
"""


def package(folder: Path, points: str, name: str = "hails", module: str = MODULE) -> Path:
    """Write a folder as pip's --target makes it: a module and the metadata of the package that it is of."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / f"{name}.py").write_text(module)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[meshweave.commands]\n{points}\n")
    return folder


def called(
    *words: str, paths: tuple[Path, ...] = (), alone: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a command line in a process of its own, with folders of packages; `alone`: with no others at all."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*paths, *filter(None, sys.path))))}
    if alone:
        env["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    return subprocess.run(
        [sys.executable, *(("-S",) if alone else ()), "-m", "meshweave", *words],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


IN_TURN = """
import contextlib, io, json, sys
from meshweave.cli.app import run_app
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as said:
        status = run_app(words)
    print(json.dumps([words, status, out.getvalue(), said.getvalue()]))
"""


def called_in_turn(
    commands: Sequence[Sequence[str]], paths: tuple[Path, ...]
) -> list[tuple[list[str], int, str, str]]:
    """Run command lines in one process with these folders alone: words, status, output and errors of each."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run(
        [sys.executable, "-S", "-c", IN_TURN, json.dumps(commands)],
        env=env, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def wheel_alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """Return folders that have what this Python has, but for the lab and the studies."""
    folder = tmp_path_factory.mktemp("site")
    for site in (Path(path) for path in sys.path if path.endswith(("site-packages", "dist-packages"))):
        for entry in site.iterdir():
            is_ours = entry.name == "meshweave" or entry.name.startswith(
                ("meshweave_lab", "meshweave_studies")
            )
            is_ours |= entry.suffix == ".pth"
            if not is_ours and not (folder / entry.name).exists():
                (folder / entry.name).symlink_to(entry)
    (folder / "meshweave").mkdir()  # of an editable installation the compiled module lies apart
    core = Path(str(find_spec("meshweave._core").origin))  # type: ignore[union-attr]
    for path in {*(SOURCE / "meshweave").iterdir(), core}:
        if path == core or not path.name.startswith("_core"):
            (folder / "meshweave" / path.name).symlink_to(path)
    return (folder,)


def test_the_table_is_what_the_packages_offer() -> None:
    for name, groups in OFFERED.items():
        folder = ROOT / name.removeprefix("meshweave-")
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        assert project["name"] == name
        offered = {group: tuple(points) for group, points in project["entry-points"].items()}
        assert offered == groups
        for group, points in project["entry-points"].items():
            for point in points:
                assert [one.value for one in entry_points(group=group, name=point)] == [points[point]]
                assert entry_points(group=group)[point].load()


def test_verbs_of_a_package_join(tmp_path: Path) -> None:
    site = package(tmp_path / "site", "hail = hails:hail\nmore = hails:more")
    assert called("hail", "you", paths=(site,)).stdout == "hail you\n"
    assert called("more", "greet", "you", paths=(site,)).stdout == "hail you\n"
    shown = called("--help", paths=(site,))
    assert "Hail somebody." in shown.stdout and "Two verbs." in shown.stdout, shown.stderr
    typo = called("hial", paths=(site,))
    assert (typo.returncode, typo.stdout) == (2, "") and "'hail'" in typo.stderr


def test_verbs_that_cannot_be_had_are_one_line(tmp_path: Path) -> None:
    twice = package(tmp_path / "twice", "reproduce = hails:hail")
    broken = package(tmp_path / "broken", "broken = bad:verb", "bad", "raise ValueError('no such day')")
    for words, site, said in (
        (("reproduce", "atp"), twice, "uninstall one of them"),
        (("broken",), broken, "broken = bad:verb cannot be loaded: no such day"),
    ):
        done = called(*words, paths=(site,))
        assert (done.returncode, done.stdout) == (2, "") and said in done.stderr
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert called("--version", paths=(broken,)).returncode == 0
    assert called("catalog", "models", "--json", paths=(broken,)).returncode == 0


def test_a_verb_of_the_wheel_is_never_another_package_s(tmp_path: Path) -> None:
    site = package(tmp_path / "site", "catalog = hails:hail")
    assert "gpt3" in called("catalog", "models", "--json", paths=(site,)).stdout


def test_the_wheel_alone_says_what_to_install(wheel_alone: tuple[Path, ...], tmp_path: Path) -> None:
    lab, out = ROOT / "examples" / "labs" / "torus-2x2.toml", tmp_path / "out.toml"
    commands = [
        ["calibrate", *what, "--out", str(out)] for what in (("--lab", str(lab)), ("--device", "tpu-v5e"))
    ]
    mesh = ("--from", "2 S0", "--to", "2 R", "--shape", "8", "--cluster", "p3.8xlarge")
    commands.append(["reshard", *mesh, "--order", "exact"])
    packages = ["meshweave-lab", "meshweave-studies", "meshweave-studies"]
    for name, groups in OFFERED.items():
        verbs = [[verb] for verb in groups["meshweave.commands"]]
        verbs += [["tune", verb] for verb in groups.get("meshweave.commands.tune", ())]
        commands += [[*verb, "--help"] for verb in verbs]
        packages += [name] * len(verbs)
    answers = called_in_turn(commands, wheel_alone)
    for package, (words, status, printed, said) in zip(packages, answers, strict=True):
        assert (status, printed) == (2, ""), (words, printed, said)
        assert package in said and said.count("\n") == 1 and "pip install" in said, (words, said)
    shown = called("--help", paths=wheel_alone, alone=True)
    assert shown.returncode == 0 and "simulate" in shown.stdout and "reproduce" not in shown.stdout
    moved = (
        "import meshweave as mw\nfrom meshweave.algorithms.universal.issue_order import rule_of\n"
        "for ask, error in ((lambda: mw.Lab, AttributeError), (lambda: rule_of('greedy'), mw.MeshweaveError)):\n"
        "    try:\n        ask()\n    except error as said:\n        print(said)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, wheel_alone))}
    ran = subprocess.run(
        [sys.executable, "-S", "-c", moved], env=env, capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stdout.startswith("meshweave.Lab is meshweave_lab.Lab now")
    assert "'greedy' is of the package meshweave-studies, which is not installed: pip install" in ran.stdout
