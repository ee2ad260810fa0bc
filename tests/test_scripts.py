"""Scripts of the repository start: what they import is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(
    path.relative_to(ROOT)
    for folder in ("benchmarks", "validation", "docs")
    for path in (ROOT / folder).glob("*.py")
    if "argparse.ArgumentParser(" in path.read_text()
)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_a_script_tells_its_options(script: Path) -> None:
    command = [sys.executable, str(script), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert done.returncode == 0 and "usage: " in done.stdout, done.stderr
