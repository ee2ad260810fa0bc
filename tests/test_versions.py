"""The three distributions have one version, and those of them that need another one name it exactly."""

import json
import runpy
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


def test_a_version_is_given_once(tmp_path: Path) -> None:
    made = runpy.run_path(str(ROOT / "packaging" / "release.py"))
    names = (*made["PLACES"], "CHANGELOG.md")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    made["release"](tmp_path, "7.8.9rc1", "2030-01-02")
    before = meshweave.__version__
    for name in made["PLACES"]:
        old, new = ((folder / name).read_text() for folder in (ROOT, tmp_path))
        assert new == old.replace(f'"{before}"', '"7.8.9rc1"').replace(f"=={before}", "==7.8.9rc1")
    changes = (tmp_path / "CHANGELOG.md").read_text()
    assert changes.startswith("# Changelog\n\n## Unreleased\n\n## 7.8.9rc1 (2030-01-02)\n\n")
    with pytest.raises(SystemExit, match=r"it has 7\.8\.9rc1"):
        made["release"](tmp_path, "7.8.9rc1", "2030-01-02")
    with pytest.raises(SystemExit, match="'seven' is no version"):
        made["release"](tmp_path, "seven", "2030-01-02")


def test_wheels_were_tried_without_a_compiler() -> None:
    """What packaging/wheels.py saved: a wheel for 3.11, and one of the stable ABI that 3.12 and 3.13 took."""
    saved = json.loads((ROOT / "validation" / "results" / "wheels.json").read_text())
    wheels = {name: size for name, size in saved["bytes"].items() if name.endswith(".whl")}
    assert max(wheels.values()) < 6 << 20
    assert any("-cp311-cp311-manylinux" in name for name in wheels)
    assert any("-cp312-abi3-manylinux" in name for name in wheels)
    for minor in ("3.11", "3.12", "3.13"):
        did = {row["what"] for row in saved["rows"] if row["python"].startswith(minor)}
        for what in ("plan llama-2-7b", "simulate t3_ring", "support", "run plan.json", "mw.step"):
            assert any(what in each for each in did), (minor, what)


def test_the_import_is_quick() -> None:
    """As it was measured, beside an interpreter that does nothing (benchmarks/import_time.py)."""
    saved = json.loads((ROOT / "benchmarks" / "results" / "import_time.json").read_text())
    assert saved["rows"]["meshweave"]["beyond_s"] < 0.020
