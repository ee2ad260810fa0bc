"""Grouped products of experts by their shapes."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files

import numpy as np
import pytest

from meshweave.cost.calls import with_counts
from meshweave.cost.compute import shape_s
from meshweave.cost.grouped import even_rows, grouped_constants, grouped_s, grouped_seconds
from meshweave.cost.products import product_s
from meshweave.describe.files import parse_table
from meshweave.describe.machine.cluster import load_cluster
from meshweave.ir.work import Compute

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


def test_a_tile_more_than_units_takes_a_wave() -> None:
    of = grouped_constants("H100-SXM5-80GB", "bfloat16")
    assert of is not None
    alone = replace(of, memory_bytes_per_s=1e30, launch_s=0.0, overlap=50.0)
    seconds = [
        grouped_s(alone, (128, 4096, tiles * 128, 1, 1)) for tiles in (of.units - 1, of.units, of.units + 1)
    ]
    whole = replace(alone, units=10**9, flops_per_s=of.flops_per_s * 10**9 / of.units)
    first = [grouped_s(whole, (128, 4096, tiles * 128, 1, 1)) for tiles in (of.units, of.units + 1)]
    assert seconds[1] - seconds[0] < 0.02 * seconds[0]
    assert seconds[2] - first[1] > 1.5 * (seconds[1] - first[0]) + 1e-6


def test_copies_elsewhere_cost_passes_and_tiles_where_experts_are_chosen() -> None:
    of = grouped_constants("B200-SXM", "nvfp4")
    assert of is not None
    rows = even_rows(512, 4096, 1536, 8, 2)
    chosen = replace(
        rows, tokens=np.array([1024.0]), absent=np.array([7680.0]), absent_tiles=np.array([480.0])
    )
    tiles, passes, tokens = (
        float((grouped_seconds(of, chosen) - grouped_seconds(replace(of, **{name: 0.0}), chosen))[0])
        for name in ("absent_tile_s", "absent_passes", "token_passes")
    )
    assert tiles == pytest.approx(of.absent_tile_s * 480 * (24 + 32) / of.units)
    assert passes == pytest.approx(of.absent_passes * 7680 * (4096 + 3 * 1536) * 2 / of.memory_bytes_per_s)
    assert tokens == pytest.approx(of.token_passes * 1024 * 4096 * 2 / of.memory_bytes_per_s)
    assert grouped_seconds(of, chosen) - tiles - passes - tokens == pytest.approx(grouped_seconds(of, rows))


def test_the_catalog_has_libraries_that_ten_constants_describe() -> None:
    chips = parse_table(
        (files("meshweave") / "catalog" / "grouped.toml").read_text("utf-8"), "grouped", "toml"
    )["chips"]
    for of in chips.values():
        for entry in of.values():
            assert len(entry["constants"]) == 2 + 10
            assert entry["held_out_error"] <= 0.15


@pytest.mark.parametrize(("rows", "each", "active"), [(1600, 200, 8), (1593, 200, 8), (5, 1, 5)])
def test_without_constants_all_rows_are_multiplied_expert_by_expert(
    rows: int, each: int, active: int
) -> None:
    chip = load_cluster("tpu-v5e:4").chip
    assert chip.kernels is not None
    of = chip.kernels.product("bfloat16")
    assert of is not None
    call = Compute("call", 0, 1, dtype="bfloat16", call="experts", shape=(rows, 4096, 1024, 8, 2))
    sizes = ((2048, 4096), (4096, 1024))
    expected = sum(product_s(of, each, n, k, 2, active) for n, k in sizes)
    assert shape_s(with_counts(call), chip) == pytest.approx(expected)
