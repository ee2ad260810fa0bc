"""LAB.toml: what it means and what is wrong with it; and the wiring, which routes as the simulator does."""

from pathlib import Path

import pytest

from meshweave.base.errors import DescriptionError
from meshweave.cost.machine import Machine
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.network import HostsNetwork, RingNetwork, SwitchNetwork, TorusNetwork
from meshweave.describe.machine.tree import TreeNetwork
from meshweave_lab.description import Link
from meshweave_lab.description_file import load_lab
from meshweave_lab.network.wiring import FABRIC, wire

EXAMPLES = Path(__file__).parents[2] / "examples" / "labs"
SWITCH = 'name = "x"\n[network]\nkind = "switch"\nhosts = 3\nranks_per_host = 2\n[network.nic]\n'
RING = 'name = "x"\n[network]\nkind = "ring"\nhosts = 5\n[network.axis]\nlink_bits_per_s = 8e6\n'
TREE = (
    'name = "x"\n[network]\nkind = "tree"\ngroups = 2\nhosts_per_group = 3\n'
    "nic = { link_bytes_per_s = 4e6 }\nroot = { link_bytes_per_s = 1e6 }\n"
)
BRIDGED = TREE + "direct = { link_bytes_per_s = 8e6 }\n"


def torus(rows, cols, more=""):
    axis = "[[network.axes]]\nlink_bytes_per_s = 1e6\n"
    return f'name = "x"\n[network]\nkind = "torus"\nshape = [{rows}, {cols}]\n{axis}{axis}{more}'


def described(tmp_path, text):
    file = tmp_path / "lab.toml"
    file.write_text(text)
    return load_lab(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = 'x'", r"lab\.toml: network: missing; give a table"),
        (SWITCH.replace("switch", "swich"), r"network\.kind: 'swich' .*did you mean 'switch'.*; give one of"),
        (SWITCH, r"network\.nic: no rate; give link_bytes_per_s or link_bits_per_s"),
        (SWITCH + "link_bits_per_s = 8e6\nlink_bytes_per_s = 1e6", r"network\.nic: both .* give one of them"),
        (SWITCH + "link_mbits = 8", r"network\.nic\.link_mbits: unknown key.*; known keys: "),
        (SWITCH + "link_bits_per_s = 8", r"nic\.link_bits_per_s: 8 is not valid; give 100 kbit/s to"),
        (
            SWITCH + "link_bits_per_s = 8e6\nburst_bytes = 1000",
            r"burst_bytes: 1000 is not valid; .*65536 at least",
        ),
        (
            SWITCH + "link_bits_per_s = 8e6\nqueue_s = 60.0",
            r"nic\.queue_s: 60 is not valid; give 0\.001 to 1",
        ),
        (torus(1, 1), r"network: 1 hosts are not a lab; give 2 to 256"),
        (torus(2, 2, "[[network.axes]]\nlink_bytes_per_s = 1e6"), r"network\.axes: .* a list of two tables"),
        (torus(17, 17), r"network: 289 hosts are not a lab"),
        (RING.replace("5", "0"), r"network\.hosts: 0 is not valid; give the number of hosts"),
        (RING + "back_bits_per_s = 1", r"network\.axis\.back_bits_per_s: 1 is not valid"),
        ("flops_per_s = 0\n" + RING, r"flops_per_s: 0 is not valid; give FLOP/s"),
        ("mtu_bytes = 100\n" + RING, r"mtu_bytes: 100 is not valid; give the largest packet"),
        (TREE + "direct = { link_mbits = 8 }", r"network\.direct\.link_mbits: unknown key"),
        (TREE + "direct = {}", r"network\.direct: no rate; give link_bytes_per_s or link_bits_per_s"),
        (
            RING.replace("[network]", "flops_per_s = 1e9\ncall_flops_per_s = { nrom = 1e8 }\n[network]"),
            r"call_flops_per_s\.nrom: unknown work .did you mean 'norm'.*; known works: attention",
        ),
        (
            RING.replace("[network]", "call_flops_per_s = { norm = 1e8 }\n[network]"),
            r"call_flops_per_s: calls are paced only with flops_per_s; give that, too",
        ),
    ],
)
def test_a_mistake_is_one_line_that_says_what_would_be_right(tmp_path, text, message):
    with pytest.raises(DescriptionError, match=message) as caught:
        described(tmp_path, text)
    assert "\n" not in str(caught.value)


def test_all_mistakes_of_a_file_are_in_one_error(tmp_path):
    text = 'nam = "x"\nmtu_bytes = 100\n' + torus(2, 2).partition("\n")[2].replace("1e6", "1.0", 1)
    with pytest.raises(DescriptionError) as caught:
        described(tmp_path, text + "back_bits_per_s = 5.0\nqueue = 1\n")
    headline, *lines = str(caught.value).splitlines()
    assert headline.endswith("lab.toml: 4 problems")
    keys = [line.strip().partition(":")[0] for line in lines]
    assert keys == ["nam", "mtu_bytes", "network.axes.1.queue", "network.axes.0.link_bytes_per_s"]


def test_the_cluster_of_each_kind(tmp_path):
    network = described(tmp_path, SWITCH + "link_bits_per_s = 80e6").cluster().network
    assert isinstance(network, HostsNetwork)
    assert (network.num_hosts, network.chips_per_host, network.nic.link_bytes_per_s) == (3, 2, 10_000_000)
    alone = SWITCH.replace("ranks_per_host = 2\n", "") + "link_bits_per_s = 80e6"
    assert isinstance(described(tmp_path, alone).cluster().network, SwitchNetwork)
    ring = described(tmp_path, RING + "back_bits_per_s = 4e6").cluster().network
    assert isinstance(ring, RingNetwork)
    assert (ring.size, ring.link.link_bytes_per_s, ring.link.num_directions) == (5, 500_000, 2)
    grid = described(tmp_path, torus(2, 4)).cluster().network
    assert isinstance(grid, TorusNetwork)
    assert (grid.shape, [axis.num_directions for axis in grid.axes]) == ((2, 4), [1, 2])
    tree = described(tmp_path, TREE).cluster().network
    assert isinstance(tree, HostsNetwork)
    assert (tree.intra.link_bytes_per_s, tree.nic.link_bytes_per_s) == (4_000_000, 1_000_000)


def test_direct_links_are_those_of_a_tree(tmp_path):
    lab = described(tmp_path, BRIDGED)
    network = lab.cluster().network
    assert isinstance(network, TreeNetwork)
    rates = [
        (level.fanout, level.axis.link_bytes_per_s, level.direct and level.direct.link_bytes_per_s)
        for level in network.levels
    ]
    assert rates == [(3, 4_000_000, 8_000_000), (2, 1_000_000, None)]
    wiring, machine = wire(lab), Machine(lab.cluster(), (Mesh.of("tp", (6,), ("row",)),))
    routed = {(route.space, route.address): route.interface for route in wiring.routes}
    ends = {
        (port.space, port.interface): other.space
        for cable in wiring.cables
        for port, other in ((cable.a, cable.b), (cable.b, cable.a))
    }
    for src in range(6):
        for dst in {*range(6)} - {src}:
            host, other = wiring.hosts[src], wiring.hosts[dst]
            interface = routed.get((host.name, other.address))
            is_direct = [what for what, *_ in machine.path(src, dst)] == ["direct"]
            assert is_direct == (interface is not None)
            assert not is_direct or ends[host.name, interface] == other.name


def test_calls_have_the_rates_of_the_description(tmp_path):
    text = "flops_per_s = 2e9\ncall_flops_per_s = { norm = 1e8 }\n" + RING
    chip = described(tmp_path, text).cluster().chip
    rates = [chip.flops_per_s("float32", work) for work in ("norm", "attention", "")]
    assert rates == [1e8, 2e9, 2e9]


def test_a_pace_is_the_chips_peak(tmp_path):
    chip = described(tmp_path, "flops_per_s = 2e9\n" + RING).cluster().chip
    assert chip.peak("float32") == chip.peak("bfloat16") == chip.effective_flops_per_s == 2e9


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.toml")), ids=lambda file: file.stem)
def test_the_examples_are_right(file):
    lab = load_lab(file)
    assert lab.name == file.stem
    assert lab.cluster().num_chips == lab.num_ranks == len([r for h in wire(lab).hosts for r in h.ranks])


def follow(wiring, src, dst):
    """The cables from host to host, as ranks of the hosts on the way."""
    routes = {(route.space, route.address): route for route in wiring.routes}
    of = {host.address: host for host in wiring.hosts}
    joined = {frozenset([(c.a.space, c.a.interface), (c.b.space, c.b.interface)]) for c in wiring.cables}
    at, hops = wiring.hosts[src], []
    while at.ranks != (dst,):
        route = routes[at.name, wiring.hosts[dst].address]
        neighbour = of[route.via]
        assert any((at.name, route.interface) in ends and neighbour.name in dict(ends) for ends in joined)
        hops.append((at.ranks[0], route.interface))
        at = neighbour
    return hops


@pytest.mark.parametrize("shape", [(2, 2), (1, 3), (4, 4), (2, 5), (3, 1)])
def test_a_torus_routes_as_the_simulator_believes(tmp_path, shape):
    lab = described(tmp_path, torus(*shape))
    wiring, machine = wire(lab), Machine(lab.cluster(), (Mesh.of("tp", shape, ("row", "col")),))
    for src in range(lab.num_ranks):
        for dst in range(lab.num_ranks):
            believed = [
                (at, f"{('row', 'col')[axis]}{'+' if direction == 1 else '-'}")
                for _, at, axis, direction in machine.path(src, dst)
            ]
            assert follow(wiring, src, dst) == believed


@pytest.mark.parametrize("text", [torus(4, 4), RING, TREE, BRIDGED, SWITCH + "link_bits_per_s = 8e6"])
def test_what_the_kernel_would_refuse(tmp_path, text):
    wiring = wire(described(tmp_path, text))
    ports = [(port.space, port.interface) for cable in wiring.cables for port, _ in cable.ends()]
    assert len(set(ports)) == len(ports)
    assert all(len(interface) <= 15 for _, interface in ports)
    assert {space for space, _ in ports} == set(wiring.spaces)
    assert len({host.address for host in wiring.hosts}) == len(wiring.hosts)
    for host in wiring.hosts:
        assert (host.name, host.interface) in ports
    bridged = {port.bridge for cable in wiring.cables for port, _ in cable.ends() if port.space == FABRIC}
    assert bridged == set(wiring.bridges)


def test_a_bucket_follows_the_rate_within_bounds():
    assert Link(1, 1).bucket_bytes(6_250_000) == 65536
    assert Link(1, 1).bucket_bytes(40_000_000) == 100_000
    assert Link(1, 1).bucket_bytes(500_000_000) == 262144
    assert Link(1, 1, 70_000).bucket_bytes(500_000_000) == 70_000
