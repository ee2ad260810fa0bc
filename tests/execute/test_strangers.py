"""What a stranger on the machine may put into the store of a run, and calls that do not return."""

import os
import threading
import time

import pytest

from meshweave.base.errors import BindError
from meshweave.execute.ranks.patience import call_within
from meshweave.execute.ranks.signing import TOKEN_VARIABLE, new_token

pytest.importorskip("torch")

import torch.distributed as dist

from meshweave.execute.memory import shared
from meshweave.execute.memory.shared import SharedMemory
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.world import SignedStore


def test_words_that_are_not_signed_are_as_good_as_none(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, new_token())
    raw = dist.HashStore()
    ours = SignedStore(raw, limit_s=60.0)
    ours.set("talk/1/0", "words")
    assert ours.check(["talk/1/0"]) and ours.get("talk/1/0") == b"words"
    raw.set("talk/1/1", "words")  # a stranger's
    raw.set("talk/1/2", raw.get("talk/1/0"))  # signed, for another key
    assert not ours.check(["talk/1/0", "talk/1/1"]) and not ours.check(["talk/1/2"])
    with pytest.raises(RuntimeError, match="no rank has signed"):
        ours.multi_get(["talk/1/0", "talk/1/2"])


@pytest.mark.skipif(shared.why_unavailable() != "", reason="needs shared memory")
def test_a_descriptor_is_opened_only_if_it_is_memory_to_be_shared(tmp_path):
    file = (tmp_path / "private").open("w+b")
    file.truncate(1 << 16)
    foreign = os.memfd_create("something else")
    os.truncate(foreign, 1 << 16)
    memory = SharedMemory(TorchContext(), 0, 2)
    for fd in (file.fileno(), foreign):
        handle = [os.getpid(), fd, os.fstat(fd).st_ino, 1 << 16]
        with pytest.raises(BindError, match="is none that a rank of this user shares"):
            memory._attach(1, 0, handle, (0, 1))
    short = os.memfd_create("meshweave")
    with pytest.raises(BindError, match="is another one here"):  # a read behind its end would be a SIGBUS
        memory._attach(1, 0, [os.getpid(), short, os.fstat(short).st_ino, 1 << 16], (0, 1))
    os.truncate(short, 1 << 16)
    memory._attach(1, 0, [os.getpid(), short, os.fstat(short).st_ino, 1 << 16], (0, 1))
    memory.close()
    for fd in (foreign, short):
        os.close(fd)


def test_a_call_that_does_not_return_is_left_behind():
    stuck, looked = threading.Event(), []
    with pytest.raises(TimeoutError, match=r"timed out after 0\.1 s"):
        call_within(0.1, stuck.wait, lambda: looked.append(1))
    assert looked
    stuck.set()
    assert call_within(60.0, lambda: 3) == 3
    with pytest.raises(KeyError):
        call_within(60.0, lambda: {}["missing"])

    def refuse():
        raise BindError("another lane has failed")

    with pytest.raises(BindError):  # while it waits
        call_within(60.0, lambda: time.sleep(0.5), refuse)
