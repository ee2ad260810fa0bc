"""The core's proof gives the verdict of the reference, and shared ops are those that each rank would have."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from builders import NAMES, golden, listed, with_ops
from hypothesis import given
from hypothesis import strategies as st
from mutations import MUTATIONS

from meshweave.algorithms.matmul2d import Matmul2dConfig, Matmul2dProblem
from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.base.errors import ProgramError
from meshweave.base.limits import Limit
from meshweave.ir.analysis import native_proof, proof
from meshweave.ir.analysis.native_proof import CoreProof
from meshweave.ir.analysis.validate import validate
from meshweave.ir.columns.proof import ProofColumns
from meshweave.ir.columns.template import TemplateColumns
from meshweave.ir.program import On, Program, Repeat
from meshweave.ir.program.declarations import check_header, check_statements
from meshweave.ir.program.ops import Recv
from meshweave.ir.program.parse import parse
from meshweave.ir.program.statements import Statement
from meshweave.lower import lower_chains, lower_rings
from sampling import examples

KNOWN = tuple(name for name in NAMES if not golden(name).includes)
PROGRAMS = {name: golden(name) for name in KNOWN}
LISTED = {name: listed(program) for name, program in PROGRAMS.items()}


def verdicts(program: Program, labels: bool = True) -> tuple[bool, bool]:
    """What the core and the reference say of a program whose declarations make sense."""
    core = CoreProof(program, labels)
    try:
        reference = validate(program, labels=labels, native=False)
    except ProgramError:
        return core.holds, False
    if core.holds:
        assert core.skipped == reference.skipped
    return core.holds, True


def table_program(name: str) -> Program:
    entry = PRODUCTS_2D[name]
    shape = next(shape for count in (4, 8) for shape in entry.mesh_shapes(count))
    return entry.program(Matmul2dProblem(13, 11, 10, shape, "os"), Matmul2dConfig((1, 2), 1, 2))


@pytest.mark.parametrize("name", KNOWN)
def test_golden_programs_are_proved_in_the_core(name: str) -> None:
    assert verdicts(PROGRAMS[name]) == (True, True)


class ColumnsInPython(ProofColumns):
    """Columns whose ops are all described in Python."""

    def _describe_statements(self) -> None:
        TemplateColumns._describe_statements(self)


def with_moves() -> Program:
    """Every plain move and message, in loops and under conditions, for listed ranks and for meshes."""
    return parse("""
program("moves")
tp = mesh((4,), ("x",))
s = scratch((8, 8), "float32", on=tp, slots=2)
g = scratch((8, 32), "float32", on=tp)
l = lane()
with tp:
    for i in range(3):
        copy(s(i % 2), g[:, 8 * i:8 * i + 8], lane=l)
        add(s[0:4, :], s(1)[4:8, :], lane=l, name="sums")
        if tp.x == i:
            zero(g[:, blocked(-1, 2, 4, 1, 20)], lane=l)
        fence(over="tp", lane=l)
        put(at((tp.x + 1) % 4, s(1)), s, lane=l)
        fence(over="tp", lane=l)
        get(s(1), at(2, s), lane=l)
        fence(over="tp", lane=l)
with ranks(0, 2):
    send(s, peer=rank + 1, tag=7, lane=l)
with ranks(1, 3):
    recv(s(1), peer=rank - 1, tag=7, update=True, lane=l)
""")


@pytest.mark.parametrize("name", [*KNOWN, "moves"])
def test_the_core_reads_statements_as_python_does(name: str) -> None:
    program = with_moves() if name == "moves" else PROGRAMS[name]
    read, described = ProofColumns(program).data, ColumnsInPython(program).data
    assert read.keys() == described.keys()
    for column, values in read.items():
        np.testing.assert_array_equal(values, described[column], err_msg=column)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda on, recv: replace(on, where=(1, 9)), "no mesh has rank 9"),
        (lambda on, recv: replace(on, where="tq"), "there is no such mesh"),
        (lambda on, recv: Repeat("peer", 1, (on,)), "'peer' cannot be a loop index"),
        (
            lambda on, recv: replace(on, body=(replace(recv, out=replace(recv.out, buffer="t")),)),
            "buffer 't'",
        ),
        (lambda on, recv: replace(on, body=(replace(recv, lane="k"),)), "unknown lane 'k'"),
    ],
)
def test_what_is_not_declared_is_named_by_the_reference(
    change: Callable[[On, Recv], Statement], message: str
) -> None:
    program = with_moves()
    last = program.body[-1]
    assert isinstance(last, On) and isinstance(last.body[0], Recv)
    validate(program, labels=False)
    with pytest.raises(ProgramError, match=message):
        validate(replace(program, body=(*program.body[:-1], change(last, last.body[0]))), labels=False)


@pytest.mark.parametrize("name", sorted(PRODUCTS_2D))
def test_products_of_the_table_are_proved_in_the_core(name: str) -> None:
    program = table_program(name)
    for one in (program, lower_chains(lower_rings(program, 2))):
        assert verdicts(one) == (True, True)


def mutant(name: str, changes: list[int], seed: int) -> Program | None:
    """A golden program with some mistakes; None where a change does not apply or declarations make no sense."""
    program, draw, ops = PROGRAMS[name], random.Random(seed), list(LISTED[name])
    try:
        for number in changes:
            ops = MUTATIONS[number](program, ops, draw)
        changed = with_ops(program, ops)
        check_header(changed)
        check_statements(changed)
    except (IndexError, ProgramError):
        return None
    return changed


@examples(200)
@given(
    st.sampled_from(KNOWN),
    st.lists(st.integers(0, len(MUTATIONS) - 1), min_size=1, max_size=2),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_the_core_refuses_what_the_reference_refuses(
    name: str, changes: list[int], seed: int, labels: bool
) -> None:
    program = mutant(name, changes, seed)
    if program is not None:
        native, reference = verdicts(program, labels)
        assert reference or not native


def test_an_error_is_told_in_the_words_of_the_reference() -> None:
    program = with_ops(PROGRAMS["tapered_meshslice"], LISTED["tapered_meshslice"][:-1])
    messages = []
    for native in (True, False):
        with pytest.raises(ProgramError) as caught:
            validate(program, native=native)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@examples(150)
@given(st.sampled_from(KNOWN), st.integers(0, 2**32))
def test_damaged_columns_are_refused_or_judged(name: str, seed: int) -> None:
    draw = random.Random(seed)
    columns = native_proof.proof_columns(PROGRAMS[name], labels=True)
    columns["max_ops"] = np.array([5000])
    for _ in range(draw.randint(1, 3)):
        column = columns[draw.choice(sorted(columns))]
        if len(column):
            at = draw.randrange(len(column))
            column[at] = draw.choice([0, 1, -1, 7, column[at] ^ 1, column[at] ^ 2, 2**40, 2**62, -(2**63)])
    if draw.random() < 0.2:
        name = draw.choice(sorted(columns))
        columns[name] = np.ascontiguousarray(columns[name][: draw.randint(0, len(columns[name]))])
    with contextlib.suppress(ValueError):
        assert native_proof.prove(columns) in (0, 1, 2)


def test_a_permute_by_another_number_of_the_same_place_is_left_to_the_reference() -> None:
    """Members agree in the shift as written; shifts of 1 and of 1 - n place the same member first."""
    program = parse(
        """program("shifts")
tp = mesh((3,), ("x",))
x = scratch((2,), "float32", on=tp)
y = scratch((2,), "float32", on=tp)
net = lane()
with tp:
    zero(x, lane=net)
    permute(y, x, over="tp", shift=1 - 3 * tp.x, lane=net)
"""
    )
    assert verdicts(program) == (False, False)


@pytest.mark.parametrize("labels", [True, False])
def test_a_program_over_a_limit_is_proved_but_for_its_labels(
    labels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = table_program("meshslice")
    for limit in ("PROOF_WORK", "PROOF_ELEMENTS"):
        for module in (native_proof, proof):
            monkeypatch.setattr(module, limit, Limit(10, "elements", "a program of this test"))
        fresh = replace(program)
        assert CoreProof(fresh, labels).holds
        assert validate(fresh, labels=labels).skipped == validate(fresh, labels=labels, native=False).skipped


def test_flow_order_and_replicas_are_those_of_the_reference() -> None:
    program = table_program("meshslice")
    native, reference = validate(program), validate(program, native=False)
    assert native.order == reference.order
    assert native.flow == reference.flow
    assert native.replicas == reference.replicas


@pytest.mark.parametrize(
    "program", [*map(golden, NAMES), *map(table_program, sorted(PRODUCTS_2D))], ids=lambda p: p.name
)
def test_shared_ops_are_those_that_each_rank_would_have(program: Program) -> None:
    program = program.expanded
    for rank, ops in program.ops_by_rank.items():
        alone = [program.resolve(op, env, rank) for op, env in program.unbound_ops_on_rank(rank)]
        assert [bound.op for bound in ops] == alone
    forms = program.resolved_ops.form
    for op in program.ops_by_rank[program.ranks[0]]:
        assert forms(op.op) == forms(op.op)


def test_ranks_of_a_template_share_their_ops() -> None:
    entry = PRODUCTS_2D["meshslice"]
    program = entry.program(Matmul2dProblem(16, 16, 16, (4, 4), "os"), Matmul2dConfig((1,) * 4, 1))
    forms = {program.resolved_ops.form(bound.op) for ops in program.ops_by_rank.values() for bound in ops}
    assert len(forms) < sum(map(len, program.ops_by_rank.values())) / 2
