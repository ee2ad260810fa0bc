"""The provenance that every measured result must carry: date, machine, versions."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("meshweave", "numpy", "torch", "pydantic")


def describe_environment() -> dict[str, Any]:
    """Return a dict of JSON values that says when and on what a result was measured.

    "date" is the day in UTC, "cpu" the processor's name, "cores" the number of logical CPUs, and "system" the
    operating system with its release. "versions" maps "python" and each of `PACKAGES` to a version or "not
    installed".
    """
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line
        ]
        cpu = names[0] if names else cpu
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
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
