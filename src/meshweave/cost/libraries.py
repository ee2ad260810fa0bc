"""Price a collective as communication libraries run it: inside a host by measured curve, across hosts on all NICs.

On a network of hosts an all-gather, reduce-scatter or all-reduce among chips that share hosts is priced by its
size. Inside a host it takes what was measured there (`collective_seconds`), where the chip has such constants.
Across hosts a library has one ring (or tree) for each NIC that the members of a host own, each carrying its share
of every part, and takes the faster of two algorithms:

    ring: base + hops inside + hops between + moved / min(inside, NICs)
    tree: (sqrt(L) + sqrt(b / rate))^2 for b up to 128 MiB, and L + b / rate + what filling costs at 128 MiB above

S bytes among P chips move w S (P - 1) / P bytes in and out of each chip; w is 2 for an all-reduce, else 1. The
tree, for all-reduce alone, is a chain inside each host and a double binary tree between hosts. A NIC sends 1,
1.5 or 2 times its share of S for 2, 3 or more hosts, and a chain sends it up and down at once. L is the latency
of the tree, b is S. The square is a pipeline of the best number of chunks. Where the chip's switch reduces, a
host does its part of a tree as fast as an all-reduce inside it.

Latencies of a chip with measured collectives are those of NCCL's own model (src/graph/tuning.cc of NCCL 2.18:
`baseLat` and `hwLat`, protocols LL, LL128 and Simple), plus what the NIC's latency exceeds 2.7 us by. Its NICs
reach 96 % of their rate (NVIDIA/nccl-tests, issue 119: 24 of 25 GB/s). Other chips have the latencies and rates
of their links alone. NCCL corrects its trees for sizes up to 128 MiB, hence that limit.

Where hosts have different numbers of a group's members, a library has as many rings as the host with the fewest
can close: NCCL takes the least number of channels over all ranks (src/init.cc, initTransportsRank). Closed forms
know that; simulators have one ring there.

Simulators move messages step by step. A price is therefore given as launch, seconds a step and rate of a ring that
takes as long. Its messages between hosts share a host's NICs evenly. A group with one NIC in each host, or hosts
with one NIC, keep the constants of their axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshweave.base.units import to_ps
from meshweave.cost.machine import Machine
from meshweave.cost.placed import RING_ROUTE, TREE_OF_2_ROUTE, TREE_OF_3_ROUTE, HostSpan
from meshweave.describe.machine.kernels import ChipKernels, CollectiveConstants
from meshweave.describe.machine.network import HostsNetwork

# --- collectives inside one host --------------------------------------------------------------------------

# The time of a collective inside one host: launch, hops, a bandwidth curve, and a switch between two protocols.
#
# Among P chips of which each ends with (or begins with) S bytes, w rounds of P - 1 hops move b = w S (P - 1) /
# P bytes in and out of each chip; w is 2 for an all-reduce, else 1. A library has a protocol without waiting
# for small sizes and a faster one for large sizes, and takes the better:
#
#     small = launch_s + w (P - 1) hop_s + b / low_latency_bytes_per_s
#     large = launch_s + simple_s + w (P - 1) simple_hop_s + ramp_s sqrt(b') + b' / bytes_per_s
#
# with b' = b / ((P - 1) / P)^group_power, since more chips reach more of their links. A pipeline of n chunks
# over b bytes takes (n + hops) (latency + b / (n rate)); at the best n that grows with sqrt(b) beside b / rate,
# hence `ramp_s`.

Array = NDArray[np.float64]


def collective_seconds(
    constants: CollectiveConstants, kind: str, num_chips: ArrayLike, num_bytes: ArrayLike
) -> Array:
    """Return the seconds of a collective among chips of one host; numpy broadcasts `num_chips` and `num_bytes`.

    Args:
        kind: "all_reduce", which goes round the ring twice, or any other, such as "all_gather", which does once.
        num_chips: the number of its members.
        num_bytes: bytes of the whole result of an all-gather, of the whole input of the others (as nccl-tests).
    """
    of = constants
    chips, size = np.broadcast_arrays(
        np.asarray(num_chips, dtype=np.float64), np.asarray(num_bytes, dtype=np.float64)
    )
    rounds = 2 if kind == "all_reduce" else 1
    hops, share = rounds * (chips - 1), np.maximum((chips - 1) / chips, 1e-9)
    moved = rounds * size * share
    small = hops * of.hop_s + moved / of.low_latency_bytes_per_s
    moved = moved / share**of.group_power
    large = of.simple_s + hops * of.simple_hop_s + of.ramp_s * np.sqrt(moved) + moved / of.bytes_per_s
    result: Array = of.launch_s + np.where(chips > 1, np.minimum(small, large), 0.0)
    return result


# --- libraries --------------------------------------------------------------------------------------------

SIZED_KINDS = ("all_gather", "reduce_scatter", "all_reduce")
"""The kinds whose price depends on their size."""

_NIC_SHARE = 0.96
_LONGEST_FILL_BYTES = 128 << 20
_RINGS = ((6.6e-6, 0.6e-6, 2.7e-6, 0.5), (14.0e-6, 1.9e-6, 4.0e-6, 0.92), (8.4e-6, 3.4e-6, 14.0e-6, 1.0))
"""By protocol (LL, LL128, Simple): seconds of the base, of a hop inside and between hosts; share of the rate."""
_USUAL_NIC_S = 2.7e-6
"""The latency of a NIC for which NCCL's constants stand; what a description says beyond it is added to each."""
_TREE = (6.8e-6, 0.6e-6, 5.0e-6)


@dataclass(frozen=True, slots=True)
class SizedPrice:
    """The price of a collective of one size, as of a ring of steps that takes as long.

    `launch_ps` is paid once and `sync_ps` in each step, in picoseconds; `rate` is bytes per second into a chip.
    `algorithm` is "curve" (measured inside a host), "ring" or "tree". `route` says how its messages between
    hosts use the NICs: 0 as any message, or `RING_ROUTE`, `TREE_OF_2_ROUTE`, `TREE_OF_3_ROUTE` of `cost.placed`.
    """

    algorithm: str
    launch_ps: int
    sync_ps: int
    rate: int
    route: int = 0


@dataclass(frozen=True, slots=True)
class _AlgorithmTime:
    algorithm: str
    launch_s: float
    total_s: float
    rate: float
    route: int


def sized_price(
    machine: Machine, axis: str, kind: str, count: int, part_bytes: int, shared: bool = False
) -> SizedPrice | None:
    """Return the price of a collective by its size; None where the constants of the axis are used instead.

    It is None, for example, where the network has no hosts, where a group lies in one host and the chip has no
    measured constants for that, or where a group has one NIC in each of several hosts.

    Args:
        axis: the mesh axis, as "tp.row", or a mesh, as "tp".
        kind: one of `SIZED_KINDS`; any other gives None.
        count: number of members.
        part_bytes: bytes of the largest shard of a member; of an all-reduce the bytes of its whole input.
        shared: whether all groups of the axis communicate at once.
    """
    network = machine.cluster.network
    if kind not in SIZED_KINDS or count < 2 or not part_bytes or not isinstance(network, HostsNetwork):
        return None
    span, kernels = (
        machine.any_host_span(axis) if shared else machine.host_span(axis),
        machine.cluster.chip.kernels,
    )
    if span is None:
        return None
    if -(-count // span.num_hosts) != span.per_host or (not span.fewest and count % span.num_hosts):
        return None  # a part of the axis
    steps = (count - 1) * (2 if kind == "all_reduce" else 1)
    step_bytes = -(-part_bytes // count) if kind == "all_reduce" else part_bytes
    total = part_bytes if kind == "all_reduce" else part_bytes * count
    if span.num_hosts == 1:
        constants = kernels.collective(kind) if kernels else None
        if constants is None or network.intra.has_own_constants(kind):
            return None
        seconds = float(collective_seconds(constants, kind, count, total))
        rates = (constants.bytes_per_s * ((count - 1) / count) ** constants.group_power, math.inf)
        best = _AlgorithmTime("curve", constants.launch_s, seconds, rates[0], 0)
    elif machine.uses_rails(axis) or span.fewest > 1:
        times = _across_hosts(network, kernels, kind, span, count, total, shared)
        best = min(times, key=lambda x: x.total_s)
    else:
        return None
    rate = max(int(min(best.rate, network.intra.link_bytes_per_s)), 1)
    rest = to_ps(best.total_s) - to_ps(best.launch_s) - steps * -(-step_bytes * 10**12 // rate)
    if rest < 0 and best.algorithm == "curve":  # the protocol of small sizes may be faster
        rate, rest = max(int(network.intra.link_bytes_per_s), 1), to_ps(best.total_s) - to_ps(best.launch_s)
        rest -= steps * -(-step_bytes * 10**12 // rate)
    return SizedPrice(best.algorithm, to_ps(best.launch_s), max(rest, 0) // steps, rate, best.route)


def _across_hosts(
    network: HostsNetwork, kernels: ChipKernels | None, kind: str, span: HostSpan, count: int, total: int,
    shared: bool,
) -> Iterator[_AlgorithmTime]:  # fmt: skip
    """Yield what each algorithm takes among `count` chips of several hosts, about `span.per_host` of each."""
    rounds = 2 if kind == "all_reduce" else 1
    ring_kind = "reduce_scatter" if kind == "all_reduce" else kind
    rails = network.nics_per_host / span.groups_per_host
    rails = rails if shared else max(rails, 1.0)
    own = (span.fewest or span.per_host) * network.nics_per_host / network.chips_per_host
    rails = min(rails, max(own, 1.0))
    nics = rails * min(network.nic.comm(ring_kind).bytes_per_s, network.nic.link_bytes_per_s)
    inside = min(network.intra.comm(ring_kind).bytes_per_s, network.intra.link_bytes_per_s)
    measured = None if kernels is None else kernels.collective(ring_kind)
    far, near, launch = network.nic.link_latency_s, network.intra.link_latency_s, network.intra.launch_s
    rings: tuple[tuple[float, float, float, float], ...] = ((launch, near, far, 1.0),)
    tree, ramp_s = (launch, near, far), 0.0
    if measured is not None:
        nics *= _NIC_SHARE
        inside = min(inside, measured.bytes_per_s * (1 - 1 / span.per_host) ** measured.group_power)
        extra = max(far - _USUAL_NIC_S, 0.0)
        rings = tuple((base, hop, net + extra, share) for base, hop, net, share in _RINGS)
        tree, ramp_s = (_TREE[0], _TREE[1], _TREE[2] + extra), measured.ramp_s
    moved = rounds * total * (count - 1) / count
    for base, hop, net, share in rings:
        rate = share * min(inside, nics)
        crossings = 2 * span.num_hosts if kind == "all_reduce" else span.num_hosts - 1
        latency = base + (rounds * (count - 1) - crossings) * hop + crossings * net
        filled = latency + ramp_s * math.sqrt(moved)
        yield _AlgorithmTime("ring", base, filled + moved / rate, rate, RING_ROUTE)
    if kind != "all_reduce":
        return
    host_rate = inside / 2
    constants = kernels.collective(kind) if kernels is not None else None
    if kernels is not None and kernels.switch_reduces and constants is not None:
        share = 1 - 1 / span.per_host
        host_rate = constants.bytes_per_s * share**constants.group_power / (2 * share)
    rate = min(host_rate, nics / {2: 1.0, 3: 1.5}.get(span.num_hosts, 2.0))
    levels = span.num_hosts.bit_length() - 1
    latency = tree[0] + 2 * ((span.per_host - 1) * tree[1] + levels * tree[2])
    fill = 2 * math.sqrt(latency * min(total, _LONGEST_FILL_BYTES) / rate)
    route = {2: TREE_OF_2_ROUTE, 3: TREE_OF_3_ROUTE}.get(span.num_hosts, RING_ROUTE)
    yield _AlgorithmTime("tree", tree[0], latency + fill + total / rate, moved * rate / total, route)
