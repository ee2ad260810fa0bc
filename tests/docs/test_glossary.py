"""Every class, function and module that the glossary names exists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pages
import pytest

GLOSSARY = pages.ROOT / "docs" / "glossary.md"
ENTRY = re.compile(r"^\*\*(?P<words>[^*]+)\*\*", re.MULTILINE)
NAME = re.compile(r"`(meshweave(?:_\w+)?\.[\w.]+)`")


def names() -> list[str]:
    return list(dict.fromkeys(NAME.findall(GLOSSARY.read_text())))


@pytest.mark.parametrize("name", names())
def test_names_exist(name: str) -> None:
    path, *parts = name.split(".")
    value: object = importlib.import_module(path)
    for part in parts:
        path = f"{path}.{part}"
        try:
            value = importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name == "torch":
                pytest.skip("torch is not installed: the torch rung cannot run here")
            value = getattr(value, part, None) or value.__dataclass_fields__[part]  # type: ignore[attr-defined]


def test_each_word_is_defined_once() -> None:
    words = [word.strip() for entry in ENTRY.findall(GLOSSARY.read_text()) for word in entry.split(",")]
    assert len(words) > 40
    assert len(words) == len(set(words)), sorted(word for word in words if words.count(word) > 1)


def test_the_glossary_is_in_order() -> None:
    words = [entry.split(",")[0].lower() for entry in ENTRY.findall(Path(GLOSSARY).read_text())]
    assert words == sorted(words)
