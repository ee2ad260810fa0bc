"""What one rank of `reshard_lab.py` does: every variant of a reshard on the same tensors, interleaved."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from meshweave.algorithms.reshard import Fabric, ReshardProblem, plan_reshard, reshard_program
from meshweave.execute.groups import TorchContext
from meshweave.execute.launch import Context
from meshweave.execute.measure import quiet, start_together
from meshweave.execute.torch_backend import bind
from meshweave.lab.description import load_lab
from meshweave.reproduce.resharding_cases import CASES, one_to_many


def problem_of(setting: Mapping[str, Any]) -> ReshardProblem:
    """`setting`: shape, and either the number of a `case` of table 2 or `receivers` [hosts, ranks of each]."""
    case = CASES[setting["case"]] if "case" in setting else one_to_many(*setting["receivers"])
    return case.problem(tuple(setting["shape"]), chips_per_host=4)


def measure(context: Context, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Runs every variant of every setting once to warm up and then `repeat` times, in turns.

    `payload`: lab (its file), settings (see `problem_of`; `variants` lists [strategy, order]), repeat, deadline_s.
    Returns for each setting and variant the seconds from the common start to the end of this rank's part (0 for a
    rank without one), whether all that arrived was right, and late_s.
    """
    torch.set_num_threads(1)
    fabric = Fabric.of(load_lab(payload["lab"]).cluster())
    shared = TorchContext(liveness=context.liveness, deadline_s=payload["deadline_s"])
    rows, late_s = [], 0.0
    for number, setting in enumerate(payload["settings"]):
        problem = problem_of(setting)
        (item,) = problem.items
        # Every element is its own number, as far as float32 can tell them apart; whole numbers below 2**24.
        whole = (np.arange(np.prod(item.shape), dtype=np.int64) % (1 << 24)).reshape(item.shape)
        tensors, expected = {}, None
        if context.rank in item.src.mesh:
            tensors["x0"] = _shard(whole, item.src.indices(item.shape, context.rank))
        if context.rank in item.dst.mesh:
            expected = _shard(whole, item.dst.indices(item.shape, context.rank))
            tensors["y0"] = torch.empty_like(expected)
        del whole
        bound = []
        for strategy, order in setting["variants"]:
            plan = plan_reshard(problem, fabric, strategy=strategy, order=order)
            program = reshard_program(plan)
            start = time.monotonic()
            mine = context.rank in program.ranks
            bound.append(bind(program, context.rank, tensors, context=shared) if mine else None)
            if context.rank == 0:
                took_s = time.monotonic() - start
                said = f"{setting['name']}: {strategy}, {order}: bound in {took_s:.1f} s"
                print(said, file=sys.stderr, flush=True)
        times: list[list[float]] = [[] for _ in bound]
        right = [True for _ in bound]
        gc.collect()
        with quiet():
            for repetition in range(payload["repeat"] + 1):
                for which in range(len(bound)) if repetition % 2 else reversed(range(len(bound))):
                    if "y0" in tensors:
                        tensors["y0"].zero_()
                    start_ns, late_ns = start_together(shared)
                    one, took = bound[which], 0.0
                    if one is not None:
                        one.run()
                        took = time.monotonic() - start_ns / 1e9
                    if repetition:
                        times[which].append(took)
                        late_s = max(late_s, late_ns / 1e9)
                    if expected is not None:
                        right[which] = right[which] and bool(torch.equal(tensors["y0"], expected))
        rows.append({"times_s": times, "right": right})
        del bound, tensors, expected
        gc.collect()
        if context.rank == 0:
            print(f"{number + 1} of {len(payload['settings'])} settings", file=sys.stderr, flush=True)
    shared.close()
    return {"rows": rows, "late_s": late_s}


def _shard(whole: np.ndarray[Any, Any], index: tuple[np.ndarray[Any, Any], ...]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(whole[np.ix_(*index)]).astype(np.float32))
