"""One rank of a fidelity run: one case after another, traced, each from a common start, on aligned clocks."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

from meshweave.check.reference import expected_shard, random_inputs
from meshweave.execute.numpy import local_inputs
from meshweave.ir.program.parse import parse

_NOTHING = 3.4e38
"""Stands for the error of an element that a run did not write (NaN)."""


def fidelity_runs(context: Any, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Bind, run (once to warm up, then `repeat` times) and release every case in turn. Rank 0 prints progress.

    Args:
        payload: cases [{title, program, flops_per_s}], repeat, seed,
            deadline_s.

    Returns:
        offsets: this rank's clock against rank 0's as [at_ns, offset_ns, uncertainty_ns], before and after all
        cases. By case: error, the largest absolute difference from the dense product over all runs; overruns, the
        number of products slower than the pace; and runs. Each run has start_ns, the common start in rank 0's
        clock, and in this rank's clock end_ns, late_ns (by how much this rank began late) and spans, the start and
        end of every op in program order. All in nanoseconds.

    Raises:
        BindError, RankLostError, DeadlineError: as binding and running raise them.
    """
    import torch

    from meshweave.execute.torch.context import TorchContext
    from meshweave_lab.fidelity.clocks import clock_offsets

    torch.set_num_threads(1)
    # One context for all: every group has threads of gloo's that wake up often, and idle ones disturb too.
    shared = TorchContext(liveness=context.liveness, deadline_s=payload["deadline_s"])
    before = clock_offsets(shared)
    cases = []
    for number, case in enumerate(payload["cases"]):
        cases.append(_run_case(case, payload, shared, before.offset_ns))
        gc.collect()
        if context.rank == 0:
            durations_s = [(run["end_ns"] - run["start_ns"]) / 1e9 for run in cases[-1]["runs"]]
            title = f"case {number} of {len(payload['cases'])}, {case['title']}"
            print(
                f"{title}: rank 0 took {', '.join(f'{s:.3f}' for s in durations_s)} s",
                file=sys.stderr,
                flush=True,
            )
    after = clock_offsets(shared)
    shared.close()
    return {"offsets": [astuple(before), astuple(after)], "cases": cases}


def _run_case(
    case: Mapping[str, Any], payload: Mapping[str, Any], shared: Any, offset_ns: int
) -> dict[str, Any]:
    import torch

    from meshweave.execute.torch.bind import bind
    from meshweave.execute.torch.measure import start_together, without_garbage_collection
    from meshweave_lab.pace import paced

    program, rank = parse(case["program"]), shared.rank
    whole = random_inputs(program, payload["seed"])
    expected = torch.from_numpy(expected_shard(program, whole, "c", rank))
    bound = bind(program, rank, {}, context=shared, trace=True)
    # Copied into the bound tensors, which lie in memory as the program wants them.
    inputs: Any = {
        name: torch.from_numpy(shard.copy()) for name, shard in local_inputs(program, whole, rank).items()
    }
    del whole
    out, runs, error = bound.outputs["c"], [], 0.0
    with without_garbage_collection(), paced(case["flops_per_s"]) as pacer:
        for repetition in range(int(payload["repeat"]) + 1):
            out.fill_(float("nan"))  # a run must write every element
            start_ns, late_ns = start_together(shared, offset_ns)
            trace = bound.run(inputs)
            end_ns, inputs = time.monotonic_ns(), None
            assert trace is not None
            difference = (out - expected).abs().nan_to_num(nan=_NOTHING)
            error = max(error, float(difference.max()) if difference.numel() else 0.0)
            if repetition:
                spans = [edge // 1000 for s in trace.spans for edge in (s.start_ps, s.end_ps)]
                runs.append({"start_ns": start_ns, "end_ns": end_ns, "late_ns": late_ns, "spans": spans})
        overruns = pacer.report().num_overruns
    return {"runs": runs, "error": error, "overruns": overruns}
