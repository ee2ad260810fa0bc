"""Fused products of any size: sound, and what they declare."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave.algorithms.fused import ENTRIES, NoChoice
from meshweave.algorithms.fused.product import SUMS
from meshweave.algorithms.universal.problem import UniversalProblem
from meshweave.base.errors import LayoutError
from meshweave.describe.layout import Layout, Shard
from meshweave.describe.layout.mesh import Mesh
from meshweave.execute.numpy import run_numpy
from meshweave.ir.analysis.validate import validate
from sampling import examples

sizes = st.integers(1, 9)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
@given(data=st.data())
@examples(25)
def test_uneven_sizes_are_computed_or_refused(entry: Any, data: st.DataObject) -> None:
    """Parts of unlike sizes, on two to five ranks; only a problem that leaves a rank without any is refused."""
    count = data.draw(st.integers(2, 5), label="number of ranks")
    ranks = data.draw(st.lists(st.integers(0, 6), min_size=count, max_size=count, unique=True), label="ranks")
    mesh = Mesh("ring", (count,), ("members",), tuple(ranks))
    placements = data.draw(st.sampled_from(entry.accepted), label="placements")
    a, b, c = (Layout(mesh, (placement,)) for placement in placements)
    order = data.draw(st.sampled_from([None, (1, 0)]), label="order of b")
    m, n, k = (data.draw(sizes, label=name) for name in "mnk")
    problem = UniversalProblem(m, n, k, a, b, c, orders=(None, order, None))
    if entry.refusal(problem) is not None:
        cut = [(m, n, k)[dim] for dim in entry.cut_dims]
        assert any(-(-size // count) * (count - 1) >= size for size in cut)
        return
    config = data.draw(st.sampled_from(list(entry.candidates(problem))), label="config")
    program = entry.program(problem, config)
    assert all(note.startswith("deadlocks of ready-first") for note in validate(program).skipped)
    inputs = entry.random_inputs(problem)
    outputs = run_numpy(program, inputs, seed=data.draw(st.integers(0, 9), label="seed")).outputs
    for tensor, value in entry.reference(problem, inputs).items():
        np.testing.assert_array_equal(outputs[tensor], value)


def test_folded_operands_are_refused() -> None:
    """A dim of an activation that is folded into rows is no dim of the matrix, though its number may be one."""
    mesh = Mesh.of("tp", (2,), ("x",))
    a, b, c = (Layout(mesh, (placement,)) for placement in SUMS[1])
    folded = Layout(mesh, (Shard(1),), ((3, 2), (4,)))
    for entry in (entry for entry in ENTRIES if entry.accepted == SUMS):
        assert entry.refusal(UniversalProblem(6, 4, 4, a, b, c)) is None
        with pytest.raises(LayoutError, match="it takes A sharded by columns"):
            entry.program(UniversalProblem(6, 4, 4, folded, b, c), NoChoice())
