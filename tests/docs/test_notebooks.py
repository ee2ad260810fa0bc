"""Notebooks run, and show what they were saved with."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pages
import pytest

NOTEBOOK = runpy.run_path(str(pages.ROOT / "docs" / "notebook.py"))


@pytest.mark.parametrize(
    "path", sorted((pages.ROOT / "examples").glob("*.ipynb")), ids=lambda path: path.stem
)
def test_a_notebook_runs_and_shows_what_was_saved(path: Path) -> None:
    assert path in NOTEBOOK["NOTEBOOKS"]
    saved, made = json.loads(path.read_text("utf-8")), json.loads(NOTEBOOK["run_notebook"](path))
    for before, now in zip(saved["cells"], made["cells"], strict=True):
        assert before == now, f"run python docs/notebook.py: {''.join(now['source'])}"
    errors = [output for cell in made["cells"] for output in cell.get("outputs", ()) if "error" in output]
    assert not errors


def test_what_a_cell_is_worth_is_its_output() -> None:
    names: dict[str, object] = {}
    (printed, worth) = NOTEBOOK["_outputs"]("print('a')\nx = 2\nx * 3", names, 4)
    assert printed["text"] == ["a\n"] and worth["data"] == {"text/plain": ["6"]} and names["x"] == 2
    assert NOTEBOOK["_outputs"]("x = 3", names, 5) == []
