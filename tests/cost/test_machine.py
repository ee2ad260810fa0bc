"""Where messages go: paths and link rates by hand, meshes laid on networks of another shape, placements."""

from itertools import pairwise

import numpy as np
import pytest

from meshweave.base.errors import LayoutError
from meshweave.cost.machine import Machine, mesh_machine
from meshweave.cost.placed import RING_ROUTE, Link
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.chip import Chip
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.links import NetworkAxis
from meshweave.describe.machine.network import (
    FullMeshNetwork,
    HostsNetwork,
    Network,
    RingNetwork,
    SwitchNetwork,
    TorusNetwork,
)
from meshweave.describe.machine.tree import TreeLevel, TreeNetwork

CHIP = Chip("chip", (("float32", 1e12),), 1e12, 1 << 30, 1e12)
FAST, SLOW = NetworkAxis("fast", 10e9), NetworkAxis("slow", 1e9, 5e-6)
TREE = TreeNetwork((TreeLevel(2, FAST), TreeLevel(3, SLOW, links=4), TreeLevel(2, SLOW)))


def on(network: Network, *shape: int, logical: bool = False) -> Machine:
    cluster = Cluster("box", CHIP, network, "a test")
    return mesh_machine(cluster, shape, ("x", "y", "z", "w")[: len(shape)], logical=logical)


def placed(machine: Machine, placement: tuple[int, ...]) -> Machine:
    return Machine(machine.cluster, machine.meshes, machine.logical, placement)


# --- both ways round --------------------------------------------------------------------------------------


def test_a_ring_of_two_has_two_ways() -> None:
    ring = on(RingNetwork(FAST, 2), 2)
    assert ring.path(0, 1) == ring.path(0, 1, False) == (("link", 0, 0, 1),)
    assert ring.path(0, 1, True) == (("link", 0, 0, -1),)
    assert ring.path(1, 0, True) == (("link", 1, 0, -1),)
    assert ring.path(1, 1, True) == ()


def test_an_axis_of_no_mesh_has_no_price() -> None:
    torus = on(TorusNetwork((FAST, SLOW), (2, 4), 8), 2, 4)
    assert torus.axis("tp.x").link_bytes_per_s == 10e9 and torus.axis("").link_bytes_per_s == 1e9
    with pytest.raises(LayoutError, match=r"no mesh has an axis 'tp.X': there are tp\.x, tp\.y"):
        torus.axis("tp.X")


def test_only_the_opposite_member_can_be_reached_both_ways() -> None:
    ring = on(RingNetwork(FAST, 4), 4)
    assert ring.path(1, 3) == (("link", 1, 0, 1), ("link", 2, 0, 1))
    assert ring.path(1, 3, True) == (("link", 1, 0, -1), ("link", 0, 0, -1))
    for dst, step in ((2, 1), (0, -1)):
        assert ring.path(1, dst) == ring.path(1, dst, True) == (("link", 1, 0, step),)
    odd = on(RingNetwork(FAST, 5), 5)
    assert all(odd.path(0, dst) == odd.path(0, dst, True) for dst in range(5))


def test_on_a_torus_each_axis_goes_its_way() -> None:
    torus = on(TorusNetwork((FAST, FAST), (2, 4), 8), 2, 4)
    assert torus.path(0, 5) == (("link", 0, 0, 1), ("link", 4, 1, 1))
    assert torus.path(0, 5, True) == (("link", 0, 0, -1), ("link", 4, 1, 1))
    assert torus.path(0, 6, True) == (("link", 0, 0, -1), ("link", 4, 1, -1), ("link", 7, 1, -1))


def test_links_of_a_turned_torus_keep_their_rates() -> None:
    torus = TorusNetwork((FAST, SLOW), (2, 4), 8)
    assert [on(torus, 2, 4).weighted_link_rate(("link", 0, axis, 1)) for axis in (0, 1)] == [10**10, 10**9]
    assert [on(torus, 4, 2).weighted_link_rate(("link", 0, axis, 1)) for axis in (0, 1)] == [10**9, 10**10]


# --- trees ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("src", "dst", "path"),
    [
        (0, 1, [("up", 0, 0, 0), ("down", 1, 0, 0)]),
        (1, 4, [("up", 1, 0, 0), ("up", 0, 1, 0), ("down", 2, 1, 0), ("down", 4, 0, 0)]),
        (
            11,
            0,
            [
                ("up", 11, 0, 0),
                ("up", 5, 1, 0),
                ("up", 1, 2, 0),
                ("down", 0, 2, 0),
                ("down", 0, 1, 0),
                ("down", 0, 0, 0),
            ],
        ),
        (3, 3, []),
    ],
)
def test_messages_climb_to_the_lowest_common_switch(src: int, dst: int, path: list[Link]) -> None:
    machine = on(TREE, 6, 2)
    assert machine.path(src, dst) == machine.path(src, dst, True) == tuple(path)
    rates = {0: 10 * 10**9, 1: 4 * 10**9, 2: 10**9}  # four parallel links in the middle
    assert [machine.weighted_link_rate(link) for link in path] == [rates[level] for _, _, level, _ in path]


def test_a_ring_over_all_leaves_crosses_each_link_once_each_way() -> None:
    machine = on(TREE, 12)
    hops = [link for src in range(12) for link in machine.path(src, (src + 1) % 12)]
    assert len(hops) == len(set(hops)) == 2 * (12 + 6 + 2)
    assert machine.rate("tp.x", "all_gather") == 10**9
    assert on(TREE, 6, 2).rate("tp.y", "all_gather") == 10**10
    assert on(TREE, 2, 6).rate("tp.y", "all_gather") == 4 * 10**9


# --- logical meshes ---------------------------------------------------------------------------------------


def test_a_mesh_that_the_torus_does_not_carry() -> None:
    cube = TorusNetwork((FAST, SLOW, FAST), (4, 8, 8), 256)
    with pytest.raises(
        LayoutError, match=r"does not carry a mesh of shape \(16, 16\); .*logical=True"
    ) as error:
        on(cube, 16, 16).axis("tp.x")
    assert "\n" not in str(error.value)
    machine = on(cube, 16, 16, logical=True)
    assert machine.axis("tp.x") == machine.axis("tp.y") == machine.axis("") == SLOW
    assert machine.constants("tp.y", "all_gather").sync_s == 5e-6
    assert machine.path(0, 1) == (("link", 0, 2, 1),)
    assert machine.path(7, 8) == (("link", 7, 1, 1), ("link", 15, 2, 1))
    assert machine.path(15, 0) == (("link", 15, 1, -1), ("link", 7, 2, 1))
    assert len(machine.path(0, 16)) == 2  # along the slow axis
    assert [machine.weighted_link_rate(("link", 0, axis, 1)) for axis in range(3)] == [10**10, 10**9, 10**10]
    assert hash(machine) == hash(on(cube, 16, 16, logical=True)) and machine != on(cube, 16, 16)


def test_a_mesh_whose_ranks_are_in_an_order_of_their_own() -> None:
    """Closed forms price neighbours, which they are not; simulation sends over the links between them."""
    cluster = on(TorusNetwork((FAST, FAST), (4, 4), 16), 4, 4).cluster

    def machine(*ranks: int, logical: bool = False) -> Machine:
        shape = (4, len(ranks) // 4)
        return Machine(cluster, (Mesh("tp", shape, ("x", "y"), ranks),), logical)

    by_columns = [4 * (at % 4) + at // 4 for at in range(16)]
    assert machine(*by_columns).axis("tp.x") == FAST
    shuffled = [0, 5, 2, 7, 4, 1, 6, 3, *range(8, 16)]
    with pytest.raises(
        LayoutError, match=r"ranks 1 and 9 are neighbours along axis x of mesh tp, and 2 links"
    ):
        machine(*shuffled).axis("tp.x")
    assert machine(*shuffled, logical=True).axis("tp.x") == FAST
    with pytest.raises(
        LayoutError, match=r"ranks 0 and 2 are neighbours along axis x of mesh tp, and 2 links"
    ):
        machine(0, 2, 1, 3).axis("tp.x")


def test_what_the_torus_carries_keeps_its_constants_when_logical() -> None:
    torus = TorusNetwork((FAST, SLOW), (2, 4), 8)
    turned = on(torus, 4, 2, logical=True)
    assert (turned.axis("tp.x"), turned.axis("tp.y")) == (SLOW, FAST)
    # The torus is not turned with it: ranks lie on its chips in the order of its own rows.
    assert turned.path(0, 2) == (("link", 0, 1, 1), ("link", 1, 1, 1))
    assert on(torus, 4, 2).path(0, 2) == (("link", 0, 0, 1),)
    assert on(torus, 4, 2, 1).path(0, 2) == (("link", 0, 0, 1),), "an axis of one rank changes nothing"
    assert [turned.weighted_link_rate(("link", 0, axis, 1)) for axis in (0, 1)] == [10**10, 10**9]


def test_more_mesh_axes_than_a_reconfigurable_torus_has() -> None:
    torus = TorusNetwork((FAST, SLOW), None, 32, True)
    with pytest.raises(LayoutError, match=r"3 axes does not fit a torus of 2; .*logical=True"):
        on(torus, 2, 4, 4).axis("tp.x")
    machine = on(torus, 2, 4, 4, logical=True)
    assert machine.axis("tp.z") == SLOW
    assert machine.path(0, 8) == (("link", 0, 0, 1),)  # 4 x 8 is nearest to a square
    assert on(torus, 2, 16, logical=True).path(0, 16) == (("link", 0, 0, 1),)  # what fits is formed


def test_a_mesh_of_some_of_the_chips() -> None:
    torus = TorusNetwork((FAST, SLOW), (4, 4), 16)
    machine = on(torus, 2, 3, logical=True)
    assert machine.axis("tp.x") == FAST
    assert machine.path(3, 4) == (("link", 3, 0, 1), ("link", 7, 1, 1))


@pytest.mark.parametrize(
    "network", [RingNetwork(FAST, 12), SwitchNetwork(FAST, 12), TREE, HostsNetwork(3, 4, FAST, 2, SLOW)]
)
@pytest.mark.parametrize("shape", [(12,), (3, 4), (2, 6), (2, 3, 2)])
def test_other_networks_carry_any_mesh(network: Network, shape: tuple[int, ...]) -> None:
    plain, logical = on(network, *shape), on(network, *shape, logical=True)
    for name in plain.meshes[0].axes:
        assert plain.axis(f"tp.{name}") == logical.axis(f"tp.{name}")
    for src in range(12):
        for dst in range(12):
            path = plain.path(src, dst)
            assert path == logical.path(src, dst) and len(set(path)) == len(path)
            assert all(
                plain.weighted_link_rate(link) in (10**9, 4 * 10**9, 8 * 10**9, 10**10) for link in path
            )


@pytest.mark.parametrize(
    "network",
    [TREE, HostsNetwork(2, 6, FAST, 2, SLOW), FullMeshNetwork(2, 6, FAST, SLOW)],
)
@pytest.mark.parametrize("shape", [(12, 1), (2, 6), (2, 3, 2), (6, 2)])
@pytest.mark.parametrize("inner", [False, True])
def test_meshes_of_parts_run_as_one_over_all_chips(
    network: Network, shape: tuple[int, ...], inner: bool
) -> None:
    """A mesh of all chips, and one for each coordinate of its first axis, or of its last."""
    names = ("x", "y", "z")[: len(shape)]
    ranks = np.arange(12).reshape(shape)
    ranks = np.moveaxis(ranks, -1, 0) if inner else ranks
    left = names[:-1] if inner else names[1:]
    parts = [Mesh(f"p{n}", each.shape, left, tuple(each.flatten().tolist())) for n, each in enumerate(ranks)]
    machine = Machine(Cluster("box", CHIP, network, "a test"), (Mesh.of("tp", shape, names), *parts))
    for part in parts:
        for name in left:
            for shared in (False, True):
                assert machine.axis(f"{part.name}.{name}", shared) == machine.axis(f"tp.{name}", shared)


@pytest.mark.parametrize(
    ("network", "first", "rate"),
    [
        (TREE, 0, 4e9),  # below one child of the root
        (TREE, 4, 1e9),
        (HostsNetwork(3, 4, FAST, 2, SLOW), 1, 10e9),  # in a host that it does not fill
        (HostsNetwork(3, 4, FAST, 2, SLOW), 3, 1e9),
    ],
)
def test_a_group_that_lies_as_no_other_runs_at_the_links_that_it_crosses(
    network: Network, first: int, rate: float
) -> None:
    machine = Machine(Cluster("box", CHIP, network, "a test"), (Mesh.of("part", (3,), ("x",), first),))
    for name in ("part.x", "part"):
        assert machine.axis(name).link_bytes_per_s == machine.axis(name, shared=True).link_bytes_per_s == rate


def test_a_logical_mesh_on_a_ring_shares_links() -> None:
    machine = on(RingNetwork(FAST, 16), 4, 4)
    hops = [link for src in range(16) for link in machine.path(src, (src + 4) % 16)]
    assert len(hops) == 64 and max(hops.count(link) for link in hops) == 4


def test_meshes_without_axes_are_wrong_in_either_way() -> None:
    cluster = Cluster("box", CHIP, TorusNetwork((FAST,), (1,), 1), "a test")
    for logical in (False, True):
        with pytest.raises(LayoutError, match=r"at least 1 axis, not 0$"):
            Machine(cluster, (Mesh.of("tp", (), ()),), logical).axis("tp")


# --- placements -------------------------------------------------------------------------------------------


def test_a_ring_folded_onto_a_torus() -> None:
    plain = on(TorusNetwork((FAST, FAST), (4, 4), 16), 16)
    assert [len(plain.path(a, b)) for a, b in pairwise(range(16))].count(2) == 3
    # Down the first column, and back through the other three in a snake.
    column = [12, 8, 4, 0]
    snake = (1, 2, 3, 7, 6, 5, 9, 10, 11, 15, 14, 13, *column)
    folded = placed(plain, snake)
    assert all(len(folded.path(rank, (rank + 1) % 16)) == 1 for rank in range(16))
    assert folded.path(0, 1) == (("link", 1, 1, 1),)
    assert folded.path(15, 0) == (("link", 0, 1, 1),)
    assert hash(folded) != hash(plain) and folded.axis("tp.x") == plain.axis("tp.x")


def test_ports_nics_and_switches_are_those_of_the_chips() -> None:
    backwards = tuple(range(11, -1, -1))
    switch = placed(on(SwitchNetwork(FAST, 12), 12), backwards)
    assert switch.path(0, 2) == (("out", 11, 0, 0), ("in", 9, 0, 0))
    hosts = placed(on(HostsNetwork(3, 4, FAST, 2, SLOW), 12), backwards)
    nics = (("nics-out", 2, 0, 0), ("nics-in", 0, 0, 0))  # those that its ring shares with others
    assert hosts.path(0, 11) == (("nic-out", 2, 1, 0), ("nic-in", 0, 0, 0), *nics)
    assert hosts.path(0, 11, RING_ROUTE) == nics
    one_nic = placed(on(HostsNetwork(3, 4, FAST, 1, SLOW), 12), backwards)
    assert one_nic.path(0, 11) == (("nic-out", 2, 0, 0), ("nic-in", 0, 0, 0))
    tree = placed(on(TREE, 12), backwards)
    assert tree.path(0, 1) == (("up", 11, 0, 0), ("down", 10, 0, 0))
    assert placed(on(TREE, 12), tuple(range(12))).path(0, 7) == on(TREE, 12).path(0, 7)


@pytest.mark.parametrize("placement", [(), (0, 1, 2), (0, 1, 2, 2), (1, 2, 3, 4), (0, 1, 2, 3, 4)])
def test_a_placement_is_a_permutation(placement: tuple[int, ...]) -> None:
    with pytest.raises(
        LayoutError, match="not a permutation of the 4 chips of box; give every chip from 0 to 3"
    ):
        placed(on(SwitchNetwork(FAST, 4), 4), placement)
