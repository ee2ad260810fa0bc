"""Worlds of four ranks, of which one gets a signal: `python signal_world.py CASES.json`.

This process imports torch once, starts no thread, and forks the ranks of each case. Rank 0 hosts the store, as
where scripts are started by hand. A case is [workload, signal, victim, delay in seconds]; for each a line of JSON
is printed, see `World.verdict`.
"""

import atexit
import gc
import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import meshweave as mw

NUM_RANKS = 4
DEADLINE_S, SLACK_S = 3.0, 5.0
NUM_AT_ONCE = 2
START_S = 120.0  # for imports and for torch's own groups, on a loaded machine


ROWS = (Shard(0), Replicate())


def sharded(mesh, *shape, placements=ROWS, requires_grad=False):
    """A DTensor of ones, made without communication; all sizes are divided evenly."""
    local = list(shape)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            local[placement.dim] //= mesh.size(axis)
    tensor = DTensor.from_local(torch.ones(local), mesh, placements, run_check=False)
    return tensor.requires_grad_(requires_grad)


def multiply(transport):
    def work(mesh, context):
        a = sharded(mesh, 64, 64)
        b = sharded(mesh, 64, 64, placements=(Replicate(), Shard(0)))
        while True:
            mw.matmul(a, b, [Shard(0), Shard(1)], transport=transport, context=context)

    return work


def bind_new_sizes(mesh, context):
    number = 0
    while True:
        number += 1
        a = sharded(mesh, 4, 4 * number)
        b = sharded(mesh, 4 * number, 8, placements=(Replicate(), Shard(0)))
        mw.matmul(a, b, transport=("messages", "shared")[number % 2], context=context)


def form_groups(mesh, context):
    a, b = sharded(mesh, 8, 8), sharded(mesh, 8, 8, placements=(Shard(1), Shard(0)))
    while True:
        ours = mw.TorchContext(deadline_s=DEADLINE_S)
        mw.matmul(a, b, [Shard(0), Shard(1)], transport="messages", context=ours)
        ours.close()


def train(mesh, context):
    weight = sharded(mesh, 32, 32, placements=(Replicate(), Shard(1)), requires_grad=True)
    data = sharded(mesh, 16, 32)
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    while True:
        mw.matmul(data, weight, [Shard(0), Shard(1)], context=context).to_local().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def move_state(mesh, context):
    turned = (Shard(1), Shard(0))
    state = {"weight": sharded(mesh, 16, 16, placements=(Shard(0), Shard(1))), "step": torch.tensor(3)}
    while True:
        mw.nn.reshard_state_dict(state, mesh, lambda name, tensor: turned, context=context)


WORKLOADS = {
    "messages": multiply("messages"),
    "shared": multiply("shared"),
    "binding": bind_new_sizes,
    "groups": form_groups,
    "training": train,
    "state dicts": move_state,
}


def run_rank(rank, port, workload, folder):
    """Run a rank until it fails; leave how it did, and when, in `folder`."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(NUM_RANKS)
    )
    torch.set_num_threads(1)
    outcome = {}
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=START_S))
        mesh = DeviceMesh("cpu", torch.arange(NUM_RANKS).view(2, 2), mesh_dim_names=("x", "y"))
        context = mw.TorchContext(deadline_s=DEADLINE_S)
        (folder / f"ready-{rank}").touch()
        WORKLOADS[workload](mesh, context)
    except mw.MeshweaveError as error:
        sys.last_value = error
        outcome = {
            "kind": type(error).__name__,
            "missing": list(getattr(error, "missing", ())),
            "says": str(error),
        }
    except BaseException as error:
        sys.last_value = error
        outcome = {"kind": type(error).__name__, "missing": [], "says": traceback.format_exc()[-2000:]}
    part = folder / f"part-{rank}"
    part.write_text(json.dumps({**outcome, "at": time.monotonic()}))
    part.rename(folder / f"outcome-{rank}")
    atexit._run_exitfuncs()
    os._exit(0)


class World:
    """The ranks of one case, from their start to the verdict; `step` looks after them and never waits."""

    def __init__(self, case):
        self.workload, self.signal, self.victim, self.delay_s = case
        self.folder = Path(tempfile.mkdtemp(prefix="signal-world-"))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.running, self.ended_at, self.sent_at, self.resumed_at = {}, {}, None, None
        self.ready_at, self.begin = None, time.monotonic()
        for rank in range(NUM_RANKS):
            pid = os.fork()
            if pid == 0:
                try:
                    run_rank(rank, port, self.workload, self.folder)
                finally:
                    os._exit(1)
            self.running[rank] = pid

    @property
    def survivors(self):
        return [rank for rank in range(NUM_RANKS) if rank != self.victim]

    def step(self):
        """Return the verdict once there is one."""
        now = time.monotonic()
        for rank, pid in list(self.running.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del self.running[rank]
                self.ended_at[rank] = now
        if self.ready_at is None:
            if all((self.folder / f"ready-{rank}").exists() for rank in range(NUM_RANKS)):
                self.ready_at = now
            elif now > self.begin + START_S:
                return self.verdict("ranks did not start")
        elif self.sent_at is None:
            if now >= self.ready_at + self.delay_s:
                if self.victim not in self.running:
                    return self.verdict("ranks ended before the signal")
                os.kill(self.running[self.victim], getattr(signal, self.signal))
                self.sent_at = now
        elif self.resumed_at is None:
            if not any(rank in self.running for rank in self.survivors):
                if self.signal != "SIGSTOP":
                    return self.verdict()
                os.kill(self.running[self.victim], signal.SIGCONT)
                self.resumed_at = now
            elif now > self.sent_at + 2 * DEADLINE_S + SLACK_S + 10.0:
                return self.verdict("survivors run on")
        elif not self.running:
            return self.verdict()
        elif now > self.resumed_at + 2 * DEADLINE_S + SLACK_S:
            return self.verdict("the resumed rank runs on")
        return None

    def verdict(self, wrong=""):
        """End what runs; return what is wrong ("" if nothing), how late the survivors were, and what all said."""
        for pid in self.running.values():
            os.kill(pid, signal.SIGKILL)
            os.kill(pid, signal.SIGCONT)
            os.waitpid(pid, 0)
        paths = {rank: self.folder / f"outcome-{rank}" for rank in range(NUM_RANKS)}
        said = {rank: json.loads(path.read_text()) for rank, path in paths.items() if path.exists()}
        judged = self.survivors + ([self.victim] if self.signal == "SIGSTOP" else [])
        for rank in judged if not wrong else []:
            if rank not in said:
                wrong = f"rank {rank} said nothing"
            elif said[rank]["kind"] != "RankLostError" or said[rank]["missing"] != [self.victim]:
                wrong = f"rank {rank} names {said[rank]['missing']}: {said[rank]['kind']}"
        late_s = max((self.ended_at.get(rank, 0.0) for rank in self.survivors), default=0.0) - (
            self.sent_at or 0.0
        )
        if not wrong and late_s > DEADLINE_S + SLACK_S:
            wrong = f"the last survivor ended after {late_s:.1f} s"
        for path in self.folder.iterdir():
            path.unlink()
        self.folder.rmdir()
        case = [self.workload, self.signal, self.victim, self.delay_s]
        return {"case": case, "wrong": wrong, "late_s": round(late_s, 2), "said": said if wrong else {}}


def main():
    cases = json.loads(sys.argv[1])
    worlds = []
    while cases or worlds:
        while cases and len(worlds) < NUM_AT_ONCE:
            worlds.append(World(cases.pop(0)))
        for world in list(worlds):
            verdict = world.step()
            if verdict is not None:
                worlds.remove(world)
                print(json.dumps(verdict), flush=True)
        time.sleep(0.02)


if __name__ == "__main__":
    # Before forking: what a rank imports after the signal would count as lateness of its waits.
    import meshweave.nn.linear
    import meshweave.nn.reshard_state
    from meshweave.execute.torch.compat import import_all_of_dtensor

    import_all_of_dtensor()
    gc.collect()
    gc.freeze()  # ranks would look through, and so copy, all that was imported
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
