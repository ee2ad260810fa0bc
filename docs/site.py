"""Build the site into build/docs: README, guide, API reference, command-line reference, glossary and decisions.

    python docs/site.py          # every warning of the generator is an error

Pages are staged in build/docs-pages with the paths that they have in the repository, so that their relative links
hold in both places, and the explorer (docs/explorer) beside them. The API reference lists the names of
`meshweave`, its namespaces, and what the lab and the studies offer. The command-line reference comes from the
typer app. Both are written into the staged tree only.
"""

from __future__ import annotations

import inspect
import logging
import re
import runpy
import shutil
import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import groupby
from pathlib import Path

import typer
import yaml
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort
from typer.cli import get_docs_for_click

import meshweave
from meshweave.cli.app import app

ROOT = Path(__file__).parents[1]
STAGE = ROOT / "build" / "docs-pages"
CONFIG = ROOT / "docs" / "mkdocs.yml"
PAGES = (
    "*.md", "docs/guide/*.md", "docs/decisions/*.md", "docs/reference/*.md", "docs/glossary.md",
    "benchmarks/results/*.md", "validation/README.md", "validation/papers.md", "validation/results/*.md",
)  # fmt: skip
GROUPS = {
    "describe": "The catalog, clusters, models, meshes, layouts and machines.",
    "programs": "Programs, their text and their proof.",
    "algorithms": "The table of algorithms and their contract.",
    "planning": "The search for the best degrees, layouts and schedule; plans in the words of other software.",
    "readings": "Estimate, simulation, execution by numpy and torch, and traces of them.",
    "torch": "Products and resharding of DTensors, models and pipelines by a plan, checkpoints.",
    "proofs": "Checks of plans, programs and models.",
    "messages": "The base of errors that a user can cause and mend, and what is said while the library works.",
}
NAMESPACES = [f"meshweave.{name}" for name in meshweave._NAMESPACES]
PACKAGES = ["meshweave_lab", "meshweave_studies"]
EXPLORER = """# Explorer

[Algorithms op by op, saved plans and every published run](../explorer.html){target=_blank}: one page, which needs
no network and can be copied elsewhere.
"""
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")


def pages() -> Iterator[Path]:
    """Yield the pages of the repository that the site has, relative to its root."""
    for pattern in PAGES:
        yield from sorted(path.relative_to(ROOT) for path in ROOT.glob(pattern))


def stage() -> None:
    """Copy all pages, and the files that they link to, and write the generated ones."""
    shutil.rmtree(STAGE, ignore_errors=True)
    for page in pages():
        text = (ROOT / page).read_text(encoding="utf-8")
        _write(page, text)
        for target in LINK.findall(text):
            linked = (ROOT / page.parent / target).resolve()
            if linked.is_file() and linked.is_relative_to(ROOT) and linked.suffix != ".md":
                copy = STAGE / linked.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(linked, copy)
    explorer = runpy.run_path(str(ROOT / "docs" / "explorer" / "build.py"))
    _write(Path("explorer.html"), explorer["explorer_page"]())
    _write(Path("docs/explorer.md"), EXPLORER)
    for group in GROUPS:
        _write(Path("docs/reference/api") / f"{group}.md", api_page(group))
    for module in (*NAMESPACES, *PACKAGES):
        _write(Path("docs/reference/api") / f"{module}.md", module_page(module))
    _write(Path("docs/reference/command-line.md"), command_line_page())
    _write(Path("docs/reference/README.md"), reference_page())


def api_page(group: str) -> str:
    """Return the page of one group of the front door: a directive for each name."""
    homes = vars(meshweave)["_homes"]
    head = f"# {group.capitalize()}\n\n{GROUPS[group]} Every name is one of `meshweave`: `import meshweave as mw`."
    names = sorted(meshweave._GROUPS[group].split(), key=str.lower)
    return "\n\n".join([head, *(f"::: {homes[name]}.{name}" for name in names)]) + "\n"


def module_page(module: str) -> str:
    """Return the page of a namespace, or of a package beside the wheel: a directive for each name."""
    head = f"# {module}\n\n{_paragraphs(module)}\n\nEvery name is one of `{module}`."
    return "\n\n".join([head, *(f"::: {place}" for place in places(module))]) + "\n"


def places(module: str) -> list[str]:
    """Return where the names of a namespace or package are defined, in the order of the names."""
    itself = import_module(module)
    homes = vars(itself).get("_homes", {})
    return [f"{homes.get(name, module)}.{name}" for name in sorted(itself.__all__, key=str.lower)]


def _paragraphs(module: str) -> str:
    """Return the docstring of a module, its indented lines fenced."""
    lines = (inspect.getdoc(import_module(module)) or "").splitlines()
    text = ""
    for is_code, part in groupby(lines, key=lambda line: line.startswith("    ")):
        joined = "\n".join(line[4:] if is_code else line for line in part)
        text += f"```python\n{joined}\n```\n" if is_code else f"{joined}\n"
    return text.strip()


def reference_page() -> str:
    """Return the first page of the reference: what there is, and all names of the front door by group."""
    lines = [
        "# Reference",
        "[Command line](command-line.md): every verb and option. "
        "[Description files](descriptions.md): every key of cluster and model files. "
        "[Limits](limits.md): how large what is read may be.",
        "## Python",
        "`import meshweave as mw` has these names by group, and the namespaces after them (`mw.errors`). "
        "What is not listed is private by convention. A program that plans, predicts or trains needs the first "
        "list, which stays near 45 names; one that does what few do needs a namespace more: the table of "
        "algorithms, critical paths and the binding of programs stand there "
        "([0068](../decisions/0068-names-and-namespaces.md)). What belongs to one object is its method: "
        "`Plan.summary`, `Plan.to_dataframe`, `Plan.save`.",
    ]
    for group, meaning in GROUPS.items():
        names = sorted(meshweave._GROUPS[group].split(), key=str.lower)
        words = ", ".join(f"`{name}`" for name in names)
        lines.append(f"**[{group.capitalize()}](api/{group}.md)**: {meaning}\n{words}")
    for module in (*NAMESPACES, *PACKAGES):
        names = ", ".join(f"`{name}`" for name in sorted(import_module(module).__all__, key=str.lower))
        meaning = _paragraphs(module).splitlines()[0]
        lines.append(f"**[`{module}`](api/{module}.md)**: {meaning}\n{names}")
    return "\n\n".join(lines) + "\n"


def command_line_page() -> str:
    """Return the reference of the command line, from the typer app itself."""
    command = typer.main.get_command(app)
    context = command.make_context("meshweave", [], resilient_parsing=True)
    return get_docs_for_click(obj=command, ctx=context, name="meshweave", title="Command line")


def config_path() -> Path:
    """Write the configuration with the pages of each section listed under their titles; return its path."""
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    config["docs_dir"], config["site_dir"] = str(STAGE), str(ROOT / "build" / "docs")
    config["plugins"][-1]["mkdocstrings"]["handlers"]["python"]["paths"] = [
        str(ROOT / source) for source in ("src", "lab/src", "studies/src")
    ]
    sections = {title: part for entry in config["nav"] for title, part in entry.items()}
    sections["Guide"] += _in_order("docs/guide")
    sections["Decisions"] += _in_order("docs/decisions")
    sections["Reference"] += [
        {"Command line": "docs/reference/command-line.md"},
        {"Description files": "docs/reference/descriptions.md"},
        {"Limits": "docs/reference/limits.md"},
        {
            "Python": [{group.capitalize(): f"docs/reference/api/{group}.md"} for group in GROUPS]
            + [{module: f"docs/reference/api/{module}.md"} for module in (*NAMESPACES, *PACKAGES)]
        },
    ]
    path = STAGE.parent / "mkdocs.yml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return path


def _in_order(folder: str) -> list[str]:
    """Return the pages of a folder in the order in which its README links to them."""
    readme = (ROOT / folder / "README.md").read_text(encoding="utf-8")
    names = dict.fromkeys(target for target in LINK.findall(readme) if "/" not in target)
    return [f"{folder}/{name}" for name in names if name.endswith(".md")]


def _write(page: Path, text: str) -> None:
    path = STAGE / page
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def main() -> int:
    """Build the site. Returns the exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    stage()
    config = load_config(str(config_path()), strict=True)
    try:
        build(config)
    except Abort as error:
        print(error, file=sys.stderr)
        return 1
    print(f"written: {config.site_dir}/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
