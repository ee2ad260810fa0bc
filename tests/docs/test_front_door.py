"""`import meshweave` has every public name, and documentation and examples use nothing deeper."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from types import ModuleType

import pages
import pytest

import meshweave

FRONT_DOOR = pages.ROOT / "src" / "meshweave" / "__init__.py"
EXAMPLES = sorted((pages.ROOT / "examples").glob("*.py"))
NEEDS_TORCH = {
    "FallingBehindWarning", "Pipeline", "StepComparison", "StepWatch", "StoredTensor", "TorchContext",
    "UniversalParallel", "bind", "load_weights", "matmul", "matmul2d", "pipeline", "prepare",
    "record_torch_actions", "reshard", "reshard_state_dict", "save_weights", "torch_pipeline",
    "universal_linear",
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in meshweave.__all__ if name != "__version__"])
def test_every_name_resolves(name: str) -> None:
    if name in NEEDS_TORCH:
        pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
    if name == "jax":
        pytest.importorskip("jax", reason="jax is not installed: the jax rung cannot run here")
    value = getattr(meshweave, name)
    assert isinstance(value, ModuleType) == (name in ("fused", "jax"))
    assert value is getattr(importlib.import_module(f"meshweave.{meshweave._HOME[name]}"), name)


def test_names_stay_when_submodules_are_imported() -> None:
    """A subpackage is set as an attribute of its parent when it is imported; that must not hide a function."""
    for module in ("estimate", "simulate"):
        importlib.import_module(f"meshweave.{module}")
        assert callable(getattr(meshweave, module))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        meshweave.nothing  # type: ignore[attr-defined] # noqa: B018


def test_type_checkers_see_the_same_names() -> None:
    for node in ast.parse(FRONT_DOOR.read_text()).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            seen = {
                alias.asname: f"{line.module}"
                for line in node.body
                if isinstance(line, ast.ImportFrom)
                for alias in line.names
                if alias.name == alias.asname
            }
            assert seen == {name: f"meshweave.{module}" for name, module in meshweave._HOME.items()}
            assert meshweave.__all__ == ["__version__", *sorted(meshweave._HOME)]
            return
    pytest.fail("there is no TYPE_CHECKING block")


def test_importing_loads_nothing() -> None:
    code = "import meshweave, sys; print([n for n in ('numpy', 'pydantic', 'torch', 'typer') if n in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_examples_import_nothing_deeper() -> None:
    for path in EXAMPLES:
        assert not deep_imports(path.read_text()), path


def test_snippets_import_nothing_deeper() -> None:
    for page in pages.RUN_PAGES:
        for block in pages.blocks(page):
            if block.language == "python":
                assert not deep_imports(block.setup + "\n" + block.text), block.place


def test_prose_names_nothing_deeper() -> None:
    """Calls in prose are of the front door too; modules may be named where their inside is described."""
    for page in (pages.ROOT / "README.md", *pages.GUIDE):
        for name in re.findall(r"`(?:meshweave|mw)\.(\w+)\(", pages.prose(page)):
            assert name in meshweave.__all__, f"{page}: meshweave.{name}"


def deep_imports(source: str) -> list[str]:
    """Return the modules below `meshweave` that Python source imports, and names that it has not."""
    deep = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            deep += [alias.name for alias in node.names if alias.name.startswith("meshweave.")]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "meshweave":
            deep += [node.module] if node.module != "meshweave" else []
            deep += [alias.name for alias in node.names if alias.name not in meshweave.__all__]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "mw":
            deep += [] if node.attr in meshweave.__all__ else [f"mw.{node.attr}"]
    return deep
