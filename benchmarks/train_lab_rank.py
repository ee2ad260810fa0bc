"""What one rank of `train_lab.py` does: layers of a user's model by `mw.parallelize`, beside torch's own."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from block_lab import Constants, with_constants
from block_lab_rank import problem_of
from block_lab_torch import bind_parallelized
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from meshweave.algorithms.block import BlockConfig, BlockProblem
from meshweave.algorithms.table import algorithm
from meshweave.cost.machine import Machine
from meshweave.describe.machine.cluster import Cluster
from meshweave.execute.ranks.job import RankContext
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.measure import start_together, without_garbage_collection
from meshweave.ir.program import Program
from meshweave.ir.program.ops import Matmul
from meshweave.ir.work import Compute, traffic, work_of
from meshweave.nn.parallel.attention import Heads
from meshweave.nn.parallel.parallelize import parallelize
from meshweave.nn.parallel.structure import LayerMap, ModelMap
from meshweave.simulate import simulate
from meshweave.trace import Trace
from meshweave_lab.bench.rank import running_order
from meshweave_lab.description_file import load_lab
from meshweave_lab.pace import paced

WORDS = 64


class LabLayer(nn.Module):
    """A layer of a GPT, written plainly."""

    def __init__(self, problem: BlockProblem) -> None:
        super().__init__()
        hidden, inner = problem.hidden, problem.heads * problem.head_dim
        self.num_heads = self.num_kv_heads = problem.heads
        self.head_dim = problem.head_dim
        self.ln_1, self.ln_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden, inner, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(inner, hidden, bias=False)
        self.up_proj = nn.Linear(hidden, problem.ffn, bias=False)
        self.down_proj = nn.Linear(problem.ffn, hidden, bias=False)
        self.act = nn.GELU(approximate="tanh")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the residual after the layer."""
        normal = self.ln_1(x)
        q, k, v = (
            part(normal).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        x = x + self.o_proj(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.down_proj(self.act(self.up_proj(self.ln_2(x))))


class LabModel(nn.Module):
    """An embedding, layers and a head."""

    def __init__(self, problem: BlockProblem, num_layers: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(WORDS, problem.hidden)
        self.h = nn.ModuleList(LabLayer(problem) for _ in range(num_layers))
        self.ln_f = nn.LayerNorm(problem.hidden)
        self.lm_head = nn.Linear(problem.hidden, WORDS, bias=False)


class StepPrograms:
    """The programs that run in a step, as a recorder of a context: what they move, multiply and should take."""

    def __init__(self, rank: int) -> None:
        self.rank, self.num_bytes, self.flops = rank, 0, 0
        self.runs: list[Program] = []

    def add(self, program: Program, trace: Trace) -> None:
        """Take a run of a program."""
        self.runs.append(program)
        self.num_bytes += sum(traffic(program, self.rank).values())
        works = [work_of(program, b.op) for b in program.ops_on_rank(self.rank) if isinstance(b.op, Matmul)]
        self.flops += sum(work.flops for work in works if isinstance(work, Compute))

    def simulated_s(self, cluster: Cluster) -> float:
        """Return the seconds of all runs, one after another, each simulated alone."""
        took: dict[int, float] = {}
        for program in self.runs:
            if id(program) not in took:
                took[id(program)] = simulate(
                    program, Machine(cluster, program.meshes, logical=True)
                ).duration_s
        return sum(took[id(program)] for program in self.runs)


MAP = ModelMap(
    embedding="wte",
    layers="h",
    layer=LayerMap(
        attention_norm="ln_1",
        out="o_proj",
        feed_forward_norm="ln_2",
        up="up_proj",
        down="down_proj",
        activation="act",
        query="q_proj",
        key="k_proj",
        value="v_proj",
    ),
    norm="ln_f",
    head="lm_head",
    has_causal_loss=False,
)


def measure_models(context: RankContext, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Run layers forward and backward by every strategy and by torch, in changing order, from common starts.

    `payload`: lab, constants (fields of `Constants`), problem (fields of `BlockProblem`), layers, strategies
    [{algorithm, mesh, config}], repeat, flops_per_s, deadline_s. Returns by strategy, torch last, the seconds of
    each repetition; by strategy the loss, the bytes that the programs of a step have moved and those of the
    strategy's program, and on rank 0 the seconds of a step: its programs, each simulated alone, and the products
    beside them; and the overruns.
    """
    torch.set_num_threads(1)
    problem, layers = problem_of(payload["problem"]), payload["layers"]
    shared = TorchContext.default()
    shared.deadline_s = payload["deadline_s"]
    runs: list[Callable[[], None]] = []
    losses, moved, expected, predicted = [], [], [], []
    constants = Constants(**payload["constants"])
    cluster = with_constants(load_lab(payload["lab"]).cluster(), constants, context.num_ranks)
    rate = payload["flops_per_s"]
    for strategy in payload["strategies"]:
        run, loss = bind_model(problem, layers, strategy)
        recorder = shared.recorder = StepPrograms(context.rank)
        with paced(rate) as pacer:
            run()
        shared.recorder = None
        # What is multiplied outside of programs waits for nobody, and is in nobody's way.
        outside_s = pacer.report().flops / rate - recorder.flops / rate
        predicted.append(outside_s + recorder.simulated_s(cluster) if context.rank == 0 else 0.0)
        runs.append(run)
        losses.append(loss)
        moved.append(recorder.num_bytes)
        expected.append(layers * program_bytes_of(problem, strategy, context.rank))
        if context.rank == 0:
            print(f"{len(runs)} of {len(payload['strategies'])} bound", file=sys.stderr, flush=True)
    whole = algorithm("data_parallel").random_inputs(problem, 0)
    theirs, _ = bind_parallelized(problem, whole, context.num_ranks, context.rank)
    runs.append(lambda: [theirs() for _ in range(layers)] and None)
    gc.collect()
    times: list[list[float]] = [[] for _ in runs]
    with without_garbage_collection(), paced(payload["flops_per_s"]) as pacer:
        for repetition in range(payload["repeat"] + 1):
            for which in running_order(len(runs), repetition):
                start_ns, _ = start_together(shared)
                runs[which]()
                if repetition:
                    times[which].append(time.monotonic() - start_ns / 1e9)
            if context.rank == 0:
                print(f"repetition {repetition} of {payload['repeat']}", file=sys.stderr, flush=True)
        report = pacer.report()
    return {
        "times": times, "losses": losses, "moved": moved, "expected": expected, "predicted": predicted,
        "overruns": [report.num_overruns, report.overrun_s],
    }  # fmt: skip


def bind_model(
    problem: BlockProblem, num_layers: int, strategy: Mapping[str, Any]
) -> tuple[Callable[[], None], float]:
    """Return what runs the layers of a model by a strategy forward and backward once, and the model's loss."""
    torch.manual_seed(0)
    model = LabModel(problem, num_layers)
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(0, WORDS, (2, problem.batch, problem.sequence), generator=generator)
    sizes = tuple(strategy["mesh"])
    if sizes[1] == 1:
        sizes = sizes[:1]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("row", "col")[: len(sizes)])
    config = BlockConfig(**strategy["config"])
    heads = Heads(problem.heads, problem.heads, problem.head_dim, problem.head_dim**-0.5)
    mapping = replace(MAP, heads=heads)
    parallel = parallelize(model, strategy["algorithm"], mesh, mapping=mapping, config=config, check=False)
    with torch.no_grad():
        loss = float(parallel.loss(tokens, targets))
        start = parallel.embed(tokens)

    def run() -> None:
        x = start.detach().requires_grad_()
        y = parallel.run_blocks(x, problem.batch, problem.sequence)
        y.backward(torch.ones_like(y))

    return run, loss


def program_bytes_of(problem: BlockProblem, strategy: Mapping[str, Any], rank: int) -> int:
    """Return the bytes that the program of a strategy moves on a rank, for one layer."""
    own = BlockProblem(**{**vars(problem), "mesh_shape": tuple(strategy["mesh"])})
    program = algorithm(strategy["algorithm"]).program(own, BlockConfig(**strategy["config"]))
    return sum(traffic(program, rank).values())
