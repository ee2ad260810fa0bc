"""The only unit conversions of the project.

Seconds and bytes per second are floats where people read them. Inside the cost model and the simulator a
duration is an integer number of picoseconds and a rate an integer number of bytes (or FLOPs) per second,
so that equal inputs give equal bytes of output on every machine.
"""

from __future__ import annotations

PS_PER_S = 10**12

GB = 10**9
GIB = 2**30

_DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
}

DTYPES = tuple(_DTYPE_BYTES)

_ROUNDED = 0.9995
"""A unit from which three digits show one of the next: 999.6 ms are `1 s`."""


def dtype_bytes(dtype: str) -> int:
    """Return the size of one element in bytes. Raises KeyError for a dtype that is not in `DTYPES`."""
    return _DTYPE_BYTES[dtype]


def to_ps(seconds: float) -> int:
    """Convert seconds to integer picoseconds, rounded to the nearest."""
    return round(seconds * PS_PER_S)


def to_s(picoseconds: int) -> float:
    """Convert integer picoseconds to seconds."""
    return picoseconds / PS_PER_S


def work_ps(amount: int, rate_per_s: int) -> int:
    """Return the picoseconds that `amount` (bytes or FLOPs) takes at a rate per second, rounded up once."""
    return -(-amount * PS_PER_S // rate_per_s)


def format_s(seconds: float) -> str:
    """Format a duration for people: `12.3 ms`."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= _ROUNDED * scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def format_bytes(count: float) -> str:
    """Format a number of bytes for people in decimal units, as links are rated: `1.5 GB`."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= _ROUNDED * scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"
