"""Counts that are known at run time: one row a cell stands for any number of rows, and ops name equal cells."""

import numpy as np
import pytest

from meshweave.base.errors import ProgramError
from meshweave.cost.machine import Machine
from meshweave.describe.machine.cluster import load_cluster
from meshweave.execute.numpy import run_numpy
from meshweave.ir.analysis.cells import check_cells, sampled_counts
from meshweave.ir.analysis.dataflow import analyse
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program import Range, parse, to_text
from meshweave.simulate.engine import simulate

EXCHANGE = """program("exchange of cells")
q = mesh((2,), ("x",))
n = counts((4, 2), 5, (0, 12))
P = tensor((4, 2, 3), "int64", counts=n)
Q = tensor((4, 2, 3), "int64", counts=n)
computes(Q, same(P))
p = input(P, q[S(1)])
q0 = output(Q, q[S(0)])
other = temp(P, q[S(0)], order=(1, 0, 2))
compute = lane()
go = lane()
with q:
    for e in range(2):
        copy(q0[e:e + 1, q.x:q.x + 1, :], p[2 * q.x + e:2 * q.x + e + 1, :, :], lane=compute)
        permute(q0[e:e + 1, 1 - q.x:1 - q.x + 1, :], p[2 * (1 - q.x) + e:2 * (1 - q.x) + e + 1, :, :], over="q.x", lane=go)
"""  # noqa: E501
VALUES = np.array([[1, 2], [0, 3], [5, 0], [4, 1]])


def exchange(old: str = "", new: str = "") -> str:
    assert old in EXCHANGE
    return EXCHANGE.replace(old, new) if old else EXCHANGE


def test_the_text_form_round_trips_and_is_proved():
    program = parse(EXCHANGE)
    assert to_text(program) == EXCHANGE
    assert validate(program).skipped == ()
    plain = program.with_counts({"n": VALUES})
    assert parse(to_text(plain)) == plain and not plain.counts


def test_a_plain_program_has_the_rows_of_each_rank_padded_at_its_ends():
    plain = parse(EXCHANGE).with_counts({"n": VALUES})
    assert plain.tensor_of["P"].shape == (1, 20, 3)
    assert plain.tensor_of["Q"].shape == (1, 20, 3)
    assert [plain.local_shape("other", rank) for rank in (0, 1)] == [(1, 6, 3), (1, 10, 3)]
    first = plain.ops_on_rank(0)[1].op.src.selectors
    assert first[1] == Range(1, 6)  # of experts 0 (1 row), 1 (none) and 2 (5)


def test_rows_arrive_by_expert_and_source_whatever_the_counts():
    program = parse(EXCHANGE)
    for seed in range(6):
        counts = sampled_counts(program, seed)["n"]
        plain = program.with_counts({"n": counts})
        most = max(counts.sum(axis=0))
        whole = np.full((1, 2 * most, 3), -1)
        labels = {
            (e, s): [100 * e + 10 * s + i for i in range(counts[e, s])] for e in range(4) for s in (0, 1)
        }
        for s in (0, 1):
            rows = [row for e in range(4) for row in labels[e, s]]
            whole[0, s * most : s * most + len(rows)] = np.array(rows).reshape(-1, 1)
        out = run_numpy(plain, {"P": whole}).outputs["Q"][0]
        held = out.shape[0] // 2
        for rank in (0, 1):
            rows = [row for e in (2 * rank, 2 * rank + 1) for s in (0, 1) for row in labels[e, s]]
            assert out[rank * held : rank * held + len(rows), 0].tolist() == rows


def simulated(program):
    return simulate(program, Machine.of(load_cluster("tpu-v4-pod:4"), program, logical=True))


@pytest.mark.parametrize("read", [lambda p: p.ops_on_rank(0), lambda p: run_numpy(p, {}), simulated])
def test_nothing_runs_before_counts_have_values(read):
    with pytest.raises(ProgramError, match="has counts n, known at run time"):
        read(parse(EXCHANGE))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        # Another expert's slot: at one row a cell the shapes fit, and the labels tell.
        ("q0[e:e + 1, 1 - q.x", "q0[1 - e:2 - e, 1 - q.x", "holds another element|other cells"),
        # All cells of a source at once: in the sender's memory by expert, in the receiver's not a run.
        (
            "q0[e:e + 1, 1 - q.x:1 - q.x + 1, :], p[2 * (1 - q.x) + e:2 * (1 - q.x) + e + 1, :, :]",
            "q0[:, 1 - q.x:1 - q.x + 1, :], p[2 * (1 - q.x):2 * (1 - q.x) + 2, :, :]",
            "no run in memory",
        ),
        (
            "copy(q0[e:e + 1, q.x:q.x + 1, :]",
            "copy(q0[e:e + 1, 1 - q.x:2 - q.x, :]",
            "holds another|never written|other cells",
        ),
        ("counts((4, 2), 5, (0, 12))", "counts((4, 3), 5)", "does not begin with counts"),
        ("counts((4, 2), 5, (0, 12))", "counts((4, 2), 5, (0, 12, 1))", "2 dims, not totals"),
        ("order=(1, 0, 2)", "order=(2, 1, 0)", "dims come first in its order"),
        ("q0 = output(Q, q[S(0)])", "q0 = output(Q, q[R])", "every axis of its mesh cuts"),
        ('"int64", counts=n)\nQ', '"int64", counts=m)\nQ', "'m' is no table of counts"),
    ],
)
def test_faults_are_refused(old, new, message):
    with pytest.raises(ProgramError, match=message):
        validate(parse(exchange(old, new)))


def test_cells_in_another_order_are_refused_though_their_rows_are_as_many():
    """Both ends hold the same cells, one by expert and one by source."""
    mixed = exchange(
        "    for e in range(2):\n",
        "    copy(other, q0, lane=compute)\n    for e in range(2):\n",
    )
    with pytest.raises(ProgramError, match="has other cells in other"):
        program = parse(mixed)
        check_cells(program, analyse(program.one_row_a_cell))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "needs values of counts 'n'"),
        ({"n": VALUES, "k": VALUES}, "has no counts 'k'"),
        ({"n": VALUES[:3]}, r"integers of shape \(4, 2\)"),
        ({"n": VALUES * 1.0}, "integers of shape"),
        ({"n": VALUES - 1}, "are 0 to 5, not -1"),
        ({"n": VALUES + 1}, "are 0 to 5, not 1 to 6"),
        ({"n": np.full((4, 2), 4)}, "16 rows at one position of dim 1, at most 12"),
    ],
)
def test_values_beyond_what_is_declared_are_refused(values, message):
    with pytest.raises(ProgramError, match=message):
        parse(EXCHANGE).with_counts(values)


def test_sampled_counts_keep_to_what_is_declared():
    program = parse(EXCHANGE)
    sampled = [sampled_counts(program, seed)["n"] for seed in range(5)]
    assert not sampled[0].any() and (sampled[1].sum(axis=0) == 12).all()
    for values in sampled:
        program.with_counts({"n": values})


def test_collectives_that_have_no_form_for_cells_are_refused():
    gathered = exchange("copy(q0[e:e + 1, q.x:q.x + 1, :], p[2 * q.x + e:2 * q.x + e + 1, :, :], lane=compute)",
        'all_gather(other, q0[:, q.x:q.x + 1, :], over="q.x", dim=1, lane=compute)')  # fmt: skip
    with pytest.raises(ProgramError, match="all_gather has no form for cells"):
        parse(gathered).with_counts({"n": VALUES})
