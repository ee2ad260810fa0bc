"""Fit the constants of attention and of collectives to measured kernels, by `meshweave.calibrate.kernel_fit`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from meshweave.calibrate.kernel_fit import Array, Free, Hardware, fit_constants
from meshweave.cost.attention import attention_seconds
from meshweave.cost.libraries import collective_seconds
from meshweave.describe.machine.kernels import AttentionConstants, CollectiveConstants


def fit_attention(sizes: Array, seconds: Array, hardware: Hardware, block: int = 64) -> AttentionConstants:
    """Return the constants of causal attention.

    Args:
        sizes: (heads of all sequences, length, head size, bytes of operands and result) of each sample.
        seconds: of each sample.
        block: queries, and keys, of a tile.
    """
    free = {
        "flops_per_s": Free(0.7 * hardware.peak_flops_per_s, hardware.peak_flops_per_s),
        "tile_s": Free(1e-6),
        "launch_s": Free(1e-5),
        "memory_bytes_per_s": Free(0.7 * hardware.memory_bytes_per_s, hardware.memory_bytes_per_s),
        "tail_share": Free(0.5, 1.0),
        "overlap": Free(2.0, least=1.0),
        "slowdown": Free(0.02),
    }
    heads, length, width, num_bytes = sizes.T

    def made(constants: Mapping[str, Any]) -> AttentionConstants:
        return AttentionConstants(units=hardware.units, block=block, **constants)

    def seconds_of(constants: Mapping[str, float]) -> Array:
        return attention_seconds(made(constants), heads, length, length, width, num_bytes, causal=True)

    return made(fit_constants(free, seconds_of, seconds, np.ones_like(seconds)))


def fit_collective(kind: str, chips: Array, num_bytes: Array, seconds: Array) -> CollectiveConstants:
    """Return the constants of one kind of collective on one host.

    Args:
        chips, num_bytes, seconds: of each sample.
    """
    most = float((num_bytes / seconds).max()) * (2 if kind == "all_reduce" else 1)
    free = {
        "launch_s": Free(6e-6),
        "hop_s": Free(1e-6),
        "low_latency_bytes_per_s": Free(most / 6),
        "simple_s": Free(1e-5),
        "simple_hop_s": Free(1e-6),
        "bytes_per_s": Free(most),
        "ramp_s": Free(1e-9),
        "group_power": Free(0.3),
    }

    def seconds_of(constants: Mapping[str, float]) -> Array:
        return collective_seconds(CollectiveConstants(**constants), kind, chips, num_bytes)

    return CollectiveConstants(**fit_constants(free, seconds_of, seconds, np.ones_like(seconds)))
