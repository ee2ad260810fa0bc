"""LAB.toml: reading and checking the description of a lab."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from meshweave.base.errors import did_you_mean
from meshweave.describe.files import (
    Duration,
    FileModel,
    Name,
    Problem,
    Rate,
    fail_with_all,
    format_value,
    load_table,
    validate_table,
    whole_float_to_int,
)
from meshweave.describe.machine.chip import WORK_KINDS
from meshweave_lab.description import MIN_BURST_BYTES, LabDescription, Link, SwitchLab, TorusLab, TreeLab

MAX_HOSTS = 256
MAX_RANKS = 1024
_MIN_BYTES_PER_S, _MAX_BYTES_PER_S = 12_500, 12_500_000_000


_NumHosts = Annotated[int, BeforeValidator(whole_float_to_int), Field(ge=1, le=MAX_HOSTS)]
_Burst = Annotated[int, BeforeValidator(whole_float_to_int), Field(ge=MIN_BURST_BYTES, le=2**30)]
_Mtu = Annotated[int, BeforeValidator(whole_float_to_int), Field(ge=1280, le=65000)]


class _LabLinkFile(FileModel):
    link_bytes_per_s: Rate | None = Field(None, description="bytes per second of one direction, a number")
    link_bits_per_s: Rate | None = Field(None, description="bits per second of one direction, a number")
    burst_bytes: _Burst | None = Field(
        None, description=f"the token bucket in bytes, {MIN_BURST_BYTES} at least (left out: by the rate)"
    )
    queue_s: Duration = Field(0.005, description="seconds a packet may queue before it is dropped")
    latency_s: Duration = Field(
        100e-6, description="seconds that a small message takes, for the cluster description only"
    )

    def problems(self, key: str) -> list[Problem]:
        """Return what is wrong with the table at `key` although each of its values is valid."""
        problems = _rate_problems(key, "link", self.link_bytes_per_s, self.link_bits_per_s)
        if self.link_bytes_per_s is None and self.link_bits_per_s is None:
            problems.append(Problem(key, "no rate; give link_bytes_per_s or link_bits_per_s"))
        if not 0.001 <= self.queue_s <= 1.0:
            problems.append(
                Problem(f"{key}.queue_s", f"{self.queue_s:g} is not valid; give 0.001 to 1 second")
            )
        return problems

    def link(self) -> Link:
        """Return the link; `problems` must be empty."""
        rate = _bytes_per_s(self.link_bytes_per_s, self.link_bits_per_s)
        assert rate is not None
        return Link(rate, rate, self.burst_bytes, self.queue_s, self.latency_s)


class _LabAxisFile(_LabLinkFile):
    back_bytes_per_s: Rate | None = Field(
        None, description="bytes per second towards lower coordinates, where it differs"
    )
    back_bits_per_s: Rate | None = Field(
        None, description="bits per second towards lower coordinates, where it differs"
    )

    def problems(self, key: str) -> list[Problem]:
        return super().problems(key) + _rate_problems(
            key, "back", self.back_bytes_per_s, self.back_bits_per_s
        )

    def link(self) -> Link:
        link = super().link()
        back = _bytes_per_s(self.back_bytes_per_s, self.back_bits_per_s)
        back = link.bytes_per_s if back is None else back
        return Link(link.bytes_per_s, back, link.burst_bytes, link.queue_s, link.latency_s)


def _bytes_per_s(in_bytes: float | None, in_bits: float | None) -> int | None:
    if in_bytes is not None:
        return round(in_bytes)
    return None if in_bits is None else round(in_bits / 8)


def _rate_problems(key: str, what: str, in_bytes: float | None, in_bits: float | None) -> list[Problem]:
    if in_bytes is not None and in_bits is not None:
        return [Problem(key, f"both {what}_bytes_per_s and {what}_bits_per_s are given; give one of them")]
    given = in_bytes if in_bytes is not None else in_bits
    if given is None or _MIN_BYTES_PER_S <= (given if in_bits is None else given / 8) <= _MAX_BYTES_PER_S:
        return []
    name = f"{what}_{'bytes' if in_bits is None else 'bits'}_per_s"
    return [Problem(f"{key}.{name}", f"{given:g} is not valid; give 100 kbit/s to 100 Gbit/s")]


class _LabSwitchFile(FileModel):
    hosts: _NumHosts = Field(description=f"the number of hosts, 1 to {MAX_HOSTS}")
    ranks_per_host: _NumHosts = Field(1, description=f"the number of ranks of a host, 1 to {MAX_HOSTS}")
    nic: _LabLinkFile = Field(description="a table that describes the link of a host")
    local_bytes_per_s: Rate = Field(
        2.4e9, description="bytes per second inside a host, for the cluster description only"
    )

    def network(self) -> SwitchLab:
        return SwitchLab(self.hosts, self.ranks_per_host, self.nic.link(), self.local_bytes_per_s)


class _LabTorusFile(FileModel):
    shape: list[_NumHosts] = Field(
        description="a list of two sizes, rows and columns", min_length=2, max_length=2
    )
    axes: list[_LabAxisFile] = Field(
        description="a list of two tables, the links between rows and those between columns",
        min_length=2,
        max_length=2,
    )

    def network(self) -> TorusLab:
        return TorusLab(tuple(self.shape), tuple(axis.link() for axis in self.axes))


class _LabRingFile(FileModel):
    hosts: _NumHosts = Field(description=f"the number of hosts, 2 to {MAX_HOSTS}")
    axis: _LabAxisFile = Field(description="a table that describes the links")

    def network(self) -> TorusLab:
        return TorusLab((self.hosts,), (self.axis.link(),))


class _LabTreeFile(FileModel):
    groups: _NumHosts = Field(description=f"the number of leaf bridges, 1 to {MAX_HOSTS}")
    hosts_per_group: _NumHosts = Field(description=f"the number of hosts on each, 1 to {MAX_HOSTS}")
    nic: _LabLinkFile = Field(description="a table that describes the link of a host to its leaf bridge")
    root: _LabLinkFile = Field(description="a table that describes the link of a leaf bridge to the root")
    direct: _LabLinkFile | None = Field(
        None, description="a table that describes the link that any two hosts of a group have besides"
    )

    def network(self) -> TreeLab:
        direct = None if self.direct is None else self.direct.link()
        return TreeLab(self.groups, self.hosts_per_group, self.nic.link(), self.root.link(), direct)


_NetworkFile = _LabSwitchFile | _LabTorusFile | _LabRingFile | _LabTreeFile
_NETWORK_FILES: dict[str, type[_NetworkFile]] = {
    "switch": _LabSwitchFile,
    "torus": _LabTorusFile,
    "ring": _LabRingFile,
    "tree": _LabTreeFile,
}
"""The model of the table `network` for each value of its key `kind`."""


class _LabFile(FileModel):
    name: Name = Field(description="the lab's name, a string of printable characters")
    note: str = Field("", description="what to know before use, a string")
    mtu_bytes: _Mtu = Field(9000, description="the largest packet in bytes, 1280 to 65000")
    flops_per_s: Rate | None = Field(
        None, description="FLOP/s at which compute is paced in each rank (left out: not paced), a number"
    )
    call_flops_per_s: dict[str, Rate] = Field(
        default_factory=dict,
        description="a table of FLOP/s by kind of work, of calls that are paced at a rate of their own",
    )
    network: dict[str, Any] = Field(description="a table that describes the network, with its kind")


def load_lab(path: str | Path) -> LabDescription:
    """Return the description in a LAB.toml (or a JSON file of the same keys).

    Raises:
        DescriptionError: the error lists every problem of the file.
    """
    data = load_table(path)
    top, problems = validate_table(_LabFile, data)
    network: SwitchLab | TorusLab | TreeLab | None = None
    table = data.get("network")
    if isinstance(table, dict):
        network, network_problems = _network(table)
        problems += network_problems
    rates = {} if top is None else top.call_flops_per_s
    problems += [
        Problem(
            f"call_flops_per_s.{kind}",
            f"unknown work{did_you_mean(kind, WORK_KINDS)}; known works: {', '.join(WORK_KINDS)}",
        )
        for kind in rates
        if kind not in WORK_KINDS
    ]
    if rates and top is not None and top.flops_per_s is None:
        problems.append(Problem("call_flops_per_s", "calls are paced only with flops_per_s; give that, too"))
    if top is None or network is None or problems:
        fail_with_all(path, problems)
    return LabDescription(top.name, network, top.mtu_bytes, top.flops_per_s, top.note, tuple(rates.items()))


def _network(table: dict[str, Any]) -> tuple[SwitchLab | TorusLab | TreeLab | None, list[Problem]]:
    """Return the network of the table `network`, or None and all that is wrong with it."""
    kind = table.get("kind")
    if not isinstance(kind, str) or kind not in _NETWORK_FILES:
        what = "missing" if kind is None else f"{format_value(kind)} is not a kind of lab"
        hint = did_you_mean(kind, _NETWORK_FILES) if isinstance(kind, str) else ""
        return None, [Problem("network.kind", f"{what}{hint}; give one of {', '.join(_NETWORK_FILES)}")]
    rest = {key: value for key, value in table.items() if key != "kind"}
    model = _NETWORK_FILES[kind]
    file, problems = validate_table(model, rest, ("network",))
    for key, link_model, link_table in _link_tables(model, rest):
        link, _ = validate_table(link_model, link_table)
        problems += link.problems(key) if link is not None else []
    if file is None or problems:
        return None, problems
    network = file.network()
    num_hosts = network.hosts if isinstance(network, SwitchLab) else network.num_ranks
    if not 2 <= num_hosts <= MAX_HOSTS:
        problems.append(Problem("network", f"{num_hosts} hosts are not a lab; give 2 to {MAX_HOSTS}"))
    elif network.num_ranks > MAX_RANKS:
        problems.append(
            Problem("network", f"{network.num_ranks} ranks are too many; give {MAX_RANKS} at most")
        )
    return network, problems


def _link_tables(
    model: type[_NetworkFile], table: dict[str, Any]
) -> Iterator[tuple[str, type[_LabLinkFile], dict[str, Any]]]:
    """Yield the key path, the model and the value of each table in `table` that describes a link."""
    for key in ("nic", "root", "direct", "axis"):
        if key in model.model_fields and isinstance(table.get(key), dict):
            yield f"network.{key}", _LabAxisFile if key == "axis" else _LabLinkFile, table[key]
    axes = table.get("axes")
    if "axes" in model.model_fields and isinstance(axes, list):
        for number, axis in enumerate(axes):
            if isinstance(axis, dict):
                yield f"network.axes.{number}", _LabAxisFile, axis
