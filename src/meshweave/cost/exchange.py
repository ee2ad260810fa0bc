"""The time of a dispatch or a combine: copies of tokens to the ranks of their experts, and what these made back.

Each of T tokens on a rank goes to k of E experts on P ranks, p of them in a host. Libraries differ in what they
send:

    copies    one copy for each expert of a token, straight to its rank (an all-to-all of NCCL)
    ranks     one copy for each rank that has an expert of the token
    hosts     one copy for each host over the NICs, and inside that one for each rank (DeepEP, Hybrid-EP)

A rank that has e of n experts to choose from has one of the k of a token with the probability 1 - C(n - e, k) /
C(n, k). Where a token may go to g of G groups of experts, n = E g / G, and a rank has g / G of that (DeepSeek-AI,
DeepSeek-V3, 2024, section 2.1.2). A host likewise. The ranks of a host send and forward at once:

    units  = (own bytes x sent + bytes between + bytes that arrive) / (multiprocessors x unit_bytes_per_s)
    inside = bytes that arrive / (inside_share x link)
    time   = base_s + hosts x host_s + max(sqrt(units^2 + inside^2), bytes between / (between_share x NIC))

Multiprocessors handle what comes from other hosts twice, since they forward it to the ranks of their host.

`CopyExchange.load` is how many copies the most loaded rank gets over the average: all wait for it. Constants of
DeepEP and of TRT-LLM are fitted by `validation/fit_exchange.py` on measured exchanges, at most four for each op,
and stand in `catalog/exchange.toml`. Those of the all-to-all are ours: no table of measurements has it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any, Literal

from meshweave.base.errors import UnsupportedError, require_known
from meshweave.cost.machine import Machine
from meshweave.describe.files import parse_table
from meshweave.describe.machine.network import HostsNetwork
from meshweave.ir.work import CopyExchange, Transfer

Sends = Literal["copies", "ranks", "hosts"]
_FILE = "exchange.toml"


@dataclass(frozen=True)
class ExchangeConstants:
    """The constants of a dispatch or of a combine; the module docstring has the formula.

    Attributes:
        base_s: seconds of an exchange of no bytes, but for `host_s`.
        host_s: seconds more for each host of several, as ranks wait for counts of tokens from each.
        unit_bytes_per_s: bytes per second that a multiprocessor of the chip sends and receives; 0 for no
            limit.
        inside_share, between_share: shares (0 to 1) of the rates of links inside a host, and of NICs.
        sent: how often a rank's own tokens count as bytes through its multiprocessors.
    """

    base_s: float
    unit_bytes_per_s: float = 0.0
    inside_share: float = 1.0
    between_share: float = 1.0
    sent: float = 1.0
    host_s: float = 0.0


@dataclass(frozen=True)
class DispatchLibrary:
    """A library of dispatch and combine, with what it sends and its constants.

    Attributes:
        sends: one copy of a token for each of its experts ("copies"), for each rank with one of them ("ranks"),
            or for each host and inside that for each rank ("hosts").
        inside, between: (dispatch, combine) constants for ranks of one host, and of several.
        multiprocessors: the units that its kernels take from products that run beside them.
    """

    name: str
    sends: Sends
    inside: tuple[ExchangeConstants, ExchangeConstants]
    between: tuple[ExchangeConstants, ExchangeConstants]
    multiprocessors: int = 0


@lru_cache(maxsize=1)
def libraries() -> dict[str, DispatchLibrary]:
    """Return the dispatch libraries of the catalog by name."""
    table = parse_table((files("meshweave") / "catalog" / _FILE).read_text("utf-8"), _FILE, "toml")
    out = {}
    for name, entry in table["libraries"].items():
        inside, between = (_constants(entry[where]) for where in ("inside", "between"))
        out[name] = DispatchLibrary(name, entry["sends"], inside, between, entry.get("multiprocessors", 0))
    return out


def _constants(entry: dict[str, Any]) -> tuple[ExchangeConstants, ExchangeConstants]:
    return ExchangeConstants(**entry["dispatch"]), ExchangeConstants(**entry["combine"])


def library_of(name: str) -> DispatchLibrary:
    """Return a dispatch library by its name. Raises UnsupportedError if the catalog has none of the name."""
    require_known(name, libraries(), "there is no dispatcher", UnsupportedError, "there are")
    return libraries()[name]


@lru_cache(maxsize=4096)
def chance_of_expert(parts: int, experts: int, chosen: int, groups: int, top_groups: int) -> float:
    """Return the probability that at least one of the experts that a token chooses is on a given rank or host.

    Args:
        parts: number of ranks (or hosts), among which the experts are equally divided.
        experts: number of all experts.
        chosen: number of experts that a token chooses, all equally likely.
        groups, top_groups: number of equal groups of experts, and of those groups that a token may choose from;
            1 and 1 for experts without groups.
    """
    own, among, of_group = experts // parts, experts * top_groups // groups, experts // groups
    if own <= of_group:
        return top_groups / groups * (1 - _missing(among, own, chosen))
    mine, missed = own // of_group, 0.0  # so many groups are its own, of which some are among those chosen
    for count in range(min(mine, top_groups) + 1):
        chance = math.comb(mine, count) * math.comb(groups - mine, top_groups - count)
        missed += chance / math.comb(groups, top_groups) * _missing(among, count * of_group, chosen)
    return 1 - missed


def _missing(among: int, own: int, chosen: int) -> float:
    """Return the probability that none of `chosen` of `among` is one of `own`."""
    if among - own < chosen:
        return 0.0
    return math.comb(among - own, chosen) / math.comb(among, chosen)


@dataclass(frozen=True)
class ExchangeBytes:
    """The bytes of the most loaded rank in an exchange (`ir.work.CopyExchange`: a dispatch or a combine).

    Attributes:
        own: bytes of its own tokens, one copy of each.
        arriving: bytes that it receives over the links inside its host, those that peers of the host pass on
            from other hosts included; of libraries that send to ranks or hosts also the copies that it keeps.
        between: bytes that it receives from other hosts through its NIC.
        hosts: number of hosts that the ranks are on.
    """

    own: float
    arriving: float
    between: float
    hosts: int = 1


def exchange_bytes(work: CopyExchange, per_host: int, hosts: int) -> ExchangeBytes:
    """Return the bytes of the most loaded rank in an exchange over `hosts` hosts with `per_host` ranks each.

    Raises:
        UnsupportedError: the catalog has no library called `work.library`.
    """
    sends, own = library_of(work.library).sends, float(work.tokens * work.part_bytes)
    limits = work.groups, work.top_groups
    if sends == "copies":
        each = own * work.load * work.chosen / work.num_ranks
        return ExchangeBytes(own, each * (per_host - 1), each * per_host * (hosts - 1), hosts)
    arriving = own * work.load * chance_of_expert(work.num_ranks, work.experts, work.chosen, *limits)
    if hosts == 1 or sends == "ranks":
        return ExchangeBytes(own, arriving * per_host, arriving * per_host * (hosts - 1), hosts)
    of_host = chance_of_expert(hosts, work.experts, work.chosen, *limits)
    return ExchangeBytes(own, arriving * work.num_ranks, own * work.load * of_host * (hosts - 1), hosts)


def elements_after_dispatch(work: CopyExchange, item_bytes: int) -> int:
    """Return the number of elements of the tokens that the most loaded rank holds after a dispatch.

    A token counts once on each rank that has one of its experts, its own rank included, however many copies
    the library sends. `item_bytes` are the bytes of an element.
    """
    share = chance_of_expert(work.num_ranks, work.experts, work.chosen, work.groups, work.top_groups)
    return round(work.tokens * work.part_bytes * work.load * share * work.num_ranks) // item_bytes


def bytes_s(
    of: ExchangeConstants, moved: ExchangeBytes, link: float, nic: float, multiprocessors: int
) -> float:
    """Return the seconds of an exchange in which the most loaded rank moves `moved`; see the module docstring.

    Args:
        of: the constants of the library for this op.
        link: bytes per second of a link inside a host.
        nic: bytes per second of a rank's share of a NIC.
        multiprocessors: number of multiprocessors that send and receive; 0 for no limit by them.
    """
    units = 0.0
    if of.unit_bytes_per_s and multiprocessors:
        handled = moved.own * of.sent + moved.between + moved.arriving
        units = handled / (multiprocessors * of.unit_bytes_per_s)
    inside = moved.arriving / (of.inside_share * link)
    idle_s = of.base_s + (moved.hosts * of.host_s if moved.hosts > 1 else 0.0)
    return idle_s + max(math.hypot(units, inside), moved.between / (of.between_share * nic))


def exchange_s(work: CopyExchange, machine: Machine) -> float | None:
    """Return the seconds of an exchange between the ranks of a group of the mesh axis `work.axis`, on hosts.

    None where the network has no hosts, no mesh has the axis, or hosts have different numbers of a group's
    ranks.

    Raises:
        UnsupportedError: the catalog has no library of that name.
    """
    network, span = machine.cluster.network, machine.host_span(work.axis)
    if not isinstance(network, HostsNetwork) or span is None:
        return None
    library = library_of(work.library)
    per_host, hosts = span.per_host, max(work.num_ranks // span.per_host, 1)
    moved = exchange_bytes(work, per_host, hosts)
    constants = (library.between if hosts > 1 else library.inside)[work.kind == "combine"]
    sharing = span.per_host * span.groups_per_host / network.nics_per_host
    nic = network.nic.link_bytes_per_s / max(sharing, 1.0)
    return bytes_s(constants, moved, network.intra.link_bytes_per_s, nic, library.multiprocessors)


def as_all_to_all(work: CopyExchange) -> Transfer:
    """Return an all-to-all in which each rank receives as many bytes as the most loaded one does in `work`.

    It is priced in place of the exchange on networks without hosts, as if all ranks were in one host.

    Raises:
        UnsupportedError: the catalog has no library of that name.
    """
    moved = exchange_bytes(work, work.num_ranks, 1)
    keeps = library_of(work.library).sends != "copies"  # what the rank keeps is among what arrives
    part = math.ceil(moved.arriving / max(work.num_ranks - 1 + keeps, 1))
    return Transfer("all_to_all", work.axis, work.num_ranks, part)
