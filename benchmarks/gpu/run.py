"""Everything here that needs a CUDA device: the tests marked `gpu`, kernels, and training steps.

python benchmarks/gpu/run.py [--folder FOLDER]

Writes tests.json, kernels.json and steps.json with the device, versions and date. Without a device it says what it
leaves out; that is no failure.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PARTS = (
    "tests marked gpu",
    "kernels (benchmarks/gpu/kernels.py)",
    "training steps (benchmarks/gpu/steps.py)",
)


FILES = sorted(
    {str(path) for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text("utf-8")}
)


def why_not() -> str:
    """Return why nothing can run, "" where a CUDA device is there."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return "" if torch.cuda.is_available() else "torch finds no CUDA device"


def run_tests() -> list[dict[str, Any]]:
    """Run the tests marked `gpu`; return the outcome and seconds of each."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={report}", *FILES]
        if importlib.util.find_spec("xdist") is not None:
            command += ["-n", "3"]
        subprocess.run(command, cwd=ROOT, check=False)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    return [
        {
            "name": f"{case.get('classname')}.{case.get('name')}",
            "outcome": next((child.tag for child in case), "passed"),
            "s": float(case.get("time", 0)),
        }
        for case in cases
    ]


def main() -> int:
    """Run all parts; return 1 where one fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="where results go; default benchmarks/results/gpu")
    arguments = parser.parse_args()
    reason = why_not()
    if reason:
        print(f"{reason}: left out {', '.join(PARTS)}")
        return 0
    from device import FOLDER, save_rows

    folder = (arguments.folder or FOLDER).resolve()
    tests = run_tests()
    print(save_rows(folder, "tests", tests))
    is_bad = not tests or any(test["outcome"] in ("failure", "error") for test in tests)
    for script in ("kernels.py", "steps.py"):
        done = subprocess.run([sys.executable, str(HERE / script), "--folder", str(folder)], check=False)
        is_bad = is_bad or done.returncode != 0
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
