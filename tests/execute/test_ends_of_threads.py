"""Threads that talk to a store end before the interpreter does: one that comes back from C++ later aborts it."""

from __future__ import annotations

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")

from meshweave.execute.torch import call_watch

WATCH = """
import time
import torch.distributed as dist
from meshweave.execute.torch import call_watch
from meshweave.execute.torch.call_order import call_order
from meshweave.execute.torch.context import TorchContext

def look(self, store, **options):
    until = time.monotonic() + 2.5
    while time.monotonic() < until:
        inner.set("busy", "1")

inner = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
dist.init_process_group("gloo", store=inner, rank=0, world_size=1)
call_watch.WatchedCalls.look = look
context = TorchContext()
call_order(context).sequence((0,))
time.sleep(0.5)
print("done")
"""
HEART = """
import time
import torch.distributed as dist
from meshweave.execute.ranks.liveness import Liveness

class SlowStore:
    def __init__(self, inner):
        self.inner = inner

    def clone(self):
        return SlowStore(self.inner.clone())

    def set(self, key, value):
        until = time.monotonic() + 0.8
        while time.monotonic() < until:
            self.inner.set(key, value)

    def __getattr__(self, name):
        return getattr(self.inner, name)

store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
liveness = Liveness(SlowStore(store), 0, (0,), interval_s=0.05, stale_s=0.2)
time.sleep(0.6)
print("done")
"""


@pytest.mark.parametrize(
    "script", [WATCH, pytest.param(HEART, marks=pytest.mark.slow)], ids=["calls", "heartbeat"]
)
def test_a_slow_store_does_not_abort_a_process_that_ends(script: str) -> None:
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert (ended.stdout, ended.returncode) == ("done\n", 0), ended.stderr


def test_the_watch_of_calls_ends_with_the_last_context_also_where_that_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Watched:
        looks = 0

        def look(self, store: object, *, is_urgent: bool = False) -> None:
            Watched.looks += 1

    world = Watched()
    monkeypatch.setattr(call_watch, "dist", SimpleNamespace(group=SimpleNamespace(WORLD=world)))
    monkeypatch.setattr(call_watch, "signed_store", lambda: SimpleNamespace(clone=lambda: None))
    watch, watched = call_watch.CallWatch(world), Watched()
    watch.add(watched)  # type: ignore[arg-type]
    until = time.monotonic() + 60
    while not Watched.looks and time.monotonic() < until:
        time.sleep(0.01)
    del watched
    assert watch._thread is not None
    watch._thread.join(60)
    assert not watch._thread.is_alive()
