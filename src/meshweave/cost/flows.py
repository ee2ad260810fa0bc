"""Who shares which link: how many messages pass each link at once, and the rates that they leave each other.

Links are shared max-min fairly, as a simulation shares them: each message gets an equal share of a link, and what
one cannot use the others have.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meshweave.describe.machine.network import FullMeshNetwork, HostsNetwork, SwitchNetwork
from meshweave.describe.machine.tree import TreeNetwork

Flows = Mapping[str, tuple[float, NDArray[np.int64]]]
"""By kind of link, its bytes per second, and how many messages pass each link of that kind at once."""
Counts = NDArray[np.int64]


def torus_flows(
    shape: tuple[int, ...], groups: NDArray[np.int64], one_way: bool = False
) -> tuple[Counts, ...]:
    """Return, for each axis of a torus, how many messages pass each of its links while all ring groups send.

    Each chip sends one message to the next chip of its ring and one to the previous, on the dimension-ordered
    routes of `PlacedMeshes.path`. Entry [d, c] of an axis' array counts those that leave chip c along the axis,
    forwards (d = 0) or backwards (d = 1).

    Args:
        shape: the sizes of the torus, whose chips are numbered in row-major order.
        groups: the chips of each group in the order of its ring, shape (groups, members).
        one_way: whether chips send to the next chip of their ring alone.
    """
    return _torus_flows(shape, groups.shape, groups.tobytes(), one_way)


@lru_cache(maxsize=256)
def _torus_flows(
    shape: tuple[int, ...], size: tuple[int, ...], chips: bytes, one_way: bool
) -> tuple[Counts, ...]:
    groups = np.frombuffer(chips, dtype=np.int64).reshape(size)
    forth, *back = (
        _message_flows(shape, groups.ravel(), np.roll(groups, ahead, axis=1).ravel(), ahead > 0)
        for ahead in ((-1,) if one_way else (-1, 1))
    )
    return tuple(map(operator.add, forth, back[0])) if back else forth


def _message_flows(
    shape: tuple[int, ...], src: Counts, dst: Counts, back: bool = False
) -> tuple[Counts, ...]:
    """Return how many messages from chips to others pass the links of each axis of a torus, as `torus_flows` does.

    With `back` those halfway around an axis go backwards.
    """
    at, to = list(np.unravel_index(src, shape)), np.unravel_index(dst, shape)
    flows = []
    for axis, length in enumerate(shape):
        ahead = (to[axis] - at[axis]) % length
        if not ahead.any():
            flows.append(np.zeros((2, math.prod(shape)), dtype=np.int64))
            continue
        forth = 2 * ahead < length + 1 - back
        beside = [(each, size) for i, (each, size) in enumerate(zip(at, shape, strict=True)) if i != axis]
        line, lines = np.zeros_like(ahead), 1
        for each, size in beside:
            line, lines = line * size + each, lines * size
        directed = []
        for hops, begin in (
            (np.where(forth, ahead, 0), at[axis]),
            (left := np.where(forth, 0, length - ahead), (at[axis] - left + 1) % length),
        ):
            begin = line * 2 * length + begin
            more, less = (np.bincount(each, minlength=lines * 2 * length) for each in (begin, begin + hops))
            passing = np.cumsum((more - less).reshape(lines, 2, length), axis=None).reshape(lines, 2, length)
            others = [size for _, size in beside]
            directed.append(np.moveaxis(passing.sum(axis=1).reshape(*others, length), -1, axis).ravel())
        flows.append(np.stack(directed))
        at[axis] = to[axis]
    return tuple(flows)


@dataclass(frozen=True)
class TorusLinks:
    """The links of a torus of a shape, with the bytes per second of those along each axis."""

    shape: tuple[int, ...]
    rates: tuple[float, ...]


Switched = SwitchNetwork | HostsNetwork | TreeNetwork | FullMeshNetwork
Links = TorusLinks | Switched


def least_rate(links: Links, groups: Counts, shift: int = 1, both: bool = False) -> float:
    """Return the bytes per second that messages have on the fullest link, infinite where none takes a link.

    Each member sends a message to the one `shift` places on in its group.

    Args:
        groups: the chips of the groups that send at once, shape (groups, members).
        both: whether each sends one to the member before it, too.
    """
    chips = np.ascontiguousarray(groups, dtype=np.int64)
    return _cached_rates(links, chips.shape, chips.tobytes(), (shift,), both)[0]


def step_rates(links: Links, groups: Counts) -> tuple[float, ...]:
    """Return `least_rate` for each step of an all-to-all: in step i all members send to the one i places on."""
    chips = np.ascontiguousarray(groups, dtype=np.int64)
    return _cached_rates(links, chips.shape, chips.tobytes(), tuple(range(1, chips.shape[1])))


@lru_cache(maxsize=1024)
def _cached_rates(
    links: Links, size: tuple[int, ...], chips: bytes, shifts: tuple[int, ...], both: bool = False
) -> tuple[float, ...]:
    groups = np.frombuffer(chips, dtype=np.int64).reshape(size)
    return tuple(_least_rate(links, groups, shift, both) for shift in shifts)


def _least_rate(links: Links, groups: Counts, shift: int, both: bool) -> float:
    src, dst = groups.ravel(), np.roll(groups, -shift, axis=1).ravel()
    if isinstance(links, TorusLinks):
        flows = torus_flows(links.shape, groups) if both else _message_flows(links.shape, src, dst)
        most = [(int(each.max()), rate) for each, rate in zip(flows, links.rates, strict=True)]
    else:
        if both:
            src, dst = np.concatenate((src, dst)), np.concatenate((dst, src))
        apart = src != dst
        taken = _taken(links, src[apart], dst[apart])
        most = [(int(np.unique(on, return_counts=True)[1].max(initial=0)), rate) for on, rate in taken]
    return min((rate / count for count, rate in most if count), default=math.inf)


def _taken(links: Switched, src: Counts, dst: Counts) -> list[tuple[Counts, float]]:
    """Return the links that messages between chips take: for each kind their numbers and bytes per second."""
    match links:
        case TreeNetwork():
            return links.taken(src, dst)
        case HostsNetwork():
            size, nics = links.chips_per_host, links.nics_per_host
            far = src // size != dst // size
            nic, intra = links.nic.link_bytes_per_s, links.intra.link_bytes_per_s
            by_nic = ((each[far] // size * nics + each[far] % size % nics, nic) for each in (src, dst))
            return [*by_nic, (src[~far], intra), (dst[~far], intra)]
        case FullMeshNetwork():
            size = links.chips_per_package
            out = src - src % size + dst % size  # its own package is crossed first
            inside = (src * size + out % size)[src != out], links.inner.link_bytes_per_s
            across = (out * links.num_packages + dst // size)[out != dst], links.link.link_bytes_per_s
            return [inside, across]
        case _:
            return [(each, links.link.link_bytes_per_s) for each in (src, dst)]


def shared_rates(one: Flows, other: Flows, rates: tuple[float, float]) -> tuple[float, float]:
    """Return the bytes per second that each message gets, of two kinds of traffic that run at once.

    Where the links that carry both are too slow, the messages on them share the rate max-min fairly; the slowest
    link sets the result.

    Args:
        one, other: by kind of link, (its bytes per second, how many messages of this traffic pass each such link).
        rates: (bytes per second of a message of `one` while it runs alone, the same of `other`); upper bounds of
            the result, which has the same order.
    """
    first, second = rates
    for name in one.keys() & other.keys():
        capacity, counts = one[name]
        for pair in set(zip(counts.ravel().tolist(), other[name][1].ravel().tolist(), strict=True)):
            if all(pair) and pair[0] * rates[0] + pair[1] * rates[1] > capacity:
                low = 0 if rates[0] < rates[1] else 1
                least = min(rates[low], capacity / sum(pair))
                most = min(rates[1 - low], (capacity - pair[low] * least) / pair[1 - low])
                own = (least, most) if low == 0 else (most, least)
                first, second = min(first, own[0]), min(second, own[1])
    return first, second
