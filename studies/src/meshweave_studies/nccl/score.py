"""Predict the bus bandwidth of collectives across hosts, and score it against published runs of nccl-tests.

The published figures and their sources stand in `meshweave_studies/published/nccl.toml`. Each host is described by
its chip, the number and rate of its NICs, and the latency of its network: that at which the first row of its
table is met. Such a row is of 8 bytes, or of the smallest size that was printed, and is not scored. Sources
without one have no latency but NCCL's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from typing import Any

from meshweave.base.units import to_s
from meshweave.cost.libraries import sized_price
from meshweave.cost.machine import Machine
from meshweave.cost.price import price
from meshweave.describe.files import parse_table
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.describe.machine.network import HostsNetwork
from meshweave.ir.work import Transfer

GOAL = 0.15
"""The share of a published figure within which a prediction is a hit."""
_CLUSTERS = {"a100": "dgx-a100", "h100": "dgx-h100"}
_AXIS = "all.rank"


@dataclass(frozen=True)
class BandwidthRow:
    """A published bus bandwidth and the predicted one, in GB/s of 1e9.

    Attributes:
        counts: whether the row counts; figures that their authors call too low are shown alone.
        algorithm: what the price takes: "ring" or "tree"; "axis" where it knows no algorithm of NCCL.
    """

    source: str
    url: str
    host: str
    num_gpus: int
    kind: str
    bytes: int
    published: float
    predicted: float
    algorithm: str
    counts: bool
    note: str = ""

    @property
    def error(self) -> float:
        """Return the relative error of the prediction."""
        return self.predicted / self.published - 1

    @property
    def is_hit(self) -> bool:
        """Return whether the prediction is within the goal."""
        return abs(self.error) <= GOAL

    def to_json(self) -> dict[str, Any]:
        """Return the row as plain values."""
        return {**asdict(self), "error": round(self.error, 4), "is_hit": self.is_hit}


def cluster_of(source: Mapping[str, Any], latency_s: float = 0.0) -> Cluster:
    """Return the cluster that a source describes, with a latency between hosts in seconds."""
    cluster = load_cluster(_CLUSTERS[source["chip"]])
    network = cluster.network
    assert isinstance(network, HostsNetwork)
    nic = replace(network.nic, link_bytes_per_s=source["nic_bytes_per_s"], link_latency_s=latency_s)
    network = replace(network, num_hosts=source["hosts"], nics_per_host=source["nics"], nic=nic)
    return replace(cluster, name=source["name"], network=network)


def collective_s(cluster: Cluster, kind: str, num_bytes: int) -> float:
    """Return the seconds of a collective among all chips; `num_bytes` is the size that nccl-tests prints."""
    count = cluster.num_chips
    machine = Machine(cluster, (Mesh.of("all", (count,), ("rank",)),))
    part = num_bytes if kind == "all_reduce" else -(-num_bytes // count)
    return to_s(price(Transfer(kind, _AXIS, count, part), machine).total_ps)


def bus_bandwidth(kind: str, num_chips: int, num_bytes: int, seconds: float) -> float:
    """Return the bus bandwidth in GB/s (nccl-tests, doc/PERFORMANCE.md)."""
    rounds = 2 if kind == "all_reduce" else 1
    return rounds * num_bytes * (num_chips - 1) / num_chips / seconds / 1e9


def network_latency_s(source: Mapping[str, Any]) -> float:
    """Return the latency between hosts in seconds at which a source's first row is met; 0 without such a row."""
    if "smallest" not in source:
        return 0.0
    num_bytes, seconds = source["smallest"][0], source["smallest"][1] * 1e-6
    low, high = 0.0, 1e-3
    for _ in range(40):
        middle = (low + high) / 2
        if collective_s(cluster_of(source, middle), source["kind"], num_bytes) < seconds:
            low = middle
        else:
            high = middle
    return round(high, 9)


def published_sources() -> list[dict[str, Any]]:
    """Return the published figures, one table for each source."""
    text = files("meshweave_studies").joinpath("published", "nccl.toml").read_text("utf-8")
    sources: list[dict[str, Any]] = parse_table(text, "nccl.toml", "toml")["sources"]
    return sources


def bandwidth_rows(sources: Sequence[Mapping[str, Any]] | None = None) -> list[BandwidthRow]:
    """Return every published figure beside the predicted one."""
    out = []
    for source in published_sources() if sources is None else sources:
        cluster = cluster_of(source, network_latency_s(source))
        for num_bytes, published in source["rows"]:
            seconds = collective_s(cluster, source["kind"], num_bytes)
            predicted = bus_bandwidth(source["kind"], cluster.num_chips, num_bytes, seconds)
            out.append(
                BandwidthRow(
                    source["name"],
                    source["url"],
                    source["host"],
                    cluster.num_chips,
                    source["kind"],
                    num_bytes,
                    published,
                    round(predicted, 2),
                    _algorithm(cluster, source["kind"], num_bytes),
                    not source.get("too_low", False),
                    source.get("reported_as", ""),
                )
            )
    return out


def _algorithm(cluster: Cluster, kind: str, num_bytes: int) -> str:
    count = cluster.num_chips
    machine = Machine(cluster, (Mesh.of("all", (count,), ("rank",)),))
    part = num_bytes if kind == "all_reduce" else -(-num_bytes // count)
    known = sized_price(machine, _AXIS, kind, count, part)
    return known.algorithm if known else "axis"
