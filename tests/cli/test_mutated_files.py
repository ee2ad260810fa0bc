"""Mutated files of every kind and odd options, over every verb: status 0, or one line and status 2, in bounds.

`MESHWEAVE_SWEEP=SEED:COUNT` chooses the cases of the slow test, so that other seeds can be swept;
`SEED:COUNT:NUMBER,NUMBER` runs some of these again.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from forked import run_forked
from sweep import command_line, kinds, refuse_processes, sweep
from verb_commands import COMMANDS, leaves

from meshweave.cli.app import run_app


def _sweep(folder: Path, seed: int, count: int, only: Sequence[int] = ()) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        run_app(["lab", "check"])  # what is slow to import is imported once, before all forks
    statuses: Counter[tuple[str, int]] = Counter()
    faults = []
    num_cut = 0
    for number, case in zip(only or range(count), sweep(folder, seed, count, only), strict=True):
        statuses[case.kind, case.outcome.status] += 1
        num_cut += case.is_cut
        if number % 500 == 499:
            print(
                f"{number + 1} of {count}: {len(faults)} faults, {num_cut} ended before their time",
                flush=True,
            )
        if case.fault:
            (folder / f"fault-{number}").write_bytes(case.data)
            faults.append(f"{number}: {case.kind}: {' '.join(arg[:80] for arg in case.args)}: {case.fault}")
            print(faults[-1][:700], flush=True)
    assert not faults, f"seed {seed}, {len(faults)} of {count}, files in {folder}:\n" + "\n".join(faults[:20])
    assert num_cut <= max(count // 100, 3), num_cut
    good = sum(number for (_, status), number in statuses.items() if status == 0)
    assert only or good > count // 20, statuses  # else the changes are too wild


def test_the_commands_are_those_of_every_verb_and_kind_of_file() -> None:
    verbs = dict(leaves())
    assert set(COMMANDS) == set(verbs)
    for verb, commands in COMMANDS.items():
        arguments = [param.name for param in verbs[verb].params if param.param_type_name == "argument"]
        assert not arguments or any(len(command.split()) > len(verb.split()) for command in commands), verb


@pytest.mark.slow
def test_good_commands_are_good(tmp_path: Path) -> None:
    """Else their mutations would show nothing; what needs processes, a lab or a compiler is refused here."""
    table = kinds(tmp_path)
    (tmp_path / "scratch").mkdir()
    bad = []
    for verb, commands in COMMANDS.items():
        for command in commands:

            def action(command: str = command) -> int:
                refuse_processes()
                os.chdir(tmp_path / "scratch")
                return run_app(command_line(tmp_path, table, "", command))

            outcome = run_forked(action, 100)
            refused = re.search(
                "no processes in this|there is no (row|figure|paper)|no lab|libtpu|figures", outcome.err
            )
            if outcome.status and not refused and verb != "lab check":
                bad.append((command, outcome))
    assert not bad, "\n".join(f"{command}: {outcome.status} {outcome.err}" for command, outcome in bad)


def test_some_mutated_files(tmp_path: Path) -> None:
    _sweep(tmp_path, 1, 20)


@pytest.mark.slow
@pytest.mark.timeout(20_000)
def test_many_mutated_files(tmp_path: Path) -> None:
    seed, count, only, *_ = *os.environ.get("MESHWEAVE_SWEEP", "").split(":"), "", "", ""
    numbers = [int(number) for number in only.split(",") if number]
    _sweep(tmp_path, int(seed or random.Random().randrange(10**9)), int(count or 10_000), numbers)
