"""The layer chart in CONTRIBUTING is the contract that import-linter holds."""

from __future__ import annotations

import tomllib

import pages


def test_the_chart_is_the_contract() -> None:
    pyproject = tomllib.loads((pages.ROOT / "pyproject.toml").read_text())
    contracts = pyproject["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    charts = [block for block in pages.blocks(pages.ROOT / "CONTRIBUTING.md") if block.text.startswith("cli")]
    drawn = [line.split("  ")[0].strip() for line in charts[0].text.splitlines()]
    assert drawn == layers
