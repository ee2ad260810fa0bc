"""Grouped products of experts by their shapes."""

from __future__ import annotations

from importlib.resources import files

import numpy as np
import pytest

from meshweave.cost.grouped import even_rows, grouped_constants, grouped_s, grouped_seconds
from meshweave.describe.files import parse_table

SHAPE = (32768, 7168, 2048, 8, 2)


def entries() -> list[tuple[str, str]]:
    """Return the chips and dtypes of the catalog."""
    text = (files("meshweave") / "catalog" / "grouped.toml").read_text("utf-8")
    return [
        (chip, dtype) for chip, of in parse_table(text, "grouped", "toml")["chips"].items() for dtype in of
    ]


@pytest.mark.parametrize(("chip", "dtype"), entries())
def test_times_are_above_those_of_memory_and_grow_with_rows(chip: str, dtype: str) -> None:
    of = grouped_constants(chip, dtype)
    assert of is not None
    seconds = [grouped_s(of, (rows, *SHAPE[1:])) for rows in (64, 1024, 8192, 32768)]
    assert seconds == sorted(seconds)
    assert seconds[0] > 3 * 8 * 7168 * 2048 * of.item_bytes / 1.2e13  # no chip reads weights faster


def test_as_many_rows_of_more_experts_take_longer() -> None:
    of = grouped_constants("H100-SXM5-80GB", "bfloat16")
    assert of is not None
    few, many = (grouped_s(of, (1024, 4096, 1536, experts, 2)) for experts in (4, 64))
    assert many > 1.5 * few


def test_a_loss_of_a_tile_is_that_of_its_padding() -> None:
    of = grouped_constants("H100-SXM5-80GB", "bfloat16")
    assert of is not None
    rows = even_rows(8 * 128, 4096, 1536, 8, 2)
    assert list(rows.tiles[0]) == [64, 32, 16, 8]
    assert np.all(grouped_seconds(of, rows) > 0)


def test_experts_have_no_constants_on_other_chips() -> None:
    assert grouped_constants("TPU-v5e", "bfloat16") is None
