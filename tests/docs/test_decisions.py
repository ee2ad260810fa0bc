"""The index of decisions has every page once, under a topic, with a status."""

from __future__ import annotations

import re

import pages

FOLDER = pages.ROOT / "docs" / "decisions"
ROW = re.compile(r"^\| \[(\d{4})\]\(([^)]+)\) \| (.+) \| (.+) \|$", re.MULTILINE)


def test_every_decision_has_a_topic_and_a_status() -> None:
    index = (FOLDER / "README.md").read_text()
    rows = [match.groups() for topic in index.split("\n## ")[1:] for match in ROW.finditer(topic)]
    assert sorted(file for _, file, _, _ in rows) == sorted(path.name for path in FOLDER.glob("0*.md"))
    for number, file, _, status in rows:
        assert file.startswith(number)
        changed = re.fullmatch(r"changed by \[(\d{4})\]\((\d{4})-[^)]+\)", status)
        assert status == "holds" or (changed and changed[1] == changed[2] > number), (number, status)
