"""The notice of each package goes into its wheel and names every file of figures that it ships."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("package", [".", "lab", "studies"])
def test_the_notice_names_shipped_figures(package: str) -> None:
    folder = ROOT / package
    files = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["license-files"]
    assert all((folder / name).is_file() for name in files)
    notices = {str(path.relative_to(folder)) for path in folder.glob("src/**/NOTICE*")}
    notices |= {path.name for path in folder.glob("NOTICE")}
    assert set(files) == notices | {"LICENSE"}
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    text = (folder / "NOTICE").read_text() if (folder / "NOTICE").exists() else ""
    for path in folder.glob("src/meshweave*/**/*.csv"):
        assert path.name in text and str(path.parent.relative_to(folder)) in text, path


def test_the_packages_have_one_version() -> None:
    """The lab and the studies use what is private in the wheel, so they are of one version with it."""
    projects = [
        tomllib.loads((ROOT / package / "pyproject.toml").read_text())["project"]
        for package in (".", "lab", "studies")
    ]
    version = projects[0]["version"]
    assert [project["version"] for project in projects] == [version] * 3
    assert [project["dependencies"] for project in projects[1:]] == [[f"meshweave=={version}"]] * 2
