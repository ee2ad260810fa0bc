"""Trees of switches: which level a mesh axis runs at, by hand and against every group, and their files."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meshweave.base.errors import DescriptionError, LayoutError
from meshweave.cost.machine import Machine
from meshweave.cost.placed import Link
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.describe.machine.links import CommConstants, NetworkAxis
from meshweave.describe.machine.tree import TreeLevel, TreeNetwork

LEAF, SPINE, CORE = NetworkAxis("leaf", 10e9), NetworkAxis("spine", 5e9, 1e-6), NetworkAxis("core", 4e9, 2e-6)
THIN = TreeNetwork((TreeLevel(4, LEAF), TreeLevel(2, SPINE), TreeLevel(3, CORE)))

FILE = """
name = "fat"
source = "made up"
[chip]
name = "chip"
peak_flops_per_s = { bfloat16 = 1e12 }
memory_bytes = 16e9
memory_bytes_per_s = 1e11
[network]
kind = "tree"
[[network.levels]]
fanout = 8
axis = { name = "leaf", link_bytes_per_s = 25e9, link_latency_s = 1e-6, ways = 2 }
[[network.levels]]
fanout = 4
links = 2
[network.levels.axis]
name = "spine"
link_bytes_per_s = 10e9
[network.levels.axis.constants]
all_gather = { bytes_per_s = 15e9, sync_s = 5e-6, launch_s = 1e-5 }
"""


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ((6, 4), ["core", "leaf"]),
        ((3, 8), ["core", "spine"]),
        ((12, 2), ["core", "leaf"]),
        ((4, 6), ["core", "core"]),  # six chips are no whole subtrees
        ((24, 1), ["core", "leaf"]),
        ((3, 2, 4), ["core", "spine", "leaf"]),
        ((24,), ["core"]),
    ],
)
def test_a_mesh_axis_runs_at_the_slowest_level_that_it_crosses(
    shape: tuple[int, ...], names: list[str]
) -> None:
    assert shape in THIN.mesh_shapes(len(shape))
    assert [THIN.axis(i, len(shape), shape).name for i in range(len(shape))] == names


def test_parallel_links_add_up() -> None:
    fat = TreeNetwork((TreeLevel(4, LEAF), TreeLevel(2, SPINE, links=4)))
    assert fat.axis(0, 2, (2, 4)) == LEAF  # 20 GB/s above, 10 GB/s below
    wider = TreeNetwork((TreeLevel(4, LEAF), TreeLevel(2, SPINE, links=2)))
    assert wider.axis(0, 2, (2, 4)) == replace(SPINE, link_bytes_per_s=10e9)  # of equals the upper one
    assert wider.axis(1, 2, (2, 4)) == LEAF
    assert wider.levels[1].child_bytes_per_s == 10e9


def test_without_a_shape_the_last_axis_stays_low() -> None:
    assert [THIN.axis(i, 3).name for i in range(3)] == ["core", "core", "leaf"]
    assert THIN.axis(0, 1).name == "core"
    with pytest.raises(LayoutError):
        THIN.axis(0, 2, (5, 5))
    with pytest.raises(LayoutError):
        THIN.mesh_shapes(0)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(1, 3), st.data())
def test_levels_crossed_are_those_of_some_group(
    fanouts: list[int], num_dims: int, data: st.DataObject
) -> None:
    # Each level is slower than the one below, so that the highest one that is crossed is the slowest.
    tree = TreeNetwork(tuple(TreeLevel(n, NetworkAxis(str(i), 1e9 / (i + 1))) for i, n in enumerate(fanouts)))
    assume(tree.num_chips <= 240)
    shape = data.draw(st.sampled_from(tree.mesh_shapes(num_dims)))
    mesh = Mesh.of("tp", shape, ("x", "y", "z")[:num_dims])
    for i, axis in enumerate(mesh.axes):
        crossed = {0}
        for group in mesh.groups(axis):
            crossed |= {
                n for n in range(len(fanouts)) if len({rank // math.prod(fanouts[:n]) for rank in group}) > 1
            }
        assert tree.axis(i, num_dims, shape).name == str(max(crossed))


def test_a_tree_grows_at_the_top() -> None:
    assert [level.fanout for level in THIN.with_chips(40).levels] == [4, 2, 5]
    one = THIN.with_chips(8)
    assert (one.num_chips, one.axis(0, 1).name) == (8, "spine")
    for chips in (4, 20):
        with pytest.raises(DescriptionError, match="multiple of 8"):
            THIN.with_chips(chips)


def test_what_a_tree_cannot_be() -> None:
    with pytest.raises(DescriptionError, match="levels is empty"):
        TreeNetwork(())
    for fanout, links in ((0, 1), (2, 0)):
        with pytest.raises(DescriptionError, match=r"tree level: .* of at least 1"):
            TreeLevel(fanout, LEAF, links)
    with pytest.raises(DescriptionError, match="over the limit of 65,536"):
        TreeNetwork((TreeLevel(2**20, LEAF),) * 2)


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "fat.toml"
    path.write_text(FILE)
    cluster = load_cluster(path)
    network = cluster.network
    assert isinstance(network, TreeNetwork)
    assert [(x.fanout, x.links, x.axis.name) for x in network.levels] == [(8, 1, "leaf"), (4, 2, "spine")]
    assert network.axis(0, 2, (4, 8)).comm("all_gather") == CommConstants(15e9, 5e-6, 1e-5)
    assert network.axis(1, 2, (4, 8)).comm("all_gather") == CommConstants(50e9, 1e-6, 0.0)
    assert hash(cluster) is not None
    assert load_cluster(f"{path}:64").num_chips == 64
    with pytest.raises(DescriptionError, match="multiple of 8"):
        load_cluster(f"{path}:12")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("fanout = 4\n", "", "network.levels.1.fanout: missing; give how many of the level below"),
        ("fanout = 4", "fanout = 0", "network.levels.1.fanout: 0 is not valid; give how many"),
        (
            "fanout = 4",
            "fanout = 16e6",
            "network: tree: has 128,000,000 chips, over the limit of 65,536: give smaller fanouts",
        ),
        ("links = 2", "links = 1.5", "network.levels.1.links: 1.5 is not valid; give the number of parallel"),
        ("links = 2", "link = 2", "network.levels.1.link: unknown key (did you mean 'links'"),
        ("= 10e9", "= -1", "network.levels.1.axis.link_bytes_per_s: -1 is not valid"),
        ("sync_s", "syncs", "network.levels.1.axis.constants.all_gather.syncs: unknown key"),
        (
            'kind = "tree"',
            'kind = "tre"',
            "network.kind: 'tre' is not a kind of network (did you mean 'tree'",
        ),
    ],
)
def test_a_wrong_key_is_named_on_one_line(old: str, new: str, says: str, tmp_path: Path) -> None:
    assert old in FILE
    path = tmp_path / "mine.toml"
    path.write_text(FILE.replace(old, new, 1))
    with pytest.raises(DescriptionError) as caught:
        load_cluster(path)
    assert f"mine.toml: {says}" in str(caught.value)
    assert "\n" not in str(caught.value)


BRIDGE = NetworkAxis("bridge", 40e9, 0.0, 2)
BRIDGED = TreeNetwork((TreeLevel(2, LEAF, 1, BRIDGE), TreeLevel(3, SPINE, 2)))


@pytest.mark.parametrize(
    ("shape", "i", "own", "shared"),
    [
        ((3, 2), 1, ("bridge", 40e9), 20e9),  # two chips: both directions of their ring on one link
        ((3, 2), 0, ("spine", 10e9), 5e9),  # every other chip: two rings share the uplink of a pair
        ((6, 1), 0, ("spine", 10e9), 10e9),  # of equals the upper one
        ((2, 3), 1, ("spine", 10e9), 5e9),  # the pair in the middle has an end of either ring
    ],
)
def test_bridged_pairs(shape: tuple[int, int], i: int, own: tuple[str, float], shared: float) -> None:
    assert BRIDGED.axis(i, 2, shape).name == own[0]
    assert [_axis(BRIDGED, shape, i, by).link_bytes_per_s for by in (False, True)] == [own[1], shared]


def test_links_between_two_chips() -> None:
    assert [BRIDGED.axis_between(0, dst).name for dst in (1, 2, 5)] == ["bridge", "spine", "spine"]
    assert BRIDGED.axis_between(3, 3).name == "leaf"
    four = TreeNetwork((TreeLevel(2, LEAF), TreeLevel(4, SPINE, 1, BRIDGE)))
    assert [four.axis_between(0, dst).name for dst in (1, 2)] == ["leaf", "leaf"]
    quad = TreeNetwork((TreeLevel(4, LEAF, 1, BRIDGE),))
    assert _axis(quad, (2, 2), 0).link_bytes_per_s == 20e9
    assert _axis(quad, (4, 1), 0).link_bytes_per_s == 40e9


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_groups_share_what_their_rings_load(fanouts: list[int], data: st.DataObject) -> None:
    """Against a count of the rings of all groups on every link, where groups are whole subtrees or leave them."""
    levels = tuple(
        TreeLevel(
            n, NetworkAxis(f"up{i}", data.draw(st.integers(1, 99)) * 1e6), data.draw(st.integers(1, 3)),
            NetworkAxis(f"direct{i}", data.draw(st.integers(1, 99)) * 1e6) if data.draw(st.booleans()) else None,
        )
        for i, n in enumerate(fanouts)
    )  # fmt: skip
    tree = TreeNetwork(levels)
    boundaries = [*tree.chips_below, tree.num_chips]
    low, high = sorted(data.draw(st.lists(st.sampled_from(boundaries), min_size=2, max_size=2)))
    assume(low < high)
    shape = (tree.num_chips // high, high // low, low)
    assert _axis(tree, shape, 1).link_bytes_per_s == pytest.approx(_slowest(tree, shape), rel=1e-6)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_groups_that_end_within_subtrees_share_their_links(fanouts: list[int], data: st.DataObject) -> None:
    """A subtree may hold the end of one block of groups and the beginning of the next."""
    rates = data.draw(st.lists(st.integers(1, 99), min_size=3, max_size=3))
    tree = TreeNetwork(
        tuple(TreeLevel(n, NetworkAxis(f"up{i}", rates[i] * 1e6)) for i, n in enumerate(fanouts))
    )
    shape = data.draw(st.sampled_from(tree.mesh_shapes(3)))
    assume(shape[1] > 1)
    assert _axis(tree, shape, 1).link_bytes_per_s == pytest.approx(_slowest(tree, shape), rel=1e-6)


def _axis(tree: TreeNetwork, shape: tuple[int, ...], i: int, shared: bool = True) -> NetworkAxis:
    mesh = Mesh.of("tp", shape, ("x", "y", "z")[: len(shape)])
    machine = Machine(Cluster("box", load_cluster("dgx-a100").chip, tree, "a test"), (mesh,))
    return machine.axis(f"tp.{mesh.axes[i]}", shared)


def _slowest(tree: TreeNetwork, shape: tuple[int, ...]) -> float:
    """Return the least bytes per second that a ring of axis 1 has on a link while all of its groups run."""
    cluster = Cluster("box", load_cluster("dgx-a100").chip, tree, "a test")
    machine = Machine(cluster, (Mesh.of("tp", shape, ("x", "y", "z")),))
    load: Counter[Link] = Counter()
    for group in machine.meshes[0].groups("y"):
        for i, rank in enumerate(group):
            load.update(machine.path(rank, group[(i + 1) % len(group)]))
    return min(machine.weighted_link_rate(link) / count for link, count in load.items())
