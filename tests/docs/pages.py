"""The pages of the documentation, taken apart: fenced blocks with their markers, links, anchors.

A marker is an HTML comment on the lines before a block, which a browser does not show:

    <!-- run: 4 ranks -->     the Python block runs on 4 local processes
    <!-- skip: why -->        the block cannot run in a test, and why
    <!-- lab -->              the commands build a lab, and need root
    <!-- gloo -->             the commands start processes

Lines in a `run` comment after the first are Python that runs before the block, such as what a reader has already.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUIDE = sorted((ROOT / "docs" / "guide").glob("*.md"))
RUN_PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *GUIDE]
"""Pages whose snippets and commands run."""
ALL_PAGES = sorted(
    path
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "benchmarks/**/*.md",
        "validation/*.md",
        "validation/results/*.md",
    )
    for path in ROOT.glob(pattern)
)
MARKERS = ("run", "skip", "lab", "gloo")

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MARKER = re.compile(r"<!--\s*(\w+)(?::\s*([^\n]*?))?\s*(?:\n(.*?))?-->\s*\Z", re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the marker before it."""

    page: str
    line: int
    language: str
    text: str
    marker: str = ""
    value: str = ""
    setup: str = ""

    @property
    def place(self) -> str:
        """Return the page and line at which the block begins."""
        return f"{self.page}:{self.line}"

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks that a block marked `run` wants."""
        return int(self.value.split()[0])

    def commands(self) -> list[str]:
        """Return the commands of a block, continued lines joined; of a console block those after `$`."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        return [line for line in lines if line.strip() and not line.startswith("#")]


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page, in order."""
    text, name, end = page.read_text(encoding="utf-8"), str(page.relative_to(ROOT)), 0
    for fence in _FENCE.finditer(text):
        marker = _MARKER.search(text, end, fence.start())
        kind, value, setup = marker.groups() if marker and marker[1] in MARKERS else ("", "", "")
        line = text.count("\n", 0, fence.start()) + 1
        yield Block(name, line, fence[1], fence[2], kind, value or "", setup or "")
        end = fence.end()


def prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def links(page: Path) -> list[str]:
    """Return the targets of a page's links and pictures."""
    return _LINK.findall(prose(page))


def anchors(page: Path) -> set[str]:
    """Return the anchors that the headings of a page have."""
    names: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        names.add(re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-"))
    return names
