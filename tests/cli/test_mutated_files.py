"""Mutated files of every kind end with status 0, or one line and status 2, in seconds and a gigabyte.

`MESHWEAVE_SWEEP=SEED:COUNT` chooses the cases of the slow test, so that other seeds can be swept.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
from collections import Counter
from pathlib import Path

import pytest
from sweep import sweep

from meshweave.cli.app import run_app


def _sweep(folder: Path, seed: int, count: int) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        run_app(["lab", "check"])  # what is slow to import is imported once, before all forks
    statuses: Counter[tuple[str, int]] = Counter()
    faults = []
    for number, case in enumerate(sweep(folder, seed, count)):
        statuses[case.kind, case.outcome.status] += 1
        if case.fault:
            (folder / f"fault-{number}").write_bytes(case.data)
            faults.append(f"{number}: {case.kind}: {' '.join(arg[:80] for arg in case.args)}: {case.fault}")
    assert not faults, f"seed {seed}, {len(faults)} of {count}, files in {folder}:\n" + "\n".join(faults[:20])
    kinds = {kind for kind, _ in statuses}
    good = sum(number for (_, status), number in statuses.items() if status == 0)
    assert len(kinds) == 8 and good > count // 20, statuses  # else the changes are too wild


def test_some_mutated_files(tmp_path: Path) -> None:
    _sweep(tmp_path, 1, 60)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_mutated_files(tmp_path: Path) -> None:
    seed, _, count = os.environ.get("MESHWEAVE_SWEEP", "").partition(":")
    _sweep(tmp_path, int(seed or random.Random().randrange(10**9)), int(count or 10_000))
