"""Clusters in words, files like an entry, and hosts that are filled in part."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshweave as mw
from meshweave.base.errors import DescriptionError, MeshweaveError
from meshweave.base.outputs import taken_notes
from meshweave.describe.catalog import catalog_text, clusters
from meshweave.describe.machine.cluster import load_cluster
from meshweave.describe.machine.cluster_phrase import usual_host
from meshweave.describe.machine.cluster_table import cluster_table
from meshweave.describe.machine.network import HostsNetwork


def hosts_of(text: str) -> tuple[int, int, int, float]:
    """Return hosts, chips and NICs a host, and the bytes per second of a NIC."""
    network = load_cluster(text).network
    assert isinstance(network, HostsNetwork)
    nic = network.nic.link_bytes_per_s
    return network.num_hosts, network.chips_per_host, network.nics_per_host, nic


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("64 x H100, 8 a host, 8 x 400Gb", (8, 8, 8, 50e9)),
        ("64 H100", (8, 8, 8, 50e9)),
        ("16xA100 PCIe, 4 per node, 2x200Gb/s", (4, 4, 2, 25e9)),
        ("512 x MI300X, 8 x 50GB/s", (64, 8, 8, 50e9)),
        ("128 x GB200", (2, 64, 64, 50e9)),
        ("128 x GB200, 32 a host", (4, 32, 32, 50e9)),
        ("4 x RTX 4090", (1, 4, 1, 12.5e9)),
        ("8 x h20, 1.6Tbps", (1, 8, 8, 200e9)),
        ("4 hosts of 8 H100", (4, 8, 8, 50e9)),
        ("4 nodes of 8 x H100, 2 x 200Gb InfiniBand", (4, 8, 2, 25e9)),
        ("4x8 H100", (4, 8, 8, 50e9)),
        ("4 x 4 x H100, 400Gb/s NDR", (4, 4, 4, 50e9)),
        ("2 servers with 4 A100 PCIe, 1 x 100Gb RoCE NIC", (2, 4, 1, 12.5e9)),
        ("16 x H100, 8/node, 8 x 400Gb Ethernet", (2, 8, 8, 50e9)),
    ],
)
def test_words_mean_hosts(text: str, expected: tuple[int, int, int, float]) -> None:
    assert hosts_of(text) == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("64 x H1000", "did you mean 'H100'"),
        (
            "16 x H100 with InfiniBand",
            "what follows 'H100' is not understood; links stand after a comma, as a rate",
        ),
        ("16 x A100 PCIe over Ethernet", "what follows 'A100 PCIe' is not understood"),
        ("16 x abacus", "give words such as '64 x H100, 8 a host, 8 x 400Gb'"),
        ("64 x H100, 7 a host", "64 chips are not hosts of 7"),
        ("4 hosts of 8 H1000", "did you mean 'H100'"),
        ("0 hosts of 8 H100", "give the number of hosts"),
        ("2 hosts of 0 x H100", "0 chips are not hosts of 0"),
        ("4 hosts of 8 H100, 4 a host", "chips a host are stated twice"),
        ("64 x H100, 8 x 400Gb, 4 x 400Gb", "NICs of a host are stated twice"),
        ("64 x H100, 8 x 400Gb NVLink", "is neither chips a host nor NICs"),
        ("64 x H100, 3 bananas", "'3 bananas' is neither chips a host nor NICs"),
        ("8 x TPU v6e, 2 x 400Gb", "tpu-v6e has no hosts"),
        ("0 x H100", "give at least 1"),
        ("13 x B200", "13 chips do not fill hosts of 8 evenly; give 8 or 16"),
        ("4", "'4' is no number of chips"),
        ("64 x H100, 8 x 0Gb", "network.nic.link_bytes_per_s"),
    ],
)
def test_other_words_are_refused_with_the_form(text: str, why: str) -> None:
    with pytest.raises(DescriptionError, match=re.escape(why)):
        load_cluster(text)


@given(st.text(max_size=40).map(lambda text: f"8{text}"))
def test_any_words_are_a_cluster_or_a_refusal_of_one_line(text: str) -> None:
    try:
        load_cluster(text)
    except MeshweaveError as error:
        assert "\n" not in str(error)


def test_each_chip_has_one_usual_host_that_loads() -> None:
    seen: dict[str, str] = {}
    for name in clusters():
        for line in catalog_text("clusters", name).splitlines():
            if line.startswith("usual_for"):
                for title in re.findall(r'"([^"]+)"', line):
                    assert seen.setdefault(title, name) == name
                    assert usual_host(title)[0] == name
                    size = 4 if name.startswith("tpu") else load_cluster(name).num_chips
                    assert load_cluster(f"{size} x {title}").num_chips == size
    assert len(seen) > 20


def test_a_file_like_an_entry_differs_in_what_it_says(tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "mine.toml"
    file.write_text(
        'name = "mine"\nlike = "p5"\n[network]\nnum_hosts = 4\n[network.nic]\nlink_latency_s = 5e-6\n'
    )
    mine, p5 = cluster_table(load_cluster(file)), cluster_table(load_cluster("p5:32"))
    assert mine.pop("name") == "mine"
    p5.pop("name")
    assert mine["network"]["nic"].pop("link_latency_s") == 5e-6
    p5["network"]["nic"].pop("link_latency_s")
    assert mine == p5


@pytest.mark.parametrize(("like", "why"), [('"p50"', "neither a catalog entry"), ("3", "3 is no name")])
def test_a_file_like_nothing_is_refused(tmp_path, like: str, why: str) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "mine.toml"
    file.write_text(f'name = "mine"\nlike = {like}\n')
    with pytest.raises(DescriptionError, match=re.escape(why)):
        load_cluster(file)


@given(st.sampled_from(["dgx-h100", "gb200-nvl72", "p4d", "pvc-node"]), st.integers(1, 2000))
def test_chips_fill_hosts_evenly_or_are_refused(name: str, chips: int) -> None:
    whole = load_cluster(name)
    try:
        sized = whole.with_chips(chips)
    except DescriptionError:
        return
    assert sized.num_chips == chips
    if isinstance(sized.network, HostsNetwork) and isinstance(whole.network, HostsNetwork):
        before, after = whole.network, sized.network
        assert after.chips_per_host <= before.chips_per_host
        if after.num_hosts > 1:
            assert 2 * after.chips_per_host >= before.chips_per_host
            assert after.num_hosts <= 2 * -(-chips // before.chips_per_host)


def test_hosts_used_in_part_are_said() -> None:
    taken_notes()
    load_cluster("gb200-nvl72:128")
    assert taken_notes() == ["128 chips are 2 hosts with 64 of 72 chips each"]


def test_a_plan_of_words_stands_alone(tmp_path) -> None:  # type: ignore[no-untyped-def]
    made = mw.plan("llama-2-7b", "16 x H800, 8 a host, 8 x 400Gb", batch=16, sequence=2048)
    file = tmp_path / "plan.json"
    made.save(file)
    assert "16 x H800" in mw.tune.load_plan(file).cluster
