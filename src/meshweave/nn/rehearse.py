"""A planned product at reduced size: what stays, what shrinks, and what one rank does to run and check it.

Dataflow, slices and lanes are the plan's, and so is the mesh shape as near as the number of processes allows;
sizes shrink in proportion until a laptop can multiply them. Operands are small integers, so that every order of
summation gives the same float32 and the check against the dense product is exact.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshweave.algorithms.matmul2d.common.problem import MatmulProblem
from meshweave.describe.layout.shapes import nearest_mesh
from meshweave.ir.program import Program
from meshweave.ir.program.parse import parse

_LARGEST = 4
"""Operands are integers of at most this size: sums of k products stay exact in float32 up to k = 2**20."""


@dataclass(frozen=True)
class Reduced:
    """A layer's sizes and mesh for a rehearsal."""

    tokens: int
    in_features: int
    out_features: int
    mesh_shape: tuple[int, ...]


def reduced(
    sizes: tuple[int, int, int], planned: Sequence[int], shapes: Sequence[tuple[int, ...]], max_dim: int
) -> Reduced:
    """A layer of (tokens, in, out) features planned on a mesh, for the nearest of the mesh `shapes` at hand.

    First the shards keep their size (tokens follow the rows of the mesh, features its columns), then all
    shrink alike until no dim is over `max_dim`. Raises LayoutError where `shapes` is empty.
    """
    shape = nearest_mesh(planned, shapes)
    ratio = (shape[0] / planned[0], shape[1] / planned[1], shape[1] / planned[1])
    kept = [size * min(factor, 1.0) for size, factor in zip(sizes, ratio, strict=True)]
    scale = min(1.0, max_dim / max(kept))
    step = 8 * math.lcm(*shape)
    tokens, ins, outs = (
        min(size, max(round(part * scale) // step * step, step))
        for size, part in zip(sizes, kept, strict=True)
    )
    return Reduced(tokens, ins, outs, shape)


def operand(problem: MatmulProblem, name: str, seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Global operand "a" or "b" as stored: the same small integers on every rank."""
    rng = np.random.default_rng([seed, "ab".index(name)])
    shape = problem.stored_shape(name)
    return rng.integers(-_LARGEST, _LARGEST, shape, dtype=np.int8, endpoint=True).astype(np.float32)


def shard(
    program: Program, name: str, whole: np.ndarray[Any, np.dtype[np.float32]], rank: int
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """What input buffer `name` of `rank` holds of a global operand."""
    layout = program.buffer_of[name].layout
    assert layout is not None
    return np.ascontiguousarray(whole[np.ix_(*layout.indices(whole.shape, rank))])


def dense_shard(
    program: Program, problem: MatmulProblem, a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], rank: int
) -> np.ndarray[Any, Any]:
    """The shard of the dense product that buffer c of `rank` should hold."""
    layout = program.buffer_of["c"].layout
    assert layout is not None
    rows, columns = layout.indices((problem.m, problem.n), rank)
    left = a[:, rows].T if problem.dataflow == "rs" else a[rows]
    right = b[columns].T if problem.dataflow == "ls" else b[:, columns]
    return np.asarray(left @ right)


@dataclass(frozen=True)
class Rehearsal:
    """What a rank is told, as JSON: the program as text, its problem, how often to run, operands' seed."""

    program: str
    problem: MatmulProblem
    repeat: int
    seed: int
    deadline_s: float

    def to_json(self) -> dict[str, Any]:
        p = self.problem
        return {
            "program": self.program,
            "problem": [p.m, p.n, p.k, list(p.mesh_shape), p.dataflow],
            "repeat": self.repeat,
            "seed": self.seed,
            "deadline_s": self.deadline_s,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Rehearsal:
        m, n, k, mesh_shape, dataflow = data["problem"]
        problem = MatmulProblem(m, n, k, tuple(mesh_shape), dataflow)
        return cls(data["program"], problem, data["repeat"], data["seed"], data["deadline_s"])


def rehearse_all(context: Any, payload: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Runs one rank of several rehearsals, one after another in the same processes.

    Each program is bound, run once to warm up and `repeat` times traced. Returns for each the largest absolute
    error against the dense product over all runs, which must each write every element anew, and the traces.

    `payload` holds "rehearsals", a list of `Rehearsal.to_json()`, all with the deadline of the first, and
    may hold "log", a folder in which every rank appends to `log_path` as it goes along: a line
    {"number", "error"} per rehearsal that it has ended, or {"number", "failed"} before it raises. So it is
    known what went well, and which one went wrong, where the processes do not live to return.

    Raises what binding and running raise: BindError, RankLostError, DeadlineError.
    """
    import torch

    from meshweave.execute.torch.groups import TorchContext

    jobs = [Rehearsal.from_json(one) for one in payload["rehearsals"]]
    torch.set_num_threads(1)
    shared = TorchContext(liveness=context.liveness, deadline_s=jobs[0].deadline_s if jobs else 60.0)
    results = []
    for number, job in enumerate(jobs):
        try:
            results.append(_rehearse(context, shared, job))
        except Exception as error:
            _log(payload, context.rank, {"number": number, "failed": " ".join(str(error).split())})
            raise
        _log(payload, context.rank, {"number": number, "error": results[-1]["error"]})
    shared.close()
    return results


def _rehearse(context: Any, shared: Any, job: Rehearsal) -> dict[str, Any]:
    import torch

    from meshweave.execute.torch.bind import bind

    problem, rank, program = job.problem, context.rank, parse(job.program)
    whole = {name: operand(problem, name, job.seed) for name in "ab"}
    expected = torch.from_numpy(dense_shard(program, problem, whole["a"], whole["b"], rank))
    shards = {name: torch.from_numpy(shard(program, name, whole[name], rank)) for name in "ab"}
    del whole
    bound = bind(program, rank, shards, context=shared, trace=True)
    traces, error = [], 0.0
    for _ in range(job.repeat + 1):
        bound.outputs["c"].fill_(float("nan"))  # a run must write every element
        with context.liveness.guard("all ranks to start a run"):
            torch.distributed.barrier()
        trace = bound.run()
        assert trace is not None
        traces.append(trace)
        difference = (bound.outputs["c"] - expected).abs().nan_to_num(nan=float("inf"))
        error = max(error, float(difference.max()) if difference.numel() else 0.0)
    return {"error": error, "traces": [trace.to_json() for trace in traces[1:]]}


def log_path(folder: str | Path, rank: int) -> Path:
    """The file of a rank in the folder that `rehearse_all` is told to log to."""
    return Path(folder) / f"rank-{rank}.jsonl"


def read_log(folder: str | Path, rank: int) -> list[dict[str, Any]]:
    """The complete lines that a rank has logged so far; none where it has not begun."""
    path = log_path(folder, rank)
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _log(payload: Mapping[str, Any], rank: int, line: dict[str, Any]) -> None:
    if "log" in payload:
        with log_path(payload["log"], rank).open("a") as file:
            file.write(json.dumps(line) + "\n")
