"""Reports draw what they are given: importing all of them loads neither tuner nor simulator."""

from __future__ import annotations

import subprocess
import sys


def test_reports_import_neither_tuner_nor_simulator() -> None:
    code = (
        "import importlib, pkgutil, sys\n"
        "import meshweave.report as report\n"
        "for module in pkgutil.iter_modules(report.__path__):\n"
        "    importlib.import_module(f'meshweave.report.{module.name}')\n"
        "loaded = [name for name in sys.modules if name.startswith(('meshweave.tune', 'meshweave.simulate'))]\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
