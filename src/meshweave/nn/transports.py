"""How the ranks of a product get operands of others: by messages, or in memory that they share.

`"auto"` is memory shared by the ranks of a host where all ranks of the product are processes of one host, and
messages otherwise. All ranks find out together, at their first product with it. Ranks in different network
namespaces count as ranks of different hosts, whatever they run on: so do containers, and the hosts of a lab, whose
links are there to be used.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from meshweave.base.errors import BindError, UnsupportedError, require_known
from meshweave.cost.rates import RankRates
from meshweave.describe.machine.cluster import load_cluster
from meshweave.execute.memory import RemoteMemory, open_memory
from meshweave.execute.memory.base import Exposure
from meshweave.execute.memory.shared import host_identity, why_unavailable
from meshweave.execute.ranks.agreement import exchange
from meshweave.execute.ranks.blame import ranks_text
from meshweave.execute.torch.context import TorchContext

Transport = Literal["auto", "messages", "shared", "mpi", "symmetric"]
Resolved = Literal["messages", "shared", "mpi", "symmetric"]
TRANSPORTS: tuple[str, ...] = get_args(Transport)

FENCES_S = 150e-6
"""Seconds that the fences of a product in shared memory take; what saves less time does not pay for them."""

_POOL_BYTES = 1 << 20


@cache
def shared_memory_rates() -> RankRates:
    """Return the FLOP/s, bytes/s and latencies assumed for ranks of one host that read each other's memory.

    They hold where the caller describes no machine: the catalog's `local-cpu`, with links as fast as copies
    between processes of one host.
    """
    rates = RankRates.of(load_cluster("local-cpu"))
    return replace(
        rates,
        link_bytes_per_s=6e9,
        link_latency_s=10e-6,
        launch_s=5e-6,
        memory_bytes_per_s=10e9,
        package_bytes_per_s=6e9,
    )


def check_transport(transport: str) -> None:
    """Raise UnsupportedError, which lists the known names, unless `transport` is one of `TRANSPORTS`."""
    require_known(transport, TRANSPORTS, "there is no transport", UnsupportedError, "there are")


class _Memories(dict[tuple[Resolved, tuple[int, ...]], RemoteMemory]):
    """The memory that was opened in a context, by transport and by the ranks that share it."""


class _ResolvedTransports(dict[tuple[int, ...], Resolved]):
    """What "auto" was resolved to, by the ranks of the product."""


def resolve_transport(transport: Transport, ranks: tuple[int, ...], context: TorchContext) -> Resolved:
    """Return the transport that `ranks` use: `transport` itself, or what "auto" is for them.

    That is "shared" where they are processes of one host that can share memory, on CPUs, else "messages".
    Collective among them at their first "auto" in a context.

    Raises:
        UnsupportedError: there is no such transport.
        BindError: other ranks are about to run something else.
        RankLostError, DeadlineError: other ranks are missing or late.
    """
    check_transport(transport)
    if transport != "auto":
        return transport
    if context.device.type != "cpu" or len(ranks) == 1:
        return "messages"
    resolved = context.cache(_ResolvedTransports)
    if ranks not in resolved:
        resolved[ranks] = "shared" if _is_shareable(ranks, context) else "messages"
    return resolved[ranks]


def memory_of(transport: Resolved, ranks: tuple[int, ...], context: TorchContext) -> RemoteMemory:
    """Return the remote memory of a transport other than messages, opened at its first use.

    Collective at that use: among `ranks` for shared memory, among all ranks of the context for the others.

    Raises:
        UnsupportedError: such memory is not available here.
        BindError: some ranks cannot have it.
        RankLostError, DeadlineError: other ranks are missing or late.
    """
    assert transport != "messages"
    memories = context.cache(_Memories)
    key = transport, ranks if transport == "shared" else ()
    if key not in memories:
        among = ranks if transport == "shared" else None
        memories[key] = open_memory(transport, context, pool_bytes=_POOL_BYTES, ranks=among)
    return memories[key]


def _is_shareable(ranks: tuple[int, ...], context: TorchContext) -> bool:
    """Return whether all of `ranks` are processes of one host that can map each other's memory."""
    title = "a product, auto"
    message = json.dumps([title, hashlib.sha256(title.encode()).hexdigest(), _host()])
    answers = exchange(context, ranks, message, "all ranks to choose a transport", topic="a transport")
    answer_of = {rank: json.loads(text) for rank, text in answers.items()}
    if any(answer[0] != title for answer in answer_of.values()):
        ranks_by_title: dict[tuple[str, str], list[int]] = {}
        for rank, (name, digest, *_) in answer_of.items():
            ranks_by_title.setdefault((name, digest), []).append(rank)
        sides = ", ".join(
            f"{ranks_text(group)} {name!r} ({digest[:8]})" for (name, digest), group in ranks_by_title.items()
        )
        raise BindError(f"ranks are about to run different programs: {sides}")
    hosts = {answer[2] for answer in answer_of.values()}
    if len(hosts) > 1 or "" in hosts:
        return False
    try:  # containers of one host may not reach each other's processes
        memory = memory_of("shared", ranks, context)
        memory.expose(Exposure(ranks, [ranks], "a first use of shared memory"))
    except BindError:
        return False
    return True


def _host() -> str:
    """Return what is equal for ranks that may share memory; "" where this rank cannot."""
    if why_unavailable():
        return ""
    return f"{host_identity()[0]} {Path('/proc/self/ns/net').readlink()}"
