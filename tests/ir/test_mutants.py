"""The strongest test of `validate`: whatever mutant it accepts still computes the right numbers, always."""

from __future__ import annotations

import random

import pytest
from builders import (
    NAMES,
    expected,
    golden,
    listed,
    numbers_for,
    orders,
    outputs_equal,
    run_numbers,
    with_ops,
)
from functions import FUNCTIONS
from hypothesis import given
from hypothesis import strategies as st
from mutations import MUTATIONS

from meshweave.base.errors import ProgramError
from meshweave.ir.analysis.validate import validate
from sampling import examples, mostly_slow

PROVED = NAMES
PROGRAMS = {name: golden(name) for name in PROVED}
LISTED = {name: listed(program) for name, program in PROGRAMS.items()}


def accepted(name: str, changes: list[int], seed: int, seeds: int) -> bool:
    """Whether the mutant is accepted; fails where it is and some legal order gets other numbers."""
    program, draw = PROGRAMS[name], random.Random(seed)
    ops = list(LISTED[name])
    for number in changes:
        ops = MUTATIONS[number](program, ops, draw)
    mutant = with_ops(program, ops)
    try:
        proof = validate(mutant)
    except ProgramError:
        return False
    values = numbers_for(program, seed)
    wanted = expected(name, program, values)
    for order in orders(proof.flow, seeds):
        assert outputs_equal(mutant, run_numbers(proof.flow, order, values, FUNCTIONS), wanted)
    return True


@examples(200)
@given(
    st.sampled_from(PROVED),
    st.lists(st.integers(0, len(MUTATIONS) - 1), min_size=1, max_size=2),
    st.integers(0, 2**32),
)
def test_an_accepted_mutant_is_harmless(name: str, changes: list[int], seed: int) -> None:
    accepted(name, changes, seed, seeds=10)


@pytest.mark.parametrize("name", mostly_slow(PROVED, 8))
def test_most_mutants_are_refused(name: str) -> None:
    """The property above would hold of a validate that accepts only the original, or nothing at all."""
    verdicts = [accepted(name, [seed % len(MUTATIONS)], seed, seeds=1) for seed in range(26)]
    assert accepted(name, [], 0, seeds=1)
    assert 0 < sum(verdicts) < 18
