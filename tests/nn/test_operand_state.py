"""Operands of products that change before the backward pass, and ranks that are not in their mesh."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
from sections import launched

from shared_launch import SharedLaunch

HERE = {"PYTHONPATH": str(Path(__file__).parent)}
MODULE = "operand_state_rank_functions"
SECTIONS = {
    "operands changed in place": f"{MODULE}:changed",
    "changes that no gradient sees": f"{MODULE}:harmless",
    "ranks outside of the mesh": f"{MODULE}:outside",
    "fused layers under autocast": f"{MODULE}:fused_autocast",
}


@pytest.fixture(scope="module")
def findings(launch_once: SharedLaunch) -> list[dict[str, list[str]]]:
    """One launch for all of them: starting processes is what takes time."""
    return launched(launch_once, "matmul_rank_functions:sections", SECTIONS, HERE)


@pytest.mark.gloo
@pytest.mark.parametrize("section", SECTIONS)
def test_operands_of_products(section: str, findings: list[dict[str, list[str]]]) -> None:
    assert [answer[SECTIONS[section]] for answer in findings] == [[]] * 4
