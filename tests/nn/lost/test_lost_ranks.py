"""Signals at moments of trainings: every survivor ends in time, names the right rank, and leaves nothing behind.

The sweep draws its cases from MESHWEAVE_SIGNAL_SEED, and MESHWEAVE_SIGNAL_CASES of them (200).
`benchmarks/kill_campaign.py` saves a table of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
import lost_world

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at processes in /proc"),
]

WORLD = Path(__file__).parent / "lost_world.py"
SEED = int(os.environ.get("MESHWEAVE_SIGNAL_SEED", "0"))
NUM_CASES = int(os.environ.get("MESHWEAVE_SIGNAL_CASES", "200"))


def left_behind() -> set[str]:
    shared = Path("/dev/shm")
    names = (
        {entry.name for entry in shared.iterdir() if "meshweave" in entry.name} if shared.exists() else set()
    )
    return names | {str(path) for path in Path(tempfile.gettempdir()).glob("lost-world-*")}


def judged(cases: list[dict[str, Any]], timeout_s: float) -> list[dict[str, Any]]:
    """Return the verdicts on cases of which the signal came."""
    before = left_behind()
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(WORLD), json.dumps(cases)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        timeout=timeout_s, check=True,
    )  # fmt: skip
    verdicts = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(verdicts) == len(cases)
    assert left_behind() <= before
    return [verdict for verdict in verdicts if verdict["struck"]]


def case(work: str, by: str, signal: str, victim: int, phase: str) -> dict[str, Any]:
    count = 1 if phase == "parallelize" else 3
    ranks = lost_world.WORKS[work][0]
    return {"work": work, "ranks": ranks, "by": by, "signal": signal, "victim": victim,
            "phase": phase, "count": count, "wait_s": 0.005}  # fmt: skip


FEW = [case("1f1b", "plain", "SIGKILL", 2, "forward"), case("zero3", "agent", "SIGTERM", 1, "backward")]
MORE = [
    case("megatron", "plain", "SIGSTOP", 1, "clip"),
    case("data_parallel", "plain", "SIGKILL", 0, "parallelize"),
    case("experts", "plain", "SIGKILL", 1, "dispatch"),
]


@pytest.mark.parametrize("cases", [FEW, pytest.param(MORE, marks=pytest.mark.slow)], ids=["few", "more"])
def test_survivors_name_the_rank_that_got_a_signal(cases: list[dict[str, Any]]) -> None:
    """In a pipeline, under an agent; in a norm that torch sums, before the first step, in experts."""
    verdicts = judged(cases, 300.0)
    assert [verdict for verdict in verdicts if verdict["wrong"]] == []
    assert len(verdicts) == len(cases)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_sweep_of_signals_to_trainings() -> None:
    verdicts = judged(lost_world.drawn(NUM_CASES, SEED), 7100.0)
    assert [verdict for verdict in verdicts if verdict["wrong"]] == []
    assert len(verdicts) >= 0.9 * NUM_CASES
