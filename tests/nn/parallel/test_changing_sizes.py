"""Training on batches of changing sizes: threads, descriptors and memory stay flat."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")

from meshweave.execute.ranks.launch import launch

HERE = {"PYTHONPATH": str(Path(__file__).parent)}
SLACK_BYTES = 32 << 20


def _held(strategy: str, num_steps: int, every: int, **sizes: int) -> list[list[dict[str, Any]]]:
    """Return what each rank holds every `every` steps."""
    payload = {"strategy": strategy, "num_steps": num_steps, "every": every, "seed": 1}
    payload |= {"most_rows": 8, "most_length": 24} | sizes
    timeout_s = 60 + num_steps
    return launch("size_rank_functions:steps", 2, payload, timeout_s=timeout_s, env=HERE)


def _check_flat(listed: list[dict[str, Any]], since: int) -> None:
    """Compare the end with all that stands from the first of `since` steps to the twice as late."""
    early = [at for at in listed if since <= at["step"] <= 2 * since]
    for name, slack in (("threads", 0), ("descriptors", 0), ("resident", SLACK_BYTES)):
        assert listed[-1][name] <= max(at[name] for at in early) + slack, (name, listed)


@pytest.mark.gloo
def test_forty_steps_of_changing_sizes() -> None:
    for listed in _held("megatron_sp", 40, 10):
        _check_flat(listed, 20)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(20_000)
@pytest.mark.parametrize("strategy", ["megatron_sp", "zero3", "atp", "pipeline"])
def test_many_steps_of_changing_sizes(strategy: str) -> None:
    count = int(os.environ.get("MESHWEAVE_STEPS", "5000"))
    for listed in _held(strategy, count, max(count // 20, 1)):
        _check_flat(listed, count // 10)
