"""What one rank of `reshard_lab.py` does: every variant of a reshard on the same tensors, interleaved."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from meshweave.algorithms.reshard import (
    ReshardProblem,
    TensorMove,
    plan_reshard,
    reshard_program,
)
from meshweave.cost.fabric import HostTopology
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.model import load_model
from meshweave.describe.model.state_dict import llama_parameters, server_layout, trainer_layout
from meshweave.execute.ranks.job import RankContext
from meshweave.execute.torch.bind import bind
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.measure import start_together, without_garbage_collection
from meshweave_lab.description_file import load_lab
from meshweave_studies.alpacomm.cases import CASES, one_to_many


def problem_of(setting: Mapping[str, Any]) -> ReshardProblem:
    """`setting`: a `case` of table 2 or `receivers` [hosts, ranks of each], with shape; or a Llama's `width`."""
    if "width" in setting:
        return llama(setting["width"])
    case = CASES[setting["case"]] if "case" in setting else one_to_many(*setting["receivers"])
    return case.problem(tuple(setting["shape"]), chips_per_host=4)


def llama(width: int) -> ReshardProblem:
    """The state dict of llama-2-7b, its 291 tensors at a 4096 / `width`-th of their width, in fp32: from a trainer
    of 4 FSDP x 4 TP on four hosts to two replicas of 2 TP on a fifth."""
    model = load_model("llama-2-7b")
    share = model.hidden // width
    small = replace(
        model,
        hidden=width,
        head_dim=model.head_dim // share,
        ffn_hidden=model.ffn_hidden // share,
        vocab_size=(model.vocab_size or 0) // share,
    )
    src, dst = Mesh.of("trainer", (4, 4), ("fsdp", "tp")), Mesh.of("server", (2, 2), ("replica", "tp"), 16)
    return ReshardProblem(
        tuple(
            TensorMove(one.name, one.shape, "float32", trainer_layout(one, src), server_layout(one, dst))
            for one in llama_parameters(small)
        )
    )


def measure(context: RankContext, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Runs every variant of every setting once to warm up and then `repeat` times, in turns.

    `payload`: lab (its file), settings (see `problem_of`; `variants` lists [strategy, order]), repeat, deadline_s.
    Returns for each setting and variant the seconds from the common start to the end of this rank's part (0 for a
    rank without one), whether all that arrived was right, and late_s.
    """
    torch.set_num_threads(1)
    network = HostTopology.of(load_lab(payload["lab"]).cluster())
    shared = TorchContext(liveness=context.liveness, deadline_s=payload["deadline_s"])
    rows, late_s = [], 0.0
    for number, setting in enumerate(payload["settings"]):
        problem = problem_of(setting)
        tensors, expected = {}, {}
        for at, item in enumerate(problem.moves):
            # Every element is its own number, as far as float32 can tell them apart: below 2**24.
            whole = (np.arange(np.prod(item.shape), dtype=np.int64) % (1 << 24)).reshape(item.shape)
            if context.rank in item.src.mesh:
                tensors[f"x{at}"] = _shard(whole, item.src.indices(item.shape, context.rank))
            if context.rank in item.dst.mesh:
                expected[f"y{at}"] = _shard(whole, item.dst.indices(item.shape, context.rank))
        tensors |= {name: torch.empty_like(value) for name, value in expected.items()}
        del whole
        bound = []
        for strategy, order in setting["variants"]:
            plan = plan_reshard(problem, network, strategy=strategy, order=order)
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
        with without_garbage_collection():
            for repetition in range(payload["repeat"] + 1):
                for which in range(len(bound)) if repetition % 2 else reversed(range(len(bound))):
                    for name in expected:
                        tensors[name].zero_()
                    start_ns, late_ns = start_together(shared)
                    one, took = bound[which], 0.0
                    if one is not None:
                        one.run()
                        took = time.monotonic() - start_ns / 1e9
                    if repetition:
                        times[which].append(took)
                        late_s = max(late_s, late_ns / 1e9)
                    arrived = all(torch.equal(tensors[name], value) for name, value in expected.items())
                    right[which] = right[which] and arrived
        rows.append({"times_s": times, "right": right})
        del bound, tensors, expected
        gc.collect()
        if context.rank == 0:
            print(f"{number + 1} of {len(payload['settings'])} settings", file=sys.stderr, flush=True)
    shared.close()
    return {"rows": rows, "late_s": late_s}


def _shard(whole: np.ndarray[Any, Any], index: tuple[np.ndarray[Any, Any], ...]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(whole[np.ix_(*index)]).astype(np.float32))
