"""What one rank of a benchmark does: all rivals on the same operands, interleaved, under one pace."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from meshweave.algorithms.matmul.problem import MatmulProblem
from meshweave.nn.rehearse import dense_shard, operand, shard


def bench_matmul(context: Any, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Runs every case once to warm up and check, then `repeat` times in turn.

    `payload`: problem [m, n, k, mesh_shape, dataflow], cases [{name, program} or {name, dtensor}], repeat, seed,
    flops_per_s (0: unpaced), deadline_s. Returns per case the [start, end] of each run in seconds of
    CLOCK_MONOTONIC, the largest error, and the pace report.
    """
    import torch
    import torch.distributed as dist

    from meshweave.lab.pace import paced

    torch.set_num_threads(1)
    m, n, k, mesh_shape, dataflow = payload["problem"]
    problem = MatmulProblem(m, n, k, tuple(mesh_shape), dataflow)
    whole = {name: operand(problem, name, payload["seed"]) for name in "ab"}
    runs: list[Callable[[], float]] = []
    closers: list[Callable[[], None]] = []
    for case in payload["cases"]:
        run, close = (
            _program(context, payload, case, problem, whole)
            if "program" in case
            else _dtensor(context, case, problem, whole)
        )
        runs.append(run)
        closers.append(close)
    del whole
    rate = float(payload["flops_per_s"])
    errors = [0.0] * len(runs)
    times: list[list[tuple[float, float]]] = [[] for _ in runs]
    pacing: AbstractContextManager[Any] = paced(rate) if rate else nullcontext()
    with pacing as pacer:
        for repetition in range(int(payload["repeat"]) + 1):
            for number, run in enumerate(runs):
                with context.liveness.guard("all ranks to start a run"):
                    dist.barrier()
                start = time.monotonic()
                errors[number] = max(errors[number], run())
                if repetition:
                    times[number].append((start, _ended[0]))
        report = vars(pacer.report()) if rate else None
    for close in closers:
        close()
    return {"times": times, "errors": errors, "pace": report}


_ended = [0.0]
"""When the last run ended, before its result was checked."""


def _program(
    context: Any,
    payload: Mapping[str, Any],
    case: Mapping[str, Any],
    problem: MatmulProblem,
    whole: Mapping[str, Any],
) -> tuple[Callable[[], float], Callable[[], None]]:
    import torch

    from meshweave.execute.groups import TorchContext
    from meshweave.execute.torch_backend import bind
    from meshweave.ir.parse import parse

    program = parse(case["program"])
    rank = context.rank
    expected = torch.from_numpy(dense_shard(program, problem, whole["a"], whole["b"], rank))
    shards = {name: torch.from_numpy(shard(program, name, whole[name], rank)) for name in "ab"}
    shared = TorchContext(liveness=context.liveness, deadline_s=payload["deadline_s"])
    bound = bind(program, rank, shards, context=shared)

    def run() -> float:
        bound.run()
        _ended[0] = time.monotonic()
        return float((bound.outputs["c"] - expected).abs().max()) if expected.numel() else 0.0

    return run, shared.close


def _dtensor(
    context: Any, case: Mapping[str, Any], problem: MatmulProblem, whole: Mapping[str, Any]
) -> tuple[Callable[[], float], Callable[[], None]]:
    """PyTorch's DTensor on the same operands: with the same placements, or with those that `dtensor` names."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

    mesh = init_device_mesh("cpu", problem.mesh_shape, mesh_dim_names=("row", "col"))
    named: dict[str, Placement] = {"S0": Shard(0), "S1": Shard(1), "R": Replicate()}
    a_at, b_at, c_at = ([named[word] for word in case["dtensor"][operand_name]] for operand_name in "abc")

    def placed(name: str, placements: list[Placement]) -> Any:
        local = torch.from_numpy(whole[name])
        for dim, placement in enumerate(placements):
            if isinstance(placement, Shard):
                parts = torch.chunk(local, problem.mesh_shape[dim], placement.dim)
                local = parts[mesh.get_local_rank(dim)]
        return DTensor.from_local(local.contiguous(), mesh, placements, run_check=False)

    a, b = placed("a", a_at), placed("b", b_at)
    left = whole["a"].T if problem.dataflow == "rs" else whole["a"]
    right = whole["b"].T if problem.dataflow == "ls" else whole["b"]
    full = torch.from_numpy(left @ right)
    expected = full
    for dim, placement in enumerate(c_at):
        if isinstance(placement, Shard):
            expected = torch.chunk(expected, problem.mesh_shape[dim], placement.dim)[mesh.get_local_rank(dim)]
    expected = expected.clone()

    def run() -> float:
        with torch.no_grad():
            product = (a.t() if problem.dataflow == "rs" else a) @ (b.t() if problem.dataflow == "ls" else b)
            local = product.redistribute(mesh, c_at).to_local()
            local = local.wait() if hasattr(local, "wait") else local
            error = float((local - expected).abs().max())
        _ended[0] = time.monotonic()
        return error

    return run, lambda: None
