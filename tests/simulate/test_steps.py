"""Contention by hand calculation: collectives step by step, products that stream, memory that is shared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshweave import estimate
from meshweave.cost.machine import Machine
from meshweave.describe.machine.chip import Chip
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.links import CommConstants, NetworkAxis
from meshweave.describe.machine.network import TorusNetwork
from meshweave.ir.program import Program
from meshweave.ir.program.parse import parse
from meshweave.lower import lower_rings
from meshweave.simulate import engine
from plain_simulator.reference import simulate
from plain_simulator.steps import Message, PacketChain, ShiftExchange

CHIP = Chip("test", (("float32", 1e12),), 1e12, 1 << 30, 1e12)
LAUNCH, SYNC = 5e-4, 1e-4
EXACT = {"rel": 0, "abs": 5e-12}


def ring(chips: int = 4, ways: int = 1, chip: Chip = CHIP, free: bool = False) -> Cluster:
    """Links of 1 GB/s; with `free`, without launch and synchronisation."""
    launch_s, sync_s = (0.0, 0.0) if free else (LAUNCH, SYNC)
    constants = tuple(
        (kind, CommConstants(ways * 1e9, sync_s, launch_s)) for kind in ("all_gather", "send_recv")
    )
    axis = NetworkAxis("x", 1e9, sync_s, ways, constants, launch_s)  # type: ignore[arg-type]
    return Cluster("test", chip, TorusNetwork((axis,), None, chips, True, 1), "a test")


def program(body: str, chips: int = 4, slots: int = 4) -> Program:
    """Shards `s` of 1 MB and matrices `g` of 1 MB per member."""
    return parse(
        f"""
program("test")
tp = mesh(({chips},), ("x",))
s = scratch((1000, 250), "float32", on=tp, slots={slots})
g = scratch((1000, {250 * chips}), "float32", on=tp, slots={slots})
q = scratch((1000, 1000), "float32", on=tp, slots=3)
x = lane()
y = lane()
z = lane(order="ready")
with tp:
"""
        + "".join(f"    {line}\n" for line in body.strip().splitlines())
    )


def ends(cluster: Cluster, made: Program, index: int = -1) -> list[float]:
    """Milliseconds at which one op of each rank ends, the last one by default."""
    trace = simulate(made, Machine.of(cluster, made))
    return [trace.span_of[rank, index % len(made.ops_on_rank(rank))].end_ps / 1e9 for rank in made.ranks]


def seconds(cluster: Cluster, body: str) -> float:
    made = program(body, cluster.num_chips)
    return simulate(made, Machine.of(cluster, made)).duration_s


# --- rings ----------------------------------------------------------------------------------------------

GATHER = 'all_gather(g, s, over="tp.x", dim=1, lane=x)'
SCATTER = 'reduce_scatter(s, g, over="tp.x", dim=1, lane=x)'


@pytest.mark.parametrize("ways", [1, 2])
@pytest.mark.parametrize("chips", [2, 3, 4, 5])
@pytest.mark.parametrize("body", [GATHER, SCATTER])
def test_a_ring_takes_launch_and_steps(body: str, chips: int, ways: int) -> None:
    """t_launch + (P - 1) (t_sync + shard / bw); two ways have half of it each, on two members as well."""
    expected = LAUNCH + (chips - 1) * (SYNC + 1e-3 / ways)
    assert seconds(ring(chips, ways), body) == pytest.approx(expected, **EXACT)


@pytest.mark.parametrize("ways", [1, 2])
def test_an_all_reduce_is_both(ways: int) -> None:
    expected = LAUNCH + 2 * 3 * (SYNC + 0.25e-3 / ways)
    assert seconds(ring(4, ways), 'all_reduce(s, s(1), over="tp.x", lane=x)') == pytest.approx(
        expected, **EXACT
    )


def test_groups_of_one_and_fences() -> None:
    assert seconds(ring(1), GATHER) == pytest.approx(LAUNCH, **EXACT)
    assert seconds(ring(1), 'broadcast(s, s, over="tp.x", root=0, lane=x)') == pytest.approx(LAUNCH, **EXACT)
    assert seconds(ring(4), 'fence(over="tp.x", lane=x)') == pytest.approx(LAUNCH + 3 * SYNC, **EXACT)


def test_uneven_parts_wait_for_neighbours_only() -> None:
    """Parts take 0.4, 0.8, 1.2 and 1.6 ms a hop. Step t of member i begins once i - 1, i and i + 1 are through
    with step t - 1: ends 0.4 0.8 1.2 1.6, then 3.2 1.6 2.4 2.8, then 4.4 4.8 3.2 4.0 by sender."""
    made = program(
        'all_gather(g, g(1)[:, :100 * (tp.x + 1)], over="tp.x", dim=1, sizes=100 * (peer + 1), lane=x)'
    )
    assert ends(ring(free=True), made) == pytest.approx([4.4, 4.8, 4.8, 4.0], **EXACT)


def test_who_is_late_delays_its_neighbours_step_by_step() -> None:
    """Seven of eight have come: all their messages but those to and from the eighth, then one less at each end."""

    def message(step: int, sender: int, receiver: int) -> Message:
        return Message(sender, receiver, 1, 1, step)

    steps = ShiftExchange(8, 7, lambda step: 1, message)
    may_begin = [message for member in range(7) for message in steps.join(member)]
    waves = []
    while may_begin:
        waves.append(sorted(message.sender for message in may_begin))
        may_begin = [
            later
            for over in may_begin
            for end in (over.sender, over.receiver)
            for later in steps.end_message(over, end)
        ]
    assert waves == [[0, 1, 2, 3, 4, 5], [1, 2, 3, 4], [2, 3]]
    assert sorted(message.sender for message in steps.join(7)) == [6, 7]


@pytest.mark.parametrize("ways", [1, 2])
@pytest.mark.parametrize("chips", [3, 4, 5, 6, 8])
@pytest.mark.parametrize("late", [False, True])
def test_a_collective_is_its_ring_step_by_step(chips: int, ways: int, late: bool) -> None:
    """To the picosecond, but for the copy of the own part."""
    wait = "if rank == 1:\n    matmul(q, q(1), q(2), lane=x)\n" if late else ""
    whole = program(wait + GATHER, chips)
    lowered = lower_rings(whole, ways)  # type: ignore[arg-type]
    cluster = ring(chips, ways, replace(CHIP, memory_bytes_per_s=1e15))
    machine = Machine.of(cluster, whole)
    spans = [simulate(made, machine).spans for made in (whole, lowered)]
    for rank in whole.ranks:
        one, two = (max(span.end_ps for span in listed if span.rank == rank) for listed in spans)
        assert two - one == 2 * 10**6 * 10**12 // 10**15


# --- chains and all-to-all ------------------------------------------------------------------------------


@pytest.mark.parametrize("packets", [1, 4, 10])
@pytest.mark.parametrize("kind", ["broadcast", "reduce"])
def test_a_chain_takes_launch_and_pipelined_steps(kind: str, packets: int) -> None:
    """t_launch + (P + D - 2) (t_sync + part / D / bw)."""
    body = f'{kind}(s, s(1), over="tp.x", root=2, packets={packets}, lane=x)'
    expected = LAUNCH + (4 + packets - 2) * (SYNC + 1e-3 / packets)
    assert seconds(ring(), body) == pytest.approx(expected, **EXACT)


def test_members_of_a_chain_end_when_their_packets_have_left() -> None:
    """Packets of 0.25 ms: the root sends for 1 ms, the next one until 0.25 ms later, the last two end at once."""
    made = program('broadcast(s, s(1), over="tp.x", root=3, packets=4, lane=x)')
    assert ends(ring(free=True), made) == pytest.approx([1.25, 1.5, 1.5, 1.0], **EXACT)
    made = program('reduce(s, s(1), over="tp.x", root=0, packets=4, lane=x)')
    assert ends(ring(free=True), made) == pytest.approx([1.5, 1.0, 1.25, 1.5], **EXACT)


def test_chains_from_opposite_roots_overlap_and_share_two_links() -> None:
    """From 0.5 ms on links 0-1 and 2-3 carry packets of both, up to 1.5 ms; two packets are left by then. One
    after the other they would take 3 ms."""
    body = 'broadcast(s, s(1), over="tp.x", root=0, packets=4, lane=x)\n'
    body += 'broadcast(s(2), s(3), over="tp.x", root=2, packets=4, lane=y)'
    assert seconds(ring(free=True), body) == pytest.approx(2e-3, **EXACT)


def test_a_chain_follows_another_in_its_lane() -> None:
    """The root goes on at 1 ms, the next member at 1.25 ms, when the first packet can go."""
    body = 'broadcast(s, s(1), over="tp.x", root=0, packets=4, lane=x)\n' * 2
    assert seconds(ring(free=True), body) == pytest.approx(1.25e-3 + 1.5e-3, **EXACT)


def test_a_chain_waits_for_both_ends_of_a_hop() -> None:
    chain = PacketChain(
        (2, 0, 1), 2, lambda hop, packet, sender, receiver: Message(sender, receiver, 1, 1, packet, hop=hop)
    )
    assert chain.join(1) == chain.join(2) == []
    (first,) = chain.join(0)
    assert (first.sender, first.receiver) == (2, 0)
    assert chain.end_message(first, 2) == []
    assert [(m.sender, m.receiver, m.delay_ps) for m in chain.end_message(first, 0)] == [(2, 0, 1), (0, 1, 0)]


def test_an_all_to_all_goes_one_place_farther_each_step() -> None:
    """Parts of 0.25 MB over one hop, over two, where each link carries two messages, and over one backwards."""
    body = 'all_to_all(g[:250, :], s, over="tp.x", split_dim=0, concat_dim=1, lane=x)'
    expected = LAUNCH + 3 * SYNC + (0.25 + 0.5 + 0.25) * 1e-3
    assert seconds(ring(), body) == pytest.approx(expected, **EXACT)


@pytest.mark.parametrize(("chips", "shift"), [(2, 1), (4, 2)])
def test_permutes_halfway_round_go_the_way_of_their_sign(chips: int, shift: int) -> None:
    """Two by a shift and its negative take different links, and as long as one of them."""
    statement = 'permute(s({}), s({}), over="tp.x", shift={}, lane={})'
    made = program(statement.format(1, 0, shift, "x") + "\n" + statement.format(3, 2, -shift, "y"), chips)
    machine = Machine.of(ring(chips, 2, free=True), made)
    taken = [run(made, machine).duration_s for run in (simulate, engine.simulate)]
    assert [*taken, estimate(made, machine).total_s] == pytest.approx([shift * 1e-3] * 3, **EXACT)


# --- memory ---------------------------------------------------------------------------------------------

PRODUCT = "matmul(q, q(1), q(2), lane=y)"


@pytest.mark.parametrize(
    ("bytes_per_s", "expected"),
    [(1e12, 2e-3 + 0.12e-6), (1e10, 8.8e-3)],
    ids=["bound by FLOPs", "bound by memory"],
)
def test_a_product_fills_streams_and_drains(bytes_per_s: float, expected: float) -> None:
    """1000 cubed in tiles of 100 cubed: 80 kB before, 87.88 MB beside 2 ms of FLOPs, 40 kB after."""
    chip = replace(CHIP, memory_bytes_per_s=bytes_per_s, gemm_tile=(100, 100, 100), launch_s=1e-6)
    for contention in (True, False):
        made = program(PRODUCT)
        run = simulate(made, Machine.of(ring(chip=chip), made), contention=contention)
        assert run.duration_s == pytest.approx(1e-6 + expected, **EXACT)


def test_two_products_share_engine_and_memory() -> None:
    """Bound by memory, and the engine has room for both: twice as long."""
    chip = replace(CHIP, memory_bytes_per_s=1e10, gemm_tile=(100, 100, 100))
    both = PRODUCT + "\nmatmul(g, q(1), q(2), lane=x)"
    assert seconds(ring(chip=chip), both) == pytest.approx(17.6e-3, **EXACT)


SEND = """
call(fn="f", outs=(), ins=(), flops={flops}, bytes={bytes}, lane=y)
if rank == 0:
    send(s, peer=1, lane=x)
if rank == 1:
    recv(s(1), peer=0, update={update}, lane=x)
"""


def test_a_message_takes_memory_from_a_product() -> None:
    """2 MB beside 1 ms of FLOPs, through a memory of 2.5 GB/s. A message takes 1 GB/s of it for 1 ms, in which
    1.5 MB pass; the other 0.5 MB then keep the pace of the FLOPs, 2 GB/s."""
    chip = replace(CHIP, memory_bytes_per_s=2.5e9)
    made = program(SEND.format(flops=10**9, bytes=2 * 10**6, update=False))
    assert ends(ring(free=True, chip=chip), made, 0) == pytest.approx([1.25, 1.25, 1.0, 1.0], **EXACT)


def test_what_is_added_is_read_as_well() -> None:
    """At the receiver's memory of 1 GB/s, a message that is added gets half of that."""
    chip = replace(CHIP, memory_bytes_per_s=1e9)
    for update, expected in ((False, 1.0), (True, 2.0)):
        made = program(SEND.format(flops=0, bytes=0, update=update))
        assert ends(ring(free=True, chip=chip), made)[:2] == pytest.approx([expected] * 2, **EXACT)


def test_one_sided_transfers_pass_through_both_memories() -> None:
    """A put at home reads and writes one memory; an accumulate to a neighbour reads and writes the other."""
    chip = replace(CHIP, memory_bytes_per_s=1e9)
    cluster = ring(free=True, chip=chip)
    one = "if rank == 0:\n    {}(at({}, s(1)), s, lane=x)\n" + 'fence(over="tp.x", lane=y)'
    for kind, to, expected in (("put", 0, 2e-3), ("put", 1, 1e-3), ("accumulate", 1, 2e-3)):
        assert seconds(cluster, one.format(kind, to)) == pytest.approx(expected, **EXACT)
    assert seconds(cluster, "if rank == 0:\n    get(s(1), at(1, s), lane=x)") == pytest.approx(1e-3, **EXACT)


# --- rounds ---------------------------------------------------------------------------------------------


def test_ops_that_end_together_let_others_be_issued_together() -> None:
    """Both copies end at 2 us. The first op of the ready-first lane waits for lane y, the second for lane x: it is
    the first that goes, whichever copy is looked at first."""
    made = program("""
copy(s(1), s, lane=x)
copy(s(2), s, lane=y)
copy(q(1)[:, :250], s(2), lane=z)
copy(q(2)[:, :250], s(1), lane=z)
""")
    trace = simulate(made, Machine.of(ring(), made))
    starts = [trace.span_of[0, index].start_ps for index in range(4)]
    assert starts == [0, 0, 4 * 10**6, 6 * 10**6]
