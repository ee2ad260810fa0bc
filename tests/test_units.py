"""Numbers as people read them."""

from __future__ import annotations

import pytest

from meshweave.base.units import format_bytes, format_s


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.9996, "1 s"),
        (9.996e-4, "1 ms"),
        (9.997e-7, "1 us"),
        (0.9994, "999 ms"),
        (1.5e-3, "1.5 ms"),
        (0, "0 ns"),
    ],
)
def test_a_duration_is_rounded_before_its_unit_is_chosen(seconds: float, text: str) -> None:
    assert format_s(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(999_700_000, "1 GB"), (999_999, "1 MB"), (999_400, "999 kB"), (999.6, "1 kB"), (12, "12 B")],
)
def test_bytes_are_rounded_before_their_unit_is_chosen(count: float, text: str) -> None:
    assert format_bytes(count) == text
