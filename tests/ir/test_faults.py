"""Seeded faults of ordering: `validate` finds each one and names op, rank and buffer."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from builders import golden, listed, with_ops
from seeding import WINDOW, changed, dropped, fault, swapped, text_fault

from meshweave.base.errors import ProgramError
from meshweave.ir.analysis.matching import match
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program.ops import Exchange, Fence
from meshweave.ir.program.parse import parse

# --- partners -------------------------------------------------------------------------------------------


def test_dropped_recv() -> None:
    error = fault(dropped("broadcast_reshard", "recv", 3, 0))
    assert error.rank == 2 and error.op is not None and error.op.startswith("send")
    assert "rank 3 has no matching recv in lane chain0 with tag 0" in error.message


def test_dropped_send() -> None:
    error = fault(dropped("one_f_one_b", "send", 1, 3))
    assert error.rank == 0 and error.op is not None and error.op.startswith("recv")
    assert "rank 1 has no matching send in lane gradients with tag 3" in error.message


def test_dropped_collective_on_one_rank() -> None:
    error = fault(dropped("tapered_meshslice", "all_gather", 1, 0))
    assert "gather_a" in str(error) or "never joins" in error.message


DISPATCHES = """
program("exchange")
ep = mesh((2,), ("x",))
copies = scratch((8,), "bfloat16", on=ep)
net = lane()
"""
DISPATCH = """
with ranks({}):
    exchange(over="ep", outs=(copies,), ins=(copies,), {}, lane=net)
"""


@pytest.mark.parametrize(
    "field", [each.name for each in fields(Exchange) if each.type in ("int", "float", "str")][2:]
)
def test_members_say_all_sizes_of_an_exchange_alike(field: str) -> None:
    said: dict[str, object] = {
        "carries": "dispatch",
        "num_ranks": 2,
        "part_bytes": 16,
        "library": "all_to_all",
    }
    other = said | {field: "combine" if isinstance(said.get(field), str) else 3}
    texts = [", ".join(f"{name}={value!r}" for name, value in each.items()) for each in (said, other)]
    match(parse(DISPATCHES + DISPATCH.format(0, texts[0]) + DISPATCH.format(1, texts[0])))
    with pytest.raises(ProgramError, match="collectives in another order than on rank 0"):
        match(parse(DISPATCHES + DISPATCH.format(0, texts[0]) + DISPATCH.format(1, texts[1])))


def test_swapped_collectives_on_one_rank() -> None:
    error = fault(swapped("tapered_meshslice", 3, ("all_gather", 0), ("all_gather", 2)))
    assert error.rank == 3 and error.op is not None and error.op.startswith("gather_a")
    assert "collectives in another order than on rank 2" in error.message


def test_swapped_broadcasts_on_one_rank() -> None:
    error = fault(swapped("packetised_summa", 1, ("broadcast", 0), ("broadcast", 6)))
    assert error.rank == 1 and "another order than on rank 0" in error.message


def test_collective_over_a_group_without_the_rank() -> None:
    error = fault(changed("chunked_atp", "all_reduce", 1, 0, lambda op: replace(op, over=(2, 3))))
    assert error.rank == 1 and "without being one" in error.message


def test_group_that_repeats_a_rank() -> None:
    error = fault(changed("t3_ring", "fence", 0, 0, lambda op: replace(op, over=(0, 0, 1))))
    assert error.rank == 0 and "repeat" in error.message


def test_message_of_another_shape() -> None:
    error = text_fault("broadcast_reshard", "recv(y[:4, ", "recv(y[1:4, ")
    assert (error.rank, error.buffer) == (0, "x")
    assert "sends shape (4, 3)" in error.message and "takes (3, 3)" in error.message


# --- deadlock -------------------------------------------------------------------------------------------

EXCHANGE = """
program("exchange")
tp = mesh((2,), ("x",))
X = tensor((4, 2), "float32")
Y = tensor((4, 2), "float32")
x = input(X, tp[S(0)])
y = output(Y, tp[S(0)])
net = lane()
back = lane()
with tp:
    send(x, peer=1 - tp.x, lane=net)
    recv(y, peer=1 - tp.x, lane=net)
"""


def test_both_send_before_they_receive() -> None:
    error = fault(parse(EXCHANGE))
    assert error.rank == 0 and error.buffer == "x" and error.op == "send 0.0"
    assert error.message.startswith("deadlock: ")
    for part in ("send 0.0 of rank 0", "recv 0.1 of rank 1", "send 0.0 of rank 1", "recv 0.1 of rank 0"):
        assert part in error.message


def test_a_wider_lane_frees_them() -> None:
    validate(parse(EXCHANGE.replace("net = lane()", "net = lane(width=2)")))


READY = """
program("who comes first")
tp = mesh((2,), ("x",))
u = scratch((2, 2), "float32", on=tp)
v = scratch((2, 2), "float32", on=tp)
early = lane()
late = lane()
net = lane(order="ready")
with tp:
    zero(u, lane=early)
    zero(v, lane=late)
    if tp.x == 0:
        send(u, peer=1, lane=net)
        recv(v, peer=1, lane=net)
    if tp.x == 1:
        recv(u, peer=0, lane=net)
        send(v, peer=0, lane=net)
"""


def test_deadlock_of_ready_lanes_that_depends_on_timing() -> None:
    """It all ends well if each rank's u is ready before its v."""
    error = fault(parse(READY))
    assert error.message.startswith("deadlock: ") and error.rank is not None and error.buffer in "uv"
    proof = validate(parse(READY.replace('order="ready"', 'order="ready", width=2')))
    assert proof.skipped == ("deadlocks of ready-first lanes net: 20 orders tried",)
    assert validate(parse(READY.replace('order="ready"', "width=2"))).skipped == ()


def test_collectives_of_groups_that_wait_in_a_circle() -> None:
    """Every group's members agree, and still each rank waits for the next around the square."""
    text = """
program("square")
tp = mesh((2, 2), ("row", "col"))
u = scratch((2, 2), "float32", on=tp)
v = scratch((2, 2), "float32", on=tp)
compute = lane()
net = lane()
with tp:
    zero(u, lane=compute)
    zero(v, lane=compute)
    if tp.row == tp.col:
        all_reduce(u, u, over="tp.col", lane=net)
        all_reduce(v, v, over="tp.row", lane=net)
    if tp.row != tp.col:
        all_reduce(v, v, over="tp.row", lane=net)
        all_reduce(u, u, over="tp.col", lane=net)
"""
    error = fault(parse(text))
    assert (
        error.message.startswith("deadlock: all_reduce") and error.rank is not None and error.buffer in "uv"
    )
    assert all(f"of rank {rank}" in error.message for rank in range(4))
    validate(parse(text.replace("net = lane()", "net = lane(width=2)")))


# --- races ----------------------------------------------------------------------------------------------


def test_window_is_good() -> None:
    validate(parse(WINDOW))


def test_put_without_a_fence_before_a_local_read() -> None:
    error = fault(parse(WINDOW.replace('    fence(over="tp", lane=net)\n', "", 1)))
    assert error.message.startswith("race: ") and error.buffer == "inbox"
    assert error.rank == 0 and error.op == "put 0.0"
    assert "write by rank 2 and read by put 0.1 of rank 0" in error.message


def test_two_puts_to_one_place() -> None:
    error = fault(parse(WINDOW.replace("at((tp.x + 1) % 3, inbox)", "at(tp.x // 2, inbox)")))
    assert error.message.startswith("race: write by rank") and error.buffer == "inbox" and error.rank == 0


def test_put_into_own_memory_is_one_sided_too() -> None:
    text = WINDOW.replace("(tp.x + 1) % 3", "tp.x").replace("(tp.x + 2) % 3", "tp.x")
    validate(parse(text))
    error = fault(parse(text.replace('    fence(over="tp", lane=net)\n', "", 1)))
    assert error.message.startswith("race: ") and error.buffer == "inbox"


def test_collective_does_not_order_what_it_reads_itself() -> None:
    """Rank 0's all-reduce may read its src before rank 1, whose put comes first there, has joined."""
    text = """
program("early read")
tp = mesh((2,), ("x",))
acc = scratch((2, 2), "float32", on=tp)
total = scratch((2, 2), "float32", on=tp)
net = lane()
with tp:
    zero(acc, lane=net)
    fence(over="tp", lane=net)
    if tp.x == 1:
        put(at(0, acc), acc, lane=net)
        fence(over=(1,), lane=net)
    all_reduce(total, acc, over="tp", lane=net)
"""
    error = fault(parse(text))
    assert error.message.startswith("race: ") and (error.rank, error.buffer) == (0, "acc")
    validate(
        parse(
            text.replace(
                "fence(over=(1,), lane=net)\n",
                'fence(over=(1,), lane=net)\n    all_reduce(total, total, over="tp", lane=net)\n',
            ).replace("zero(acc, lane=net)", "zero(acc, lane=net)\n    zero(total, lane=net)")
        )
    )


def test_dropped_fence_of_an_accumulating_product() -> None:
    program = golden("universal_b")
    ops = [(rank, op) for rank, op in listed(program)]
    first = [at for at, (_, op) in enumerate(ops) if isinstance(op, Fence)][:4]
    error = fault(with_ops(program, [pair for at, pair in enumerate(ops) if at not in first]))
    assert error.message.startswith("race: update by rank") and error.buffer == "c"


def test_store_where_others_add() -> None:
    put = changed("t3_ring", "put", 1, 0, lambda op: replace(op, release=None))
    error = fault(put)
    assert error.message.startswith("race: ") and (error.rank, error.buffer) == (2, "acc")
