"""Flows of rings over the links of a torus, and the rates that kinds of traffic leave each other."""

from __future__ import annotations

from collections import Counter
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshweave as mw
from meshweave.cost.flows import shared_rates, torus_flows
from meshweave.cost.machine import Machine
from meshweave.cost.price import price
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.links import NetworkAxis
from meshweave.describe.machine.network import TorusNetwork
from meshweave.ir.work import Transfer
from sampling import examples


def machine_of(size: int, stride: int, chips: int) -> Machine:
    """Return a TPU v4 torus near to a cube, with a mesh whose axis "row" has groups of so many ranks."""
    shape = chips // (size * stride), size, stride, 1
    mesh = Mesh.of("tp", shape, ("outside", "row", "inside", "one"))
    return Machine(mw.load_cluster(f"tpu-v4-pod:{chips}"), (mesh,), logical=True)


@examples(20)
@given(st.sampled_from([8, 16, 64, 128]), st.integers(0, 6), st.integers(0, 6))
def test_flows_are_those_of_the_paths_of_all_messages(chips: int, size: int, stride: int) -> None:
    size, stride = 2 ** (1 + size % 3), 2**stride
    if size * stride > chips:
        size, stride = chips, 1
    machine = machine_of(size, stride, chips)
    (mesh,) = machine.meshes
    groups = np.moveaxis(np.array(mesh.ranks).reshape(mesh.shape), 1, -1).reshape(-1, size)
    counts: Counter[tuple[int, int, int]] = Counter()
    for group in groups.tolist():
        for place, chip in enumerate(group):
            for route, other in ((0, group[(place + 1) % size]), (1, group[place - 1])):
                counts.update(
                    (axis, direction, at) for _, at, axis, direction in machine.path(chip, other, route)
                )
    flows = torus_flows(machine._torus_shape, groups)
    for axis, of_axis in enumerate(flows):
        for way, direction in enumerate((1, -1)):
            assert [counts[axis, direction, chip] for chip in range(chips)] == of_axis[way].tolist()
    assert sum(each.sum() for each in flows) == sum(counts.values())
    assert prod(machine._torus_shape) == chips


def test_groups_whose_messages_share_links_are_priced_at_a_share_of_them() -> None:
    """Groups of eight, eight chips apart, on 4 x 4 x 4: two hops along the second axis, which two groups pass."""
    near, far = machine_of(4, 1, 64), machine_of(8, 8, 64)
    near_rate, far_rate = (each.axis("tp.row", shared=True).link_bytes_per_s for each in (near, far))
    assert (near_rate, far_rate) == (50e9, 25e9)
    assert far.axis("tp.row").link_bytes_per_s == 50e9
    work = Transfer("all_gather", "tp.row", 8, 10**8)
    assert price(work, far).rate_per_s == 50e9 < price(work, far, shares_links=True).rate_per_s


def test_messages_of_two_ranks_go_one_way_and_parts_of_their_collectives_both() -> None:
    """On 4 x 4 x 8, pairs two chips apart: a link carries messages of two pairs, each twice in a collective."""
    pairs = machine_of(2, 2, 128)
    rates = [pairs.axis("tp.row", shared=True, one_way=each).link_bytes_per_s for each in (False, True)]
    assert rates == [12.5e9, 25e9]


def test_links_are_shared_max_min_fairly() -> None:
    def flows(*counts: int) -> dict[str, tuple[float, np.ndarray]]:
        return {"axis 0": (100.0, np.array(counts))}

    assert shared_rates(flows(1, 0), flows(0, 1), (100.0, 100.0)) == (100, 100)
    assert shared_rates(flows(1), flows(1), (100.0, 100.0)) == (50, 50)
    assert shared_rates(flows(1), flows(1), (20.0, 100.0)) == (20, 80)
    assert shared_rates(flows(1), flows(1), (40.0, 60.0)) == (40, 60)
    assert shared_rates(flows(3), flows(1), (30.0, 100.0)) == (25, 25)
    assert shared_rates(flows(1, 1), flows(1, 3), (100.0, 30.0)) == (25, 25)
    assert shared_rates(flows(1), {"port": (1.0, np.ones(1))}, (100.0, 100.0)) == (100, 100)


@pytest.mark.parametrize(("chips", "per_host", "links"), [(16, 1, {"nics"}), (16, 2, {"port", "nics"})])
def test_flows_among_hosts_pass_ports_and_nics(chips: int, per_host: int, links: set[str]) -> None:
    stride = 8 // per_host
    mesh = Mesh.of("tp", (chips // stride, stride), ("row", "inside"))
    machine = Machine(mw.load_cluster(f"dgx-h100:{chips}"), (mesh,), logical=True)
    flows = machine.flows("tp.row")
    assert set(flows) == links
    rate, counts = flows["nics"]
    assert rate == 8 * 50e9 and counts.tolist() == [stride]


TORI = [(2, 4), (4, 4), (8,), (2, 2, 4)]
COLLECTIVE = """program("one")
t = mesh(({a}, {b}), ("a", "b"))
x = scratch(({given}, 1024), "float32", on=t)
y = scratch(({made}, 1024), "float32", on=t)
net = lane()
with t:
    {kind}(y, x, over="t.{axis}", {dim}lane=net)
"""


@examples(100)
@given(
    st.sampled_from(TORI),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from("ab"),
    st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"]),
)
def test_a_collective_on_a_torus_takes_as_long_as_simulated(
    shape: tuple[int, ...], directions: int, rows: int, axis: str, kind: str
) -> None:
    """Pairs, rings of several hops, groups that cross: with rings of one direction and of two."""
    links = tuple(NetworkAxis(name, 1e9, num_directions=directions) for name in "xyz"[: len(shape)])
    chips = prod(shape)
    torus = Cluster("torus", mw.load_cluster("atp-ic1").chip, TorusNetwork(links, shape, chips), "a test")
    size = rows if axis == "a" else chips // rows
    given_, made = {"all_reduce": (1, 1), "all_gather": (1, size), "reduce_scatter": (size, 1)}[kind]
    text = COLLECTIVE.format(
        a=rows, b=chips // rows, given=8192 * given_, made=8192 * made, kind=kind, axis=axis,
        dim="" if kind == "all_reduce" else "dim=0, ",
    )  # fmt: skip
    program = mw.parse(text)
    machine = Machine.of(torus, program, logical=True)
    simulated_s = mw.simulate(program, machine).duration_s
    assert mw.estimate(program, machine).total_s == pytest.approx(simulated_s, rel=0.01)
