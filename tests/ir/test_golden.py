"""The golden programs: each prints as it was read, is proved, and computes what it says in any order."""

from __future__ import annotations

import numpy as np
import pytest
from builders import (
    NAMES,
    expected,
    golden,
    golden_text,
    numbers_for,
    orders,
    outputs_equal,
    run_numbers,
    universal,
)
from functions import FUNCTIONS

from meshweave.ir.analysis.lifetimes import lifetimes, peak_bytes
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program.parse import parse
from meshweave.ir.program.text import to_text


def test_there_are_these_kinds() -> None:
    assert NAMES == (
        "batched_products",
        "broadcast_reshard",
        "chunked_atp",
        "delayed_weights",
        "grouped_attention",
        "micro_batches",
        "one_f_one_b",
        "packetised_summa",
        "residual_norm",
        "ring_attention",
        "t3_ring",
        "tapered_meshslice",
        "uneven_wang",
        "universal_b",
        "universal_c",
        "vocabulary_loss",
    )


@pytest.mark.parametrize("name", NAMES)
def test_prints_as_it_was_read(name: str) -> None:
    text = golden_text(name)
    assert to_text(parse(text)) == text
    assert parse(to_text(parse(text))) == parse(text)


@pytest.mark.parametrize("name", NAMES)
def test_computes_what_it_declares_in_any_legal_order(name: str) -> None:
    program = golden(name)
    proof = validate(program)
    assert proof.skipped == ()
    values = numbers_for(program)
    wanted = expected(name, program, values)
    for order in (proof.order, *orders(proof.flow, 8)):
        machine = run_numbers(proof.flow, order, values, FUNCTIONS)
        assert outputs_equal(program, machine, wanted)


@pytest.mark.parametrize("stationary", ["b", "c"])
def test_universal_products_are_what_their_builder_makes(stationary: str) -> None:
    assert to_text(universal(stationary)) == golden_text(f"universal_{stationary}")


def test_slices_of_meshslice_taper() -> None:
    """Weights 1, 2, 1 of 19 columns that no two ranks can share evenly."""
    widths = [op.op.a.shape[1] for op in golden("tapered_meshslice").ops_by_rank[0] if op.op.kind == "matmul"]
    assert widths == [5, 10, 4]


def test_ring_of_t3_needs_no_fence_but_the_first() -> None:
    program = golden("t3_ring")
    flow = validate(program).flow
    assert sum(op.kind == "fence" for op in program.ops()) == 1
    put = next(node for node in flow.nodes() if node[0] == 2 and flow.op(node).kind == "put")
    trackers = flow.remote_predecessors[put]
    assert [flow.bound_op(node).op.name for node in trackers] == ["remote_map"]
    assert trackers[0][0] == 1


def test_pipeline_holds_as_many_stashes_as_1f1b_needs() -> None:
    """The first of two stages keeps two microbatches alive, the last one: the point of 1F1B."""
    program = golden("one_f_one_b")
    held = {"x": 8 * 3, "w0": 3 * 5, "dx": 8 * 3, "dw0": 3 * 5, "first g_in": 2 * 5}  # both h_out are sent
    assert peak_bytes(program, 0) == 4 * sum(held.values()) + 2 * 84
    last = 4 * (5 * 2 + 8 * 2 + 8 * 2 + 5 * 2)
    assert last < peak_bytes(program, 1) <= last + 56 + 4 * (2 * 2 * 5 + 2 * 2 * 2 + 2 * 2 * 5)


def test_memory_that_others_reach_lives_throughout() -> None:
    spans = lifetimes(golden("t3_ring"), 0)
    assert spans == {("acc", 0): [(0, len(golden("t3_ring").ops_by_rank[0]) - 1)]}
    assert set(lifetimes(golden("universal_b"), 3)) == {("a_in", 0), ("a_in", 1), ("part", 0), ("part", 1)}


def test_a_slot_that_is_not_read_begins_anew_beside_another_that_is() -> None:
    """Between the lives of the first slot another buffer is there alone."""
    program = parse("""
program("two slots")
one = mesh((1,), ("x",))
b = scratch((4,), "float32", on=one, slots=2)
c = scratch((8,), "float32", on=one)
d = scratch((1,), "float32", on=one)
l = lane()
with one:
    zero(b(0), lane=l)
    copy(d, b(0)[0:1], lane=l)
    zero(c, lane=l)
    copy(d, c[0:1], lane=l)
    zero(b(1), lane=l)
    copy(b(0), b(1), lane=l)
    copy(d, b(0)[0:1], lane=l)
""")
    assert lifetimes(program, 0)["b", 0] == [(0, 1), (5, 6)]
    assert peak_bytes(program, 0) == 4 + 32


def test_overlap_is_left_open() -> None:
    """The first product of the second chunk need not wait for the all-reduce of the first."""
    flow = validate(golden("chunked_atp")).flow
    ops = flow.program.ops_by_rank[0]
    first_reduce = next(i for i, bound in enumerate(ops) if bound.op.kind == "all_reduce")
    second_product = [i for i, bound in enumerate(ops) if bound.op.kind == "matmul"][1]
    assert first_reduce not in flow.predecessors[0][second_product]
    assert np.all([len(flow.predecessors[0][i]) <= 2 for i in range(len(ops))])
