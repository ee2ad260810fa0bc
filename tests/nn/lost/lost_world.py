"""Trainings of two to four ranks, of which one gets a signal at some moment: `python lost_world.py CASES.json`.

This process imports torch once, starts no thread, and forks the ranks of each case; or an agent of torchrun, which
forks them; or torchrun itself. A case is a dict: the `work` and its `ranks`, who starts them (`by`), the `signal`,
the `victim`, and the moment: `wait_s` after the victim has come to `phase` for the `count`th time. For each case a
line of JSON is printed, see `World.verdict`.

Ranks end as scripts do: what they raise goes to `sys.excepthook`, and is judged by what stands in their stderr.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import os
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshweave as mw

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
import hosted_works
from plain_models import PlainLlama

DEADLINE_S, SLACK_S = 6.0, 5.0
NUM_AT_ONCE = 2
START_S = 150.0  # for imports, torch's own groups and what comes before the moment, on a loaded machine
PHASES = ("parallelize", "forward", "backward", "clip", "optimizer")
OF_STAGES = ("parallelize", "forward", "forward", "clip", "optimizer")

# --- what ranks do -----------------------------------------------------------------------------------------------


class Moment:
    """When the victim gets its signal; for the other ranks never."""

    def __init__(self, case: Mapping[str, Any], rank: int, folder: Path) -> None:
        self._case, self._folder, self._count = case, folder, 0
        self._is_victim = rank == case["victim"]

    def come(self, phase: str) -> None:
        """Say that this rank has come to a phase."""
        case = self._case
        if self._is_victim and case["phase"] in (phase, "any"):
            self._count += 1
            if self._count == case["count"]:
                timer = threading.Timer(case["wait_s"], self._strike)
                timer.daemon = True
                timer.start()

    def _strike(self) -> None:
        _write(self._folder / "struck", str(time.monotonic()))
        os.kill(os.getpid(), getattr(signal, self._case["signal"]))


def batches() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randint(0, 24, (4, 8)), torch.randint(0, 24, (4, 8))


def train_layers(strategy: str, *sizes: int) -> Callable[[Moment], None]:
    """A model whose layers ranks share."""

    def work(moment: Moment) -> None:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("x", "y")[: len(sizes)])
        context = mw.TorchContext(deadline_s=DEADLINE_S)
        torch.manual_seed(0)
        model = PlainLlama(layers=2)
        moment.come("parallelize")
        parallel = mw.parallelize(model, strategy, mesh, context=context)
        train(moment, parallel.module.parameters(), lambda: parallel.loss(*batches()))

    return work


def train_experts(moment: Moment) -> None:
    """Routed layers, whose experts ranks share."""
    import transformers

    context = mw.TorchContext(deadline_s=DEADLINE_S)
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=24, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=16,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    moment.come("parallelize")
    plan = mw.Parallelism(data=dist.get_world_size(), expert=2)
    parallel = mw.parallelize(model, plan, context=context, check=False)
    layer = next(each for name, each in parallel.module.named_modules() if name.endswith("experts"))
    layer.register_forward_pre_hook(lambda *_: moment.come("dispatch"))
    train(moment, parallel.module.parameters(), lambda: parallel.loss(*batches()))


def train_fsdp(moment: Moment) -> None:
    """Shared layers inside of FSDP2."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    context = mw.TorchContext(deadline_s=DEADLINE_S)
    torch.manual_seed(0)
    moment.come("parallelize")
    parallel = mw.parallelize(PlainLlama(layers=2), "megatron_sp", mesh["tp"], context=context)
    for block in parallel.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(parallel.module, mesh=mesh["dp"])
    train(moment, parallel.module.parameters(), lambda: parallel.loss(*batches()))


def train(moment: Moment, parameters: Iterator[nn.Parameter], loss_of: Callable[[], torch.Tensor]) -> None:
    """Train for ever."""
    own = list(parameters)
    optimizer = torch.optim.AdamW(own, lr=1e-3)
    while True:
        optimizer.zero_grad()
        moment.come("forward")
        loss = loss_of()
        moment.come("backward")
        loss.backward()
        moment.come("clip")
        nn.utils.clip_grad_norm_(own, 1.0)
        moment.come("optimizer")
        optimizer.step()


def train_stages(
    schedule: str, stages_of: Callable[[int], tuple[int, ...]], num_stages: int
) -> Callable[[Moment], None]:
    """Stages of two ranks each, whose layers these share."""

    def work(moment: Moment) -> None:
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
        context = mw.TorchContext(deadline_s=DEADLINE_S)
        moment.come("parallelize")
        stages = {}
        for number in stages_of(dist.get_rank() // 2):
            torch.manual_seed(0)
            model = mw.parallelize(PlainLlama(layers=4), "megatron_sp", mesh["tp"], context=context)
            per = 4 // num_stages
            stages[number] = mw.nn.ParallelStage(model, number * per, (number + 1) * per, 8)
        last = stages.get(num_stages - 1)
        pipeline = mw.pipeline(
            stages, schedule, micro_batches=4, meshes=mesh, context=context,
            loss_fn=None if last is None else last.loss,
            outputs={number: [stage.example(1)] for number, stage in stages.items()},
        )  # fmt: skip
        own = [each for stage in stages.values() for each in stage.parameters()]
        optimizer = torch.optim.AdamW(own, lr=1e-3)
        while True:
            optimizer.zero_grad()
            moment.come("forward")
            pipeline.step(*batches())
            moment.come("clip")
            nn.utils.clip_grad_norm_(own, 1.0)
            moment.come("optimizer")
            optimizer.step()

    return work


def save_and_load(moment: Moment) -> None:
    """Checkpoints of a training, saved and loaded in turns."""
    mesh, context = init_device_mesh("cpu", (dist.get_world_size(),)), mw.TorchContext(deadline_s=DEADLINE_S)
    torch.manual_seed(0)
    parallel = mw.parallelize(PlainLlama(layers=2), "megatron", mesh, context=context)
    optimizer = torch.optim.AdamW(parallel.module.parameters(), lr=1e-3)
    state = mw.nn.TrainingState([parallel.module], optimizer, rank=dist.get_rank())
    checkpoints = mw.Checkpoints(Path(os.environ["LOST_FOLDER"]) / "steps", context=context)
    for step in range(1, 10**6):
        optimizer.zero_grad()
        parallel.loss(*batches()).backward()
        optimizer.step()
        moment.come("save")
        state.save(checkpoints, step)
        moment.come("wait")
        checkpoints.wait()
        moment.come("load")
        latest = checkpoints.latest()
        assert latest is not None
        state.load(checkpoints, latest)


def move_state(moment: Moment) -> None:
    """Tensors of a state dict, laid out anew again and again."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh, context = init_device_mesh("cpu", (2, 2)), mw.TorchContext(deadline_s=DEADLINE_S)
    state = {f"w{n}": distribute_tensor(torch.ones(16, 16), mesh, [Shard(0), Shard(1)]) for n in range(4)}
    while True:
        for placements in ((Shard(1), Shard(0)), (Shard(0), Shard(1))):
            moment.come("reshard")
            state = mw.nn.reshard_state_dict(
                state, mesh, lambda name, tensor, to=placements: to, context=context
            )


WORKS: dict[str, tuple[int, tuple[str, ...], Callable[[Moment], None]]] = {
    "data_parallel": (2, PHASES, train_layers("data_parallel", 2)),
    "zero3": (2, PHASES, train_layers("zero3", 2)),
    "megatron": (2, PHASES, train_layers("megatron", 2)),
    "experts": (2, (*PHASES, "dispatch"), train_experts),
    "megatron_sp": (4, PHASES, train_layers("megatron_sp", 4)),
    "ring_attention": (4, PHASES, train_layers("ring_attention", 4)),
    "atp": (4, PHASES, train_layers("atp", 2, 2)),
    "summa_block": (4, PHASES, train_layers("summa_block", 2, 2)),
    "meshslice_block": (4, PHASES, train_layers("meshslice_block", 2, 2)),
    "fsdp2": (4, PHASES, train_fsdp),
    "1f1b": (4, OF_STAGES, train_stages("1f1b", lambda p: (p,), 2)),
    "zbv": (4, OF_STAGES, train_stages("zbv", lambda p: (p, 3 - p), 4)),
    "checkpoints": (3, ("save", "wait", "load"), save_and_load),
    "state dicts": (4, ("reshard",), move_state),
    **hosted_works.works(PHASES, OF_STAGES, DEADLINE_S),
}  # fmt: skip
"""Ranks, phases, and what they do."""


def run_rank(case: Mapping[str, Any], folder: Path) -> None:
    """Run one rank as a script, to its end."""
    rank = int(os.environ["RANK"])
    with (folder / f"stderr-{rank}").open("w") as said:
        os.dup2(said.fileno(), 2)
    _write(folder / f"pid-{rank}", str(os.getpid()))
    os.environ["LOST_FOLDER"] = str(folder)
    torch.set_num_threads(1)
    for signum in (signal.SIGTERM, signal.SIGINT):  # an agent that forks hands its own on
        signal.signal(signum, signal.SIG_DFL)
    faulthandler.register(signal.SIGUSR1)
    moment = Moment(case, rank, folder)
    try:
        if case["phase"] == "join":
            moment.come("join")
            mw.nn.join_ranks(deadline_s=DEADLINE_S)
        else:
            dist.init_process_group("gloo", timeout=timedelta(seconds=START_S))
        WORKS[case["work"]][2](moment)
    except BaseException as error:
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
    atexit._run_exitfuncs()
    os._exit(1)


def _write(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text)
    part.rename(path)


# --- who starts and judges them ----------------------------------------------------------------------------------


def _agent(case: Mapping[str, Any], folder: Path) -> None:
    """Start the ranks of a case as torchrun does, and end as it does."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with (folder / "agent").open("w") as said:
        os.dup2(said.fileno(), 2)
        os.dup2(said.fileno(), 1)
    config = LaunchConfig(
        1, 1, case["ranks"], run_id=folder.name, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        start_method="fork", monitor_interval=0.1, max_restarts=0,
    )  # fmt: skip
    elastic_launch(config, run_rank)(case, folder)


def _forked(function: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            function()
        finally:
            os._exit(1)
    return pid


def _torchrun(case: Mapping[str, Any], folder: Path) -> None:
    """Become torchrun, which starts the ranks of a case as scripts."""
    with (folder / "agent").open("w") as said:
        os.dup2(said.fileno(), 2)
        os.dup2(said.fileno(), 1)
    script = [__file__, json.dumps(case), str(folder)]
    command = ["--standalone", f"--nproc-per-node={case['ranks']}", *script]
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *command])


def drawn(number: int, seed: int, only: str = "") -> list[dict[str, Any]]:
    """Return cases at random: each kind of work that begins so in turn, with each signal in turn."""
    rng, cases = random.Random(seed), []
    names = [name for name in WORKS if name.startswith(only)]
    rng.shuffle(names)
    for at in range(number):
        work = names[at % len(names)]
        ranks, phases, _ = WORKS[work]
        cases.append(
            {
                "work": work,
                "ranks": ranks,
                "by": rng.choices(("plain", "agent", "torchrun"), (6, 3, 1))[0],
                "signal": ("SIGKILL", "SIGSTOP", "SIGTERM")[at // len(names) % 3],
                "victim": rng.randrange(ranks),
                "phase": rng.choice((*phases, *phases, "any")),
                "count": 1,
                "wait_s": round(rng.choice((rng.uniform(0, 0.01), rng.uniform(0, 1.0))), 4),
            }
        )
        if cases[-1]["phase"] != "parallelize":
            cases[-1]["count"] = rng.randrange(1, 6)
        if rng.random() < 0.05:
            cases[-1].update(phase="join", by="plain", count=1)
    return cases


class World:
    """The ranks of one case, from their start to the verdict; `step` looks after them and never waits."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case, self.begin = case, time.monotonic()
        self.folder = Path(tempfile.mkdtemp(prefix="lost-world-"))
        self.others = [rank for rank in range(case["ranks"]) if rank != case["victim"]]
        self.ended_at: dict[int, float] = {}
        self.children: list[int] = []
        if case["by"] != "plain":
            start = _agent if case["by"] == "agent" else _torchrun
            self.children.append(_forked(lambda: start(case, self.folder)))
            return
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(case["ranks"]))
        for rank in range(case["ranks"]):
            os.environ["RANK"] = str(rank)
            self.children.append(_forked(lambda: run_rank(case, self.folder)))

    def _pid(self, rank: int) -> int | None:
        path = self.folder / f"pid-{rank}"
        return int(path.read_text()) if path.exists() else None

    def step(self) -> dict[str, Any] | None:
        """Return the verdict once there is one."""
        now = time.monotonic()
        for pid in list(self.children):
            if os.waitpid(pid, os.WNOHANG)[0]:
                self.children.remove(pid)
        for rank in self.others:
            pid = self._pid(rank)
            if rank not in self.ended_at and pid is not None and not _runs(pid):
                self.ended_at[rank] = now
        struck = self.folder / "struck"
        if not struck.exists():
            if self.ended_at or not self.children:
                return self.verdict("ranks ended before the signal", None)
            return self.verdict("the moment did not come", None) if now > self.begin + START_S else None
        struck_at = float(struck.read_text())
        if len(self.ended_at) == len(self.others):
            return self.verdict("", struck_at)
        return self.verdict("survivors run on", struck_at) if now > struck_at + DEADLINE_S + 20.0 else None

    def verdict(self, wrong: str, struck_at: float | None) -> dict[str, Any]:
        """End what runs; return what is wrong ("" if nothing), how late the survivors were, and what they said."""
        pids = [pid for rank in range(self.case["ranks"]) if (pid := self._pid(rank)) is not None]
        for pid in pids if wrong else []:
            if _runs(pid):
                os.kill(pid, signal.SIGUSR1)  # say where they are
        time.sleep(0.2 if wrong else 0.0)
        said = {rank: self._said(rank) for rank in range(self.case["ranks"])}
        ends_s = [round(at - (struck_at or at), 1) for _, at in sorted(self.ended_at.items())]
        late_s = max(ends_s, default=0.0)
        for rank in self.others if not wrong else []:
            names = named(said[rank])
            if names != {self.case["victim"]}:
                wrong = f"rank {rank} names {sorted(names)}"
        if not wrong and late_s > DEADLINE_S + SLACK_S:
            wrong = f"the last survivor ended after {late_s:.1f} s"
        for pid in (*pids, *self.children):
            if _runs(pid):
                os.kill(pid, signal.SIGKILL)
        for pid in self.children:
            os.waitpid(pid, 0)
        tails = {rank: text[-3000:] for rank, text in said.items()} if wrong else {}
        if wrong and (self.folder / "agent").exists():
            tails[-1] = (self.folder / "agent").read_text()[-3000:]
        shutil.rmtree(self.folder)
        return {
            **self.case,
            "struck": struck_at is not None,
            "wrong": wrong,
            "late_s": late_s,
            "ends_s": ends_s,
            "said": tails,
        }

    def _said(self, rank: int) -> str:
        path = self.folder / f"stderr-{rank}"
        return path.read_text() if path.exists() else ""


_BLAMES = re.compile(
    r"ranks? (\d+(?:(?:, | and )\d+)*)(?:, which hosts the store,)? "
    r"(?:stopped answering|never answered|failed|w\w+ told to stop|left early|ended)"
)


def named(said: str) -> set[int]:
    """Return the ranks that a process has named as lost, in the last of its lines that name any."""
    lines = [
        line for line in said.splitlines() if "RankLostError: " in line or line.startswith("meshweave: ")
    ]
    found = [_BLAMES.findall(line) for line in lines]
    last = next((each for each in reversed(found) if each), [])
    return {int(number) for ranks in last for number in re.findall(r"\d+", ranks)}


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def main() -> None:
    """Run the cases of the command line."""
    cases, worlds = json.loads(sys.argv[1]), []
    while cases or worlds:
        while cases and len(worlds) < NUM_AT_ONCE:
            worlds.append(World(cases.pop(0)))
        for world in list(worlds):
            verdict = world.step()
            if verdict is not None:
                worlds.remove(world)
                print(json.dumps(verdict), flush=True)
        time.sleep(0.02)


def preload(cases: list[dict[str, Any]]) -> None:
    """Import, before forking, what ranks would import after the signal."""
    import torch.distributed.checkpoint
    import torch.distributed.fsdp  # noqa: F401

    import meshweave.nn.parallel.parallelize
    import meshweave.nn.pipelining.pipeline
    import meshweave.nn.reshard_state
    import meshweave.nn.training.state  # noqa: F401
    from meshweave.execute.torch.compat import import_all_of_dtensor

    import_all_of_dtensor()
    if any(case["work"].startswith("hosted") for case in cases):
        hosted_works.preload()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    given = json.loads(sys.argv[1])
    preload([given] if len(sys.argv) > 2 else given)
    if len(sys.argv) > 2:  # a rank of torchrun
        run_rank(given, Path(sys.argv[2]))
    gc.collect()
    gc.freeze()  # ranks would look through, and so copy, all that was imported
    main()
