"""Contexts made and dropped, sizes multiplied: threads, descriptors and memory stay flat."""

from pathlib import Path

import pytest

from meshweave.execute.ranks.launch import launch

pytest.importorskip("torch")
pytestmark = pytest.mark.gloo

ENV = {"PYTHONPATH": str(Path(__file__).parent)}


def run(function, payload, timeout_s=120.0):
    return launch(f"leak_rank_functions:{function}", 4, payload, timeout_s=timeout_s, env=ENV)


def check_contexts(num_contexts, slack_bytes):
    for first, *later in run("contexts", {"num_contexts": num_contexts}, 900.0):
        for counts in later:
            assert counts["threads"] <= first["threads"] and counts["descriptors"] <= first["descriptors"]
        assert later[-1]["resident"] <= first["resident"] + slack_bytes


def test_a_dropped_context_leaves_nothing():
    check_contexts(3, 16 << 20)


@pytest.mark.slow
def test_a_hundred_dropped_contexts_leave_nothing():
    check_contexts(100, 16 << 20)


def check_sizes(num_sizes, cache_bytes, every, transports, slack_bytes):
    payload = {
        "num_sizes": num_sizes,
        "cache_bytes": cache_bytes,
        "every": every,
        "transports": transports,
    }
    for result in run("sizes", payload, 1100.0):
        assert result["errors"] == 0
        counts = result["counts"]
        full = next(number for number, at in enumerate(counts) if at["programs"] < every * (number + 1))
        for at in counts[full:]:
            assert at["counted"] <= cache_bytes
            # Programs in use share groups, whose number the first of them have settled.
            assert at["threads"] <= counts[full]["threads"] + 4
            assert at["descriptors"] <= counts[full]["descriptors"] + 8
        assert counts[-1]["resident"] <= counts[full]["resident"] + slack_bytes


def test_new_sizes_drop_old_ones_on_all_ranks_together():
    check_sizes(12, 250_000, 4, ["messages", "shared", "reshard"], 32 << 20)


@pytest.mark.slow
def test_two_thousand_sizes_take_no_more_memory_than_the_first_hundreds():
    check_sizes(2000, 40_000_000, 200, ["messages", "shared", "reshard"], 32 << 20)
