"""Saving benchmark results beside the machine that they were measured on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from meshweave_lab.provenance import describe_environment

__all__ = ["RESULTS", "describe_environment", "in_fresh_process", "save"]

RESULTS = Path(__file__).parent / "results"


def in_fresh_process(code: str, *arguments: str, timeout_s: float) -> dict[str, Any]:
    """What Python code prints as JSON, its arguments in `sys.argv[1:]`."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=timeout_s)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def save(name: str, rows: Any) -> Path:
    """Writes `results/NAME.json` with the machine beside the rows."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": describe_environment(), "rows": rows}, indent=1) + "\n")
    return path
