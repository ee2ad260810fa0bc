"""What all tests share: ranks that start in milliseconds, and one lab at a time."""

from __future__ import annotations

import fcntl
import gc
import importlib.util
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import sampling
from shared_launch import SharedLaunch

sampling.register_profiles()

IMPORTED_ONCE = (
    "meshweave.nn.parallel.parallelize", "meshweave.nn.prove.proof", "meshweave.nn.training.state",
    "meshweave.nn.weights", "meshweave.algorithms.step", "meshweave.tune.plan", "torch.distributed.fsdp",
    "transformers.generation.utils", "transformers.models.llama.modeling_llama", "peft",
    "torch._dynamo.backends.common", "torch._inductor.pattern_matcher",
)  # fmt: skip
"""What ranks of many tests import, which takes each of them seconds; a server leaves out what is not here."""

SERVERS = "MESHWEAVE_TESTS_FORK_SERVERS"
"""The variable that tells workers where shared servers listen."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Shells start background jobs so, and processes hand it on: commands that tests interrupt would not stop.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def rare_collections() -> Iterator[None]:
    """Leave what was imported out of garbage collections, and make these rare.

    Searches make millions of objects and hardly a cycle: collections took a fifth of the time of their tests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)
    yield
    gc.freeze()  # pytest collects five times at its end


def pytest_configure(config: pytest.Config) -> None:
    """Start, beside several workers, the servers that their ranks are forks of: each would start its own."""
    has_workers = config.getoption("numprocesses", None) and SERVERS not in os.environ
    if has_workers and sys.platform == "linux" and importlib.util.find_spec("torch") is not None:
        from meshweave_lab.fork_server import PRELOADED
        from meshweave_lab.shared_fork_servers import shared_fork_servers

        servers = ExitStack()
        there = [name for name in IMPORTED_ONCE if importlib.util.find_spec(name.partition(".")[0])]
        paths = servers.enter_context(shared_fork_servers([*PRELOADED, *there]))
        os.environ[SERVERS] = os.pathsep.join(paths)
        config.add_cleanup(servers.close)


@pytest.fixture(scope="session", autouse=True)
def warm_ranks() -> Iterator[None]:
    """Let the ranks of every launch in the tests be forks of two processes that have imported torch."""
    if importlib.util.find_spec("torch") is None:
        yield
        return
    from meshweave_lab.fork_server import fork_servers

    shared = os.environ.get(SERVERS, "").split(os.pathsep) if "PYTEST_XDIST_WORKER" in os.environ else ()
    with fork_servers(shared=[path for path in shared if path]) as servers:
        servers.import_also(*IMPORTED_ONCE)
        yield


@pytest.fixture(scope="session")
def launch_once(tmp_path_factory: pytest.TempPathFactory) -> SharedLaunch:
    """Return what starts ranks once for all workers of this run."""
    own = tmp_path_factory.getbasetemp()
    return SharedLaunch(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own)


@pytest.fixture(autouse=True)
def one_lab_at_a_time(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep the labs of all workers apart: each test with a lab checks that nothing is left of it."""
    if request.node.get_closest_marker("lab") is None:
        yield
        return
    with (Path(tempfile.gettempdir()) / "meshweave-tests-lab.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
