"""What the ranks of test_launch.py run."""

import ctypes
import os
import signal
import sys
import threading
import time
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from meshweave.algorithms.matmul2d import Matmul2dConfig, Matmul2dProblem
from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.base.errors import BindError
from meshweave.execute.ranks import guard
from meshweave.execute.ranks.agreement import exchange
from meshweave.execute.torch.call_order import call_order
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.world import signed_store


def ring(context, payload):
    """Pass a number around until the victim kills itself in the middle of it."""
    rank, after, before = context.rank, (context.rank + 1) % context.num_ranks, context.rank - 1
    guard = nullcontext if rank == payload["unguarded"] else context.liveness.guard
    box = torch.zeros(1)
    for step in range(1000):
        if rank == payload["victim"] and step == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        with guard("the ring"):
            received = dist.irecv(box, before % context.num_ranks)
            dist.send(torch.ones(1), after)
            received.wait()
        time.sleep(0.005)


def left_behind(context, payload):
    """Leave threads in the store's C++, which come back one after the other once the work is done."""

    def wait(store, seconds):
        with suppress(RuntimeError):
            store.wait(["nobody sets this"], timedelta(seconds=seconds))

    for number in range(1, 30):
        given = context.store.clone(), 0.5 + 0.1 * number
        threading.Thread(target=wait, args=given, daemon=True).start()
    time.sleep(0.5)


def slow(context, payload):
    """Rank 1 computes for longer than `stale_s`, and holds the GIL as best it can, while rank 0 looks."""
    if context.rank == 1:
        until = time.monotonic() + payload["busy_s"]
        while time.monotonic() < until:
            sum(range(1000))
    missing = context.liveness.missing()
    total = torch.tensor([context.rank + 1.0])
    with context.liveness.guard("the slow rank"):
        dist.all_reduce(total)
    return {
        "rank": context.rank,
        "sum": total.item(),
        "missing": list(missing),
        "payload": payload,
        "threads": torch.get_num_threads(),
    }


def faulty(context, payload):
    box = torch.zeros(1)
    if context.rank == 1:
        raise KeyError("colour")
    with context.liveness.guard("rank 1"):
        dist.recv(box, 1)


def heard_before_it_is_said(context, payload):
    """Rank 0 ends with what it has heard of rank 1's failure, before rank 1 has ended with the failure."""
    if context.rank == 1:
        time.sleep(0.5)
        raise KeyError("colour")
    error = BindError("rank 1 failed in ring (call 1): KeyError: 'colour'")
    error.is_echo = True
    raise error


def read_nothing(context, payload):
    ctypes.string_at(0)


def unprintable(context, payload):
    return {1, 2}


def hanging(context, payload):
    """The last rank sleeps for ever, with its heart beating."""
    if context.rank == context.num_ranks - 1:
        time.sleep(1000)
    with context.liveness.guard("word from rank 1", payload["deadline_s"]) as wait:
        dist.irecv(torch.zeros(1), 1).wait(wait.timeout)


def deserted(context, payload):
    """Rank 0 dies, and rank 1 cannot notice: it waits for rank 2, which is busy."""
    dist.barrier()
    if context.rank == 0:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    if context.rank == 2:
        time.sleep(1000)
    with context.liveness.guard("rank 2"):
        dist.recv(torch.zeros(1), 2)


def seen(context, payload):
    """What a rank can tell of the process it is in."""
    print(f"said by {context.rank}", flush=True)
    print(f"complained by {context.rank}", file=sys.stderr, flush=True)
    given = {name: os.environ.get(f"MESHWEAVE_TEST_{name}") for name in ("GIVEN", "WORD")}
    words = {**given, "RANK": os.environ["RANK"]}
    return {
        "parent": os.getppid(),
        "words": {name: word for name, word in words.items() if word is not None},
        "folder": str(Path.cwd()),
        "hash": hash("meshweave"),
        "threads": torch.get_num_threads(),
        "handlers": [str(signal.getsignal(signum)) for signum in (signal.SIGINT, signal.SIGCHLD)],
    }


def kill_parent(context, payload):
    """Rank 0 kills the process that it was forked from."""
    dist.barrier()
    if context.rank == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)


def imports_of_a_dtensor(context, payload):
    """The modules of torch that a first product of DTensors imports in this rank."""
    from torch.distributed.device_mesh import DeviceMesh

    before = set(sys.modules)
    from torch.distributed.tensor import Shard, distribute_tensor

    tensor = distribute_tensor(torch.ones(4, 4), DeviceMesh("cpu", [0]), [Shard(0)])
    _ = tensor @ tensor
    return sorted(name for name in set(sys.modules) - before if name.startswith("torch"))


def sleeping(context, payload):
    """Every rank sleeps for ever; rank `at_start` ends by SIGTERM as one that has yet to begin does."""
    if payload.get("at_start") == context.rank:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(1000)


def stopping(context, payload):
    """Rank 1 is stopped by a signal, and the others wait for it."""
    dist.barrier()
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    with context.liveness.guard("rank 1") as wait:
        dist.irecv(torch.zeros(1), 1).wait(wait.timeout)


def stopped_while_forming(context, payload):
    """Rank 2 has told its address to a group that the others come to later, and is stopped meanwhile.

    By lot (the order of ports) gloo lets it connect or be connected to, and only the first is waited for. Where it
    is connected to by both others, one of these kills it.
    """
    ours = TorchContext(deadline_s=1.0 if context.rank < 2 else 60.0)
    if context.rank < 2:
        pid = context.store.get("stopped").decode()
        while Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "T":
            time.sleep(0.01)
    else:
        threading.Thread(target=stop_once_published, args=(context.store,)).start()
    problem = Matmul2dProblem(m=12, n=12, k=12, mesh_shape=(1, 3), ranks=(0, 1, 2))
    ours.prepare(PRODUCTS_2D["collective"].program(problem, Matmul2dConfig()))
    context.store.set(f"formed/{context.rank}", "")
    context.store.wait(["formed/0", "formed/1"])
    if context.rank == 0:
        os.kill(int(pid), signal.SIGKILL)


def killed_while_others_agree(context, payload):
    """Rank 2 is killed when the others have spoken, before it has: no connection breaks by that."""
    ours = TorchContext(liveness=context.liveness, deadline_s=200.0)
    exchange(ours, range(3), "words", "the first agreement")
    if context.rank == 2:
        sequence = call_order(ours).sequence(range(3))
        while not signed_store().check([sequence.words_key(2, rank) for rank in (0, 1)]):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    exchange(ours, range(3), "words", "the second agreement")


def killed_while_one_looks_late(context, payload):
    """As above, and rank 1 hears of it from rank 0 before it looks itself."""
    if context.rank == 1:
        guard._FIRST_LOOK_S = 60.0
    killed_while_others_agree(context, payload)


def killed_while_others_form_a_group(context, payload):
    """Rank 2 is killed before it comes to form a group, for which the others wait."""
    ours = TorchContext(liveness=context.liveness, deadline_s=200.0)
    if context.rank == 2:
        context.store.wait(["forming/0", "forming/1"])
        os.kill(os.getpid(), signal.SIGKILL)
    context.store.set(f"forming/{context.rank}", "")
    problem = Matmul2dProblem(m=12, n=12, k=12, mesh_shape=(1, 3), ranks=(0, 1, 2))
    ours.prepare(PRODUCTS_2D["collective"].program(problem, Matmul2dConfig()))


def stop_once_published(store):
    """Stop this process once its address in the second group of the world is in the store."""
    store = store.clone()
    while not any(key.endswith("/1//cpu//0/2") for key in map(str, store.list_keys())):
        time.sleep(0.01)
    time.sleep(0.2)
    store.set("stopped", str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def default_liveness(context, payload):
    """Whether contexts share the liveness of their process, that of `launch` and else one of their own."""
    adopted = TorchContext().liveness is context.liveness
    none = TorchContext(liveness=False).liveness is None
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("again", context.store),
        rank=context.rank,
        world_size=context.num_ranks,
    )
    first, second = TorchContext(), TorchContext()
    dist.barrier()
    missing = first.liveness.missing()
    dist.barrier()
    own = [first.liveness is second.liveness is not context.liveness, missing, first.liveness.is_closed]
    return {"adopted": adopted, "own": own, "none": none}


def seen_store(context, payload):
    """The addresses (hexadecimal) on which anybody listens on the store's port, and this run's token."""
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    port = f":{context.store.port:04X}"
    listening = [line[1].removesuffix(port) for line in lines if line[3] == "0A" and line[1].endswith(port)]
    dist.barrier()
    return {"addresses": listening, "token": os.environ["MESHWEAVE_RUN_TOKEN"]}
