"""Exchanges between experts: what libraries send, and what of it takes time."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from meshweave.base.errors import UnsupportedError
from meshweave.cost.exchange import (
    as_all_to_all,
    bytes_s,
    chance_of_expert,
    elements_after_dispatch,
    exchange_bytes,
    library_of,
)
from meshweave.ir.work import CopyExchange


def exchange(library: str, ranks: int = 16, tokens: int = 4096, **more: object) -> CopyExchange:
    """Return the dispatch of tokens of 7168 features in 16 bits."""
    given = {"experts": 256, "chosen": 8, "library": library, **more}
    return CopyExchange("dispatch", "experts.rank", ranks, 14336, tokens=tokens, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parts", "groups", "top"), [(8, 1, 1), (64, 1, 1), (32, 8, 4), (4, 8, 4), (8, 8, 2)]
)
def test_shares_are_those_of_drawn_choices(parts: int, groups: int, top: int) -> None:
    rng, hits, draws = random.Random(1), 0, 20_000
    own = 256 // parts
    for _ in range(draws):
        kept = rng.sample(range(groups), top)
        among = [g * (256 // groups) + i for g in kept for i in range(256 // groups)]
        hits += any(expert < own for expert in rng.sample(among, 8))
    assert chance_of_expert(parts, 256, 8, groups, top) == pytest.approx(hits / draws, abs=0.012)


def test_fewer_copies_are_sent_by_rank_and_by_host() -> None:
    copies, hosts = (exchange_bytes(exchange(name, 64), 8, 8) for name in ("all_to_all", "deepep"))
    assert hosts.between < 0.7 * copies.between
    assert copies.between == pytest.approx(4096 * 14336 * 8 * 56 / 64)


def test_a_loaded_rank_gets_more() -> None:
    even, loaded = (exchange_bytes(exchange("deepep", load=load), 8, 2) for load in (1.0, 1.5))
    assert loaded.arriving == pytest.approx(1.5 * even.arriving)
    assert loaded.own == even.own


def test_an_unknown_library_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="did you mean 'deepep'"):
        library_of("deep_ep")


def test_what_arrives_is_one_copy_a_token_and_rank() -> None:
    work = exchange("hybridep", ranks=8)
    arriving = round(exchange_bytes(work, 8, 1).arriving)
    assert elements_after_dispatch(work, 2) == arriving // 2
    assert elements_after_dispatch(work, 4) == arriving // 4
    assert elements_after_dispatch(work, 2) < 8 * work.tokens * work.part_bytes // 2


@pytest.mark.parametrize(
    ("kind", "item_bytes", "documented"), [("dispatch", 1 + 4 / 128, 58e9), ("combine", 2, 57e9)]
)
def test_deepep_between_hosts_is_as_fast_as_it_documents(
    kind: str, item_bytes: float, documented: float
) -> None:
    """DeepEP, docs/legacy.md: 4096 tokens, 32 ranks of H800 on 4 hosts; bytes to all hosts, the own one included.

    Its constants are fitted on H100 (`validation/fit_exchange.py`).
    """
    work = replace(
        exchange("deepep", 32, groups=4, top_groups=4), kind=kind, part_bytes=round(7168 * item_bytes)
    )
    moved, library = exchange_bytes(work, 8, 4), library_of("deepep")
    constants = library.between[kind == "combine"]
    seconds = bytes_s(constants, moved, 200e9, 50e9, library.multiprocessors)
    assert moved.between * 4 / 3 / seconds == pytest.approx(documented, rel=0.1)
    one_host = bytes_s(constants, replace(moved, hosts=1), 200e9, 50e9, library.multiprocessors)
    assert seconds - one_host == pytest.approx(4 * constants.host_s)


@pytest.mark.parametrize("library", ["all_to_all", "deepep", "trtllm_one_sided"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 16])
def test_an_all_to_all_in_place_of_an_exchange_leaves_out_what_a_rank_keeps(library: str, ranks: int) -> None:
    work = exchange(library, ranks)
    copies = 8 if library == "all_to_all" else ranks * chance_of_expert(ranks, 256, 8, 1, 1)
    received = (ranks - 1) * as_all_to_all(work).part_bytes
    assert received == pytest.approx(4096 * 14336 * copies * (ranks - 1) / ranks, abs=ranks)
