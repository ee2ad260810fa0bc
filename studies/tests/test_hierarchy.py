"""Hierarchical communication matrices: views of clusters, and files."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave.base.errors import DescriptionError
from meshweave.cost.machine import mesh_machine
from meshweave.describe.catalog import catalog_text
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.describe.machine.links import CommConstants, NetworkAxis
from meshweave.describe.machine.network import (
    FullMeshNetwork,
    HostsNetwork,
    Network,
    RingNetwork,
    SwitchNetwork,
)
from meshweave.describe.machine.tree import TreeLevel, TreeNetwork
from meshweave.describe.model import load_model
from meshweave.describe.model.workload import Workload
from meshweave_studies.matrix.device_meshes import device_meshes, mesh_bandwidth, rank_meshes
from meshweave_studies.matrix.hierarchy import GivenPairs, MatrixLayer, communication_matrix
from meshweave_studies.matrix.matrix_file import load_cluster_or_matrix, load_matrix
from sampling import examples

CHIP = load_cluster("dgx-a100").chip


def on(network: Network) -> Cluster:
    return Cluster("box", CHIP, network, "a test")


def layers(network: Network) -> list[tuple[str, int, int, int]]:
    """Name, size, bandwidth of the first pair and of a group of each layer, in GB/s."""
    matrix = communication_matrix(on(network))
    return [
        (x.name, x.size, x.p2p_bytes_per_s[0][1] // 10**9, x.group_bytes_per_s[0] // 10**9)
        for x in matrix.layers
    ]


A, B = NetworkAxis("a", 10e9), NetworkAxis("b", 4e9)


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        (SwitchNetwork(A, 5), [("a", 5, 10, 10)]),
        (RingNetwork(A, 5), [("a", 5, 10, 20)]),
        (RingNetwork(A, 2), [("a", 2, 20, 20)]),
        (HostsNetwork(3, 4, A, 2, B), [("b", 3, 8, 8), ("a", 4, 10, 10)]),
        (HostsNetwork(1, 4, A, 2, B), [("a", 4, 10, 10)]),
        (FullMeshNetwork(3, 2, A, B), [("b", 3, 8, 16), ("a", 2, 10, 10)]),
        (TreeNetwork((TreeLevel(2, A, 1, B), TreeLevel(3, B, 2))), [("b", 3, 8, 8), ("b", 2, 4, 4)]),
        (TreeNetwork((TreeLevel(4, A, 1, B),)), [("b", 4, 4, 12)]),
    ],
)
def test_a_matrix_is_read_off_the_network(
    network: Network, expected: list[tuple[str, int, int, int]]
) -> None:
    assert layers(network) == expected


def test_the_torus_of_figure_7b() -> None:
    outer, inner = communication_matrix(load_cluster("atp-ic6")).layers
    assert outer.p2p_bytes_per_s[0] == (0, 100 * 10**9, 0, 100 * 10**9)
    assert inner.p2p_bytes_per_s[1] == (25 * 10**9, 0, 25 * 10**9, 0)
    assert {*outer.group_bytes_per_s} == {200 * 10**9} and {*inner.group_bytes_per_s} == {50 * 10**9}
    flat = communication_matrix(load_cluster("atp-ic6"), (8, 2))
    assert [layer.size for layer in flat.layers] == [8, 2]
    with pytest.raises(DescriptionError, match="has no shape"):
        communication_matrix(load_cluster("atp-ic6"), (8, 3))


def test_calibrated_constants_limit_one_ring() -> None:
    measured = NetworkAxis("a", 10e9, constants=(("all_reduce", CommConstants(3e9, 0, 0)),))
    matrix = communication_matrix(on(TreeNetwork((TreeLevel(4, A), TreeLevel(2, measured)))))
    assert [mesh_bandwidth(matrix, mesh).first_link for mesh in ((8, 1), (4, 2), (2, 4))] == [3e9, 3e9, 2.5e9]


@examples(60)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=3), st.data())
def test_the_view_agrees_with_what_closed_forms_charge(exponents: list[int], data: st.DataObject) -> None:
    """Equal where a device's share of a level shrinks upwards: equation 3 looks at no lower level."""
    below, per_device, tree = 1, data.draw(st.integers(100, 1000)) * 10**6, []
    descending = True
    for number, exponent in enumerate(exponents):
        directions = data.draw(st.sampled_from([1, 2]))
        axis = NetworkAxis(str(number), float(per_device * below), 0.0, directions)
        direct = None
        if data.draw(st.integers(0, 4)) == 0 and number == 0:
            direct = NetworkAxis("direct", float(per_device * data.draw(st.integers(1, 9))))
        tree.append(TreeLevel(2**exponent, axis, 1, direct))
        below *= 2**exponent
        before, per_device = per_device, data.draw(st.integers(100, 1000)) * 10**6
        descending &= directions == 1 and (per_device <= before or number == len(exponents) - 1)
    cluster = on(TreeNetwork(tuple(tree)))
    matrix = communication_matrix(cluster)
    for mesh in device_meshes(below):
        machine = mesh_machine(cluster, mesh, ("row", "col"))
        bandwidth = mesh_bandwidth(matrix, mesh) if below > 1 else None
        for name, size in (("row", mesh[0]), ("col", mesh[1])):
            if size == 1 or bandwidth is None:
                continue
            link = bandwidth.first_link if name == "row" else bandwidth.second_link
            assert link is not None
            charged = machine.rate(f"tp.{name}", "all_reduce", shared=True)
            if descending:
                assert int(link) == charged, (mesh, name)


@pytest.mark.parametrize("name", ["atp-ic1", "atp-ic2", "atp-ic3", "atp-ic4", "atp-ic4-flat", "atp-ic6"])
def test_the_view_of_a_catalog_entry_agrees(name: str) -> None:
    cluster = load_cluster(name)
    for mesh in device_meshes(cluster.num_chips):
        machine = mesh_machine(cluster, mesh, ("row", "col"))
        view = communication_matrix(cluster, mesh if name == "atp-ic6" else None)
        bandwidth = mesh_bandwidth(view, mesh)
        for axis, link in (("row", bandwidth.first_link), ("col", bandwidth.second_link)):
            if link is not None:
                assert int(link) == machine.rate(f"tp.{axis}", "all_reduce", shared=True), (mesh, axis)


LAYERS = """
name = "two"
source = "made up"
[[layers]]
name = "nodes"
size = 2
p2p_bytes_per_s = 25e9
group_bytes_per_s = 25e9
[[layers]]
name = "gpus"
p2p_matrix_bytes_per_s = [[0, 50e9], [40e9, 0]]
group_list_bytes_per_s = [60e9, 70e9]
[[measured]]
mesh = [4, 1]
first_bytes_per_s = 3e9
"""


def catalog_file(folder: Path) -> Path:
    path = folder / "box.toml"
    path.write_text(catalog_text("clusters", "atp-ic4"))
    return path


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "two.toml"
    path.write_text(LAYERS)
    matrix = load_matrix(path)
    assert matrix.layers[0] == MatrixLayer.uniform("nodes", 2, 25 * 10**9, 25 * 10**9)
    assert mesh_bandwidth(matrix, (2, 2)).second_link == 40 * 10**9
    assert mesh_bandwidth(matrix, (2, 2)).first_link == Fraction(25 * 10**9, 2)
    bandwidth = mesh_bandwidth(matrix, (4, 1))
    assert (bandwidth.measured, bandwidth.first, bandwidth.first_link) == (True, 3 * 10**9, 45 * 10**8)
    assert load_matrix(f"{catalog_file(tmp_path)}:8").num_devices == 8
    path.write_text('name = "v"\nsource = "s"\ncluster = "atp-ic2"\n')
    view = communication_matrix(load_cluster("atp-ic2"))
    assert load_matrix(path) == replace(view, name="v") and load_matrix("atp-ic2") == view


@examples(60)
@given(st.integers(1, 12), st.integers(0, 5), st.integers(1, 12), st.integers(1, 5), st.booleans())
def test_a_few_numbers_say_what_a_matrix_says(
    size: int, rate: int, members: int, step: int, is_ring: bool
) -> None:
    layer = (MatrixLayer.ring if is_ring else MatrixLayer.uniform)("x", size, *((rate or 1,) * (2 - is_ring)))
    written = GivenPairs(layer.p2p_bytes_per_s)
    assert layer.least_to_others(members, step) == written.least_to_others(members, step)
    assert size == 1 or layer.pairs.least == written.least


@pytest.mark.parametrize("network", [SwitchNetwork(A, 65536), RingNetwork(A, 65536)])
def test_large_layers_are_not_written_out(network: Network) -> None:
    gpt = load_model("gpt3")
    times = rank_meshes(on(network), gpt, Workload(4, 2048))
    assert len(times) == 17 and times[0].total_s > 0
    with pytest.raises(DescriptionError, match="65536 members; a matrix of more than 4096"):
        assert communication_matrix(on(network)).layers[0].p2p_bytes_per_s


def test_a_matrix_file_of_a_cluster_keeps_its_name_and_the_shapes_of_a_torus(tmp_path: Path) -> None:
    path = tmp_path / "measured.toml"
    measured = "[[measured]]\nmesh = [16, 1]\nfirst_bytes_per_s = 3e9\n"
    path.write_text(f'name = "mine"\nsource = "made up"\ncluster = "atp-ic6"\n{measured}')
    source, matrix = load_cluster_or_matrix(path)
    assert matrix.name == "mine" and isinstance(source, Cluster)
    gpt, load = load_model("gpt3"), Workload(4, 2048)
    plain = {time.mesh_shape: time for time in rank_meshes(source, gpt, load)}
    for time in rank_meshes(source, gpt, load, measured=matrix.measured):
        assert time.bandwidth.measured == (time.mesh_shape == (16, 1))
        assert time.bandwidth.measured or time == plain[time.mesh_shape]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("size = 2\n", "", "give a size"),
        ("size = 2", "size = 0", "layers.0.size: 0 is not valid"),
        ("[60e9, 70e9]", "[60e9]", "give a size of at most 4096, or lists of numbers of one size"),
        ("[40e9, 0]", "[40e9]", "a point-to-point matrix is not square"),
        ("[40e9, 0]", "[nan, 0]", "layers.1.p2p_matrix_bytes_per_s.1.0: nan is not valid; give"),
        ("p2p_bytes_per_s = 25e9", "p2p_bytes_per_s = -1", "layers.0.p2p_bytes_per_s: -1 is not valid"),
        ("p2p_bytes_per_s = 25e9\n", "", "give either p2p_bytes_per_s or p2p_matrix_bytes_per_s"),
        ("mesh = [4, 1]", "mesh = [3, 1]", "does not have its 4 devices"),
        ("mesh = [4, 1]", "mesh = [1, 4]", "give first_bytes_per_s where that dimension has more than 1"),
        ("name = \"two\"", "name = \"two\"\ncluster = \"atp-ic2\"", "give either layers or a cluster"),
        ("group_bytes_per_s = 25e9", "group_byte_per_s = 25e9", "did you mean 'group_bytes_per_s'"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_named_on_one_line(old: str, new: str, says: str, tmp_path: Path) -> None:
    assert old in LAYERS
    path = tmp_path / "two.toml"
    path.write_text(LAYERS.replace(old, new, 1))
    with pytest.raises(DescriptionError) as caught:
        load_matrix(path)
    assert says in str(caught.value) and "\n" not in str(caught.value)
