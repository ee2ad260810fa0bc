"""The saved table of compiled products: it is generated, and shows what the guide says of it."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
BENCHMARK = runpy.run_path(str(ROOT / "benchmarks" / "jax_compile.py"))
FOUR = ("v4:4x4x1", "v5e:4x4")
"""The topologies of 16 chips, with rings of four."""
ROWS = json.loads((ROOT / "benchmarks" / "results" / "jax_compile.json").read_text())["programs"]


def test_the_table_is_generated() -> None:
    page = (ROOT / "benchmarks" / "results" / "jax_compile.md").read_text()
    assert page == BENCHMARK["table"](ROWS), "run python benchmarks/jax_compile.py"


def test_the_summary_in_the_guide_is_generated() -> None:
    assert BENCHMARK["guide"](ROWS) == BENCHMARK["GUIDE"].read_text(), "run python benchmarks/jax_compile.py"


def test_every_row_is_a_case() -> None:
    keys = [BENCHMARK["key_of"](row) for row in ROWS]
    assert len(set(keys)) == len(keys) and set(keys) <= set(BENCHMARK["cases"]())
    for row in ROWS:
        problem = BENCHMARK["problem_of"](row["topology"], row["model"], row["layer"])
        assert row["sizes"] == [problem.m, problem.n, problem.k]
        assert row["synchronous"] + row["asynchronous"] + row["fused"] >= row["beside"]
        assert row["expected_s"] >= row["product_s"] > 0 and row["predicted_s"] > 0


def test_every_case_is_saved() -> None:
    assert [BENCHMARK["key_of"](row) for row in ROWS] == list(BENCHMARK["cases"]())


def test_fused_gathers_of_meshslice_have_a_product_each_but_the_first_of_either_axis() -> None:
    """Of all products on all topologies: two of eight gathers come before the first product, none between two."""
    rows = [row for row in ROWS if row["emission"] == "fused"]
    assert len(rows) == 24
    assert all((row["synchronous"], row["fused"], row["beside"]) == (2, 6, 6) for row in rows)
    assert all(row["exposed_within"] == 0 for row in rows)


def test_ordered_rings_of_meshslice_run_beside_products_on_v4() -> None:
    """On v4 all but the ring of the first slice along either axis; on v5e at most three more are bare."""
    rows = [row for row in ROWS if row["emission"] == "ordered-rings" and row["topology"] in FOUR]
    for row in rows:
        assert row["asynchronous"] == 24 and row["beside"] + row["exposed_within"] == 18
        assert row["exposed_within"] <= (0 if row["topology"] == "v4:4x4x1" else 3)


def test_rings_in_the_order_of_the_compiler_hide_fewer_steps() -> None:
    beside = {"v4:4x4x1": 11, "v5e:4x4": 3}
    rows = [row for row in ROWS if row["emission"] == "rings" and row["topology"] in FOUR]
    assert all(row["beside"] == beside[row["topology"]] for row in rows)


def test_plain_gathers_are_synchronous_on_v4() -> None:
    rows = [row for row in ROWS if row["topology"] == "v4:4x4x1" and row["emission"] == "collectives"]
    for row in rows:
        assert row["fused"] == 0 and (row["algorithm"] == "wang" or row["asynchronous"] == 0)


def test_plain_gathers_of_meshslice_are_fused_in_part_on_v5e() -> None:
    rows = [row for row in ROWS if row["topology"] == "v5e:4x4" and row["emission"] == "collectives"]
    assert all(
        (row["synchronous"], row["fused"]) == (5, 3) for row in rows if row["algorithm"] == "meshslice"
    )


def _over_collective(topology: str, algorithm: str, emission: str) -> list[float]:
    of = {BENCHMARK["key_of"](row): row["expected_s"] for row in ROWS}
    return [
        seconds / of[(*key[:3], "collective", "collectives")]
        for key, seconds in of.items()
        if key[0] == topology and key[3:] == (algorithm, emission)
    ]


def test_tiles_are_faster_than_whole_gathers_on_16_chips_and_slices_of_k_on_256() -> None:
    for topology in FOUR:
        assert max(_over_collective(topology, "meshslice_tiled", "fused-gathers")) < 1
        assert BENCHMARK["geometric_mean"](_over_collective(topology, "meshslice", "fused")) > 1
    assert max(_over_collective("v5e:16x16", "meshslice", "collectives")) < 1


def test_permutes_on_rings_of_16_are_synchronous() -> None:
    rows = [row for row in ROWS if row["topology"] == "v5e:16x16"]
    rings = [row for row in rows if "rings" in row["emission"] or row["algorithm"] == "wang"]
    assert len(rings) == 24 and all(row["asynchronous"] == row["beside"] == 0 for row in rings)


def test_the_decision_and_the_limits_say_what_the_table_says() -> None:
    docs, mean = ROOT / "docs", BENCHMARK["geometric_mean"]
    decision = (docs / "decisions" / "0103-tiles-of-c-in-place-of-slices-of-k.md").read_text()
    fastest = BENCHMARK["fastest"](ROWS)
    for topology in (*FOUR, "v5e:16x16"):
        tiles = mean(_over_collective(topology, "meshslice_tiled", "fused-gathers"))
        assert f"{tiles:.3f}" in decision or f"tiles {tiles:.2f}" in decision
        said = fastest.split(f"on {topology} ")[1]
        assert said[:5] in decision and (topology == "v5e:16x16" or said.split("alone ")[1][:5] in decision)
    slices = mean(_over_collective("v5e:16x16", "meshslice", "collectives"))
    assert f"slices of K take {slices:.2f} of Collective's time" in decision
    by_key = {BENCHMARK["key_of"](row): row["product_s"] for row in ROWS}
    longer = [
        seconds / by_key[(*key[:3], "collective", "collectives")] - 1
        for key, seconds in by_key.items()
        if key[3:] == ("meshslice", "collectives")
    ]
    assert (
        f"expects up to {max(longer):.0%} more".replace("%", " %")
        in (docs / "guide" / "limits.md").read_text()
    )
