"""Results of the MeshSlice authors' own JAX functions beside ours, where a folder with them is named."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax_world import needs_jax, prepare_jax

import meshweave as mw

CHECKOUT = os.environ.get("MESHWEAVE_AUTHORS_JAX", "")
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "jax_authors.py"

pytestmark = [
    needs_jax,
    pytest.mark.skipif(not CHECKOUT, reason="MESHWEAVE_AUTHORS_JAX names no folder with the authors' file"),
]


@pytest.mark.parametrize("dataflow", ["os", "ls", "rs"])
@pytest.mark.parametrize("algorithm", ["collective", "wang", "meshslice"])
def test_results_equal_those_of_the_authors(
    algorithm: str, dataflow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    jax = prepare_jax()
    monkeypatch.syspath_prepend(str(BENCHMARK.parent))
    benchmark = runpy.run_path(str(BENCHMARK))
    mesh = jax.make_mesh(benchmark["MESH"], benchmark["AXES"])
    problem = mw.algorithms.Matmul2dProblem(256, 512, 768, benchmark["MESH"], dataflow)
    a, b = benchmark["operands"](problem, mesh)
    authors = benchmark["authors_module"](Path(CHECKOUT))
    expected = benchmark["theirs"](authors, algorithm, dataflow, mesh)(a, b)
    assert np.array_equal(benchmark["ours"](algorithm, problem, mesh)(a, b), expected)
