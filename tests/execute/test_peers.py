"""Processes of other ranks: that one has ended is seen, and no other process is taken for it."""

import subprocess
import sys
import time

import pytest
from memory_store import MemoryStore

from meshweave.base.errors import RankLostError
from meshweave.execute.ranks.liveness import Liveness
from meshweave.execute.ranks.peers import PeerProcesses, own_process

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at processes in /proc")

DESCRIBE = "from meshweave.execute.ranks.peers import own_process; print(own_process(), flush=True); input()"


@pytest.fixture(scope="module")
def child():
    """A process that runs, and its words."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", DESCRIBE], text=True, **pipes)
    yield process, process.stdout.readline().strip()
    process.kill()
    process.communicate()


def test_what_has_ended_is_seen_and_nothing_else(child):
    process, words = child
    host, own = own_process().split()
    number = own.rpartition("-")[0]
    peers = PeerProcesses()
    peers.add(0, own_process())
    peers.add(1, words)
    peers.add(2, f"{host} {number}-1")  # another process has the number now
    peers.add(3, f"elsewhere {number}-1")
    peers.add(4, f"{host} 1-1-1")  # in another namespace
    for rank, nonsense in enumerate(("", host, f"{host} x-y-z"), 5):
        peers.add(rank, nonsense)
    assert peers.unknown(range(9)) == [8]
    assert peers.ended(range(9)) == [2]
    process.kill()
    while 1 not in peers.ended([1]):  # also as long as nobody has waited for it
        time.sleep(0.001)
    assert process.returncode is None
    process.wait()
    assert peers.ended(range(9)) == [1, 2]


def test_a_wait_that_polls_ends_with_the_process_that_it_waits_for(child):
    store, (process, words) = MemoryStore(), child
    process.kill()
    process.wait()
    with Liveness(store, 0, range(3), interval_s=0.02, stale_s=0.2) as liveness:
        store.set("meshweave/process/1", words)
        store.set("meshweave/process/2", own_process())
        with liveness.guard("words", peers=[2]) as wait:
            until = time.monotonic() + 1.0
            while time.monotonic() < until:
                wait.check_peers(lambda: [2])
        with (
            pytest.raises(RankLostError, match="while waiting for words") as caught,
            liveness.guard("words", peers=[1, 2]) as wait,
        ):
            while True:
                wait.check_peers(lambda: [1])
        assert 1 in caught.value.missing  # rank 2 has no heartbeat here
        with liveness.guard("words", peers=[1, 2]) as wait:  # it has spoken, and ended then
            until = time.monotonic() + 1.0
            while time.monotonic() < until:
                wait.check_peers(tuple)
