"""What benchmarks/code_counts.py counts stays at zero where it got there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import code_counts  # noqa: E402
import code_structure  # noqa: E402


@pytest.fixture(scope="module")
def trees() -> code_counts.Trees:
    return code_counts.parsed(ROOT)


def test_a_class_name_has_one_meaning(trees: code_counts.Trees) -> None:
    assert code_counts.repeated_class_names(trees) == {}


def test_everything_public_has_a_docstring(trees: code_counts.Trees) -> None:
    assert code_counts.undocumented(trees) == []


def test_every_public_name_is_in_a_snippet() -> None:
    assert code_structure.in_no_snippet(ROOT, code_structure.public_names(ROOT)) == []


def test_functions_are_short(trees: code_counts.Trees) -> None:
    assert code_counts.long_functions(trees) == []


def test_names_say_what_they_hold(trees: code_counts.Trees) -> None:
    assert code_counts.riddles(trees) == []


def test_compat_alone_touches_private_names_of_torch(trees: code_counts.Trees) -> None:
    assert [path.relative_to(ROOT) for path in code_counts.private_torch(trees)] == [
        Path("src/meshweave/execute/torch/compat.py"),
        Path("src/meshweave/execute/torch/compat_gradients.py"),
        Path("src/meshweave/execute/torch/compat_values.py"),
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


def test_the_structure_counts(tmp_path: Path) -> None:
    """A tree of two distributions with one of each: a test of the counting itself."""
    wheel, lab = tmp_path / "src/meshweave", tmp_path / "lab/src/meshweave_lab"
    for folder in (wheel / "tune", wheel / "algorithms/block", lab, tmp_path / "docs/guide"):
        folder.mkdir(parents=True)
    (wheel / "__init__.py").write_text('_GROUPS = {"one": "shown hidden"}\n_NAMESPACES = ("tune", "jax")\n')
    (wheel / "tune/__init__.py").write_text('_HOME = {"tune.a": "inner shown", "tune.b": "deep"}\n')
    (wheel / "jax.py").write_text("from meshweave.nn import array as array\n")
    (wheel / "algorithms/block/mega.py").write_text('class Mega:\n    """Do."""\n\n    name = "mega"\n')
    (wheel / "tune/a.py").write_text(
        '"""mega"""\nfrom meshweave.tune import b\n\nCHOSEN = ["mega", "mega"]\n'
    )
    (wheel / "tune/b.py").write_text("from meshweave.tune.a import CHOSEN  # noqa\n\n# head_dim\n")
    many = ", ".join(f"a{number}" for number in range(10))
    (lab / "c.py").write_text(f"def f(self, {many}, *, b=1):\n    return self.head_dim\n")
    (tmp_path / "docs/guide/x.md").write_text("hidden\n\n```python\nmw.shown(mw.tune.inner)\n```\n")
    counts = code_counts.counts(tmp_path)
    assert counts["lines of code of the wheel"] == 2 + 1 + 1 + 2 + 2 + 1
    assert counts["lines of code of all distributions"] == 11
    assert (counts["public names"], counts["public names in no snippet"]) == (4, 2)
    assert (counts["names of namespaces"], counts["names of namespaces in no snippet"]) == (3, 2)
    assert counts["names of strategies and schedules quoted in planning"] == 2
    assert counts["files that name sizes of a dense layer"] == 1
    assert counts["functions with 10 or more parameters"] == 1
    assert counts["cycles of imports between files"] == 1
    assert counts["lines of code a function"] == 11.0
