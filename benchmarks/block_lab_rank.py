"""What one rank of `block_lab.py` does: constants of the lab, then every strategy of a block, interleaved."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
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
from meshweave.execute.ranks.job import RankContext
from meshweave.execute.torch.bind import bind
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.measure import start_together, without_garbage_collection
from meshweave.ir.program import FULL, Buffer, Lane, On, Program, Repeat, Statement, Tensor, View
from meshweave.ir.program.ops import AllGather, AllReduce, Matmul, Op, Zero
from meshweave.lower import lower_rings
from meshweave_lab.bench.rank import running_order
from meshweave_lab.pace import paced

PRODUCT = (256, 256, 384)
"""Rows, terms and columns of the products that run beside a calibration."""
TOLERANCE = 1e-3
"""The largest error of a result, as a share of the largest value of the tensor."""


@dataclass(frozen=True)
class BoundStrategy:
    """What runs a step once, and what returns the largest relative error of its results."""

    run: Callable[[], None]
    error: Callable[[], float]


# --- constants ----------------------------------------------------------------------------------------------


def ring_program(kind: str, num_ranks: int, part_bytes: int, loops: int = 1, products: int = 0) -> Program:
    """Return all-gathers as rings, or the transport's all-reduces, one after another, with products beside them.

    Args:
        kind: "all_gather" or "all_reduce".
        part_bytes: the bytes of a part; an all-reduce sums as many parts as there are ranks.
        loops: how many there are, in lane "row".
        products: how many products there are, in lane "compute".
    """
    mesh, count = Mesh.of("tp", (num_ranks, 1), ("row", "col")), part_bytes // 4
    shape, whole = (num_ranks * count,), View("y", (FULL,))
    everywhere = Layout(mesh, (Replicate(), Replicate()))
    tensors = (Tensor("X", shape, "float32"), Tensor("Y", shape, "float32"))
    y = Buffer("y", "output", "tp", "float32", "Y", everywhere)
    if kind == "all_gather":
        x = Buffer("x", "input", "tp", "float32", "X", Layout(mesh, (Shard(0), Replicate())))
        op: Op = AllGather(out=whole, src=View("x", (FULL,)), dim=0, over="tp.row", lane="row")
    else:
        x = Buffer("x", "input", "tp", "float32", "X", everywhere)
        op = AllReduce(out=whole, src=View("x", (FULL,)), over="tp.row", lane="row")
    statements: list[Statement] = [Repeat("i", loops, (op,))]
    buffers, lanes = [x, y], [Lane("row")]
    if products:
        a, b, c = (View(name, (FULL, FULL)) for name in "abc")
        m, k, n = PRODUCT
        for view, sizes in ((a, (m, k)), (b, (k, n)), (c, (m, n))):
            buffers.append(Buffer(view.buffer, "scratch", "tp", "float32", shape=sizes))
        zeros = (Zero(out=view, lane="compute") for view in (a, b))
        product = Matmul(out=c, a=a, b=b, lane="compute")
        statements += [*zeros, Repeat("j", products, (product,))]
        lanes.append(Lane("compute"))
    body = (On("tp", tuple(statements)),)
    return lower_rings(Program(kind, (mesh,), tensors, tuple(buffers), tuple(lanes), body))


def measure_constants(context: RankContext, payload: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return for each (kind, bytes of a part) the seconds of one op in a row of `loops`, by repetition.

    Constants are those of a busy machine: paced products run beside.

    `payload`: cases [[kind, part_bytes, loops]], products, flops_per_s, repeat, deadline_s.
    """
    torch.set_num_threads(1)
    shared = TorchContext(liveness=context.liveness, deadline_s=payload["deadline_s"])
    out = {}
    for kind, part_bytes, loops in payload["cases"]:
        program = ring_program(kind, context.num_ranks, part_bytes, loops, payload["products"])
        size = part_bytes // 4 * (1 if kind == "all_gather" else context.num_ranks)
        bound = bind(program, context.rank, {"x": torch.ones(size)}, context=shared, trace=True)
        times = []
        with without_garbage_collection(), paced(payload["flops_per_s"]):
            for repetition in range(payload["repeat"] + 1):
                start_together(shared)
                trace = bound.run()
                assert trace is not None
                spans = [span for span in trace.spans if span.lane == "row"]
                took_ps = max(span.end_ps for span in spans) - min(span.start_ps for span in spans)
                if repetition:
                    times.append(took_ps / 1e12 / loops)
        out[f"{kind} {part_bytes}"] = times
        if context.rank == 0:
            print(f"{kind} of parts of {part_bytes} bytes measured", file=sys.stderr, flush=True)
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
    entry = algorithm(strategy["algorithm"])
    program = lower_rings(entry.program(problem, BlockConfig(**strategy["config"])))
    rank = shared.rank
    assert rank is not None
    # Strategies made of 2D products see the sequences of a batch as one dim of tokens.
    as_declared = {name: value.reshape(program.tensor_of[name].shape) for name, value in whole.items()}
    # Ring attention is also given the positions of tokens.
    as_declared = {**entry.random_inputs(problem, 0), **as_declared}
    shards = {
        name: torch.from_numpy(shard.copy())
        for name, shard in local_inputs(program, as_declared, rank).items()
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

    def error() -> float:
        declared = {name: value.reshape(program.tensor_of[name].shape) for name, value in expected.items()}
        return _error(results(), declared)

    return BoundStrategy(run, error)


def _error(results: Mapping[str, tuple[Any, Any]], expected: Arrays) -> float:
    """Return the largest difference from the dense reference, relative to each tensor's largest value.

    One that is no number counts as infinite.
    """
    worst = []
    for name, (value, index) in results.items():
        dense = expected[name]
        part = dense
        for dim, chosen in enumerate(index):
            part = part.take(chosen, dim)
        if part.size:
            apart = np.nan_to_num(abs(value - part), nan=np.inf, posinf=np.inf)
            worst.append(float(apart.max() / abs(dense).max()))
    assert len(results) == len(expected), set(expected) ^ set(results)
    return max(worst, default=0.0)
