"""A cluster of four hosts of eight H100: products are not cut finer than pays."""

from __future__ import annotations

import json
from pathlib import Path

from meshweave.cli.app import run_app

MOST_SLICES = 32


def test_no_product_is_cut_finer_than_pays(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    names = ["--algorithms", "meshslice,collective", "--out", str(out)]
    assert run_app(["plan", "llama-2-70b", "--products", "--cluster", "dgx-h100:32", *names]) == 0
    plan = json.loads(out.read_text())
    layers = [layer for candidate in plan["candidates"] for layer in candidate["layers"]]
    assert max(len(item["slices"]) for layer in layers for item in layer["passes"]) <= MOST_SLICES
    assert all(candidate["utilisation"] < 0.8 for candidate in plan["candidates"])
