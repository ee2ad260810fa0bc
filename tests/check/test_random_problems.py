"""Products and reshards of all algorithms by a seed: exact. `MESHWEAVE_PROBLEMS=SEED:COUNT` chooses them."""

from __future__ import annotations

import os
import random

import pytest
from random_problems import campaign


def _faults(kind: str, seed: int, count: int) -> list[str]:
    return [f"seed {seed}: {name}: {fault}" for name, fault in campaign(kind, seed, count) if fault]


@pytest.mark.parametrize("kind", ["products", "reshards"])
def test_some(kind: str) -> None:
    assert not _faults(kind, 1, 60)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", ["products", "reshards"])
def test_many(kind: str) -> None:
    seed, _, count = os.environ.get("MESHWEAVE_PROBLEMS", "").partition(":")
    assert not _faults(kind, int(seed or random.Random().randrange(10**9)), int(count or 5000))
