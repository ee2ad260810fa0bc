"""Numbers in README and guide are those of the saved results."""

from __future__ import annotations

import re
import runpy

import pages

MEASURED = runpy.run_path(str(pages.ROOT / "docs" / "measured.py"))
README = (pages.ROOT / "README.md").read_text()
COMPARISON = (pages.ROOT / "docs" / "guide" / "comparison.md").read_text()


def test_the_table_of_the_readme_is_generated() -> None:
    assert MEASURED["page"]() == README, "run python docs/measured.py"


def test_the_picture_says_what_was_simulated() -> None:
    """The times in the picture's description are those in the picture."""
    picture = (pages.ROOT / "docs" / "pictures" / "five-algorithms.svg").read_text()
    described = re.search(r"!\[Timelines of five algorithms[^\]]*\]", README)
    assert described is not None
    for number in re.findall(r"\d+\.\d", described[0]):
        assert number in picture, number


def test_comparisons_of_the_guide() -> None:
    ratios = [row["times_faster"] for row in MEASURED["load"]("universal_scalapack")["rows"]]
    mean = MEASURED["geometric_mean"](ratios)
    assert f"{min(ratios):.2f} to {max(ratios):.2f}, geometric mean {mean:.2f}" in COMPARISON
    host = [row["times_faster"] for row in MEASURED["load"]("universal_one_host")["rows"]]
    assert f"geometric mean {MEASURED['geometric_mean'](host):.2f}, least {min(host):.2f}" in COMPARISON
