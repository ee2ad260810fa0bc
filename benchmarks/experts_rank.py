"""What one rank of `experts_lab.py` does: every algorithm for experts on the same tokens, interleaved."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from meshweave.algorithms.experts import ExpertsProblem, Routing, TokenSlices
from meshweave.algorithms.experts.algorithm import ExpertsAlgorithm
from meshweave.algorithms.experts.reference import cells_reference, layer_reference
from meshweave.algorithms.table import algorithm
from meshweave.describe.layout.mesh import Mesh
from meshweave.execute.ranks.job import RankContext
from meshweave.execute.torch.bind import bind
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.measure import start_together, without_garbage_collection
from meshweave.lower import lower_one_sided
from meshweave.nn import grouped_product

RIVAL = "all_to_all_single"
Arrays = Mapping[str, np.ndarray[Any, Any]]


def problem_of(setting: Mapping[str, Any]) -> ExpertsProblem:
    """`setting`: part, tokens, hidden, inner and routing; 4 of 64 experts on 4 hosts of 4 ranks."""
    mesh = Mesh.of("ep", (4, 4), ("host", "local"))
    sizes = setting["tokens"], 4, 64, setting["hidden"], setting["inner"]
    return ExpertsProblem(mesh, *sizes, part=setting["part"], routing=Routing(**setting["routing"]))


def candidate(name: str, problem: ExpertsProblem) -> tuple[ExpertsAlgorithm[Any], Any]:
    """Return an entry and the config that is measured: of the fused layer four slices, else the first."""
    entry = algorithm(name)
    assert isinstance(entry, ExpertsAlgorithm)
    config = TokenSlices(4, False) if name == "experts_fused" else next(entry.candidates(problem))
    return entry, config


def tensors_of(problem: ExpertsProblem) -> dict[str, np.ndarray[Any, Any]]:
    """Return the whole inputs, the same on every rank."""
    draw = np.random.default_rng(0)
    rows = problem.num_ranks * problem.tokens
    shapes = {"X": (rows, problem.hidden)}
    if problem.part == "layer":
        shapes["Gates"] = (rows, problem.top_k)
        shapes["W1"] = (problem.num_experts, problem.hidden, 2 * problem.inner)
        shapes["W2"] = (problem.num_experts, problem.inner, problem.hidden)
    drawn = {name: draw.standard_normal(shape).astype(np.float32) / 4 for name, shape in shapes.items()}
    return {**drawn, "Choices": problem.choices}


def own_part(whole: Arrays, rank: int, count: int) -> dict[str, torch.Tensor]:
    """Return a rank's rows of whole tensors by buffer name."""
    return {
        name.lower(): torch.from_numpy(np.ascontiguousarray(np.split(value, count)[rank]))
        for name, value in whole.items()
    }


class TorchLayer:
    """The rival: rows sorted by expert, `all_to_all_single`, products by expert, and back."""

    def __init__(self, problem: ExpertsProblem, own: dict[str, torch.Tensor], rank: int) -> None:
        self.problem, self.own = problem, own
        counts, ranks = problem.counts()["n0"], problem.num_ranks
        self.out_sizes = counts[:, rank].reshape(ranks, -1).sum(axis=1).tolist()
        mine = counts.reshape(ranks, -1, ranks)[rank]
        self.in_sizes = mine.sum(axis=0).tolist()
        expert = np.concatenate([np.repeat(np.arange(len(mine)), mine[:, source]) for source in range(ranks)])
        self.to_experts = torch.from_numpy(np.argsort(expert, kind="stable"))
        self.to_sources = torch.argsort(self.to_experts)
        self.rows = mine.sum(axis=1).tolist()
        self.output = torch.empty_like(own["x"])

    def run(self) -> None:
        """Compute the own tokens."""
        own, inner = self.own, self.problem.inner
        order = torch.argsort(own["choices"].reshape(-1), stable=True)
        sent = own["x"][order // self.problem.top_k]
        received = sent.new_empty((sum(self.in_sizes), self.problem.hidden))
        dist.all_to_all_single(received, sent, self.in_sizes, self.out_sizes)
        h = grouped_product(received[self.to_experts], own["w1"], self.rows)
        a = torch.nn.functional.silu(h[:, :inner]) * h[:, inner:]
        z = grouped_product(a, own["w2"], self.rows)[self.to_sources]
        back = torch.empty_like(sent)
        dist.all_to_all_single(back, z, self.out_sizes, self.in_sizes)
        taken = torch.empty_like(back)
        taken[order] = back
        weighted = taken.reshape(*own["choices"].shape, -1) * own["gates"][..., None]
        self.output.copy_(weighted.sum(1))


def bound_entries(
    setting: Mapping[str, Any], whole: Arrays, shared: TorchContext, rank: int
) -> list[tuple[Callable[[], Any], torch.Tensor, torch.Tensor]]:
    """Return for each entry what runs it, its output, and what that must be."""
    problem, out = problem_of(setting), []
    own = own_part(whole, rank, problem.num_ranks)
    layer = layer_reference(problem, whole)["Y"] if problem.part == "layer" else None
    for name in setting["entries"]:
        if name == RIVAL:
            rival = TorchLayer(problem, own, rank)
            run, output = rival.run, rival.output
            expected = layer
        else:
            entry, config = candidate(name, problem)
            program = entry.program(problem, config)
            program = lower_one_sided(program) if entry.is_one_sided else program
            started = time.monotonic()
            bound = bind(program, rank, own, context=shared, calls=entry.functions(problem))
            if rank == 0:
                print(f"{name}: bound in {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
            run, output = bound.run, bound.outputs["y" if layer is not None else "q0"]
            expected = layer
            if expected is None:
                cells = cells_reference(problem, whole, entry.source_order(problem))
                expected = np.moveaxis(cells["Q0"], 1, 0)
        mine = torch.from_numpy(np.ascontiguousarray(np.split(expected, problem.num_ranks)[rank]))
        out.append((run, output, mine if layer is not None else mine.movedim(0, 1)))
    return out


def is_right(output: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether all rows that are expected are there; padded ones are NaN."""
    wanted = ~expected.isnan()
    return torch.allclose(output[wanted], expected[wanted], rtol=1e-4, atol=1e-5)


def measure(context: RankContext, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Runs every entry of every setting once to warm up and then `repeat` times, in turns.

    `payload`: settings (see `problem_of`; `entries` lists names), repeat, deadline_s. Returns for each setting and
    entry the seconds from the common start to the end of this rank's part, whether values were right, and late_s.
    """
    torch.set_num_threads(1)
    shared = TorchContext(liveness=context.liveness, deadline_s=payload["deadline_s"])
    rows, late_s = [], 0.0
    for setting in payload["settings"]:
        whole = tensors_of(problem_of(setting))
        entries = bound_entries(setting, whole, shared, context.rank)
        times: list[list[float]] = [[] for _ in entries]
        right = [True for _ in entries]
        gc.collect()
        with without_garbage_collection():
            for repetition in range(payload["repeat"] + 1):
                for which in range(len(entries)) if repetition % 2 else reversed(range(len(entries))):
                    run, output, expected = entries[which]
                    output.zero_()
                    start_ns, late_ns = start_together(shared)
                    run()
                    took = time.monotonic() - start_ns / 1e9
                    if repetition:
                        times[which].append(took)
                        late_s = max(late_s, late_ns / 1e9)
                    right[which] = right[which] and is_right(output, expected)
        rows.append({"times_s": times, "right": right})
        del entries
        gc.collect()
    shared.close()
    return {"rows": rows, "late_s": late_s}
