"""What benchmarks/code_counts.py counts stays at zero where it got there."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import code_counts  # noqa: E402


@pytest.fixture(scope="module")
def trees() -> code_counts.Trees:
    return {path: ast.parse(path.read_text()) for path in sorted((ROOT / "src/meshweave").rglob("*.py"))}


def test_a_class_name_has_one_meaning(trees: code_counts.Trees) -> None:
    assert code_counts.repeated_class_names(trees) == {}


def test_everything_public_has_a_docstring(trees: code_counts.Trees) -> None:
    assert code_counts.undocumented(trees) == []


def test_functions_are_short(trees: code_counts.Trees) -> None:
    assert code_counts.long_functions(trees) == []


def test_names_say_what_they_hold(trees: code_counts.Trees) -> None:
    assert code_counts.riddles(trees) == []


def test_one_module_touches_private_names_of_torch(trees: code_counts.Trees) -> None:
    assert [path.relative_to(ROOT / "src/meshweave") for path in code_counts.private_torch(trees)] == [
        Path("execute/torch/compat.py")
    ]


def test_the_counts_count(tmp_path: Path) -> None:
    """A file with one of each fault: a test of the counting itself."""
    folder = tmp_path / "src/meshweave"
    folder.mkdir(parents=True)
    body = "".join(f"    value_{number} = {number}\n" for number in range(70))
    classes = 'class A:\n    """Do."""\n\n\nclass _A:\n    pass\n\n\n'
    text = f"{classes}def long():\n{body}    found = 1\n    return found\n"
    (folder / "one.py").write_text(text)
    (folder / "two.py").write_text("import torch\n\nSPEC = torch.distributed._world\n")
    counts = code_counts.counts(tmp_path)
    assert counts["class names defined more than once"] == 1
    assert counts["public classes and functions without a docstring"] == 1
    assert counts["functions over 60 lines"] == 1
    assert counts["files that touch private torch names"] == 1
    assert counts["names called found, way or ways"] == 2
