"""The core's proof gives the verdict of the reference, and shared ops are those that each rank would have."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest
from builders import NAMES, golden, listed, with_ops
from hypothesis import given
from hypothesis import strategies as st
from mutations import MUTATIONS

from meshweave.algorithms.matmul2d import ALGORITHMS, Matmul2dConfig, Matmul2dProblem
from meshweave.base.errors import ProgramError
from meshweave.ir.analysis import native_labels
from meshweave.ir.analysis.dataflow import analyse, untimed_order
from meshweave.ir.analysis.proof import prove_outputs
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program import Program
from meshweave.ir.program.resolve import resolve_op
from meshweave.lower import lower_chains, lower_rings
from sampling import examples

KNOWN = tuple(name for name in NAMES if native_labels._is_known(golden(name)) and name != "batched_products")
PROGRAMS = {name: golden(name) for name in KNOWN}
LISTED = {name: listed(program) for name, program in PROGRAMS.items()}


def verdicts(program: Program) -> tuple[bool, bool]:
    """What the core and the reference say of the values of a program that is sound in all else."""
    flow = validate(program, labels=False).flow
    order = untimed_order(flow)
    try:
        prove_outputs(flow, order)
    except ProgramError:
        return native_labels.labels_hold(flow, order), False
    return native_labels.labels_hold(flow, order), True


def table_program(name: str) -> Program:
    entry = ALGORITHMS[name]
    shape = next(shape for count in (4, 8) for shape in entry.mesh_shapes(count))
    return entry.program(Matmul2dProblem(13, 11, 10, shape, "os"), Matmul2dConfig((1, 2), 1, 2))


def test_the_core_knows_these_programs() -> None:
    assert set(KNOWN) >= {"broadcast_reshard", "packetised_summa", "t3_ring", "tapered_meshslice"}
    assert set(KNOWN) >= {"uneven_wang", "universal_b", "universal_c"}


@pytest.mark.parametrize("name", KNOWN)
def test_golden_programs_are_proved_in_the_core(name: str) -> None:
    assert verdicts(PROGRAMS[name]) == (True, True)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_products_of_the_table_are_proved_in_the_core(name: str) -> None:
    program = table_program(name)
    for one in (program, lower_chains(lower_rings(program, 2))):
        assert verdicts(one) == (True, True)


@examples(150)
@given(
    st.sampled_from(KNOWN),
    st.lists(st.integers(0, len(MUTATIONS) - 1), min_size=1, max_size=2),
    st.integers(0, 2**32),
)
def test_the_core_refuses_what_the_reference_refuses(name: str, changes: list[int], seed: int) -> None:
    program, draw, ops = PROGRAMS[name], random.Random(seed), list(LISTED[name])
    for number in changes:
        ops = MUTATIONS[number](program, ops, draw)
    mutant = with_ops(program, ops)
    try:
        native, reference = verdicts(mutant)
    except ProgramError:
        return
    assert native == reference


def test_an_error_is_told_in_the_words_of_the_reference() -> None:
    program = with_ops(PROGRAMS["tapered_meshslice"], LISTED["tapered_meshslice"][:-1])
    messages = []
    for native in (True, False):
        with pytest.raises(ProgramError) as caught:
            validate(program, native=native)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@examples(200)
@given(st.sampled_from(KNOWN), st.integers(0, 2**32))
def test_damaged_columns_are_refused_or_judged(name: str, seed: int) -> None:
    draw = random.Random(seed)
    flow = analyse(PROGRAMS[name])
    columns = native_labels._columns(flow, untimed_order(flow))
    for _ in range(draw.randint(1, 3)):
        column = columns[draw.choice(sorted(columns))]
        if len(column):
            at = draw.randrange(len(column))
            column[at] = draw.choice([0, 1, -1, 7, column[at] ^ 1, column[at] ^ 2, 2**40, 2**62, -(2**63)])
    if draw.random() < 0.2:
        name = draw.choice(sorted(columns))
        columns[name] = np.ascontiguousarray(columns[name][: draw.randint(0, len(columns[name]))])
    with contextlib.suppress(ValueError, native_labels._core.ProgramFault):
        assert native_labels._core.labels_hold(columns) in (True, False)


@pytest.mark.parametrize(
    "program", [*map(golden, NAMES), *map(table_program, sorted(ALGORITHMS))], ids=lambda p: p.name
)
def test_shared_ops_are_those_that_each_rank_would_have(program: Program) -> None:
    program = program.expanded
    for rank, ops in program.ops_by_rank.items():
        alone = [resolve_op(program, op, env, rank) for op, env in program.unbound_ops_on_rank(rank)]
        assert [bound.op for bound in ops] == alone
    forms = program.resolved_ops.form
    for op in program.ops_by_rank[program.ranks[0]]:
        assert forms(op.op) == forms(op.op)


def test_ranks_of_a_template_share_their_ops() -> None:
    entry = ALGORITHMS["meshslice"]
    program = entry.program(Matmul2dProblem(16, 16, 16, (4, 4), "os"), Matmul2dConfig((1,) * 4, 1))
    forms = {program.resolved_ops.form(bound.op) for ops in program.ops_by_rank.values() for bound in ops}
    assert len(forms) < sum(map(len, program.ops_by_rank.values())) / 2
