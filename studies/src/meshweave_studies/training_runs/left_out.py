"""Published runs that no score counts: hybrids, adapters, and runs whose source leaves out what predictions need.

`published/left_out_runs.toml` lists them by words of their source and of their model, and says why.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files
from typing import Any

from meshweave.describe.files import parse_table
from meshweave_studies.training_runs.rows import PublishedRun

_FILE = "left_out_runs.toml"


@lru_cache(maxsize=1)
def _listed() -> list[dict[str, Any]]:
    text = files("meshweave_studies").joinpath("published", _FILE).read_text("utf-8")
    listed: list[dict[str, Any]] = parse_table(text, _FILE, "toml")["left_out"]
    return listed


def left_out_reason(run: PublishedRun) -> str:
    """Return why a run counts in no score; "" where it counts."""
    for entry in _listed():
        if entry.get("source", "") in run.source and entry.get("model", "") in run.model:
            return str(entry["reason"])
    return ""
