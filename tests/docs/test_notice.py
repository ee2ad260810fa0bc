"""The notice goes into the wheel and names every file of figures that the package ships."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_notice_names_shipped_figures() -> None:
    files = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license-files"]
    assert all((ROOT / name).is_file() for name in files)
    notices = {str(path.relative_to(ROOT)) for path in ROOT.glob("src/**/NOTICE*")} | {"NOTICE", "LICENSE"}
    assert set(files) == notices
    text = (ROOT / "NOTICE").read_text()
    for path in ROOT.glob("src/meshweave/**/*.csv"):
        assert path.name in text and str(path.parent.relative_to(ROOT)) in text, path
