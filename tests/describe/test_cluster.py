"""Clusters: constants and their fallbacks, the meshes a network carries, errors that name the key."""

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave.base.errors import DescriptionError, LayoutError
from meshweave.cost.machine import Machine
from meshweave.cost.placed import Link
from meshweave.describe.catalog import catalog_text
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.chip import Chip
from meshweave.describe.machine.cluster import Cluster, cluster_from, load_cluster
from meshweave.describe.machine.cluster_table import cluster_table
from meshweave.describe.machine.links import CommConstants, NetworkAxis
from meshweave.describe.machine.network import (
    FullMeshNetwork,
    HostsNetwork,
    RingNetwork,
    SwitchNetwork,
    TorusNetwork,
)

FAST, SLOW = NetworkAxis("fast", 100e9), NetworkAxis("slow", 10e9)


def test_small_tpu_has_the_published_constants() -> None:
    cluster = load_cluster("tpu-v4-4x4")
    row, col = cluster.network.axis(0), cluster.network.axis(1)
    assert [a.comm("all_gather").bytes_per_s for a in (row, col)] == [27.472e9, 79.751e9]
    assert [a.comm("reduce_scatter").bytes_per_s for a in (row, col)] == [37.506e9, 63.167e9]
    assert [a.comm("send_recv").bytes_per_s for a in (row, col)] == [38.801e9, 35.224e9]
    assert row.comm("all_gather") == CommConstants(27.472e9, 5e-6, 13e-6)
    assert (row.comm("reduce_scatter").launch_s, row.comm("send_recv").sync_s) == (26e-6, 50e-6)
    assert (cluster.num_chips, cluster.chip.peak("bfloat16")) == (16, 272e12)
    assert cluster.network.mesh_shapes() == ((4, 4),)
    with pytest.raises(DescriptionError, match="tpu-v4-4x4: the torus has the fixed shape"):
        cluster.with_chips(64)


def test_pod() -> None:
    cluster = load_cluster("tpu-v4-pod")
    assert (cluster.num_chips, cluster.chip.effective_flops_per_s) == (256, 249e12)
    assert cluster.network.axis(0).comm("all_gather") == CommConstants(60e9, 6e-6, 100e-6)
    assert cluster.network.axis(1).comm("reduce_scatter").bytes_per_s == 50e9
    assert (32, 8) in cluster.network.mesh_shapes()
    assert (16, 16, 4) in load_cluster("tpu-v4-pod:1024").network.mesh_shapes(3)
    for chips in ("2", "65537", "0"):
        with pytest.raises(DescriptionError, match=r"tpu-v4-pod.*give"):
            load_cluster(f"tpu-v4-pod:{chips}")
    for bad in ("x", "", "-4", "²"):
        with pytest.raises(DescriptionError, match="number of chips"):
            load_cluster(f"tpu-v4-pod:{bad}")
    with pytest.raises(LayoutError, match="4 axes"):
        cluster.network.mesh_shapes(4)


def test_comm_falls_back_in_the_documented_order() -> None:
    ag, rs = CommConstants(1e9, 1e-6, 2e-6), CommConstants(2e9, 1e-6, 2e-6)
    both = NetworkAxis("x", 5e9, 1e-6, 2, (("all_gather", ag), ("reduce_scatter", rs)), 3e-6)
    assert all(both.comm(k) == ag for k in ("all_reduce", "all_to_all"))
    # A kind of one direction takes half the rate of one of both.
    assert all(both.comm(k) == replace(ag, bytes_per_s=0.5e9) for k in ("broadcast", "send_recv"))
    assert both.comm("reduce") == replace(rs, bytes_per_s=1e9)
    assert replace(both, num_directions=1).comm("reduce") == rs
    assert NetworkAxis("x", 5e9, constants=(("reduce_scatter", rs),)).comm("all_gather") == rs
    bare = NetworkAxis("x", 5e9, 1e-6, 2, (), 3e-6)
    assert bare.comm("all_reduce") == CommConstants(10e9, 1e-6, 3e-6)
    for one_direction in ("broadcast", "reduce", "send_recv"):
        assert bare.comm(one_direction) == CommConstants(5e9, 1e-6, 3e-6)
    with pytest.raises(DescriptionError, match="did you mean 'all_gather'"):
        bare.comm("allgather")


@given(st.integers(1, 3000), st.integers(1, 4))
def test_mesh_shapes_are_all_factorisations(chips: int, num_dims: int) -> None:
    shapes = SwitchNetwork(FAST, chips).mesh_shapes(num_dims)
    assert len(set(shapes)) == len(shapes)
    assert all(len(s) == num_dims and math.prod(s) == chips for s in shapes)
    if num_dims == 2:
        assert len(shapes) == sum(chips % d == 0 for d in range(1, chips + 1))


def test_fixed_torus_carries_its_shape_and_the_transposed() -> None:
    torus = TorusNetwork((FAST, SLOW), (2, 8), 16)
    assert torus.mesh_shapes() == ((2, 8), (8, 2))
    assert [torus.axis(i, 2, (2, 8)).name for i in (0, 1)] == ["fast", "slow"]
    assert [torus.axis(i, 2, (8, 2)).name for i in (0, 1)] == ["slow", "fast"]
    assert torus.mesh_shapes(1) == ((16,),)
    assert torus.axis(0, 1) == SLOW  # a ring through all chips goes at the pace of the slowest links
    assert torus.mesh_shapes(3) == ((2, 8, 1), (2, 1, 8), (8, 2, 1), (1, 2, 8), (8, 1, 2), (1, 8, 2))
    with pytest.raises(LayoutError, match="does not carry"):
        torus.axis(0, 2, (4, 4))


def test_cube_folds_into_planes() -> None:
    cube = TorusNetwork((FAST, FAST, SLOW), (2, 3, 5), 30)
    assert set(cube.mesh_shapes(2)) == {(6, 5), (10, 3), (2, 15), (15, 2), (3, 10), (5, 6)}
    assert cube.axis(0, 2, (6, 5)) == FAST
    assert cube.axis(1, 2, (6, 5)) == SLOW


@pytest.mark.parametrize(
    "shape, names",
    [
        ((4, 8), ["nic", "intra"]),
        ((8, 4), ["nic", "intra"]),
        ((2, 16), ["nic", "nic"]),
        ((32, 1), ["nic", "intra"]),
    ],
)
def test_hosts_use_the_nic_only_where_a_group_leaves_the_host(
    shape: tuple[int, int], names: list[str]
) -> None:
    hosts = HostsNetwork(4, 8, NetworkAxis("intra", 300e9), 8, NetworkAxis("nic", 25e9))
    assert [hosts.axis(i, 2, shape).name for i in (0, 1)] == names
    assert [hosts.axis(i).name for i in (0, 1)] == ["nic", "intra"]
    assert hosts.with_chips(8).axis(0).name == "intra"
    assert (hosts.with_chips(64).num_hosts, hosts.with_chips(4).chips_per_host) == (8, 4)
    with pytest.raises(DescriptionError, match="give 8 or 16"):
        hosts.with_chips(13)


@pytest.mark.parametrize("links", [(5e9, 50e9), (50e9, 50e9), (500e9, 50e9)])
@pytest.mark.parametrize("sizes", [(2, 4), (3, 4), (2, 6), (4, 2)])
def test_a_ring_is_no_faster_than_a_link_that_it_crosses(
    links: tuple[float, float], sizes: tuple[int, int]
) -> None:
    inside, outside = (NetworkAxis(name, rate) for name, rate in zip(("in", "out"), links, strict=True))
    chip = load_cluster("p3.8xlarge").chip
    for network in (HostsNetwork(*sizes, inside, 1, outside), FullMeshNetwork(*sizes, inside, outside)):
        for shape, i in product(network.mesh_shapes(3), range(3)):
            if shape[i] == 1:
                continue
            mesh = Mesh.of("tp", shape, ("x", "y", "z"))
            machine = Machine(Cluster("box", chip, network, "a test"), (mesh,))
            load: Counter[Link] = Counter()
            for group in mesh.groups(mesh.axes[i]):
                for src, dst in pairwise((*group, group[0])):
                    load.update(machine.path(src, dst))
            slowest = min(machine.weighted_link_rate(link) / count for link, count in load.items())
            axis = machine.axis(f"tp.{mesh.axes[i]}", shared=True)
            assert axis.link_bytes_per_s == pytest.approx(slowest), (network, shape, i)


@pytest.mark.parametrize("per_host", range(1, 9))
def test_a_nic_is_shared_by_all_groups_that_a_host_has_a_part_of(per_host: int) -> None:
    intra, nic = NetworkAxis("intra", 1e12), NetworkAxis("nic", 1e9)
    chip = load_cluster("p3.8xlarge").chip
    for num_hosts, num_dims in product((2, 3, 4), (1, 2, 3)):
        network = HostsNetwork(num_hosts, per_host, intra, 1, nic)
        for shape, i in product(network.mesh_shapes(num_dims), range(num_dims)):
            ranks = np.arange(network.num_chips).reshape(shape)
            hosts = np.moveaxis(ranks // per_host, i, -1).reshape(-1, shape[i])
            split = [set(group) for group in hosts.tolist() if len(set(group)) > 1]
            most = max(sum(host in group for group in split) for host in range(num_hosts))
            mesh = Mesh.of("tp", shape, ("x", "y", "z")[:num_dims])
            machine = Machine(Cluster("box", chip, network, "a test"), (mesh,))
            axis = machine.axis(f"tp.{mesh.axes[i]}", shared=True)
            assert axis == (replace(nic, link_bytes_per_s=1e9 / most) if most else intra), (shape, i)


def test_a_ring_has_one_direction_where_chips_have_one_port() -> None:
    both = replace(FAST, num_directions=2)
    for make in (lambda: SwitchNetwork(both, 4), lambda: HostsNetwork(2, 4, both, 1, SLOW)):
        with pytest.raises(
            DescriptionError, match=r"axis fast has ways = 2, .* share the one port of a chip; give 1"
        ):
            make()
    assert HostsNetwork(2, 4, FAST, 1, both).nic.num_directions == 2


@pytest.mark.parametrize(
    "network", [RingNetwork(FAST, 8), SwitchNetwork(FAST, 8), TorusNetwork((FAST, FAST), (2, 4), 8)]
)
def test_wrong_mesh_axes(network: Any) -> None:
    for call in (lambda: network.axis(2), lambda: network.axis(0, 2, (3, 3)), lambda: network.mesh_shapes(0)):
        with pytest.raises(LayoutError):
            call()


def test_chip_peak() -> None:
    chip = load_cluster("dgx-a100").chip
    assert chip.peak("float16") == 312e12
    with pytest.raises(DescriptionError, match="did you mean 'float32'"):
        chip.peak("float3")
    with pytest.raises(DescriptionError, match="memory_bytes"):
        Chip("c", (("float32", 1e12),), 1e12, 0, 1e9)


def edited(tmp_path: Path, old: str, new: str) -> Path:
    text = catalog_text("clusters", "tpu-v4-pod")
    assert old in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new, 1))
    return path


@pytest.mark.parametrize(
    "old, new, says",
    [
        (
            "link_bytes_per_s = 50e9",
            "link_bytes_per_s = -1",
            "network.axes.0.link_bytes_per_s: -1 is not valid; give ",
        ),
        (
            "link_bytes_per_s = 50e9",
            "link_bytes_per_s = nan",
            "network.axes.0.link_bytes_per_s: nan is not valid",
        ),
        (
            "link_bytes_per_s = 50e9",
            "link_bytes_per_s = inf",
            "network.axes.0.link_bytes_per_s: inf is not valid",
        ),
        (
            "link_bytes_per_s = 50e9",
            "link_bytes_per_s = 0",
            "network.axes.0.link_bytes_per_s: 0 is not valid",
        ),
        (
            "link_bytes_per_s = 50e9",
            'link_bytes_per_s = "9"',
            "network.axes.0.link_bytes_per_s: '9' is not valid",
        ),
        (
            "link_bytes_per_s",
            "link_byte_per_s",
            "network.axes.0.link_byte_per_s: unknown key (did you mean 'link_",
        ),
        ("link_bytes_per_s = 50e9", "", "network.axes.0.link_bytes_per_s: missing; give bytes per second"),
        (
            "all_gather =",
            "allgather =",
            "network.axes.0.constants.allgather: unknown key (did you mean 'all_gather'",
        ),
        (
            "sync_s = 6e-6",
            "sync_s = -6e-6",
            "network.axes.0.constants.all_gather.sync_s: -6e-06 is not valid",
        ),
        ('name = "tpu-v4-pod"', 'name = "a\\nb"', "name: 'a\\nb' is not valid; give the cluster's name"),
        ("ways = 2", "ways = 3", "network.axes.0.ways: 3 is not valid; give the number of directions"),
        (
            'kind = "torus"',
            'kind = "tours"',
            "network.kind: 'tours' is not a kind of network (did you mean 'torus'",
        ),
        ('kind = "torus"', "", "network.kind: missing; give one of torus, ring, switch, hosts, tree"),
        (
            "bfloat16 =",
            "bfloat61 =",
            "chip.peak_flops_per_s.bfloat61: unknown dtype (did you mean 'bfloat16'",
        ),
        ("memory_bytes =", "memory_byte =", "chip.memory_byte: unknown key (did you mean 'memory_bytes'"),
        ("[chip]", "[chips]", "chips: unknown key (did you mean 'chip'"),
        ("chips = 256", "chips = 3", "network: torus: 3 chips; give a number from 4 to 65536"),
        ("chips = 256", "chips = true", "network.chips: true is not valid"),
        ("reconfigurable = true", "", "network: torus: shape None does not fit"),
    ],
)
def test_a_wrong_key_is_named_on_one_line(old: str, new: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(DescriptionError) as caught:
        load_cluster(edited(tmp_path, old, new))
    message = str(caught.value)
    assert "\n" not in message
    assert f"mine.toml: {says}" in message


def test_a_file_takes_a_number_of_chips_too(tmp_path: Path) -> None:
    path = edited(tmp_path, "chips = 256", "chips = 64.0")
    assert load_cluster(str(path)).num_chips == 64
    assert load_cluster(f"{path}:16").num_chips == 16


def test_all_problems_of_a_cluster_file_come_in_one_error(tmp_path: Path) -> None:
    path = edited(tmp_path, "link_bytes_per_s = 50e9", "link_bytes_per_s = -1")
    text = path.read_text()
    for old, new in (
        ("memory_bytes =", "memory_byte ="),  # both an unknown and a missing key: one problem
        ("bfloat16 =", "bfloat61 ="),
        ("ways = 2", "ways = 3"),
        ("sync_s = 6e-6,", ""),
    ):
        assert old in text
        text = text.replace(old, new, 1)
    path.write_text(text)
    with pytest.raises(DescriptionError) as caught:
        load_cluster(path)
    headline, *problems = str(caught.value).splitlines()
    assert headline == f"{path}: 5 problems"
    for line, says in zip(
        problems,
        [
            "  chip.memory_byte: unknown key (did you mean 'memory_bytes'?); known keys: name, source, ",
            "  chip.peak_flops_per_s.bfloat61: unknown dtype (did you mean 'bfloat16'?); known dtypes: ",
            "  network.axes.0.link_bytes_per_s: -1 is not valid; give bytes per second of one link",
            "  network.axes.0.ways: 3 is not valid; give the number of directions a ring collective uses",
            "  network.axes.0.constants.all_gather.sync_s: missing; give seconds of synchronisation per step",
        ],
        strict=True,
    ):
        assert line.startswith(says)


def test_many_problems_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("".join(f"key_{number} = 1\n" for number in range(50)))
    with pytest.raises(DescriptionError) as caught:
        load_cluster(path)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{path}: 53 problems" and len(lines) == 22 and lines[-1] == "  and 33 more"


def test_more_chips_than_a_torus_has_are_slices_of_equal_size() -> None:
    pod = load_cluster("tpu-v6e")
    assert isinstance(pod.with_chips(128).network, TorusNetwork)
    joined = pod.with_chips(1024).network
    assert isinstance(joined, HostsNetwork)
    assert (joined.num_hosts, joined.chips_per_host, joined.nics_per_host) == (4, 256, 256)
    assert (joined.nic.link_bytes_per_s, joined.intra.link_bytes_per_s) == (12.5e9, 200e9)
    assert cluster_from(cluster_table(pod), "pod.toml").with_chips(1024) == replace(pod, network=joined)
    odd = load_cluster("tpu-v6e:384").network
    assert isinstance(odd, HostsNetwork) and (odd.num_hosts, odd.chips_per_host) == (3, 128)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("tpu-v6e:300", "slices are sold with 1, 4, 8, 16, 32, 64, 128, 256 chips; give 256 or 384"),
        ("tpu-v6e:24", "give 16 or 32"),
        ("tpu-v5e:2", "give 1 or 4"),
        ("tpu-v5e:1000", "give 896 or 1024"),
        ("tpu-v5p:96", "slices are sold with 4, 8, 16, 32, 64 and multiples of 64 chips; give 64 or 128"),
        ("tpu-v7:9300", "give 9216 or 9344"),
        ("tpu-v4:100", "give 64 or 128"),
    ],
)
def test_slices_come_in_the_sizes_that_are_sold(name: str, near: str) -> None:
    with pytest.raises(DescriptionError) as caught:
        load_cluster(name)
    message = str(caught.value)
    chips = name.partition(":")[2]
    assert f"{chips} chips are neither one slice nor several equal ones: " in message and message.endswith(
        near
    )
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "gbit_per_s", "bisection", "all_reduce"),
    [("tpu-v5e", 1600, 1.6e12, 51.2e12), ("tpu-v6e", 3200, 3.2e12, 102.4e12)],
)
def test_links_of_a_pod_are_what_its_maker_adds_up(
    name: str, gbit_per_s: float, bisection: float, all_reduce: float
) -> None:
    """Of 16 x 16 chips; a cut through a torus crosses two links of each row."""
    network = load_cluster(name).network
    assert isinstance(network, TorusNetwork) and network.chips == 256
    assert {axis.num_directions for axis in network.axes} == {2}
    rates = [axis.link_bytes_per_s for axis in network.axes]
    assert rates[0] == rates[1] and 2 * sum(rates) == gbit_per_s * 1e9 / 8
    assert 2 * 16 * rates[0] == bisection and 256 * 2 * sum(rates) == all_reduce


def test_a_slice_of_v5p_has_no_more_chips_than_one_job() -> None:
    assert isinstance(load_cluster("tpu-v5p:6144").network, TorusNetwork)
    joined = load_cluster("tpu-v5p:8960").network
    assert isinstance(joined, HostsNetwork) and (joined.num_hosts, joined.chips_per_host) == (2, 4480)
    with pytest.raises(DescriptionError, match="6208 chips are neither one slice nor several equal ones"):
        load_cluster("tpu-v5p:6208")


def test_every_size_that_is_sold_loads_and_a_part_of_a_slice_is_one_for_programs() -> None:
    for name in ("tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-v7"):
        network = load_cluster(name).network
        assert isinstance(network, TorusNetwork) and network.sizes
        for size in network.sizes:
            assert load_cluster(f"{name}:{size}").num_chips == size
    assert load_cluster("tpu-v6e:64").with_chips(24).num_chips == 24
