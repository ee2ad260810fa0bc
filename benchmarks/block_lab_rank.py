"""What one rank of `block_lab.py` does: constants of the lab, then every strategy of a block, interleaved."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from block_lab_functions import FusedFunctions
from block_lab_torch import bind_parallelized

from meshweave.algorithms.block import BlockConfig, BlockProblem
from meshweave.algorithms.block.reference import reference
from meshweave.algorithms.contract import Arrays
from meshweave.algorithms.table import algorithm
from meshweave.describe.layout import Layout, Replicate, Shard
from meshweave.describe.layout.mesh import Mesh
from meshweave.execute.numpy import local_inputs
from meshweave.execute.ranks.launch import RankContext
from meshweave.execute.torch.bind import bind
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.measure import start_together, without_garbage_collection
from meshweave.ir.program import FULL, Buffer, Lane, On, Program, Tensor, View
from meshweave.ir.program.ops import AllGather, AllReduce
from meshweave.lab.bench.rank import running_order
from meshweave.lab.pace import paced
from meshweave.lower import lower_rings

TOLERANCE = 1e-3
"""The largest error of a result, as a share of the largest value of the tensor."""


@dataclass(frozen=True)
class BoundStrategy:
    """What runs a step once, and what returns the largest relative error of its results."""

    run: Callable[[], None]
    error: Callable[[], float]


# --- constants ----------------------------------------------------------------------------------------------


def ring_program(kind: str, num_ranks: int, part_bytes: int) -> Program:
    """Return one all-gather as a ring, or one of the transport's all-reduces, of parts of so many bytes."""
    mesh, count = Mesh.of("tp", (num_ranks, 1), ("row", "col")), part_bytes // 4
    shape, whole, at = (num_ranks * count,), View("y", (FULL,)), On
    everywhere = Layout(mesh, (Replicate(), Replicate()))
    tensors = (Tensor("X", shape, "float32"), Tensor("Y", shape, "float32"))
    y = Buffer("y", "output", "tp", "float32", "Y", everywhere)
    if kind == "all_gather":
        x = Buffer("x", "input", "tp", "float32", "X", Layout(mesh, (Shard(0), Replicate())))
        gather = AllGather(out=whole, src=View("x", (FULL,)), dim=0, over="tp.row", lane="row")
        return lower_rings(Program(kind, (mesh,), tensors, (x, y), (Lane("row"),), (at("tp", (gather,)),)))
    x = Buffer("x", "input", "tp", "float32", "X", everywhere)
    total = AllReduce(out=whole, src=View("x", (FULL,)), over="tp.row", lane="row")
    return Program(kind, (mesh,), tensors, (x, y), (Lane("row"),), (at("tp", (total,)),))


def measure_constants(context: RankContext, payload: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return for each (kind, bytes of a part) the seconds of one op in a row of `loops`, by repetition.

    `payload`: cases [[kind, part_bytes, loops]], repeat, deadline_s.
    """
    torch.set_num_threads(1)
    shared = TorchContext(liveness=context.liveness, deadline_s=payload["deadline_s"])
    out = {}
    for kind, part_bytes, loops in payload["cases"]:
        program = ring_program(kind, context.num_ranks, part_bytes)
        size = part_bytes // 4 * (1 if kind == "all_gather" else context.num_ranks)
        bound = bind(program, context.rank, {"x": torch.ones(size)}, context=shared)
        times = []
        with without_garbage_collection():
            for repetition in range(payload["repeat"] + 1):
                start_ns, _ = start_together(shared)
                for _ in range(loops):
                    bound.run()
                if repetition:
                    times.append((time.monotonic() - start_ns / 1e9) / loops)
        out[f"{kind} {part_bytes}"] = times
    shared.close()
    return out


# --- strategies ---------------------------------------------------------------------------------------------


def measure_blocks(context: RankContext, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Run every strategy once to warm up and then `repeat` times, in changing order, each from a common start.

    `payload`: problem (fields of `BlockProblem`), strategies [{algorithm, mesh, config} or {"torch": True}],
    repeat, seed, flops_per_s, call_flops_per_s, deadline_s. Returns by strategy the seconds of each repetition,
    the error, and the overruns [count, seconds]; late_s, and the report of the pace.
    """
    torch.set_num_threads(1)
    shared = TorchContext(liveness=context.liveness, deadline_s=payload["deadline_s"])
    problem = problem_of(payload["problem"])
    whole = algorithm("data_parallel").random_inputs(problem, payload["seed"])
    expected = reference(problem, whole)
    bound = []
    for strategy in payload["strategies"]:
        if strategy.get("torch"):
            run, results = bind_parallelized(problem, whole, context.num_ranks, context.rank)
            bound.append(BoundStrategy(run, lambda results=results: _error(results(), expected)))  # type: ignore[misc]
        else:
            bound.append(_bind(strategy, problem, whole, expected, shared))
        if context.rank == 0:
            print(f"{len(bound)} of {len(payload['strategies'])} bound", file=sys.stderr, flush=True)
    gc.collect()
    times: list[list[float]] = [[] for _ in bound]
    errors, overruns = [0.0] * len(bound), [[0, 0.0] for _ in bound]
    late_s = 0.0
    rates = tuple(payload["call_flops_per_s"].items())
    with without_garbage_collection(), paced(payload["flops_per_s"], rates) as pacer:
        for repetition in range(payload["repeat"] + 1):
            for which in running_order(len(bound), repetition):
                before = pacer.report()
                start_ns, late_ns = start_together(shared)
                bound[which].run()
                took = time.monotonic() - start_ns / 1e9
                after = pacer.report()
                if not repetition:
                    errors[which] = bound[which].error()
                    continue
                times[which].append(took)
                late_s = max(late_s, late_ns / 1e9)
                overruns[which][0] += after.num_overruns - before.num_overruns
                overruns[which][1] += after.overrun_s - before.overrun_s
            if context.rank == 0:
                print(f"repetition {repetition} of {payload['repeat']}", file=sys.stderr, flush=True)
        report = vars(pacer.report())
    shared.close()
    return {"times": times, "errors": errors, "overruns": overruns, "late_s": late_s, "pace": report}


def problem_of(values: Mapping[str, Any]) -> BlockProblem:
    """Return a problem from its fields as JSON has them."""
    known = {field.name for field in fields(BlockProblem)}
    assert set(values) <= known, set(values) - known
    return BlockProblem(**{**values, "mesh_shape": tuple(values["mesh_shape"])})


def _bind(
    strategy: Mapping[str, Any], problem: BlockProblem, whole: Arrays, expected: Arrays, shared: TorchContext
) -> BoundStrategy:
    problem = replace(problem, mesh_shape=tuple(strategy["mesh"]))
    program = lower_rings(
        algorithm(strategy["algorithm"]).program(problem, BlockConfig(**strategy["config"]))
    )
    rank = shared.rank
    assert rank is not None
    shards = {
        name: torch.from_numpy(shard.copy()) for name, shard in local_inputs(program, whole, rank).items()
    }
    step = bind(program, rank, shards, context=shared, calls=FusedFunctions(problem).table())

    def results() -> dict[str, tuple[Any, Any]]:
        out = {}
        for name, value in step.outputs.items():
            buffer = program.buffer_of[name]
            assert buffer.tensor is not None and buffer.layout is not None
            shape = program.tensor_of[buffer.tensor].shape
            out[buffer.tensor] = value.numpy(), buffer.layout.indices(shape, rank)
        return out

    def run() -> None:
        step.run()

    return BoundStrategy(run, lambda: _error(results(), expected))


def _error(results: Mapping[str, tuple[Any, Any]], expected: Arrays) -> float:
    """Return the largest difference from the dense reference, relative to each tensor's largest value."""
    worst = []
    for name, (value, index) in results.items():
        dense = expected[name]
        part = dense
        for dim, chosen in enumerate(index):
            part = part.take(chosen, dim)
        if part.size:
            worst.append(float(abs(value - part).max() / abs(dense).max()))
    assert len(results) == len(expected), set(expected) ^ set(results)
    return max(worst, default=0.0)
