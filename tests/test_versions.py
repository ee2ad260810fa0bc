"""The three distributions have one version, and those of them that need another one name it exactly."""

import tomllib
from pathlib import Path

import pytest

import meshweave

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("folder", [".", "lab", "studies"])
def test_the_version_is_that_of_the_package(folder: str) -> None:
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    assert project["version"] == meshweave.__version__
    ours = [text for text in project["dependencies"] if text.startswith("meshweave")]
    assert ours == ([] if folder == "." else [f"meshweave=={meshweave.__version__}"])
