"""Counts of how code is cut: sizes of the distributions, doors, names that planning quotes, cycles of imports.

`code_counts.py` prints and saves them. What is counted by rules that can be argued about:

- Public names are those of the tables of `meshweave/__init__.py`, its namespaces (`mw.errors`) among them. One is
  in a snippet where it stands as a word in a fenced block of README.md or the guide, or in an example. Names of
  namespaces are counted apart: those of their tables, or those that they import as what
  they are called.
- Planning quotes a strategy or schedule where a file of `PLANNING` has its name as a text that is no docstring.
- A file names sizes of a dense layer where it has one of `LAYER_SIZES` as an attribute, a name or an argument.
- A cycle of imports is a set of files of which each reaches each other by imports, those for the type checker
  included; imports of the front door (`meshweave` itself) are left out.
"""

from __future__ import annotations

import ast
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from code_counts import DISTRIBUTIONS, WHEEL, Trees, nodes

PLANNING = tuple(f"{WHEEL}/{room}" for room in ("algorithms/step", "tune", "nn", "check", "cli"))
NAMED = tuple(f"{WHEEL}/algorithms/{family}" for family in ("block", "pipeline"))
LAYER_SIZES = {"ffn_hidden", "num_heads", "num_kv_heads", "head_dim"}
MANY_PARAMETERS = 10
FENCED = re.compile(r"^```.*?\n(.*?)^```", re.MULTILINE | re.DOTALL)


def structure(root: Path, trees: Trees) -> dict[str, float]:
    """Return the counts of a checkout, of which `trees` are the modules of all distributions."""
    code = {path: lines_of_code(path, tree) for path, tree in trees.items()}
    wheel = {path: lines for path, lines in code.items() if path.is_relative_to(root / WHEEL)}
    texts = [line for lines in code.values() for line in lines]
    functions = [node for tree in trees.values() for node in nodes(tree) if isinstance(node, FUNCTION)]
    names, inner = public_names(root), names_of_namespaces(root)
    return {
        "lines of code of the wheel": sum(map(len, wheel.values())),
        "lines of the wheel": sum(len(path.read_text().splitlines()) for path in wheel),
        "lines of code of all distributions": len(texts),
        "lines of csrc": sum(len(path.read_text().splitlines()) for path in (root / "csrc").glob("*.*")),
        "lines of code a function": round(len(texts) / max(len(functions), 1), 1),
        "characters a line of code": round(sum(map(len, texts)) / max(len(texts), 1), 1),
        "public names": len(names),
        "public names in no snippet": len(in_no_snippet(root, names)),
        "names of namespaces": len(inner),
        "names of namespaces in no snippet": len(in_no_snippet(root, inner)),
        "names of strategies and schedules quoted in planning": sum(quoted_names(root, trees).values()),
        "files that name sizes of a dense layer": len(files_with_layer_sizes(trees)),
        f"functions with {MANY_PARAMETERS} or more parameters": len(many_parameters(trees)),
        "cycles of imports between files": len(import_cycles(root, trees)),
    }


FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def texts_alone(tree: ast.Module) -> list[ast.Expr]:
    """Return docstrings and other texts that stand alone as statements."""
    return [n for n in nodes(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]


def lines_of_code(path: Path, tree: ast.Module) -> list[str]:
    """Return the lines of a file without docstrings, comments and blanks, stripped."""
    left_out = {
        number for n in texts_alone(tree) for number in range(n.lineno, (n.end_lineno or n.lineno) + 1)
    }
    lines = ((number, line.strip()) for number, line in enumerate(path.read_text().splitlines(), 1))
    return [line for number, line in lines if line and not line.startswith("#") and number not in left_out]


def public_names(root: Path) -> list[str]:
    """Return the names of the front door, namespaces among them."""
    tables = _assigned(root / WHEEL / "__init__.py")
    names = " ".join(tables.get("_GROUPS", {}).values()).split()
    return [*names, *tables.get("_NAMESPACES", ())]


def names_of_namespaces(root: Path) -> list[str]:
    """Return the names of all namespaces, without those of the front door."""
    names: list[str] = []
    for space in _assigned(root / WHEEL / "__init__.py").get("_NAMESPACES", ()):
        file, package = root / WHEEL / f"{space}.py", root / WHEEL / space / "__init__.py"
        path = file if file.exists() else package
        table = _assigned(path).get("_HOME")
        names += " ".join(table.values()).split() if table else _handed_on(path)
    return sorted({*names} - {*public_names(root)})


def _handed_on(path: Path) -> list[str]:
    """Return the names that a module imports for others, as what they are called there."""
    imports = (node for node in nodes(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom))
    return [each.name for node in imports for each in node.names if each.name == each.asname]


def _assigned(path: Path) -> dict[str, Any]:
    """Return the literals that a module assigns to names; nothing where there is no such file."""
    literals = {}
    for node in ast.parse(path.read_text()).body if path.exists() else ():
        if isinstance(node, ast.Assign):
            with suppress(ValueError):
                literals[ast.unparse(node.targets[0])] = ast.literal_eval(node.value)
    return literals


def in_no_snippet(root: Path, names: list[str]) -> list[str]:
    """Return the names that stand in no fenced block of README and guide and in no example."""
    pages = [path for path in (root / "README.md", *(root / "docs/guide").glob("*.md")) if path.exists()]
    texts = [block for page in pages for block in FENCED.findall(page.read_text())]
    texts += [path.read_text() for path in (root / "examples").rglob("*.py")]
    words = set(re.findall(r"\w+", "\n".join(texts)))
    return [name for name in names if name not in words]


def quoted_names(root: Path, trees: Trees) -> dict[Path, int]:
    """Return how often each file of planning quotes the name of a strategy or of a schedule."""
    named = {
        node.value.value
        for path, tree in trees.items()
        for node in nodes(tree)
        if _lies_in(root, path, NAMED)
        and isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "name"
        and isinstance(node.value, ast.Constant)
    }
    quoted = {}
    for path, tree in trees.items():
        if _lies_in(root, path, PLANNING):
            alone = {id(text.value) for text in texts_alone(tree)}
            constants = [n for n in nodes(tree) if isinstance(n, ast.Constant) and id(n) not in alone]
            quoted[path] = sum(isinstance(n.value, str) and n.value in named for n in constants)
    return {path: count for path, count in quoted.items() if count}


def _lies_in(root: Path, path: Path, folders: tuple[str, ...]) -> bool:
    return any(path.is_relative_to(root / folder) for folder in folders)


def files_with_layer_sizes(trees: Trees) -> list[Path]:
    """Return the files that name a size of a dense layer."""
    fields = {ast.Name: "id", ast.arg: "arg", ast.Attribute: "attr", ast.keyword: "arg"}
    return [
        path
        for path, tree in trees.items()
        if any(getattr(n, fields.get(type(n), ""), None) in LAYER_SIZES for n in nodes(tree))
    ]


def many_parameters(trees: Trees) -> list[tuple[Path, str]]:
    """Return the functions with `MANY_PARAMETERS` parameters or more, `self` not counted."""
    functions = []
    for path, tree in trees.items():
        for node in nodes(tree):
            if isinstance(node, FUNCTION):
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                if len(given) - (bool(given) and given[0].arg in ("self", "cls")) >= MANY_PARAMETERS:
                    functions.append((path, node.name))
    return functions


def import_cycles(root: Path, trees: Trees) -> list[set[str]]:
    """Return the sets of files of which each imports each other, by way of others or itself."""
    files = {_module(root, path): tree for path, tree in trees.items()}
    graph = {name: _imported(name, tree, files) for name, tree in files.items()}
    reached = {name: _reached(name, graph) for name in graph}
    cycles: list[set[str]] = []
    for name in graph:
        cycle = {other for other in reached[name] if name in reached[other]}
        if cycle and cycle not in cycles:
            cycles.append(cycle)
    return cycles


def _module(root: Path, path: Path) -> str:
    source = next(Path(folder).parent for folder in DISTRIBUTIONS if path.is_relative_to(root / folder))
    name = ".".join(path.relative_to(root / source).with_suffix("").parts)
    return name.removesuffix(".__init__")


def _imported(name: str, tree: ast.Module, files: dict[str, ast.Module]) -> set[str]:
    wanted: set[str] = set()
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            wanted.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = (f"{node.module}.{alias.name}" for alias in node.names)
            wanted.update(one if one in files else node.module for one in inner)
    return {one for one in wanted if one in files} - {name, "meshweave"}


def _reached(name: str, graph: dict[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    ahead = [name]
    while ahead:
        new = graph[ahead.pop()] - reached
        reached |= new
        ahead += new
    return reached
