"""Groups of a mesh axis that meet on links: closed forms give each its share, and simulation agrees."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from meshweave.cost.machine import Machine
from meshweave.describe.machine.chip import Chip
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.links import NetworkAxis
from meshweave.describe.machine.network import (
    FullMeshNetwork,
    HostsNetwork,
    Network,
    RingNetwork,
    TorusNetwork,
)
from meshweave.describe.machine.tree import TreeLevel, TreeNetwork
from meshweave.estimate import estimate
from meshweave.ir.program import Program
from meshweave.ir.program.parse import parse
from meshweave.simulate import simulate
from plain_simulator import reference

CHIP = Chip("chip", (("float32", 1e12),), 1e12, 1 << 30, 1e12)
FAST, SLOW = NetworkAxis("fast", 10e6), NetworkAxis("slow", 1e6)
BRIDGE = NetworkAxis("bridge", 40e6, num_directions=2)
PAIRS = TreeNetwork((TreeLevel(2, FAST, 1, BRIDGE), TreeLevel(4, SLOW, 3)))
QUADS = TreeNetwork((TreeLevel(4, FAST, 1, BRIDGE), TreeLevel(2, SLOW)))
HOSTS, TWO_NICS = HostsNetwork(2, 4, FAST, 1, SLOW), HostsNetwork(2, 4, FAST, 2, SLOW)
THREE_HOSTS = HostsNetwork(3, 4, FAST, 1, SLOW)
WAYS: tuple[Literal[1, 2], ...] = (1, 2)
NUM_BYTES = 64_002


def all_reduces(shape: tuple[int, int], axis: str, first: int = 0) -> Program:
    return parse(f"""
program("all groups of an axis at once")
tp = mesh({shape}, ("row", "col"), first={first})
s = scratch(({NUM_BYTES},), "int8", on=tp)
x = lane()
with tp:
    zero(s, lane=x)
    all_reduce(s, s, over="tp.{axis}", lane=x)
""")


@pytest.mark.parametrize(
    ("network", "shape", "axis", "megabytes_per_s"),
    [
        (HOSTS, (2, 4), "row", 0.25),  # four rings on a NIC
        (HOSTS, (4, 2), "row", 0.5),
        (HOSTS, (8, 1), "row", 1),
        (HOSTS, (2, 4), "col", 10),
        (TWO_NICS, (2, 4), "row", 0.5),
        (THREE_HOSTS, (4, 3), "col", 0.5),  # a host has the end of one group and the beginning of the next
        (replace(THREE_HOSTS, num_hosts=2, chips_per_host=3), (3, 2), "col", 1),
        (PAIRS, (4, 2), "row", 1.5),  # two rings share the three links of a pair
        (PAIRS, (4, 2), "col", 40),  # both directions of a ring of two on one link
        (PAIRS, (8, 1), "row", 3),
        (PAIRS, (2, 4), "col", 3),
        (QUADS, (2, 4), "col", 80),
        (QUADS, (4, 2), "col", 40),
        (QUADS, (2, 4), "row", 0.25),
    ],
)
def test_each_ring_has_its_share(
    network: Network, shape: tuple[int, int], axis: str, megabytes_per_s: float
) -> None:
    program = all_reduces(shape, axis)
    machine = Machine.of(Cluster("box", CHIP, network, "a test"), program)
    size = shape[0] if axis == "row" else shape[1]
    assert machine.rate(f"tp.{axis}", "all_reduce", shared=True) == megabytes_per_s * 1e6
    expected = 2 * (size - 1) / size * NUM_BYTES / (megabytes_per_s * 1e6)
    alone = reference.simulate(program, machine, contention=False).duration_s
    assert alone == pytest.approx(expected, rel=1e-3)
    for contended in (reference.simulate(program, machine), simulate(program, machine)):
        assert contended.duration_s == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("network", "shape", "first", "axis"),
    [
        *((RingNetwork(NetworkAxis("ring", 1e6, 0.0, ways), 8), shape, 0, axis) for ways in WAYS
          for shape in ((2, 4), (4, 2), (8, 1), (2, 2)) for axis in ("row", "col")),
        (replace(HOSTS, num_hosts=3), (2, 3), 2, "row"),  # ranks 2, 5 and 3, 6 and 4, 7
        (replace(HOSTS, num_hosts=3), (3, 3), 1, "row"),
        (TreeNetwork((TreeLevel(2, FAST), TreeLevel(3, SLOW))), (2, 2), 0, "row"),
        (TreeNetwork((TreeLevel(2, FAST), TreeLevel(3, SLOW))), (2, 3), 0, "col"),  # over the edge of a pair
        (FullMeshNetwork(3, 2, SLOW, SLOW), (2, 2), 1, "row"),
    ],
)  # fmt: skip
def test_rings_of_some_chips_and_of_several_hops_have_their_share(
    network: Network, shape: tuple[int, int], first: int, axis: str
) -> None:
    program = all_reduces(shape, axis, first)
    machine = Machine.of(Cluster("box", CHIP, network, "a test"), program)
    simulated = simulate(program, machine).duration_s
    assert estimate(program, machine).total_s == pytest.approx(simulated, rel=1e-3)


def test_paths_take_direct_links() -> None:
    machine = Machine.of(Cluster("box", CHIP, PAIRS, "a test"), all_reduces((4, 2), "row"))
    assert machine.path(2, 3) == (("direct", 2, 0, 3),)
    assert machine.path(3, 2) == (("direct", 3, 0, 2),)
    assert machine.path(1, 2) == (("up", 1, 0, 0), ("up", 0, 1, 0), ("down", 1, 1, 0), ("down", 2, 0, 0))
    assert [machine.weighted_link_rate(link) for link in machine.path(1, 2)] == [10e6, 3e6, 3e6, 10e6]
    assert machine.weighted_link_rate(("direct", 2, 0, 3)) == 40e6
    assert machine.axis_between(6, 7) == BRIDGE


def test_a_mesh_inside_a_host_runs_at_the_links_of_the_host() -> None:
    program = parse("""
program("meshes on a part of the hosts")
inner = mesh((2, 2), ("row", "col"), first=4)
outer = mesh((2, 2), ("row", "col"), first=2)
a = scratch((4,), "int8", on=inner)
b = scratch((4,), "int8", on=outer)
x = lane()
with inner:
    zero(a, lane=x)
with outer:
    zero(b, lane=x)
""")
    machine = Machine.of(Cluster("box", CHIP, HOSTS, "a test"), program)
    rates = {name: machine.rate(name, "all_reduce") for name in ("inner.row", "inner.col", "inner")}
    assert set(rates.values()) == {10_000_000}
    assert machine.rate("outer.row", "all_reduce") == 1_000_000  # ranks 2, 4 and 3, 5 are in two hosts
    assert machine.rate("outer.col", "all_reduce") == 10_000_000
    assert machine.rate("outer", "all_reduce") == 1_000_000


@pytest.mark.parametrize("network", [PAIRS, QUADS, TreeNetwork((TreeLevel(4, FAST), TreeLevel(2, SLOW, 3)))])
@pytest.mark.parametrize("shape", [(1, 8), (2, 4), (4, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_parts_of_an_all_to_all_climb_no_higher_in_a_tree_than_they_must(
    axis: int, shape: tuple[int, int], network: TreeNetwork
) -> None:
    """All groups of a mesh axis at once."""
    size = shape[axis]
    program = parse(f"""
program("all to all")
tp = mesh({shape}, ("x", "y"))
s = scratch(({1000 * size},), "int8", on=tp)
t = scratch(({1000 * size},), "int8", on=tp)
x = lane()
with tp:
    zero(s, lane=x)
    all_to_all(t, s, over="tp.{"xy"[axis]}", split_dim=0, concat_dim=0, lane=x)
""")
    machine = Machine.of(Cluster("box", CHIP, network, "a test"), program)
    simulated = simulate(program, machine).duration_s
    assert estimate(program, machine).total_s == pytest.approx(simulated, rel=1e-3)


@pytest.mark.parametrize("ways", [1, 2])
@pytest.mark.parametrize("ranks", [3, 6, 8])
@pytest.mark.parametrize("kind", ["full mesh", "hosts"])
def test_parts_of_an_all_to_all_go_straight_to_their_members(
    kind: str, ranks: int, ways: Literal[1, 2]
) -> None:
    """Also where a group has 4 members on one host and 2 on the other, each with a NIC of its own."""
    link = replace(SLOW, num_directions=ways)
    mesh, hosts = FullMeshNetwork(4, 2, link, link), HostsNetwork(2, 4, FAST, 4, SLOW)
    program = parse(f"""
program("all to all")
tp = mesh(({ranks},), ("x",))
s = scratch(({1000 * ranks},), "int8", on=tp)
t = scratch(({1000 * ranks},), "int8", on=tp)
x = lane()
with tp:
    zero(s, lane=x)
    all_to_all(t, s, over="tp.x", split_dim=0, concat_dim=0, lane=x)
""")
    machine = Machine.of(Cluster("box", CHIP, mesh if kind == "full mesh" else hosts, "a test"), program)
    simulated = simulate(program, machine).duration_s
    assert estimate(program, machine).total_s == pytest.approx(simulated, rel=1e-3)


RING, TWO_WAY_RING = (RingNetwork(NetworkAxis("ring", 1e6, 0.0, ways), 8) for ways in WAYS)
TORUS = TorusNetwork((replace(FAST, num_directions=2), SLOW), (3, 4), 12)
TWO_WAY = replace(SLOW, num_directions=2)
EXCHANGE = "all_to_all(t, s, over={axis!r}, split_dim=0, concat_dim=0, lane=x)"
HALFWAY, BACK = ("permute(t, s, over={axis!r}, shift=" + shift + ", lane=x)" for shift in ("2", "-1"))
SUM, CHAIN = (
    "all_reduce(t, t, over={axis!r}, lane=x)",
    "broadcast(t, s, over={axis!r}, root=0, packets=6, lane=x)",
)


@pytest.mark.parametrize(
    ("network", "shape", "first", "axis", "op"),
    [
        *((ring, shape, 0, axis, EXCHANGE) for ring in (RING, TWO_WAY_RING)
          for shape, axis in (((8, 1), "row"), ((2, 4), "row"), ((2, 4), "col"), ((1, 5), "col"))),
        *((TORUS, (3, 4), 0, axis, EXCHANGE) for axis in ("row", "col")),
        *((TORUS, (1, 5), 2, "col", op) for op in (SUM, EXCHANGE)),  # over the edge of a row, on no torus axis
        (HOSTS, (2, 4), 0, "col", EXCHANGE),
        (HOSTS, (8, 1), 0, "row", EXCHANGE),  # parts inside a host are faster
        (replace(HOSTS, nic=TWO_WAY), (8, 1), 0, "row", BACK),  # one direction has the NIC
        (replace(HOSTS, nic=TWO_WAY), (8, 1), 0, "row", CHAIN),
        (HOSTS, (8, 1), 0, "row", HALFWAY),  # two ranks of a host send to the next
        (RING, (4, 2), 0, "row", HALFWAY),
        (FullMeshNetwork(2, 2, TWO_WAY, FAST), (4, 1), 0, "row", BACK),
        (FullMeshNetwork(1, 4, TWO_WAY, FAST), (2, 2), 0, "row", SUM),  # both directions of two ranks on one link
        (FullMeshNetwork(3, 2, TWO_WAY, FAST), (6, 1), 0, "row", SUM),
        (TreeNetwork((TreeLevel(3, SLOW, 3), TreeLevel(4, SLOW, 1, BRIDGE))), (12, 1), 0, "row", SUM),
        (TreeNetwork((TreeLevel(4, TWO_WAY, 2, TWO_WAY), TreeLevel(2, FAST))), (8, 1), 0, "row", SUM),
    ],
)  # fmt: skip
def test_the_fullest_link_sets_the_pace(
    network: Network, shape: tuple[int, int], first: int, axis: str, op: str
) -> None:
    program = parse(f"""
program("all groups of an axis at once")
tp = mesh({shape}, ("row", "col"), first={first})
s = scratch((1680,), "int8", on=tp)
t = scratch((1680,), "int8", on=tp)
x = lane()
with tp:
    zero(s, lane=x)
    zero(t, lane=x)
    {op.format(axis=f"tp.{axis}")}
""")
    machine = Machine.of(Cluster("box", CHIP, network, "a test"), program)
    simulated = simulate(program, machine).duration_s
    assert estimate(program, machine).total_s == pytest.approx(simulated, rel=1e-3)
