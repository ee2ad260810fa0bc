"""Every causal language model of transformers is exact or refused, never wrong, on four ranks.

A few of them run by default with `test_taking.py`, whose ranks have transformers already.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
pytest.importorskip("transformers", reason="transformers is not installed")

SCRIPT = Path(__file__).parents[3] / "validation/architectures.py"
ENOUGH = 120
EXACT = 60


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sweep_of_architectures", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_are_exact_or_refused() -> None:
    script = _script()
    for given in script.options().values():
        rows = script.run([{**case, "options": given} for case in script.cases()])
        bad = [row for row in rows if script.outcome(row) in ("wrong", "crash")]
        assert not bad, bad
        made = {row["kind"] for row in rows if "error" not in row}
        assert len(made) >= ENOUGH, sorted(made)
        exact = {row["kind"] for row in rows if row["strategies"].get("megatron:4", [""])[0] == "exact"}
        assert len(exact) >= EXACT, sorted(exact)
