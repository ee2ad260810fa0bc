"""Relative links of all pages lead to files of the repository, and to anchors that are there."""

from __future__ import annotations

from pathlib import Path

import pages
import pytest


@pytest.mark.parametrize("page", pages.ALL_PAGES, ids=lambda page: str(page.relative_to(pages.ROOT)))
def test_links(page: Path) -> None:
    for link in pages.links(page):
        if "://" in link or link.startswith("mailto:"):
            continue
        target, _, anchor = link.partition("#")
        linked = (page.parent / target).resolve() if target else page
        assert linked.exists(), f"{page}: {link} leads nowhere"
        if anchor and linked.suffix == ".md":
            assert anchor in pages.anchors(linked), f"{page}: {link}: no such heading"


def test_pages_are_reached() -> None:
    """Every page of guide and decisions is linked from the README of its folder, and that from the first page."""
    root = pages.ROOT
    for folder in ("docs/guide", "docs/decisions"):
        linked = {
            (root / folder / link.partition("#")[0]).resolve()
            for link in pages.links(root / folder / "README.md")
        }
        missing = {path for path in (root / folder).glob("*.md") if path.name != "README.md"} - linked
        assert not missing, missing
        assert f"{folder}/README.md" in pages.links(root / "README.md")
