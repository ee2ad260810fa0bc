"""Everything here that needs a CUDA device: the tests marked `gpu`, and the benchmarks of this folder.

python benchmarks/gpu/run.py [--stage NAME,...] [--folder FOLDER]

Writes one file for each stage, with the device, versions and date. Tracked and triggered products are saved one by
one, and go on from what is there. Without a device it runs the kernels in Triton's interpreter, on a CPU, and says
what it leaves out; that is no failure. On a machine without a network: benchmarks/gpu/bare.sh.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STAGES = {
    "tests": ("", "tests marked gpu"),
    "tracked": ("fused.py --parts tracked", "products that count their tiles"),
    "triggered": ("fused.py --parts triggered", "copies that products trigger"),
    "ops": ("bound_ops.py", "what a bound op costs"),
    "kernels": ("kernels.py", "kernels"),
    "steps": ("steps.py", "training steps"),
}
"""By name, each of less than four minutes: the script of this folder that runs it, and what it measures."""
ONE_DEVICE = (
    "Ranks share one device: results do not say how fast transfers between devices are, what they take from "
    "products beside them, or whether atomic additions and waits of streams reach another device."
)
INTERPRETED = ("tests/execute/test_tracked_product.py",)
"""Tests whose kernels run in Triton's interpreter where there is no device."""


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


def run_interpreted() -> int:
    """Run kernels in Triton's interpreter; return 1 where that fails."""
    if importlib.util.find_spec("triton") is None:
        print("left out the kernels in Triton's interpreter: triton is not installed")
        return 0
    print("kernels in Triton's interpreter, on a CPU:", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", *INTERPRETED]
    is_bad = subprocess.run(command, cwd=ROOT, check=False).returncode != 0
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    dry = [sys.executable, str(HERE / "fused.py"), "--dry"]
    return int(subprocess.run(dry, env=env, check=False).returncode != 0 or is_bad)


def main() -> int:
    """Run all parts; return 1 where one fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="where results go; default benchmarks/results/gpu")
    parser.add_argument("--stage", default="all", help=f"all, or some between commas: {', '.join(STAGES)}")
    parser.add_argument("--no-interpreter", action="store_true", help="without a device run nothing")
    arguments = parser.parse_args()
    chosen = list(STAGES) if arguments.stage == "all" else arguments.stage.split(",")
    if unknown := [name for name in chosen if name not in STAGES]:
        parser.error(f"no stage '{unknown[0]}'; give all or some of {', '.join(STAGES)}")
    reason = why_not()
    if reason:
        print(f"{reason}: left out {', '.join(f'{title} ({name})' for name, (_, title) in STAGES.items())}")
        return 0 if arguments.no_interpreter else run_interpreted()
    import torch
    from device import FOLDER, save_rows

    if torch.cuda.device_count() == 1:
        print(ONE_DEVICE)
    folder = (arguments.folder or FOLDER).resolve()
    is_bad = False
    for name in chosen:
        if name == "tests":
            tests = run_tests()
            print(save_rows(folder, "tests", tests))
            is_bad = is_bad or not tests or any(test["outcome"] in ("failure", "error") for test in tests)
            continue
        script, *options = STAGES[name][0].split()
        command = [sys.executable, str(HERE / script), *options, "--folder", str(folder)]
        is_bad = subprocess.run(command, check=False).returncode != 0 or is_bad
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
