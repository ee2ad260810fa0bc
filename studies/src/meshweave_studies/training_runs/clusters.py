"""The clusters on which published runs ran: entries of the catalog, by chips and source of a row."""

from __future__ import annotations

import re
from dataclasses import replace

from meshweave.base.errors import DescriptionError
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.describe.machine.network import HostsNetwork
from meshweave_studies.training_runs.models import NoPredictionError
from meshweave_studies.training_runs.rows import PublishedRun

_CHIPS = re.compile(r"(?:(\d+)\s+(?:x\s+)?)?(\S+)")
_CLUSTERS_OF_CHIPS = (
    (r"a100.*40", "dgx-a100-40gb"),
    (r"a100", "dgx-a100"),
    (r"h100", "dgx-h100"),
    (r"h200", "dgx-h200"),
    (r"gb300", "gb300-nvl72"),
    (r"gb200", "gb200-nvl72"),
    (r"b200", "dgx-b200"),
    (r"b300", "dgx-b300"),
    (r"v5e", "tpu-v5e"),
    (r"v5p", "tpu-v5p"),
    (r"v6e", "tpu-v6e"),
    (r"v4", "tpu-v4"),
)
"""Patterns of a kind of chip, in the order in which they are tried, and the cluster that has it."""
_CLUSTERS_OF_SOURCES = (
    ("torchtitan", "h100", "grand-teton-h100"),
    ("nanotron", "h100", "p5"),
    ("2104.04473", "a100", "selene"),
)
"""Words of a source, kind of chip, and the cluster on which that source ran."""


_OWN_RATES = ("nanotron", "p5", 4, 180e9 / 8)
"""Words of a source that measured its NICs, the name of its cluster, from how many hosts on they carry less than
their peak, and how many bytes per second.

nanotron's runs print the bus bandwidth of an all-reduce over all ranks beside the throughput (column "AllReduce
(GB/s)" of their results, bench_final2_mfu2.csv, in eyao600/Rapid-LLM validation_scripts/huggingface_data): 318 to
436 on 2 hosts, as eight NICs carry; 155 to 219 on 4, 160 to 200 on 8 to 32, and 175 to 178 on 64.
"""


def cluster_of(run: PublishedRun) -> Cluster:
    """Return the cluster of a run, of as many chips. Raises NoPredictionError where the catalog has none."""
    stated = _CHIPS.fullmatch(run.chips.strip().rstrip("?"))
    if stated is None or not stated[1]:
        raise NoPredictionError("the number of chips is not stated")
    count, kind = int(stated[1]), stated[2].lower()
    pods = re.fullmatch(r"v5e-(\d+)", kind)
    if pods:
        count *= int(pods[1])
    name = next(
        (name for word, chip, name in _CLUSTERS_OF_SOURCES if word in run.source and chip in kind), None
    )
    name = name or next((name for pattern, name in _CLUSTERS_OF_CHIPS if re.search(pattern, kind)), None)
    if name is None:
        raise NoPredictionError(f"the catalog has no cluster of {stated[2]}")
    try:
        cluster = load_cluster(name).with_chips(count)
    except DescriptionError as error:
        raise NoPredictionError(str(error)) from None
    network, (word, own, hosts, rate) = cluster.network, _OWN_RATES
    if (
        word not in run.source
        or name != own
        or not isinstance(network, HostsNetwork)
        or network.num_hosts < hosts
    ):
        return cluster
    return replace(cluster, network=replace(network, nic=replace(network.nic, link_bytes_per_s=rate)))
