"""Counts of what makes code hard to read: size, names with two meanings, missing docstrings, repeats.

    python benchmarks/code_counts.py                      # this tree
    python benchmarks/code_counts.py --beside OTHER_TREE  # another checkout first, then this one, as a table
    python benchmarks/code_counts.py --save ...           # and into results/code_counts.json

Counted are the files of the distributions of the repository: the wheel (src/meshweave), the lab and the studies. A
run of lines stands twice where six or more consecutive lines of code are equal but for their indentation; blank
lines, comments, docstrings and imports are left out. Lines of code are those without docstrings, comments, blanks.
`code_structure.py` has the counts of what is written where.
"""

from __future__ import annotations

import argparse
import ast
import collections
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
LONGEST_FUNCTION = 60
LONGEST_FILE = 400
SHORTEST_RUN = 6
PRIVATE_TORCH = re.compile(
    r"\b(?:torch|dist)(?:\.\w+)*\._(?!_)\w+|from torch[\w.]*\._(?!_)\w+ import|from torch[\w.]* import _(?!_)\w+"
)
PRIVATE_ATTRIBUTES = {"_local_tensor", "_spec", "_flatten", "_sharding_spec"}

Trees = dict[Path, ast.Module]

WHEEL = "src/meshweave"
DISTRIBUTIONS = (WHEEL, "lab/src/meshweave_lab", "studies/src/meshweave_studies")

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def parsed(root: Path, folders: tuple[str, ...] = DISTRIBUTIONS) -> Trees:
    """Return the modules of the distributions of a checkout, or of some of their folders."""
    paths = (path for folder in folders for path in sorted((root / folder).rglob("*.py")))
    return {path: ast.parse(path.read_text()) for path in paths}


def counts(root: Path) -> dict[str, float]:
    """Return all counts of a checkout."""
    from code_structure import structure

    trees = parsed(root)
    return {
        **structure(root, trees),
        "class names defined more than once": len(repeated_class_names(trees)),
        "public classes and functions": sum(1 for _ in public(trees)),
        "public classes and functions without a docstring": len(undocumented(trees)),
        f"functions over {LONGEST_FUNCTION} lines": len(long_functions(trees)),
        f"files over {LONGEST_FILE} lines": sum(
            len(p.read_text().splitlines()) > LONGEST_FILE for p in trees
        ),
        f"runs of {SHORTEST_RUN} or more lines that stand twice": repeated_runs(trees),
        "files that touch private torch names": len(private_torch(trees)),
        "names called found, way or ways": len(riddles(trees)),
        "docstrings that begin with Of": sum(text.startswith("Of ") for text in docstrings(trees)),
        "lines": sum(len(path.read_text().splitlines()) for path in trees),
    }


@functools.cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """Return all nodes of a module; every count goes over them."""
    return tuple(ast.walk(tree))


def repeated_class_names(trees: Trees) -> dict[str, list[Path]]:
    """Return the class names with more than one definition, leading underscores left out."""
    places = collections.defaultdict(list)
    for path, tree in trees.items():
        for node in nodes(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(path)
    return {name: paths for name, paths in places.items() if len(paths) > 1}


def public(trees: Trees) -> Iterator[tuple[Path, str, Definition]]:
    """Yield public classes and functions of modules, and public methods of public classes, by dotted name."""
    for path, tree in trees.items():
        for node in tree.body:
            if not isinstance(node, Definition) or node.name.startswith("_"):
                continue
            yield path, node.name, node
            if isinstance(node, ast.ClassDef):
                for item in node.body:
                    if isinstance(item, ast.FunctionDef) and not item.name.startswith("_"):
                        yield path, f"{node.name}.{item.name}", item


def undocumented(trees: Trees) -> list[tuple[Path, str]]:
    """Return public definitions without a docstring. A method that redefines one of a base has that one's."""
    inherited = {
        item.name
        for tree in trees.values()
        for node in nodes(tree)
        if isinstance(node, ast.ClassDef)
        for item in node.body
        if isinstance(item, ast.FunctionDef) and ast.get_docstring(item)
    }
    derived = {
        node.name
        for tree in trees.values()
        for node in nodes(tree)
        if isinstance(node, ast.ClassDef) and node.bases
    }
    return [
        (path, name)
        for path, name, node in public(trees)
        if not ast.get_docstring(node)
        and not (name.partition(".")[0] in derived and name.rpartition(".")[2] in inherited and "." in name)
    ]


def long_functions(trees: Trees) -> list[tuple[Path, str]]:
    """Return the functions of more than `LONGEST_FUNCTION` lines, their docstrings not counted."""
    return [
        (path, node.name)
        for path, tree in trees.items()
        for node in nodes(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and num_lines(node) > LONGEST_FUNCTION
    ]


def num_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function from its `def` to its end, without its docstring."""
    lines = (node.end_lineno or 0) - node.lineno + 1
    if ast.get_docstring(node):
        lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
    return lines


def riddles(trees: Trees) -> list[tuple[Path, str]]:
    """Return variables, parameters and attributes whose name does not say what they hold."""
    names = []
    for path, tree in trees.items():
        for node in nodes(tree):
            name = {ast.Name: "id", ast.arg: "arg", ast.Attribute: "attr"}.get(type(node))
            if name and getattr(node, name) in ("found", "way", "ways"):
                names.append((path, getattr(node, name)))
    return names


def docstrings(trees: Trees) -> Iterator[str]:
    """Yield all docstrings."""
    for tree in trees.values():
        for node in nodes(tree):
            if isinstance(node, Definition | ast.Module):
                text = ast.get_docstring(node)
                if text:
                    yield text


def private_torch(trees: Trees) -> list[Path]:
    """Return the files that use names of torch with a leading underscore."""
    files = []
    for path, tree in trees.items():
        source = path.read_text()
        if "torch" not in source and "dist" not in source:
            continue
        text = "\n".join(code_lines(tree, source).values())
        attributes = {node.attr for node in nodes(tree) if isinstance(node, ast.Attribute)}
        if (
            PRIVATE_TORCH.search(text)
            or PRIVATE_TORCH.search(imports(tree))
            or ("torch" in source and attributes & PRIVATE_ATTRIBUTES)
        ):
            files.append(path)
    return files


def imports(tree: ast.Module) -> str:
    return "\n".join(
        ast.unparse(node) for node in nodes(tree) if isinstance(node, (ast.Import, ast.ImportFrom))
    )


def code_lines(tree: ast.Module, text: str) -> dict[int, str]:
    """Return the lines of code by number, stripped; no comments, docstrings, imports or single brackets."""
    left_out = set()
    for node in nodes(tree):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, (ast.Import, ast.ImportFrom)):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = {}
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if number not in left_out and stripped and not stripped.startswith("#") and len(stripped) > 1:
            lines[number] = stripped
    return lines


def repeated_runs(trees: Trees) -> int:
    """Return the number of runs of lines that stand in more than one place."""
    windows: dict[tuple[str, ...], list[tuple[int, int]]] = collections.defaultdict(list)
    for file, (path, tree) in enumerate(trees.items()):
        lines = list(code_lines(tree, path.read_text()).values())
        for start in range(len(lines) - SHORTEST_RUN + 1):
            windows[tuple(lines[start : start + SHORTEST_RUN])].append((file, start))
    starts = {place for places in windows.values() if len(places) > 1 for place in places[1:]}
    return sum((file, start - 1) not in starts for file, start in starts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--beside", type=Path, help="another checkout, counted first")
    parser.add_argument(
        "--save",
        action="store_true",
        help="write results/code_counts.json; without --beside, what was before stays",
    )
    parser.add_argument("--list", action="store_true", help="print what is counted, place by place")
    options = parser.parse_args()
    now = counts(ROOT)
    before = counts(options.beside) if options.beside else {}
    width = max(map(len, now))
    for name, count in now.items():
        print(f"{name:<{width}}  {_shown(before.get(name)):>7}  {_shown(count):>7}")
    if options.list:
        trees = parsed(ROOT)
        for name, paths in repeated_class_names(trees).items():
            print("twice:", name, *(path.relative_to(ROOT) for path in paths))
        for count in (undocumented, long_functions, riddles):
            for path, name in count(trees):
                print(f"{count.__name__}: {path.relative_to(ROOT)} {name}")
        for path in private_torch(trees):
            print("private torch:", path.relative_to(ROOT))
    if options.save:
        saved = ROOT / "benchmarks/results/code_counts.json"
        rows = {"before": before or json.loads(saved.read_text())["before"], "now": now}
        saved.write_text(json.dumps(rows, indent=1) + "\n")


def _shown(count: float | None) -> str:
    return "" if count is None else f"{count:.1f}" if isinstance(count, float) else f"{count:,}"


if __name__ == "__main__":
    main()
