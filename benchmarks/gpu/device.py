"""What was measured on which device: results of one GPU, saved beside its name, versions and the date."""

from __future__ import annotations

import datetime
import importlib.util
import json
import subprocess
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from meshweave_lab.provenance import describe_environment

FOLDER = Path(__file__).parents[1] / "results" / "gpu"


def describe_device() -> dict[str, Any]:
    """Return the name, memory and driver of the CUDA device, versions of torch and its libraries, and the date."""
    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm", "--format=csv,noheader"]
    try:
        asked = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        asked = ""
    driver, power, clock = [*asked.split(", "), "", "", ""][:3]
    return {
        "name": properties.name,
        "devices": torch.cuda.device_count(),
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "driver": driver,
        "power_limit": power,
        "most_clock": clock,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "triton": version("triton") if importlib.util.find_spec("triton") else "",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def save_rows(folder: Path, name: str, rows: Any) -> Path:
    """Write `NAME.json` with the device and the machine beside the rows."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    whole = {"device": describe_device(), "machine": describe_environment(), "rows": rows}
    path.write_text(json.dumps(whole, indent=1) + "\n")
    return path


class KeptRows:
    """The rows of a result by name, saved one by one: what this device has measured already is not measured again.

    Rows of another device, or of other versions of its software, are dropped.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._device = describe_device()
        self.rows: dict[str, Any] = {}
        path = folder / f"{name}.json"
        if path.exists():
            saved = json.loads(path.read_text())
            if {**saved["device"], "date": ""} == {**self._device, "date": ""}:
                self.rows = dict(saved["rows"])

    def keep(self, key: str, measure: Callable[[], Any]) -> Any:
        """Return a row, measured and saved where it is not there."""
        if key not in self.rows:
            self.rows[key] = measure()
            save_rows(self._folder, self._name, self.rows)
        return self.rows[key]
