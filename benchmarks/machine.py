"""Saving benchmark results beside the machine that they were measured on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshweave.report.provenance import describe

__all__ = ["RESULTS", "describe", "save"]

RESULTS = Path(__file__).parent / "results"


def save(name: str, rows: Any) -> Path:
    """Writes `results/NAME.json` with the machine beside the rows."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": describe(), "rows": rows}, indent=1) + "\n")
    return path
