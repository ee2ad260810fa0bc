"""What the ranks of test_cuda.py run, all on one device."""

from __future__ import annotations

import traceback

import numpy as np
from backend_programs import CALLS, PROGRAMS, inputs_for
from backend_rank_functions import shards
from cuda_world import nccl_context

from meshweave.execute.numpy import run_numpy
from meshweave.execute.torch.bind import bind
from meshweave.ir.program.parse import parse
from meshweave.ir.program.text import to_text
from meshweave.trace import Trace

TURNS = 4


def floating(program):
    """The program in float32, which holds its integers exactly: CUDA multiplies no int64."""
    return parse(to_text(program).replace("int64", "float32").replace("int32", "float32"))


def compare(context, payload):
    """Run programs on CUDA several times with changing input; report what differs from numpy or fails."""
    wrong, traces = [], {}
    with nccl_context(context) as ours:
        for name in payload["programs"]:
            program = floating(PROGRAMS[name]())
            if context.rank not in program.ranks:
                ours.prepare(program)
                continue
            try:
                traces[name] = _compared(ours, program, context.rank, name, wrong)
            except Exception:
                if payload.get("stops", True):
                    raise
                wrong.append((name, traceback.format_exc()[-600:]))
                break
    return {"wrong": wrong, "traces": traces}


def _compared(ours, program, rank, name, wrong):
    """Run one program, untraced and traced, add what is wrong, and return the trace of the last run."""
    results = [run_numpy(program, inputs_for(program, seed), calls=CALLS) for seed in range(2)]
    given = [
        {key: value.cuda() for key, value in shards(program, inputs_for(program, seed), rank).items()}
        for seed in range(2)
    ]
    trace = Trace("", "", ())
    for traced in (False, True):
        bound = bind(program, rank, {}, context=ours, calls=CALLS, trace=traced)
        for turn in range(TURNS):
            trace = bound.run(given[turn % 2]) or trace
            for key, tensor in bound.outputs.items():
                value = tensor.float().cpu().numpy()
                if not np.array_equal(value, results[turn % 2].memory[rank, key, 0]):
                    wrong.append((name, traced, turn, key))
    return trace.to_json()
