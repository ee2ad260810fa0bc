"""Copies of a result on several ranks have the same bits, and so have two identical calls: products and reshards.

Ranks have different numbers of threads, and local tensors that lie differently in memory. Random cases come from a
seed that MESHWEAVE_SEED sets; MESHWEAVE_PRODUCTS and MESHWEAVE_RESHARDS say how many.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")

from meshweave.execute.memory.shared import why_unavailable
from meshweave.execute.ranks.launch import launch

HERE = {"PYTHONPATH": str(Path(__file__).parent)}
TRANSPORTS = ["messages"] if why_unavailable() else ["messages", "shared"]
SEED = int(os.environ.get("MESHWEAVE_SEED", "0"))
LAUNCHES = 6


def check(payload: dict[str, Any], num_ranks: int = 4, timeout_s: float = 60.0) -> int:
    """Return how many tensors had copies. Copies must be equal on all ranks, and nothing else be wrong."""
    answers = launch(
        "replica_rank_functions:run",
        num_ranks,
        payload | {"transports": TRANSPORTS},
        timeout_s=timeout_s,
        env=HERE,
    )
    bits: dict[tuple[str, str], set[str]] = defaultdict(set)
    copies: dict[tuple[str, str], int] = defaultdict(int)
    for reports, wrong in answers:
        assert wrong == [], wrong[:5]
        for case, part, digest in reports:
            bits[case, part].add(digest)
            copies[case, part] += 1
    drifted = sorted({case for (case, _), digests in bits.items() if len(digests) > 1})
    assert drifted == [], f"copies differ in {len(drifted)} tensors: {drifted[:5]}"
    return len({case for (case, _), count in copies.items() if count > 1})


@pytest.mark.gloo
def test_copies_of_results_have_the_same_bits() -> None:
    """A sample in which copies once differed: sums in other orders, other strides, other numbers of threads."""
    assert check({"step": 149, "only": [3, 8, 12], "reshards": 3}) > 5


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(LAUNCHES))
def test_copies_have_the_same_bits_in_products_and_reshards_by_lot(number: int) -> None:
    products = int(os.environ.get("MESHWEAVE_PRODUCTS", "3000")) // LAUNCHES
    reshards = int(os.environ.get("MESHWEAVE_RESHARDS", "1000")) // LAUNCHES
    payload = {"seed": 1000 * SEED + number, "products": products, "reshards": reshards}
    assert check(payload, 6 if number == LAUNCHES - 1 else 4, 800.0) > products // 4


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(1200)
def test_copies_have_the_same_bits_for_all_placements() -> None:
    assert check({"step": 1}, timeout_s=1100.0) > 1000
