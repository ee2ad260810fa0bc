"""Optimizers of torch, and what is read of DTensors and drawn into them, on ranks as on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")

from meshweave.execute.ranks.launch import launch  # noqa: E402

HERE = {"PYTHONPATH": str(Path(__file__).parent)}
CLASSES = [name for name in torch.optim.__all__ if name[0].isupper() and name != "Optimizer"]
NOT_RUN = {"SparseAdam": "does not support dense gradients", "LBFGS pipeline": "closure"}


@pytest.mark.gloo
@pytest.mark.parametrize("strategy", ["zero3", pytest.param("pipeline", marks=pytest.mark.slow)])
def test_each_optimizer_of_torch_steps_as_on_one_process(strategy: str) -> None:
    for rows in swept([("torch.optim", name) for name in CLASSES], [strategy], values=False):
        for name, row in zip(CLASSES, rows, strict=True):
            said = NOT_RUN.get(name) or NOT_RUN.get(f"{name} {strategy}")
            outcome, why = row[strategy]
            assert outcome == ("not run" if said else "exact"), (name, strategy, outcome, why)
            assert (said or "") in why


@pytest.mark.gloo
def test_values_are_read_and_drawn_as_on_one_process() -> None:
    for (values,) in swept([], [], values=True):
        assert max(values["off"].values()) < 1e-9, values
        assert values["said"]["a norm over stages"].startswith("UnsupportedError: this Together steps")
        assert "read one value" in values["said"]["one rank reads"], values


def swept(cases: list[tuple[str, str]], strategies: list[str], values: bool) -> list[list[Any]]:
    """What two ranks find of each case and, where asked, of values."""
    payload = {"cases": cases, "strategies": strategies, "values": values}
    return launch("optimizer_rank_functions:sweep", 2, payload, timeout_s=300, env=HERE)
