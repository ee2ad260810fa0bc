"""Descriptions that say in what they differ from an entry of the catalog: the key `like`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshweave.base.errors import DescriptionError
from meshweave.describe.catalog import catalog_text
from meshweave.describe.files import fail, format_value, parse_table


def table_like(kind: str, data: dict[str, Any], file: str | Path) -> dict[str, Any]:
    """Return a table merged over the catalog entry that its key `like` names: its keys win, lists are replaced.

    The result has no key `like`, and nothing of the entry's `usual_for`. A network of another kind than the
    entry's takes nothing from it. Without the key `like` the table is returned as it is.

    Args:
        kind: the folder of the catalog that has the entry, such as "clusters".
        file: what errors name.

    Raises:
        DescriptionError: the catalog has no such entry, or `like` is no string.
    """
    if "like" not in data:
        return data
    own = {key: value for key, value in data.items() if key != "like"}
    name = data["like"]
    if not isinstance(name, str):
        fail(file, "like", f"{format_value(name)} is no name; give an entry of the catalog's {kind}")
    try:
        text = catalog_text(kind, name)
    except DescriptionError as error:
        fail(file, "like", str(error))
    base = table_like(kind, parse_table(text, f"{name}.toml", "toml"), f"{name}.toml")
    return _laid_over({key: value for key, value in base.items() if key != "usual_for"}, own)


def _laid_over(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    if own.get("kind", base.get("kind")) != base.get("kind"):
        return own
    both = {key for key in own if isinstance(own[key], dict) and isinstance(base.get(key), dict)}
    return {**base, **own, **{key: _laid_over(base[key], own[key]) for key in both}}
