"""Signals at random moments: every survivor ends in time and names the right rank, and nothing is left behind.

The sweep draws its cases from MESHWEAVE_SIGNAL_SEED, and MESHWEAVE_SIGNAL_CASES of them (200).
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from meshweave.cli.app import run_app

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gloo,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at processes in /proc"),
]

HERE = Path(__file__).parent
WORKLOADS = ("messages", "shared", "binding", "groups", "training", "state dicts")
SIGNALS = ("SIGKILL", "SIGSTOP", "SIGTERM")
SEED = int(os.environ.get("MESHWEAVE_SIGNAL_SEED", "0"))
NUM_CASES = int(os.environ.get("MESHWEAVE_SIGNAL_CASES", "200"))
NUM_CLI_CASES = NUM_CASES // 6
TIMEOUT_S = 14.0  # of the command line in these tests


def left_behind():
    """What processes leave when they are not careful; labs and ranks of other tests come and go meanwhile."""
    shared = Path("/dev/shm")
    names = [entry.name for entry in shared.iterdir() if "meshweave" in entry.name] if shared.exists() else []
    return {*names, *map(str, Path(tempfile.gettempdir()).glob("signal-world-*"))}


def judge(cases, timeout_s):
    """Run worlds; return how many there were and what was wrong with which."""
    before = left_behind()
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(HERE / "signal_world.py"), json.dumps(cases)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=timeout_s,
        check=True,
    )
    verdicts = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(verdicts) == len(cases)
    assert left_behind() <= before
    return [verdict for verdict in verdicts if verdict["wrong"]]


def drawn(number, rng):
    cases = [
        [WORKLOADS[at % len(WORKLOADS)], rng.choice(SIGNALS), rng.randrange(4), round(rng.uniform(0, 2.0), 3)]
        for at in range(number)
    ]
    rng.shuffle(cases)
    return cases


def test_survivors_name_the_rank_that_got_a_signal():
    # One that hosts the store, and one that does not: rank 0 may then be the first to leave.
    cases = [["shared", "SIGTERM", 0, 0.2], ["messages", "SIGKILL", 1, 0.3]]
    assert judge(cases, 300.0) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_sweep_of_signals():
    assert judge(drawn(NUM_CASES - NUM_CLI_CASES, random.Random(SEED)), 3500.0) == []


# --- the command line -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    assert (
        run_app(["plan", "gpt3", "--products", "--cluster", "tpu-v4-pod:16", "--out", str(path), "--json"])
        == 0
    )
    return path


def ranks_of(parent_pid):
    """The processes of the ranks of a command, by rank, as far as they run."""
    ranks = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                is_child = int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent_pid
                environment = (entry / "environ").read_bytes().split(b"\0") if is_child else ()
            except OSError:
                continue
            for line in environment:
                if line.startswith(b"RANK="):
                    ranks[int(line[5:])] = int(entry.name)
    return ranks


def signal_a_command(plan_path, verb, signum, victim, delay_s):
    """Run a command, send a signal to one of its ranks; return what is wrong, "" if nothing is."""
    options = ["--layer", "ff1", "--ranks", "4", "--max-dim", "256", "--timeout", str(TIMEOUT_S)]
    options += ["--repeat", "1000", "--algorithm", "meshslice"] if verb == "run" else []
    command = [sys.executable, "-m", "meshweave", verb, str(plan_path), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    until, sent_at = time.monotonic() + 120.0, 0.0
    while process.poll() is None and not sent_at and time.monotonic() < until:
        if len(ranks := ranks_of(process.pid)) == 4:
            time.sleep(delay_s)
            os.kill(ranks[victim], signum)
            sent_at = time.monotonic()
        time.sleep(0.02)
    said, _ = process.communicate(timeout=120.0)
    took_s = time.monotonic() - sent_at
    if not sent_at:
        return f"{verb} ended before the signal"
    if any(Path(f"/proc/{pid}").exists() for pid in ranks.values()):
        return f"{verb} left ranks"
    headline = next((line for line in said.splitlines() if line.startswith("error: ")), said)
    wrong = re.findall(rf"ranks? (?!{victim}\b)\d", headline.partition(";")[0].partition(" while ")[0])
    named = re.search(rf"rank {victim} (was|stopped|never)", said)
    if process.returncode not in (1, 2) or not named or (verb == "run" and wrong):
        return f"{verb} {signum} {victim} {delay_s}: {process.returncode} {said[-1000:]}"
    if took_s > TIMEOUT_S + 6.0:
        return f"{verb} took {took_s:.1f} s"
    return ""


@pytest.mark.slow
def test_run_names_the_rank_that_was_stopped(plan_path):
    assert signal_a_command(plan_path, "run", signal.SIGSTOP, 2, 0.5) == ""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_sweep_of_signals_to_ranks_of_commands(plan_path):
    rng, before, wrong = random.Random(SEED), left_behind(), []
    for number in range(NUM_CLI_CASES):
        signum = getattr(signal, rng.choice(SIGNALS))
        verb = ("run", "verify")[number % 2]
        wrong.append(signal_a_command(plan_path, verb, signum, rng.randrange(4), round(rng.uniform(0, 5), 2)))
    assert [text for text in wrong if text and "ended before" not in text] == []
    assert left_behind() <= before
