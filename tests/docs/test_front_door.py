"""`import meshweave` and its namespaces have every public name; documentation and examples use nothing deeper."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import warnings
from types import ModuleType

import pages
import pytest

import meshweave
from meshweave.base.errors import DescriptionError, ProgramError

FRONT_DOOR = pages.ROOT / "src" / "meshweave" / "__init__.py"
EXAMPLES = sorted((pages.ROOT / "examples").glob("*.py"))
NAMESPACES = [f"meshweave.{name}" for name in meshweave._NAMESPACES]
NEEDS_TORCH = {
    "FallingBehindWarning", "Pipeline", "StepComparison", "StepWatch", "StoredTensor", "TorchContext",
    "UniversalParallel", "all_gather_linear", "bind", "linear_reduce_scatter", "load_weights", "matmul",
    "matmul2d", "pipeline", "prepare", "record_torch_actions", "reshard", "reshard_state_dict", "save_weights",
    "torch_pipeline", "universal_linear",
}  # fmt: skip
LAZY = [module for module in ("meshweave", *NAMESPACES) if "_homes" in vars(importlib.import_module(module))]


def names_of(module: str) -> list[str]:
    return [name for name in importlib.import_module(module).__all__ if name != "__version__"]


def moved(module: str) -> dict[str, tuple[str, str]]:
    """Return where names of a module stand now."""
    return vars(importlib.import_module(module))["_moved"]


def need(module: str, name: str) -> None:
    """Skip where what a name needs is not installed."""
    if "jax" in (name, module.rpartition(".")[2]):
        pytest.importorskip("jax", reason="jax is not installed: the jax rung cannot run here")
    elif name in NEEDS_TORCH:
        pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module in ("meshweave", *NAMESPACES) for name in names_of(module)]
)
def test_every_name_resolves(module: str, name: str) -> None:
    need(module, name)
    itself = importlib.import_module(module)
    value = getattr(itself, name)
    assert isinstance(value, ModuleType) == (module == "meshweave" and name in meshweave._NAMESPACES)
    home = vars(itself).get("_homes", {}).get(name)
    if home is not None:
        assert value is getattr(importlib.import_module(home), name)


def test_simulate_and_estimate_take_the_name_of_a_cluster() -> None:
    entry = meshweave.algorithm("summa")
    problem = next(entry.examples())
    program = entry.program(problem, next(entry.candidates(problem)))
    machine = meshweave.Machine.of(meshweave.load_cluster("dgx-h100:8"), program)
    assert meshweave.estimate(program, "dgx-h100:8") == meshweave.estimate(program, machine)
    simulated = meshweave.simulate(program, "dgx-h100:8")
    assert simulated.duration_s == meshweave.simulate(program, machine).duration_s
    with pytest.raises(DescriptionError, match="a dict is no cluster; give a Cluster, or its name or file"):
        meshweave.simulate(program, {})


@pytest.mark.parametrize("module", NAMESPACES)
def test_a_namespace_says_what_it_is_for(module: str) -> None:
    need(module, "")
    itself = importlib.import_module(module)
    assert itself.__doc__ and itself.__all__
    assert getattr(meshweave, module.rpartition(".")[2]) is itself


def test_each_namespace_says_what_it_promises() -> None:
    page = (pages.ROOT / "docs" / "guide" / "stability.md").read_text()
    promised = re.findall(r"^\| `(meshweave[\w.]*)` \| (?:stable|changing)", page, flags=re.MULTILINE)
    assert sorted(promised) == sorted(["meshweave", *NAMESPACES])


def test_no_name_stands_behind_two_doors() -> None:
    doors: dict[str, list[str]] = {}
    for module in ("meshweave", *NAMESPACES):
        for name in names_of(module):
            doors.setdefault(name, []).append(module)
    several = {name: modules for name, modules in doors.items() if len(modules) > 1}
    assert several == {
        "MeshweaveError": ["meshweave", "meshweave.errors"],
        "matmul2d": ["meshweave.nn", "meshweave.jax"],  # of tensors, and of jax arrays
    }


WITHOUT = """
import sys
from importlib.machinery import PathFinder
there = PathFinder.find_spec.__func__
def find_spec(cls, name, path=None, target=None):
    return None if name.partition(".")[0] == PACKAGE else there(cls, name, path, target)
PathFinder.find_spec = classmethod(find_spec)
import meshweave as mw
from meshweave.errors import MeshweaveError
try:
    NAME
except MeshweaveError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("name", "package"), [("parallelize", "torch"), ("nn.prepare", "torch"), ("jax.matmul2d", "jax")]
)
def test_a_name_whose_package_is_missing_says_how_to_get_it(name: str, package: str) -> None:
    code = WITHOUT.replace("PACKAGE", repr(package)).replace("NAME", f"mw.{name}")
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    expected = f"meshweave.{name} needs {package}, which is not installed: pip install 'meshweave[{package}]'"
    assert said.stdout.strip() == expected


@pytest.mark.parametrize(("door", "old"), [(door, old) for door in LAZY for old in moved(door)])
def test_a_name_that_moved_says_where(door: str, old: str) -> None:
    module, new = moved(door)[old]
    need(module, new)
    itself = importlib.import_module(door)
    assert old not in itself.__all__
    with pytest.warns(DeprecationWarning, match=rf"^{door}\.{old} is {module}\.{new} now$") as told:
        value = getattr(itself, old)
    assert [warning.filename for warning in told] == [__file__]
    assert value is getattr(importlib.import_module(module), new)


def test_nothing_of_ours_uses_a_name_that_moved() -> None:
    """The tests' own settings make such a use an error."""
    with pytest.raises(DeprecationWarning, match=r"meshweave\.Matmul is meshweave\.ir\.Matmul now"):
        meshweave.Matmul  # type: ignore[attr-defined] # noqa: B018


def test_a_name_of_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "meshweave_lab", None)
    warnings.simplefilter("ignore")
    with pytest.raises(AttributeError, match="Lab now: import of meshweave_lab"):
        meshweave.Lab  # type: ignore[attr-defined] # noqa: B018


def test_names_stay_when_submodules_are_imported() -> None:
    """A subpackage is set as an attribute of its parent when it is imported; that must not hide a function."""
    for module in ("estimate", "simulate"):
        importlib.import_module(f"meshweave.{module}")
        assert callable(getattr(meshweave, module))


def test_a_function_of_a_namespace_is_not_hidden_by_its_module() -> None:
    pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
    importlib.import_module("meshweave.nn.matmul2d")
    assert callable(meshweave.nn.matmul2d)


@pytest.mark.parametrize("module", ["meshweave", "meshweave.tune"])
def test_an_unknown_name_is_an_attribute_error(module: str) -> None:
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'nothing'"):
        importlib.import_module(module).nothing  # noqa: B018


def test_type_checkers_see_the_same_names() -> None:
    """Names are read from what type checkers import: a test of what is listed, or imported by a star."""
    assert sorted(meshweave._homes) == sorted(" ".join(meshweave._GROUPS.values()).split())
    source = ast.parse(FRONT_DOOR.read_text())
    (block,) = (node for node in source.body if isinstance(node, ast.If))
    imports = [line for line in block.body if isinstance(line, ast.ImportFrom)]
    spaces = [line.names[0].name for line in imports if line.module == "meshweave"]
    assert sorted(spaces) == sorted(meshweave._NAMESPACES)
    stars = vars(importlib.import_module("meshweave.ir.program"))
    private = {"BoundOp"} | {name for name, value in stars.items() if isinstance(value, ModuleType)}
    shown = {name for name in stars if not name.startswith("_")} - private
    assert shown == meshweave.ir._homes.keys() | meshweave.ir._moved.keys()


def test_importing_loads_nothing() -> None:
    code = "import meshweave, sys; print([n for n in ('numpy', 'pydantic', 'torch', 'typer') if n in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_a_namespace_needs_no_torch() -> None:
    """Neither torch nor jax is imported by a look at what a namespace has."""
    spaces = ", ".join(f"mw.{name}" for name in meshweave._NAMESPACES if name != "jax")
    code = (
        f"import meshweave as mw, sys; {spaces}; mw.nn.__all__; print({{'torch', 'jax'}} & {{*sys.modules}})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "set()"


def test_examples_import_nothing_deeper() -> None:
    for path in EXAMPLES:
        assert not deep_imports(path.read_text()), path


def test_snippets_import_nothing_deeper() -> None:
    for page in pages.RUN_PAGES:
        for block in pages.blocks(page):
            if block.language == "python":
                assert not deep_imports(block.setup + "\n" + block.text), block.place


def test_prose_names_nothing_deeper() -> None:
    """Calls in prose are of a door too; modules may be named where their inside is described."""
    for page in (pages.ROOT / "README.md", *pages.GUIDE):
        for space, name in re.findall(r"`(?:meshweave|mw)\.(?:(\w+)\.)?(\w+)\(", pages.prose(page)):
            assert name in names_of(f"meshweave.{space}" if space else "meshweave"), f"{page}: {space}.{name}"


def test_what_is_deeper_is_seen() -> None:
    source = (
        "import meshweave.cli\nfrom meshweave import nothing\nfrom meshweave.nn import plans\nmw.ir.secret"
    )
    assert deep_imports(source) == ["meshweave.cli", "nothing", "meshweave.nn.plans", "mw.ir.secret"]
    assert not deep_imports(
        "from meshweave.ir import Matmul\nmw.ir.Matmul\nmw.plan\nfrom meshweave import ir"
    )


def deep_imports(source: str) -> list[str]:
    """Return what Python source imports of `meshweave` and no door has: modules, and names."""
    deep = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            deep += [
                alias.name
                for alias in node.names
                if alias.name.startswith("meshweave.") and alias.name not in NAMESPACES
            ]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "meshweave":
            if node.module not in ("meshweave", *NAMESPACES):
                deep.append(f"{node.module}")
                continue
            prefix = "" if node.module == "meshweave" else f"{node.module}."
            deep += [
                f"{prefix}{alias.name}"
                for alias in node.names
                if alias.name not in names_of(f"{node.module}")
            ]
        elif isinstance(node, ast.Attribute):
            match ast.unparse(node).split("."):
                case ["mw", name] if name not in meshweave.__all__:
                    deep.append(f"mw.{name}")
                case ["mw", space, name] if space in meshweave._NAMESPACES and name not in names_of(
                    f"meshweave.{space}"
                ):
                    deep.append(f"mw.{space}.{name}")
    return deep


@pytest.mark.parametrize(
    ("level", "shown"),
    [("info", ["searching llama-2-7b on 8 chips", "priced"]), ("warning", []), ("off", [])],
)
def test_the_log_says_what_is_done_from_a_level_on(level: str, shown: list[str]) -> None:
    code = (
        f"import meshweave as mw; mw.set_log_level('{level}'); mw.set_log_level('{level}'); "
        "mw.plan('llama-2-7b', 'dgx-h100:8', batch=16, sequence=2048, tp=2, pp=1, cp=1, strategy='megatron')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == len(shown)  # once each, though the level was set twice
    for line, text in zip(lines, shown, strict=True):
        assert line.startswith("meshweave.tune") and text in line


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(meshweave.MeshweaveError, match=r"no level 'inof'.*info.*off"):
        meshweave.set_log_level("inof")


def test_errors_are_one_list() -> None:
    """`meshweave.errors` has every public class of `base.errors`."""
    defined = {
        name
        for name, value in vars(importlib.import_module("meshweave.base.errors")).items()
        if isinstance(value, type)
        and issubclass(value, meshweave.MeshweaveError)
        and not name.startswith("_")
    }
    assert set(meshweave.errors.__all__) == defined
    assert meshweave.errors.ProgramError is ProgramError
