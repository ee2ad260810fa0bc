"""One rank of a benchmark: all rivals on the same operands, interleaved, each run from a common start."""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from meshweave.algorithms.matmul2d.common.problem import Matmul2dProblem
from meshweave.check.reference import random_tensor
from meshweave.describe.layout import Layout, Placement, Replicate, Shard
from meshweave.ir.program import Program

_NOTHING = 3.4e38
"""Stands for the error of an element that a run did not write (NaN)."""

BoundRival = tuple[Callable[[], float], Callable[[], float]]
"""Two functions: one runs the product and returns when it ended (monotonic seconds); one checks the result of that
run and returns its largest absolute error."""


def bench_matmul(context: Any, payload: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """Run every rival of every round once to warm up, then `repeat` times in turn, in changing order.

    A time is from the instant that all ranks start at to the end of this rank's part. Every result is checked.

    Args:
        payload: products [{problem [m, n, k, mesh_shape, dataflow], rivals [{name, program} or {name, dtensor}],
            rounds [{flops_per_s (0: unpaced), rivals [indices]}]}], repeat, seed, deadline_s.

    Returns:
        By product and round: times [rival][repetition] in seconds, errors [rival], late_s (by how many seconds
        this rank began after the common start, at worst), and pace, the pace report.

    Raises:
        BindError, RankLostError, DeadlineError: as binding and running raise them.
    """
    import torch

    from meshweave.execute.torch.context import TorchContext
    from meshweave.execute.torch.measure import without_garbage_collection

    torch.set_num_threads(1)
    # One context for all: every group has threads of gloo's that wake up often, and idle ones disturb too.
    shared = TorchContext(liveness=context.liveness, deadline_s=payload["deadline_s"])
    meshes: dict[tuple[int, ...], Any] = {}
    out = []
    for product in payload["products"]:
        rivals = _bind(product, int(payload["seed"]), shared, meshes)
        with without_garbage_collection():
            out.append(
                [run_round(round_, rivals, int(payload["repeat"]), shared) for round_ in product["rounds"]]
            )
        del rivals
        gc.collect()
    shared.close()
    return out


def running_order(count: int, repetition: int) -> list[int]:
    """Return the order of `count` rivals in a repetition; which rival follows which changes between
    repetitions.
    """
    steps = [step for step in range(1, max(count, 2)) if math.gcd(step, count) == 1] or [1]
    step = steps[repetition % len(steps)]
    return [(repetition + i * step) % count for i in range(count)]


def run_round(
    round_: Mapping[str, Any], rivals: Sequence[BoundRival], repeat: int, shared: Any
) -> dict[str, Any]:
    """Run the rivals of a round by turns; see `bench_matmul` for what is given and returned."""
    from meshweave.execute.torch.measure import start_together
    from meshweave_lab.pace import paced

    chosen, rate = [rivals[index] for index in round_["rivals"]], float(round_["flops_per_s"])
    times: list[list[float]] = [[] for _ in chosen]
    errors, late_s = [0.0] * len(chosen), 0.0
    pacing: AbstractContextManager[Any] = paced(rate) if rate else nullcontext()
    with pacing as pacer:
        for repetition in range(repeat + 1):
            for number in running_order(len(chosen), repetition):
                run, check = chosen[number]
                start_ns, late_ns = start_together(shared)
                end = run()
                errors[number] = max(errors[number], check())
                if repetition:
                    times[number].append(end - start_ns / 1e9)
                    late_s = max(late_s, late_ns / 1e9)
            if shared.rank == 0:
                pace = f"{rate:.3g} FLOP/s" if rate else "unpaced"
                what = f"repetition {repetition} of {repeat}" if repetition else "warmed up and checked"
                print(f"{len(chosen)} rivals, {pace}: {what}", file=sys.stderr, flush=True)
        report = vars(pacer.report()) if rate else None
    return {"times": times, "errors": errors, "late_s": late_s, "pace": report}


def _bind(
    product: Mapping[str, Any], seed: int, shared: Any, meshes: dict[tuple[int, ...], Any]
) -> list[BoundRival]:
    from meshweave.ir.program.parse import parse

    m, n, k, mesh_shape, dataflow = product["problem"]
    problem = Matmul2dProblem(m, n, k, tuple(mesh_shape), dataflow)
    operands = _Operands(problem, seed, shared.rank)
    rivals: list[BoundRival] = []
    for rival in product["rivals"]:
        if "program" in rival:
            rivals.append(_bind_program(parse(rival["program"]), operands, shared))
            continue
        if problem.mesh_shape not in meshes:
            from torch.distributed.device_mesh import init_device_mesh

            meshes[problem.mesh_shape] = init_device_mesh(
                "cpu", problem.mesh_shape, mesh_dim_names=("row", "col")
            )
        rivals.append(_bind_dtensor(rival["dtensor"], operands, meshes[problem.mesh_shape]))
    return rivals


class _Operands:
    """The operands of a problem, and the shards of them and of their product on one rank, each made once."""

    def __init__(self, problem: Matmul2dProblem, seed: int, rank: int) -> None:
        self.problem, self._rank = problem, rank
        self._whole = {
            name: random_tensor(name, problem.stored_shape(name), "float32", seed) for name in "ab"
        }
        self._known: dict[tuple[object, ...], Any] = {}

    def shard(self, name: str, layout: Layout, order: tuple[int, ...] | None = None) -> Any:
        """Return this rank's shard of operand "a" or "b", its dims in memory in `order` (outermost first)."""
        import torch

        from meshweave.execute.torch.views import from_wire, to_wire

        key = (name, layout.placements, order)
        if key not in self._known:
            whole = self._whole[name]
            local = torch.from_numpy(whole[np.ix_(*layout.indices(whole.shape, self._rank))])
            natural = order or tuple(range(local.dim()))
            self._known[key] = from_wire(to_wire(local, natural).contiguous(), natural)
        return self._known[key]

    def expected(self, layout: Layout) -> Any:
        """Return this rank's shard of the dense product."""
        import torch

        key = ("c", layout.placements)
        if key not in self._known:
            problem, a, b = self.problem, self._whole["a"], self._whole["b"]
            rows, columns = layout.indices((problem.m, problem.n), self._rank)
            left = a[:, rows].T if problem.dataflow == "rs" else a[rows]
            right = b[columns].T if problem.dataflow == "ls" else b[:, columns]
            self._known[key] = torch.from_numpy(left @ right)
        return self._known[key]


def difference(result: Any, expected: Any) -> float:
    """Return the largest absolute error of a result; one that was not written counts as huge."""
    return float((result - expected).abs().nan_to_num(nan=_NOTHING).max()) if expected.numel() else 0.0


def run_and_check(bound: Any, out: Any, expected: Any) -> BoundRival:
    """Return what runs a bound program and says when it ended, and what returns the error of `out` after a run."""
    out.fill_(float("nan"))

    def run() -> float:
        bound.run()
        return time.monotonic()

    def check() -> float:
        error = difference(out, expected)
        out.fill_(float("nan"))  # the next run must write every element
        return error

    return run, check


def _bind_program(program: Program, operands: _Operands, shared: Any) -> BoundRival:
    from meshweave.execute.torch.bind import bind

    shards = {}
    for name in "ab":
        buffer = program.buffer_of[name]
        assert buffer.layout is not None
        shards[name] = operands.shard(name, buffer.layout, buffer.order)
    layout = program.buffer_of["c"].layout
    assert layout is not None
    expected = operands.expected(layout)
    bound = bind(program, shared.rank, shards, context=shared)
    return run_and_check(bound, bound.outputs["c"], expected)


def _bind_dtensor(placed: Mapping[str, Sequence[str]], operands: _Operands, mesh: Any) -> BoundRival:
    """Bind PyTorch's DTensor to the same operands, row-major, with the placements given for a, b and c."""
    import torch
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import Replicate as TorchReplicate
    from torch.distributed.tensor import Shard as TorchShard

    problem = operands.problem
    ours: dict[str, Placement] = {"S0": Shard(0), "S1": Shard(1), "R": Replicate()}
    theirs: dict[str, Any] = {"S0": TorchShard(0), "S1": TorchShard(1), "R": TorchReplicate()}
    layouts = {name: Layout(problem.mesh, tuple(ours[word] for word in placed[name])) for name in "abc"}
    placements = {name: [theirs[word] for word in placed[name]] for name in "abc"}
    a, b = (
        DTensor.from_local(operands.shard(name, layouts[name]), mesh, placements[name], run_check=False)
        for name in "ab"
    )
    expected = operands.expected(layouts["c"])
    results: list[Any] = []

    def run() -> float:
        with torch.no_grad():
            product = (a.t() if problem.dataflow == "rs" else a) @ (b.t() if problem.dataflow == "ls" else b)
            local = product.redistribute(mesh, placements["c"]).to_local()
            local = local.wait() if hasattr(local, "wait") else local
        end = time.monotonic()
        results.append(local)
        return end

    def check() -> float:
        return difference(results.pop(), expected)

    return run, check
