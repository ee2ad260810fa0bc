"""Messages of strided views pack at either end: the same in closed form, in both simulators and in the planner."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meshweave.cost.machine import Machine
from meshweave.cost.packing import packing_ps
from meshweave.describe.machine.chip import Chip
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.links import NetworkAxis
from meshweave.describe.machine.network import HostsNetwork
from meshweave.estimate.uncontended import estimate
from meshweave.ir.program import Program
from meshweave.ir.program.parse import parse
from meshweave.ir.program.views import Blocked, Range, Selector, View, selector_indices
from meshweave.simulate import engine
from meshweave.simulate.critical import critical_path
from plain_simulator import reference
from sampling import examples

LAUNCH_S, PACK_RATE, LINK_RATE = 3e-3, 5e5, 1e6
CHIP = Chip("chip", (("float32", 1e12),), 1e12, 1 << 30, 1e12)
PACKS = replace(CHIP, pack_launch_s=LAUNCH_S, pack_bytes_per_s=PACK_RATE)


MESSAGE = """
program("message")
tp = mesh(({ranks},), ("x",))
s = scratch((4, 6), "int8", on=tp, slots=2{more})
t = scratch((4, 8), "int8", on=tp)
x = lane()
with ranks(0):
    send({source}, peer=1, lane=x)
with ranks(1):
    recv({target}, peer=0, lane=x)
"""


def on_hosts(chip: Chip, program: Program) -> Machine:
    link = NetworkAxis("link", LINK_RATE)
    return Machine(Cluster("box", chip, HostsNetwork(2, 1, link, 1, link), "a test"), program.meshes)


def message(source: str, target: str, more: str = "") -> Program:
    """Part of 4 x 6 or 4 x 8 elements of a byte each goes from rank 0 to rank 1."""
    return parse(MESSAGE.format(source=source, target=target, more=more, ranks=2))


def selectors(extent: int) -> st.SearchStrategy[Selector]:
    spans = st.tuples(st.integers(0, extent), st.integers(0, extent)).map(sorted)
    ranges = spans.map(lambda span: Range(*span))
    blocks = st.tuples(st.integers(-3, 3), st.integers(1, 3), st.integers(1, 3), spans)
    return ranges | blocks.map(lambda of: Blocked(of[0], of[1], of[1] + of[2], *of[3]))


@examples(200)
@given(st.data(), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_a_view_is_strided_where_its_addresses_have_gaps(data: st.DataObject, shape: list[int]) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    of = tuple(data.draw(selectors(extent)) for extent in shape)
    in_memory = np.arange(int(np.prod(shape))).reshape([shape[dim] for dim in order])
    logical = in_memory.transpose([order.index(dim) for dim in range(len(shape))])
    addresses = np.sort(logical[np.ix_(*map(selector_indices, of))].ravel())
    assume(len(addresses))
    has_gaps = addresses[-1] - addresses[0] >= len(addresses)
    is_strided = View("s", of).is_strided(shape, order)
    if any(isinstance(selector, Blocked) for selector in of):  # a block may end where the next period begins
        assert is_strided or not has_gaps
    else:
        assert is_strided == has_gaps


def test_parts_of_a_message_are_those_of_its_route() -> None:
    """Inside a host a message takes the fast link, and so do its parts."""
    fast, slow = NetworkAxis("inside", 100 * LINK_RATE), NetworkAxis("nic", LINK_RATE, 1e-3)
    program = parse(MESSAGE.format(source="s[:, :]", target="t[:, 0:6]", more="", ranks=4))
    pair = Machine(Cluster("box", CHIP, HostsNetwork(2, 2, fast, 1, slow), "a test"), program.meshes)
    made = estimate(program, pair)
    parts = made.launch_s + made.sync_s + made.transfer_s
    assert 0 < parts == pytest.approx(made.total_s)


@pytest.mark.parametrize(
    ("source", "target", "more", "ends"),
    [
        ("s[1:3, :]", "s(1)[0:2, :]", "", 0),
        ("s[1:2, 0:4]", "s(1)[3:4, 2:6]", "", 0),
        ("s[1:3, :]", "t[0:2, 1:7]", "", 1),
        ("t[0:2, 0:6]", "s(1)[0:2, :]", "", 1),
        ("s[1:3, 0:2]", "s(1)[0:2, 1:3]", "", 2),
        ("s[:, 1:3]", "s(1)[:, 2:4]", ", order=(1, 0)", 0),
        ("s[1:3, :]", "s(1)[0:2, :]", ", order=(1, 0)", 2),
    ],
)
def test_each_strided_end_of_a_message_packs(source: str, target: str, more: str, ends: int) -> None:
    program = message(source, target, more)
    num_bytes = program.view_bytes(program.ops_on_rank(0)[0].op.src)  # type: ignore[attr-defined]
    machine, free = on_hosts(PACKS, program), on_hosts(CHIP, program)
    packs_s = ends * (LAUNCH_S + num_bytes / PACK_RATE)
    runs = [engine.simulate(program, machine), reference.simulate(program, machine)]
    seconds = [*(run.duration_s for run in runs), estimate(program, machine).total_s]
    assert seconds == pytest.approx([num_bytes / LINK_RATE + packs_s] * 3, abs=1e-11)
    assert estimate(program, machine).copy_s == pytest.approx(packs_s, abs=1e-11)
    assert engine.simulate(program, free).duration_s == pytest.approx(num_bytes / LINK_RATE, abs=1e-11)


def test_packing_is_launch_on_the_critical_path_and_slows_nobody() -> None:
    program = message("s[1:3, 0:2]", "s(1)[0:2, 1:3]")
    run = engine.simulate(program, on_hosts(PACKS, program))
    path = critical_path(run)
    assert path.slowed_ps == 0
    assert path.ps_by_category["launch"] == 2 * packing_ps(4, PACKS)


def test_no_rate_packs_for_nothing() -> None:
    assert packing_ps(1 << 20, CHIP) == packing_ps(0, PACKS) == 0
