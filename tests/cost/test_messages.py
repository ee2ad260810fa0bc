"""A message from rank to rank costs what lies between the two."""

from __future__ import annotations

import pytest

from meshweave.cost.machine import Machine
from meshweave.cost.price import price
from meshweave.describe.machine.chip import Chip
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.links import CommConstants, NetworkAxis
from meshweave.describe.machine.network import FullMeshNetwork, HostsNetwork, Network, SwitchNetwork
from meshweave.ir.program import Program
from meshweave.ir.program.ops import Send
from meshweave.ir.program.parse import parse
from meshweave.ir.work import work_of
from meshweave.lower import lower_chains
from meshweave.simulate import engine
from plain_simulator import reference

CHIP = Chip("chip", (("float32", 1e12),), 1e12, 1 << 30, 1e12)
INNER = NetworkAxis("inner", 20e6, 0.0, 1, (("send_recv", CommConstants(10e6, 1e-3, 2e-3)),))
OUTER = NetworkAxis("outer", 1e6, 4e-3, 1, (), 5e-3)
HOSTS, PACKAGES = HostsNetwork(2, 2, INNER, 1, OUTER), FullMeshNetwork(2, 2, INNER, OUTER)
NUM_BYTES = 1000
WITHIN, ACROSS = 3e-3 + NUM_BYTES / 10e6, 9e-3 + NUM_BYTES / 1e6


def message(src: int, dst: int) -> Program:
    return parse(f"""
program("message")
tp = mesh((2, 2), ("row", "col"))
s = scratch(({NUM_BYTES},), "int8", on=tp, slots=2)
x = lane()
with ranks({src}):
    send(s, peer={dst}, lane=x)
with ranks({dst}):
    recv(s(1), peer={src}, lane=x)
""")


def machine(network: Network, program: Program, placement: tuple[int, ...] | None = None) -> Machine:
    return Machine(Cluster("box", CHIP, network, "a test"), program.meshes, False, placement)


def seconds(on: Machine, program: Program) -> list[float]:
    """Alone, by the reference and by the core."""
    return [
        reference.simulate(program, on, contention=False).duration_s,
        reference.simulate(program, on).duration_s,
        engine.simulate(program, on).duration_s,
    ]


@pytest.mark.parametrize("network", [HOSTS, PACKAGES])
@pytest.mark.parametrize(
    ("src", "dst", "expected"),
    [(0, 1, WITHIN), (3, 2, WITHIN), (0, 2, ACROSS), (1, 3, ACROSS), (2, 0, ACROSS)],
)
def test_a_message_takes_the_links_between_its_ends(
    network: Network, src: int, dst: int, expected: float
) -> None:
    program = message(src, dst)
    assert seconds(machine(network, program), program) == pytest.approx([expected] * 3, abs=1e-11)


def test_chips_count_and_not_ranks() -> None:
    """Ranks 0 and 2 share a host when they are placed so."""
    for src, dst, expected in ((0, 2, WITHIN), (0, 1, ACROSS)):
        program = message(src, dst)
        placed = machine(HOSTS, program, (0, 2, 1, 3))
        assert seconds(placed, program) == pytest.approx([expected] * 3, abs=1e-11)


def test_where_all_links_are_alike_the_ends_do_not_matter() -> None:
    for dst in (1, 2, 3):
        program = message(0, dst)
        assert seconds(machine(SwitchNetwork(OUTER, 4), program), program) == pytest.approx(
            [ACROSS] * 3, abs=1e-11
        )


def test_a_price_without_ends_or_of_a_step_is_that_of_the_mesh_axis() -> None:
    program = message(0, 1)
    (send,) = (bound.op for bound in program.ops_by_rank[0])
    work, on = work_of(program, send), machine(HOSTS, program)
    assert price(work, on, endpoints=(0, 1)).rate_per_s == 10_000_000
    assert price(work, on, endpoints=(0, 2)).rate_per_s == price(work, on).rate_per_s == 1_000_000
    chain = lower_chains(
        parse("""
program("chain")
tp = mesh((2, 2), ("row", "col"))
s = scratch((10,), "int8", on=tp, slots=2)
x = lane()
with tp:
    broadcast(s(1), s, over="tp.row", root=0, packets=2, lane=x)
""")
    )
    step = next(bound.op for bound in chain.ops_by_rank[0] if isinstance(bound.op, Send))
    assert step.step is not None
    of_step, on = work_of(chain, step), machine(HOSTS, chain)
    assert price(of_step, on, endpoints=(0, 1)) == price(of_step, on)
