"""Training on batches of changing sizes: threads, descriptors and memory stay flat."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")

import torch

from meshweave.algorithms.block import BlockConfig
from meshweave.algorithms.block.problem import AXES, MESH
from meshweave.algorithms.block.sites import ProductSite, site_problem
from meshweave.algorithms.table import STRATEGIES
from meshweave.describe.layout.mesh import Mesh
from meshweave.execute.ranks.launch import launch
from meshweave.nn.parallel.programs import PARTS_KEPT, ProductPrograms

HERE = {"PYTHONPATH": str(Path(__file__).parent)}
CACHE_BYTES = 60_000_000
"""Less than the programs of all sizes take, so that some are dropped, and bound again, in most steps."""


def _held(strategy: str, num_steps: int, every: int, **sizes: int) -> list[list[dict[str, Any]]]:
    """Return what each rank holds every `every` steps."""
    payload = {"strategy": strategy, "num_steps": num_steps, "every": every, "seed": 1}
    payload |= {"most_rows": 8, "most_length": 4, "cache_bytes": CACHE_BYTES} | sizes
    timeout_s = 60 + num_steps
    num_ranks = 4 if strategy == "atp" else 2  # (2, 2)
    return launch("size_rank_functions:steps", num_ranks, payload, timeout_s=timeout_s, env=HERE)


def _check_flat(listed: list[dict[str, Any]], since: int, slack: float) -> None:
    """Compare the end with all that stands from step `since` to the twice as late; memory may be `slack` more."""
    early = [at for at in listed if since <= at["step"] <= 2 * since]
    for name, part in (("threads", 0), ("descriptors", 0), ("resident", slack)):
        assert listed[-1][name] <= max(at[name] for at in early) * (1 + part), (name, listed)


@pytest.mark.gloo
def test_thirty_two_steps_of_changing_sizes() -> None:
    for listed in _held("megatron_sp", 32, 8, most_length=2, cache_bytes=5_000_000):
        _check_flat(listed, 16, 0.08)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(20_000)
@pytest.mark.parametrize(
    "strategy", ["megatron_sp", "zero3", "data_parallel", "atp", "pipeline", "hosted megatron"]
)
def test_many_steps_of_changing_sizes(strategy: str) -> None:
    count = int(os.environ.get("MESHWEAVE_STEPS", "5000"))
    for listed in _held(strategy, count, max(count // 50, 1)):
        _check_flat(listed, count // 5, 0.02)


def test_programs_that_are_written_are_not_kept_for_each_size() -> None:
    site, own = ProductSite(True, True, 16, 2, 12), STRATEGIES.named("megatron_sp")
    mesh = Mesh(MESH, (2, 1), AXES[-2:], (0, 1))
    roles = own.roles_of(site_problem(1, 1, 1, (2, 1), "float32"))
    strategy: Any = SimpleNamespace(mesh=mesh, roles=roles, config=BlockConfig())
    sizes = range(1, PARTS_KEPT + 9)
    sized = [ProductPrograms(site, strategy, 2, 2 * length, torch.float32) for length in sizes]
    assert all(each.communicates == (True, True) for each in sized)
    written = [weakref.ref(each.parts) for each in sized]
    gc.collect()
    assert 0 < sum(each() is not None for each in written) <= PARTS_KEPT
