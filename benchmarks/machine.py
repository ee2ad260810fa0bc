"""What every benchmark result must carry: date, machine, versions."""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def describe() -> dict[str, Any]:
    """Date, processor, cores, system, and versions of what is measured."""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line
        ]
        cpu = names[0] if names else cpu
    versions = {"python": platform.python_version()}
    for package in ("meshweave", "numpy", "torch", "pydantic"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "versions": versions,
    }


def save(name: str, rows: Any) -> Path:
    """Writes `results/NAME.json` with the machine beside the rows."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": describe(), "rows": rows}, indent=1) + "\n")
    return path
