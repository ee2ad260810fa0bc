"""Contexts of one process, without other ranks."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")

from meshweave.base.errors import UnsupportedError
from meshweave.execute.torch.context import TorchContext


def test_a_context_beside_another_runs_inside_of_its_runs_and_counts_waits_with_it() -> None:
    inner = TorchContext(liveness=False, deadline_s=7.0, cache_bytes=123)
    outer = inner.beside()
    assert (outer.deadline_s, outer.liveness, outer.programs.limit_bytes) == (7.0, None, 123)
    assert outer.waits is None and inner.count_waits() is outer.waits
    with outer.lane_threads.reserve(), inner.lane_threads.reserve():
        pass


@pytest.mark.parametrize("fails_inside", [True, False])
def test_contexts_beside_each_other_break_together(fails_inside: bool) -> None:
    inner = TorchContext(liveness=False)
    outer = inner.beside()
    with (
        pytest.raises(ValueError, match="too bad"),
        (inner if fails_inside else outer).lane_threads.reserve(),
    ):
        raise ValueError("too bad")
    for context in (inner, outer):
        with pytest.raises(UnsupportedError, match=r"this context is broken: .* too bad"):
            context.lane_threads.check()
