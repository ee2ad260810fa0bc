"""Legal orders: lanes and edges are kept whatever the seed, and every seed can finish."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from builders import NAMES, golden
from hypothesis import given
from hypothesis import strategies as st

from meshweave.base.errors import ProgramError
from meshweave.ir.analysis.dataflow import Dataflow, Event, Issuer, analyse, untimed_order
from meshweave.ir.program.parse import parse
from sampling import examples

FLOWS = {name: analyse(golden(name)) for name in NAMES}


def check_legal(flow: Dataflow, order: list[Event]) -> None:
    at = {node: number for number, event in enumerate(order) for node in event}
    assert sorted(at) == sorted(flow.nodes()) and len(at) == sum(map(len, order))
    for event in order:
        joint = flow.joint(event[0])
        assert event == ((event[0],) if joint is None else joint.members)
        for node in event:
            assert all(at[other] < at[node] for other in flow.waits_for(node))
    for (_, name), queue in flow.queues.items():
        lane = flow.program.lane_of[name]
        places = [at[rank_op] for rank_op in ((_, index) for index in queue)]
        if lane.order == "fifo":
            for position, place in enumerate(places):
                # With width w an op has been issued only when all but w - 1 of those before it are done.
                late = sum(other > place for other in places[:position])
                assert late < lane.width


@pytest.mark.parametrize("name", NAMES)
def test_program_order_is_legal(name: str) -> None:
    check_legal(FLOWS[name], untimed_order(FLOWS[name]))


@examples(60)
@given(st.sampled_from(NAMES), st.integers(0, 2**64))
def test_any_seed_gives_a_legal_order(name: str, seed: int) -> None:
    check_legal(FLOWS[name], untimed_order(FLOWS[name], seed))


def test_seeds_repeat_and_differ() -> None:
    flow = FLOWS["universal_c"]
    assert untimed_order(flow, 1) == untimed_order(flow, 1)
    assert len({tuple(untimed_order(flow, seed)) for seed in range(5)}) == 5


@examples(40)
@given(st.sampled_from(NAMES), st.integers(0, 2**32))
def test_issuer_keeps_to_the_width_of_each_lane(name: str, seed: int) -> None:
    """Ops finish in any order, the members of a joint each on their own once all of them are issued."""
    flow, draw = FLOWS[name], random.Random(seed)
    issuer = Issuer(flow)
    running = set(issuer.start())
    while running:
        busy: dict[tuple[int, str], int] = defaultdict(int)
        for node in running:
            busy[node[0], flow.op(node).lane] += 1
        assert all(count <= flow.program.lane_of[lane].width for (_, lane), count in busy.items())
        able = [
            node
            for node in sorted(running)
            if (joint := flow.joint(node)) is None or all(other in issuer.issued for other in joint.members)
        ]
        node = draw.choice(able)
        running.remove(node)
        running.update(issuer.finish(node))
    assert issuer.done == set(flow.nodes())


READY = """
program("ready")
tp = mesh((1,), ("x",))
a = scratch((2, 2), "float32", on=tp)
b = scratch((2, 2), "float32", on=tp)
slow = lane()
quick = lane(order="ready")
with tp:
    zero(a, lane=slow)
    copy(b, a, lane=quick)
    zero(b, lane=quick)
    zero(b(1), lane=quick)
"""


def test_a_ready_lane_passes_what_cannot_start() -> None:
    text = READY.replace(
        'b = scratch((2, 2), "float32", on=tp)', 'b = scratch((2, 2), "float32", on=tp, slots=2)'
    )
    issuer = Issuer(analyse(parse(text)))
    assert issuer.start() == [(0, 3), (0, 0)]
    fifo = Issuer(analyse(parse(text.replace('lane(order="ready")', "lane()"))))
    assert fifo.start() == [(0, 0)]


def test_a_cycle_through_a_ready_lane_is_told() -> None:
    text = """
program("stuck")
tp = mesh((2,), ("x",))
a = scratch((2, 2), "float32", on=tp)
b = scratch((2, 2), "float32", on=tp)
l = lane(order="ready")
with tp:
    zero(a, lane=l)
    send(a, peer=1 - tp.x, lane=l)
    recv(b, peer=1 - tp.x, lane=l)
"""
    with pytest.raises(ProgramError, match=r"deadlock: send 0\.1 of rank 0 waits for recv 0\.2 of rank 1"):
        untimed_order(analyse(parse(text)))
