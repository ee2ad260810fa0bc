"""Runs of programs on local processes, each checked against the dense reference.

A `ProgramRun` goes to every rank as JSON. A rank logs each program that it has completed, so the parent can report
progress, and can name the program that failed even if all processes died.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshweave.base.errors import UnsupportedError
from meshweave.check.reference import expected_shard, random_inputs
from meshweave.execute.numpy import local_inputs
from meshweave.ir.program import Program
from meshweave.ir.program.parse import parse
from meshweave.trace import Trace

_LEAD_S = 0.01
"""From the broadcast of a start to the start: processes of one host need no more."""


@dataclass(frozen=True)
class ProgramRun:
    """A request to run a program on local processes and to check its outputs.

    Attributes:
        program: the program in its text form.
        repeat: number of measured runs, after one to warm up.
        seed: seed of the random inputs.
        deadline_s: seconds after which a wait for another rank fails.
        beside: other programs, as text, that are timed in turns with it and not checked.
    """

    program: str
    repeat: int
    seed: int
    deadline_s: float
    beside: tuple[str, ...] = ()


def run_on_processes(
    runs: Sequence[ProgramRun], num_ranks: int, timeout_s: float, log: Path | None = None
) -> list[list[dict[str, Any]]]:
    """Run programs one after another on one set of local processes.

    Args:
        num_ranks: the number of processes.
        timeout_s: seconds after which the processes are stopped.
        log: a folder in which each rank logs every program that has ended or failed there (`read_log`), or None.

    Returns:
        For each rank, for each program, a dict: "error", the largest absolute difference of its outputs from the
        dense reference; "traces", each measured run as JSON; "beside", for each program beside it the (start,
        end) of each measured run in picoseconds.

    Raises:
        UnsupportedError: torch is missing.
        RankLostError, DeadlineError: a process died, hung, or all took too long.
        MeshweaveError, RankError: what a rank raised.
    """
    try:
        import torch.distributed  # noqa: F401

        from meshweave.execute.ranks.launch import launch
    except ImportError:
        raise UnsupportedError("running needs torch: pip install 'meshweave[torch]'") from None
    payload: dict[str, Any] = {"runs": [asdict(run) for run in runs]}
    if log is not None:
        payload["log"] = str(log)
    return launch("meshweave.check.processes:run_on_rank", num_ranks, payload, timeout_s=timeout_s)


def run_on_rank(context: Any, payload: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Run one rank of several programs, one after another in the same process.

    Each program is bound, run once to warm up and `repeat` times traced, in turns with those beside it. Every
    run must write every element of the outputs anew: they are filled with NaN (integers with -1) before it.
    Measured runs begin at an instant that all ranks share.

    Args:
        context: the `RankContext` of this rank.
        payload: "runs", a list of the fields of a `ProgramRun` each, all with the deadline of the first. It may
            hold "log", a folder in which every rank appends a line to `log_path` per program: {"number",
            "error"} when it has ended, or {"number", "failed"} before it raises. So the caller knows which
            program went wrong even where no process lives to return.

    Returns:
        For each program "error", the largest absolute difference from the dense reference over all runs,
        "traces", one per measured run as JSON, and "beside", for each program beside it the (start, end) of each
        measured run in picoseconds.

    Raises:
        UnsupportedError: an output depends on a `call` or on what is not declared.
        BindError: a program cannot be bound, or has partial sums and calls.
        RankLostError, DeadlineError: another rank died, or a wait for it took longer than `deadline_s`.
    """
    import torch

    from meshweave.execute.torch.context import TorchContext

    runs = [ProgramRun(**data) for data in payload["runs"]]
    torch.set_num_threads(1)
    shared = TorchContext(liveness=context.liveness, deadline_s=runs[0].deadline_s if runs else 60.0)
    results = []
    for number, run in enumerate(runs):
        try:
            results.append(_run_and_check(context, shared, run))
        except Exception as error:
            _log(payload, context.rank, {"number": number, "failed": " ".join(str(error).split())})
            raise
        _log(payload, context.rank, {"number": number, "error": results[-1]["error"]})
    shared.close()
    return results


def _run_and_check(context: Any, shared: Any, run: ProgramRun) -> dict[str, Any]:
    import torch

    from meshweave.execute.torch.measure import without_garbage_collection

    rank, program = context.rank, parse(run.program)
    if rank not in program.ranks:  # it only comes to the starts
        for _ in range((run.repeat + 1) * (1 + len(run.beside))):
            _start(context, shared, run)
        return {"error": 0.0, "traces": [], "beside": [[] for _ in run.beside]}
    whole = random_inputs(program, run.seed)
    outputs = [
        buffer.name
        for buffer in program.buffers
        if buffer.kind == "output" and rank in program.mesh_of[buffer.mesh]
    ]
    expected = {name: torch.from_numpy(expected_shard(program, whole, name, rank)) for name in outputs}
    bound = _bind_with_inputs(program, rank, whole, shared)
    del whole
    others = map(parse, run.beside)
    beside = [_bind_with_inputs(one, rank, random_inputs(one, run.seed), shared) for one in others]
    traces, error = [], 0.0
    edges: list[list[tuple[int, int]]] = [[] for _ in beside]
    timed = [*beside, bound]
    with without_garbage_collection() if run.repeat else nullcontext():
        for repetition in range(run.repeat + 1):
            for position in range(len(timed)):
                number = (position + repetition) % len(timed)
                for output in timed[number].outputs.values():
                    _fill_with_invalid(output)
                _start(context, shared, run)
                trace = timed[number].run()
                assert trace is not None
                if number < len(beside):
                    edges[number].append(_first_start_and_last_end(trace))
                    continue
                traces.append(trace)
                differences = (_largest_difference(bound.outputs[name], expected[name]) for name in outputs)
                error = max([error, *differences])
    return {
        "error": error,
        "traces": [trace.to_json() for trace in traces[1:]],
        "beside": [measured[1:] for measured in edges],
    }


def _start(context: Any, shared: Any, run: ProgramRun) -> None:
    """Wait for all ranks, also those that have no part in the program, and if it is timed for a common instant."""
    import torch

    from meshweave.execute.torch.measure import start_together

    if run.repeat:
        start_together(shared, lead_s=_LEAD_S)
    else:
        with context.liveness.guard("all ranks to start a run"):
            torch.distributed.barrier()


def _bind_with_inputs(program: Program, rank: int, whole: Mapping[str, Any], shared: Any) -> Any:
    """Return a bound program whose inputs are shards of the tensors `whole`, arrays by name."""
    import torch

    from meshweave.execute.torch.bind import bind

    shards = {
        name: torch.from_numpy(shard.copy()).to(getattr(torch, program.buffer_of[name].dtype))
        for name, shard in local_inputs(program, whole, rank).items()
    }
    return bind(program, rank, shards, context=shared, trace=True)


def _first_start_and_last_end(trace: Trace) -> tuple[int, int]:
    """Return picoseconds; the same twice for a rank without ops."""
    spans = trace.spans
    now_ps = time.monotonic_ns() * 1000
    return min((s.start_ps for s in spans), default=now_ps), max((s.end_ps for s in spans), default=now_ps)


def _fill_with_invalid(tensor: Any) -> None:
    """Fill a tensor with a value that no result has, so that an element that is not written is seen."""
    tensor.fill_(float("nan") if tensor.is_floating_point() else -1)


def _largest_difference(result: Any, expected: Any) -> float:
    difference = (result.to(expected.dtype) - expected).abs().double().nan_to_num(nan=float("inf"))
    return float(difference.max()) if difference.numel() else 0.0


def log_path(folder: str | Path, rank: int) -> Path:
    """Return the path of the file in `folder` that global rank `rank` logs to, one JSON object a line."""
    return Path(folder) / f"rank-{rank}.jsonl"


def read_log(folder: str | Path, rank: int) -> list[dict[str, Any]]:
    """Return the complete lines that a rank has logged so far; an empty list if it has not begun.

    Each is {"number": index of the program, "error": largest absolute difference} or {"number", "failed": why}.
    """
    path = log_path(folder, rank)
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _log(payload: Mapping[str, Any], rank: int, line: dict[str, Any]) -> None:
    if "log" in payload:
        with log_path(payload["log"], rank).open("a") as file:
            file.write(json.dumps(line) + "\n")
