"""The strongest test of `validate`: whatever mutant it accepts still computes the right numbers, always."""

from __future__ import annotations

import random
from typing import Any

import pytest
from builders import NAMES, dense, golden, listed, numbers_for, orders, outputs_equal, run_numbers, with_ops
from hypothesis import given
from hypothesis import strategies as st
from mutations import MUTATIONS

from meshweave.base.errors import ProgramError
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program import Program
from sampling import examples

# What a call makes is taken on trust, so a pipeline of calls proves nothing about its numbers.
PROVED = tuple(name for name in NAMES if name != "one_f_one_b")
PROGRAMS = {name: golden(name) for name in PROVED}
LISTED = {name: listed(program) for name, program in PROGRAMS.items()}
FUNCTIONS = {"square": lambda stash, y: [y**2]}


def wanted(program: Program, values: dict[str, Any]) -> dict[str, Any]:
    if "H" in values:  # the one tensor that a call makes, in the ATP block
        values = {**values, "H": (values["X"] @ values["W1"]) ** 2}
    return dense(program, values)


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
    expected = wanted(program, values)
    for order in orders(proof.flow, seeds):
        assert outputs_equal(mutant, run_numbers(proof.flow, order, values, FUNCTIONS), expected)
    return True


@examples(200)
@given(
    st.sampled_from(PROVED),
    st.lists(st.integers(0, len(MUTATIONS) - 1), min_size=1, max_size=2),
    st.integers(0, 2**32),
)
def test_an_accepted_mutant_is_harmless(name: str, changes: list[int], seed: int) -> None:
    accepted(name, changes, seed, seeds=10)


@pytest.mark.parametrize("name", PROVED)
def test_most_mutants_are_refused(name: str) -> None:
    """The property above would hold of a validate that accepts only the original, or nothing at all."""
    verdicts = [accepted(name, [seed % len(MUTATIONS)], seed, seeds=1) for seed in range(26)]
    assert accepted(name, [], 0, seeds=1)
    assert 0 < sum(verdicts) < 18
