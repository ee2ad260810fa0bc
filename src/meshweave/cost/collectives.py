"""The time of a collective inside one host: launch, hops, a bandwidth curve, and a switch between two protocols.

Among P chips of which each ends with (or begins with) S bytes, w rounds of P - 1 hops move b = w S (P - 1) /
P bytes in and out of each chip; w is 2 for an all-reduce, else 1. A library has a protocol without waiting
for small sizes and a faster one for large sizes, and takes the better:

    small = launch_s + w (P - 1) hop_s + b / low_latency_bytes_per_s
    large = launch_s + simple_s + w (P - 1) simple_hop_s + ramp_s sqrt(b') + b' / bytes_per_s

with b' = b / ((P - 1) / P)^group_power, since more chips reach more of their links. A pipeline of n chunks
over b bytes takes (n + hops) (latency + b / (n rate)); at the best n that grows with sqrt(b) beside b / rate,
hence `ramp_s`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshweave.describe.machine.kernels import CollectiveConstants

Array = NDArray[np.float64]


def collective_seconds(
    constants: CollectiveConstants, kind: str, num_chips: ArrayLike, num_bytes: ArrayLike
) -> Array:
    """Return the seconds of a collective among `num_chips` chips of one host, of the shape of both arrays.

    Args:
        kind: "all_reduce", which takes two rounds, or any other, such as "all_gather", which takes one.
        num_bytes: the size of nccl-tests: the whole result of an all-gather, the whole input of the others.
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
