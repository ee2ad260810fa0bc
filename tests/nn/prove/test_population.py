"""Models of plain torch that differ where reduced copies do not: computed as on one process, or refused for it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")

from meshweave.execute.ranks.launch import launch

HERE = {"PYTHONPATH": f"{Path(__file__).parent}:{Path(__file__).parents[1] / 'parallel'}"}


@pytest.mark.gloo
def test_models_are_exact_or_refused_for_what_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for path in reversed(HERE["PYTHONPATH"].split(":")):
        monkeypatch.syspath_prepend(path)
    from population import POPULATION

    for answers in launch("population:tried", 2, {}, timeout_s=200, env=HERE):
        for name, (_, words) in POPULATION.items():
            said = answers[name]
            assert said == "" if not words else words in said and "\n" not in said, (name, said)


@pytest.mark.gloo
def test_dropout_that_is_set_later_is_refused() -> None:
    for said in launch("population:annealed", 2, {}, timeout_s=100, env=HERE):
        assert "was set to 0.25 after parallelize, which has read 0.5" in said
