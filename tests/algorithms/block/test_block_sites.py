"""Programs of single sites are proved like those of layers, and move what these move there."""

from __future__ import annotations

import itertools

import pytest

import meshweave as mw
from meshweave.algorithms.block import ENTRIES, BlockAlgorithm, BlockConfig, BlockProblem
from meshweave.algorithms.block.parts import BlockParts
from meshweave.algorithms.block.roles import IDLE, Side
from meshweave.algorithms.block.sites import (
    MoveSite,
    ProductSite,
    move_program,
    product_parts,
    ring_parts,
    site_problem,
)
from meshweave.ir.work import traffic

PLACES = tuple(itertools.product((True, False), repeat=2))


def _mesh(entry: BlockAlgorithm) -> tuple[int, ...]:
    if len(entry.roles) == 3:
        return 2, 2, 2
    return (3, 1) if entry.roles[1] is IDLE else (2, 3)


def _parts(entry: BlockAlgorithm, is_first: bool, is_attention: bool) -> BlockParts:
    problem = site_problem(3, 4, 10, _mesh(entry), "float32")
    site = ProductSite(is_first, is_attention, 10, 4, 3)
    return product_parts(site, problem, BlockConfig(), entry.roles_of(problem), problem.mesh)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_products_are_proved(entry: BlockAlgorithm) -> None:
    is_first, is_attention = PLACES[ENTRIES.index(entry) % 4]
    parts = _parts(entry, is_first, is_attention)
    mw.validate(parts.forward)
    mw.validate(parts.backward)
    assert not parts.sums  # gradients are complete


@pytest.mark.slow
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_products_at_all_places_are_proved(entry: BlockAlgorithm) -> None:
    for place in PLACES:
        parts = _parts(entry, *place)
        mw.validate(parts.forward)
        mw.validate(parts.backward)


def test_megatron_moves_a_sum_after_the_second_product() -> None:
    entry = next(each for each in ENTRIES if each.name == "megatron")
    first, second = _parts(entry, True, False), _parts(entry, False, False)
    residual = 3 * 4 * 10 * 4
    assert traffic(first.forward, 0) == traffic(second.backward, 0) == {}
    assert traffic(second.forward, 0) == traffic(first.backward, 0) == {"tp.row": 2 * 2 * residual // 3}


def test_attention_in_a_ring_is_proved() -> None:
    entry = next(each for each in ENTRIES if each.name == "ring_attention")
    problem = BlockProblem(2, 6, 1, 4, 2, 2, 1, (3, 1))
    parts = ring_parts(problem, BlockConfig(), entry.roles_of(problem), problem.mesh)
    mw.validate(parts.forward)
    mw.validate(parts.backward)
    assert parts.kept == ("a0", "l0")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("partial", "hidden"), ("", "hidden")),
        (("partial", ""), ("sequence", "hidden")),
        (("batch", "hidden"), ("", "")),
        (("", "sequence"), ("batch", "hidden")),
    ],
)
def test_moves_are_proved(before: tuple[str, str], after: tuple[str, str]) -> None:
    sides = Side("batch", 3), Side("sequence", 4), Side("hidden", 5)
    mesh = site_problem(3, 4, 5, (2, 3), "float32").mesh
    mw.validate(move_program(MoveSite(sides, before, after), mesh, "float32"))  # type: ignore[arg-type]
