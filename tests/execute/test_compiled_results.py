"""The saved table of compiled products: it is generated, and shows what the guide says of it."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
BENCHMARK = runpy.run_path(str(ROOT / "benchmarks" / "jax_compile.py"))
ROWS = json.loads((ROOT / "benchmarks" / "results" / "jax_compile.json").read_text())["programs"]


def test_the_table_is_generated() -> None:
    page = (ROOT / "benchmarks" / "results" / "jax_compile.md").read_text()
    assert page == BENCHMARK["table"](ROWS), "run python benchmarks/jax_compile.py"


def test_every_row_is_a_case() -> None:
    keys = [BENCHMARK["key_of"](row) for row in ROWS]
    assert len(set(keys)) == len(keys) and set(keys) <= set(BENCHMARK["cases"]())
    for row in ROWS:
        problem = BENCHMARK["problem_of"](row["model"], row["layer"])
        assert row["sizes"] == [problem.m, problem.n, problem.k]
        assert row["synchronous"] + row["asynchronous"] + row["fused"] >= row["beside"]
        assert row["expected_s"] >= row["product_s"] > 0 and row["predicted_s"] > 0


def test_emissions_of_meshslice_keep_no_bare_collective_between_products() -> None:
    """Fused gathers and, on v4, rings: what starts between two products has a product beside it."""
    rows = [row for row in ROWS if row["algorithm"] == "meshslice" and row["emission"] in ("fused", "rings")]
    assert rows and all(row["exposed_within"] == 0 for row in rows)
    assert all(row["fused"] == row["beside"] == 5 for row in rows if row["emission"] == "fused")
    assert all(
        row["beside"] >= 8 for row in rows if (row["emission"], row["topology"]) == ("rings", "v4:4x4x1")
    )


def test_plain_gathers_are_synchronous_on_v4() -> None:
    rows = [row for row in ROWS if row["topology"] == "v4:4x4x1" and row["emission"] == "collectives"]
    for row in rows:
        assert row["fused"] == 0 and (row["algorithm"] == "wang" or row["asynchronous"] == 0)
