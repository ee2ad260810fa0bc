"""Collectives across hosts: on all NICs, by size, the same in closed form and in both simulators."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave.cost.libraries import SIZED_KINDS, sized_price
from meshweave.cost.machine import Machine
from meshweave.cost.price import price
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.describe.machine.links import NetworkAxis
from meshweave.describe.machine.network import HostsNetwork
from meshweave.estimate.uncontended import estimate
from meshweave.ir.program import Program
from meshweave.ir.program.parse import parse
from meshweave.ir.work import Transfer
from meshweave.simulate import engine
from plain_simulator import reference
from sampling import examples

H100 = load_cluster("dgx-h100")
PLAIN = replace(
    H100,
    chip=replace(H100.chip, kernels=None),
    network=HostsNetwork(4, 8, NetworkAxis("a", 450e9), 8, NetworkAxis("b", 50e9)),
)


def program_of(kind: str, shape: tuple[int, ...], num_bytes: int, over: str) -> Program:
    """Return a program of one collective over an axis; `num_bytes` as nccl-tests counts it."""
    count = shape["xy".index(over)]
    axes = ", ".join(f'"{axis}"' for axis in "xy"[: len(shape)])
    whole, part = num_bytes, num_bytes // count
    src, out = {"all_gather": (part, whole), "reduce_scatter": (whole, part), "all_reduce": (whole, whole)}[
        kind
    ]
    options = "" if kind == "all_reduce" else ", dim=0"
    return parse(f"""
program("one collective")
all = mesh({shape}, ({axes},))
s = scratch(({src},), "int8", on=all)
o = scratch(({out},), "int8", on=all)
net = lane()
with all:
    zero(s, lane=net)
    {kind}(o, s, over="all.{over}"{options}, lane=net)
""")


def hosts(cluster: Cluster, num_hosts: int, nics: int, latency_s: float = 0.0) -> Cluster:
    network = cluster.network
    assert isinstance(network, HostsNetwork)
    nic = replace(network.nic, link_latency_s=latency_s)
    return replace(cluster, network=replace(network, num_hosts=num_hosts, nics_per_host=nics, nic=nic))


@examples(12)
@given(
    st.sampled_from(SIZED_KINDS),
    st.sampled_from([H100, PLAIN, load_cluster("dgx-a100")]),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(10, 30),
)
def test_closed_form_and_simulators_agree_on_an_idle_machine(
    kind: str, cluster: Cluster, num_hosts: int, nics: int, log_bytes: int
) -> None:
    cluster = hosts(cluster, num_hosts, nics, 5e-6)
    count = cluster.num_chips
    program = program_of(kind, (count,), count * (1 << log_bytes) // 8, "x")
    machine = Machine.of(cluster, program)
    core = engine.simulate(program, machine)
    exact = reference.simulate(program, machine)
    assert core.trace().spans == exact.spans
    assert core.duration_s == pytest.approx(estimate(program, machine).total_s, rel=0.005)


@pytest.mark.parametrize("num_hosts", range(2, 9))
def test_trees_of_any_number_of_hosts_have_the_nics_that_they_need(num_hosts: int) -> None:
    cluster = hosts(PLAIN, num_hosts, 2, 5e-6)
    program = program_of("all_reduce", (8 * num_hosts,), num_hosts << 24, "x")
    machine = Machine.of(cluster, program)
    assert engine.simulate(program, machine).duration_s == pytest.approx(
        estimate(program, machine).total_s, rel=0.005
    )


def bandwidth(cluster: Cluster, kind: str, num_bytes: int) -> float:
    """Return the bus bandwidth of a collective among all chips, simulated."""
    count = cluster.num_chips
    program = program_of(kind, (count,), num_bytes, "x")
    seconds = engine.simulate(program, Machine.of(cluster, program)).spans(0)
    took_s = max(span.end_ps - span.start_ps for span in seconds if span.kind == kind) * 1e-12
    return (2 if kind == "all_reduce" else 1) * num_bytes * (count - 1) / count / took_s


@pytest.mark.parametrize(("nics", "expected"), [(1, 50e9), (2, 100e9), (4, 200e9), (8, 400e9), (16, 450e9)])
def test_a_ring_rides_all_nics_up_to_the_links_inside(nics: int, expected: float) -> None:
    assert bandwidth(hosts(PLAIN, 4, nics), "all_gather", 1 << 30) == pytest.approx(expected, rel=0.01)


def test_groups_with_one_member_a_host_share_the_nics_as_before() -> None:
    program = program_of("all_gather", (4, 8), 1 << 26, "x")
    machine = Machine.of(PLAIN, program)
    assert sized_price(machine, "all.x", "all_gather", 4, 1 << 24) is None
    took_s = engine.simulate(program, machine).duration_s
    assert took_s == pytest.approx(3 * (1 << 24) / 50e9, rel=0.05)


def test_two_groups_that_share_hosts_share_their_nics() -> None:
    """Sixteen chips of each of two groups on four hosts: each group has half of the NICs, alone or not."""
    program = program_of("all_gather", (2, 16), 1 << 30, "y")
    took_s = engine.simulate(program, Machine.of(hosts(PLAIN, 4, 8), program)).duration_s
    assert 15 / 16 * (1 << 30) / took_s == pytest.approx(400e9, rel=0.02)  # two hosts each, whole


@examples(50)
@given(st.sampled_from(SIZED_KINDS), st.sampled_from([2, 3, 4, 8]), st.integers(10, 32))
def test_time_grows_with_size_and_never_beats_the_nics(kind: str, num_hosts: int, log_bytes: int) -> None:
    cluster = hosts(H100, num_hosts, 8)
    program = program_of(kind, (cluster.num_chips,), 1 << 20, "x")
    machine, count = Machine.of(cluster, program), cluster.num_chips
    parts = [(1 << log_bytes) // count, (1 << log_bytes + 1) // count]
    if kind == "all_reduce":
        parts = [1 << log_bytes, 1 << log_bytes + 1]
    times = [price(Transfer(kind, "all.x", count, part), machine).total_ps for part in parts]
    assert times[0] < times[1] <= 2.01 * times[0]
    crossing = parts[1] * (1 if kind == "all_reduce" else count * (1 - 1 / num_hosts))
    assert times[1] >= crossing / (8 * 50e9) * 1e12


def test_small_and_large_all_reduces_take_different_algorithms() -> None:
    cluster = hosts(load_cluster("dgx-a100"), 8, 8)
    program = program_of("all_reduce", (64,), 1 << 20, "x")
    machine = Machine.of(cluster, program)
    chosen = [sized_price(machine, "all.x", "all_reduce", 64, size) for size in (1 << 16, 1 << 36)]
    assert [known.algorithm for known in chosen if known] == ["tree", "ring"]


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("num_hosts", [1, 2, 4])
def test_an_all_to_all_goes_straight_to_each_member_of_other_hosts(num_hosts: int, groups: int) -> None:
    """Equal parts of 1 MB; `groups` of the axis share each host. A ring would carry P / 2 times as many bytes."""
    cluster = hosts(H100, num_hosts, 8)
    count = 8 * num_hosts // groups
    program = parse(f"""
program("exchange")
all = mesh(({count}, {groups}), ("x", "y"))
s = scratch(({count}, 500000), "bfloat16", on=all)
o = scratch((1, {count * 500000}), "bfloat16", on=all)
net = lane()
with all:
    zero(s, lane=net)
    all_to_all(o, s, over="all.x", split_dim=0, concat_dim=1, lane=net)
""")
    machine = Machine.of(cluster, program)
    simulated = engine.simulate(program, machine).duration_s
    assert estimate(program, machine).total_s == pytest.approx(simulated, rel=0.12)


@pytest.mark.parametrize(
    ("size", "num_hosts", "fewest"), [(12, 3, 4), (10, 5, 2), (20, 5, 4), (14, 7, 2), (30, 15, 2)]
)
@pytest.mark.parametrize("kind", SIZED_KINDS)
def test_uneven_groups_have_as_many_rings_as_the_smallest_host_has_nics(
    size: int, num_hosts: int, fewest: int, kind: str
) -> None:
    """Of hosts with a NIC a chip; groups of so many neighbours begin anywhere in a host."""
    cluster = hosts(H100, num_hosts, 8)
    count = cluster.num_chips // size
    machine = Machine(cluster, (Mesh.of("all", (count, size), ("outside", "row")),), logical=True)
    assert machine.host_span("all.row") is None
    whole = 2**34

    def seconds(of: Machine, axis: str, members: int, num_bytes: int = whole) -> float:
        part = num_bytes if kind == "all_reduce" else num_bytes // members
        return price(Transfer(kind, axis, members, part), of).total_ps / 1e12

    took = seconds(machine, "all.row", size)
    moved = (2 if kind == "all_reduce" else 1) * whole * (size - 1) / size
    nic = 0.96 * 50e9
    if kind != "all_reduce":  # which has a tree besides
        assert took == pytest.approx(moved / (fewest * nic), rel=0.05)
    assert moved / (8 * nic) < took < 1.05 * moved / (fewest * nic)
    assert seconds(machine, "all.row", size, 2 * whole) > 1.9 * took


def test_uneven_groups_share_a_nic_with_those_alone_that_leave_the_host() -> None:
    """Of four chips a group, in hosts of six with one NIC, each host has one group of its own and half of one."""
    cluster = hosts(H100, 2, 1)
    assert isinstance(cluster.network, HostsNetwork)
    cluster = replace(cluster, network=replace(cluster.network, chips_per_host=6))
    machine = Machine(cluster, (Mesh.of("all", (3, 4), ("outside", "row")),), logical=True)
    took = price(Transfer("all_gather", "all.row", 4, 2**32), machine).total_ps / 1e12
    assert took == pytest.approx(3 * 2**32 / (0.96 * 50e9), rel=0.05)


def test_a_group_with_one_member_in_a_host_keeps_the_constants_of_its_axis() -> None:
    machine = Machine(hosts(H100, 9, 8), (Mesh.of("all", (8, 9), ("outside", "row")),), logical=True)
    assert machine.host_span("all.row") is None and machine.any_host_span("all.row") is not None
    assert sized_price(machine, "all.row", "all_gather", 9, 2**30, shared=True) is None
    assert sized_price(machine, "all.row", "all_gather", 9, 2**30) is None


@pytest.mark.parametrize(
    "ranks", [(0, 1, 8, 9), (2, 3, 4, 5, 10, 11, 12, 13), (0, 1, 2, 8, 9, 10, 16, 17, 18)]
)
def test_a_group_of_some_chips_of_its_hosts_has_their_nics_alone(ranks: tuple[int, ...]) -> None:
    machine = Machine(PLAIN, (Mesh("some", (len(ranks),), ("x",), ranks),))
    part, own = 1 << 28, machine.any_host_span("some.x")
    assert own is not None and own.groups_per_host == 1
    took_s = price(Transfer("all_gather", "some.x", len(ranks), part), machine).total_ps / 1e12
    assert took_s == pytest.approx((len(ranks) - 1) * part / (own.per_host * 50e9), rel=0.01)
