"""Clocks of ranks: their offsets are found within what is said to be uncertain, and traces move by them."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave.trace import Span, Trace
from meshweave_lab.fidelity.clocks import ClockOffset, align, offset_at

ENV = {"PYTHONPATH": str(Path(__file__).parent)}
SKEWS_NS = [0, 1, -250_000, 3_600 * 10**9, -7 * 10**12]


@pytest.mark.gloo
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_offsets_are_found_within_their_uncertainty(num_ranks):
    """Without skew they are 0, for the processes of a host share the clock."""
    pytest.importorskip("torch")
    from meshweave.execute.ranks.launch import launch

    payload = {"skews_ns": SKEWS_NS}
    ranks = launch("clock_rank_functions:compare", num_ranks, payload, timeout_s=60.0, env=ENV)
    for rank, found in enumerate(ranks):
        for skew_ns, (_, offset_ns, uncertainty_ns) in zip(SKEWS_NS, found, strict=True):
            assert abs(offset_ns - skew_ns * rank) <= uncertainty_ns
            assert uncertainty_ns <= (1_000_000_000 if rank else 0)


@pytest.mark.gloo
def test_a_rank_that_fails_is_named():
    pytest.importorskip("torch")
    from meshweave.execute.ranks.launch import RankError, launch

    payload = {"skews_ns": SKEWS_NS, "dies": 1}
    with pytest.raises(RankError, match=r"^rank 1: KeyError") as caught:
        launch("clock_rank_functions:compare", 2, payload, timeout_s=60.0, env=ENV, stale_s=1.0)
    assert "rank 1 to compare clocks" in caught.value.reports[0]


def test_drift_is_linear_between_measurements_and_what_was_measured_outside():
    offsets = ClockOffset(1000, 50, 1), ClockOffset(2000, 150, 1), ClockOffset(4000, 50, 1)
    times = 0, 1000, 1500, 2000, 3000, 4000, 9000
    assert [offset_at(at, offsets) for at in times] == [50, 50, 100, 150, 100, 50, 50]
    assert offset_at(7, offsets[:1]) == 50 and offset_at(1000, offsets[:1] * 2) == 50


def spans_of(edges):
    starts_and_ends = zip(edges[::2], edges[1::2], strict=True)
    return [
        Span(3, i, "net", "permute", f"p{i}", 1000 * a, 1000 * b) for i, (a, b) in enumerate(starts_and_ends)
    ]


@given(
    st.lists(st.integers(0, 10**12), min_size=2, max_size=20).filter(lambda e: len(e) % 2 == 0),
    st.integers(-(10**12), 10**12),
    st.integers(-(10**8), 10**8),
)
def test_aligned_spans_keep_their_order_and_are_where_the_clock_of_rank_0_was(edges, offset_ns, drift_ns):
    """With a clock that goes wrong by up to 1e-4; to the nanosecond."""
    true_ns = sorted(edges)

    def ahead(at_ns):
        return offset_ns + drift_ns * at_ns // 10**12

    local = [at + ahead(at) for at in true_ns]
    before, after = (ClockOffset(at + ahead(at), ahead(at), 0) for at in (0, 10**12))
    moved = align(Trace("p", "torch", tuple(spans_of(local))), before, after)
    found = [edge // 1000 for span in moved.spans for edge in (span.start_ps, span.end_ps)]
    assert found == sorted(found)
    assert all(abs(a - b) <= 2 for a, b in zip(found, true_ns, strict=True))
    assert [span.label for span in moved.spans] == [f"p{i}" for i in range(len(true_ns) // 2)]
