"""The time of a fused attention kernel by its shape, causal or full.

A unit takes a tile of `block` queries of one head and runs over the keys that it may see, `block` at a time
(FlashAttention-2, Dao 2023, section 3). A causal tile i of q sees keys up to its own, (q + 1) / 2 blocks on
average.

    tile    = 4 block width keys / (flops_per_s / units) + tile_s     2 products, 2 FLOPs each
    total   = sum of tiles / units; longest = the tile that sees most keys
    c       = max(total, longest) + tail_share min(total, longest)    units do not end together

Beside that Q, K, V and the result cross the memory: (c^p + m^p)^(1/p), and the clock falls, as with products.
Grouped queries change what memory carries, not the tiles.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshweave.cost.products import slowed
from meshweave.cost.systolic import overlapped
from meshweave.describe.machine.kernels import AttentionConstants

Array = NDArray[np.float64]


def attention_seconds(
    constants: AttentionConstants,
    heads: ArrayLike,
    queries: ArrayLike,
    keys: ArrayLike,
    width: ArrayLike,
    num_bytes: ArrayLike,
    causal: bool,
) -> Array:
    """Return the seconds of forward attention on one chip, in the shape to which numpy broadcasts the sizes.

    Args:
        heads: number of query heads in all sequences of the batch together.
        queries, keys: numbers of queries and of keys in a sequence.
        width: elements of a head.
        num_bytes: bytes of Q, K, V and the result together.
        causal: whether a query sees no later keys; the last query sees all keys.
    """
    of = constants
    heads, queries, keys, width, num_bytes = np.broadcast_arrays(
        *(np.asarray(size, dtype=np.float64) for size in (heads, queries, keys, width, num_bytes))
    )
    tiles, most = np.ceil(queries / of.block), np.ceil(keys / of.block)
    unseen = np.minimum((tiles - 1) / 2, most - 1) if causal else 0.0
    block_s = 4 * of.block * of.block * width * of.units / of.flops_per_s
    total_s = heads * tiles * ((most - unseen) * block_s + of.tile_s) / of.units
    longest_s = most * block_s + of.tile_s
    compute_s = np.maximum(total_s, longest_s) + of.tail_share * np.minimum(total_s, longest_s)
    memory_s = num_bytes / of.memory_bytes_per_s
    return slowed(overlapped(compute_s, memory_s, of.overlap) + of.launch_s, of.slowdown)


@lru_cache(maxsize=1 << 14)
def attention_s(
    constants: AttentionConstants,
    heads: int,
    queries: int,
    keys: int,
    width: int,
    num_bytes: int,
    causal: bool,
) -> float:
    """Return the seconds of one forward attention on one chip; the constants' `launch_s` where a size is 0.

    Args:
        heads: query heads of all sequences of the batch.
        queries, keys: number in a sequence; with `causal`, the last query sees all keys.
        width: elements of a head.
        num_bytes: bytes of Q, K, V and the result.
    """
    if not heads * queries * keys * width:
        return constants.launch_s
    return float(attention_seconds(constants, heads, queries, keys, width, num_bytes, causal))
