"""Signals at random moments of trainings, saves, resumes, reshards and commands: who names the right rank.

    python benchmarks/kill_campaign.py [--cases 200] [--seed 0] [--only WORK] [--save NAME]

Each row of the table is a kind of work and a signal: trials, those in which every survivor named the right rank
within deadline + 5 s, and the latest end of a survivor in seconds after the signal. Trials whose moment did not
come are drawn again; those in which ranks ended before their signal are wrong. The last column has what was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from machine import save

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS / "nn" / "lost"), str(TESTS / "execute"), str(TESTS)]
import lost_world  # noqa: E402
import test_signals  # noqa: E402

SHARE_OF_COMMANDS = 0.15
AT_ONCE = 40


def trainings(number: int, seed: int, only: str) -> list[dict[str, Any]]:
    """Return the verdicts on trials of trainings; those whose signal did not come are drawn again, once."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    verdicts: list[dict[str, Any]] = []
    cases = lost_world.drawn(number + number // 4, seed, only)
    while cases and len(verdicts) < number:
        some, cases = cases[:AT_ONCE], cases[AT_ONCE:]
        done = subprocess.run(
            [sys.executable, lost_world.__file__, json.dumps(some)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True,
        )  # fmt: skip
        for line in done.stdout.splitlines():
            verdict = json.loads(line)
            print(verdict["work"], verdict["signal"], verdict["late_s"], verdict["wrong"], file=sys.stderr)
            if verdict["struck"] or "did not come" not in verdict["wrong"]:
                verdicts.append(verdict)
    return verdicts[:number]


def commands(number: int, seed: int) -> list[dict[str, Any]]:
    """Return the verdicts on trials of `meshweave run` and `meshweave verify`."""
    rng, verdicts = random.Random(seed), []
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.json"
        made = ["plan", "gpt3", "--products", "--cluster", "tpu-v4-pod:16", "--out", str(plan), "--json"]
        subprocess.run([sys.executable, "-m", "meshweave", *made], check=True, stdout=subprocess.DEVNULL)
        while len(verdicts) < number:
            verb, name = ("run", "verify")[len(verdicts) % 2], rng.choice(test_signals.SIGNALS)
            begin = time.monotonic()
            wrong = test_signals.signal_a_command(
                plan, verb, getattr(signal, name), rng.randrange(4), round(rng.uniform(0, 5), 2)
            )
            if "ended before" not in wrong:
                took_s = round(time.monotonic() - begin, 1)
                verdicts.append(
                    {"work": verb, "signal": name, "wrong": wrong, "late_s": took_s, "by": "command"}
                )
    return verdicts


def table(verdicts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each kind of work and signal."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for verdict in verdicts:
        groups[verdict["work"], verdict["signal"]].append(verdict)
    return [
        {
            "work": work,
            "signal": name,
            "trials": len(own),
            "right": sum(not verdict["wrong"] for verdict in own),
            "latest_s": max(verdict["late_s"] for verdict in own),
            "by": sorted({verdict["by"] for verdict in own}),
            "wrong": [verdict["wrong"][:200] for verdict in own if verdict["wrong"]],
        }
        for (work, name), own in sorted(groups.items())
    ]


def main() -> None:
    """Run the campaign."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", metavar="NAME")
    parser.add_argument("--only", default="", metavar="WORK", help="kinds of work that begin so, no commands")
    given = parser.parse_args()
    num_commands = 0 if given.only else round(SHARE_OF_COMMANDS * given.cases)
    verdicts = trainings(given.cases - num_commands, given.seed, given.only)
    if num_commands:
        verdicts += commands(num_commands, given.seed)
    rows = table(verdicts)
    for row in rows:
        print(
            f"{row['work']:16} {row['signal']:8} {row['right']:3}/{row['trials']:<3} {row['latest_s']:5.1f} s",
            *row["wrong"],
        )
    right = sum(row["right"] for row in rows)
    print(f"{right} of {len(verdicts)} right; seed {given.seed}, deadline {lost_world.DEADLINE_S:g} s")
    if given.save:
        found = {
            "seed": given.seed,
            "deadline_s": lost_world.DEADLINE_S,
            "trials": len(verdicts),
            "right": right,
        }
        save(given.save, [{**found, "table": rows}])


if __name__ == "__main__":
    main()
