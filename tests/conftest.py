"""What all tests share: ranks that start in milliseconds, and one worker for the tests that start them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

import sampling

sampling.register_profiles()


@pytest.fixture(scope="session", autouse=True)
def warm_ranks() -> Iterator[None]:
    """Let the ranks of every launch of this session be forks of two processes that have imported torch."""
    if importlib.util.find_spec("torch") is None:
        yield
        return
    from meshweave.execute.ranks.fork_server import fork_servers

    with fork_servers():
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests that start processes one after another, in one worker of pytest-xdist."""
    for item in items:
        if any(item.get_closest_marker(name) for name in ("gloo", "mpi", "lab")):
            item.add_marker(pytest.mark.xdist_group("ranks"))
