"""Choice by trial: plans are run for a few steps each, and the fastest is taken.

What a planner predicts is what its constants say. Where steps are short, a trial costs less than an error: the
planner's best, plain data parallelism and ZeRO-3 run on the user's model and batch, on copies of the model. Plain
data parallelism wins where no other is faster by more than a share. Measured times are kept, by kind of plan, and
correct what is predicted the next time.
"""

from __future__ import annotations

import copy
import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshweave.algorithms.block.data_parallel import DataParallel, ZeroThree
from meshweave.algorithms.step import Parallelism
from meshweave.base.errors import LayoutError, MeshweaveError, PlanError
from meshweave.base.units import format_bytes

PLAIN, SHARDED = DataParallel.name, ZeroThree.name
"""The strategy that wins where others are about as fast, and the other one that is always tried."""
_MEMORY = Path("/proc/meminfo")


@dataclass(frozen=True)
class Trial:
    """A plan that is tried.

    Attributes:
        plan: what `parallelize` takes.
        words: what it is called.
        kind: which of its times correct those of others: "data", "zero", "tensor" or "pipeline".
        predicted_s: what a step should take by the planner; None where nobody says.
        factor: what earlier trials of its kind took, to what was predicted.
        measured_s: what the median step took on the slowest rank; None where it was not run.
        refused: why it was not run.
    """

    plan: Any
    words: str
    kind: str
    predicted_s: float | None = None
    factor: float = 1.0
    measured_s: float | None = None
    refused: str = ""

    @property
    def expected_s(self) -> float | None:
        """Return what a step should take, as earlier trials correct it."""
        return None if self.predicted_s is None else self.factor * self.predicted_s

    @classmethod
    def of(cls, plan: Any, predicted_s: float | None = None) -> Trial:
        """Return the trial of the name of a strategy, or of degrees."""
        if isinstance(plan, Parallelism):
            pipeline, tensor = plan.pipeline > 1, plan.tensor_size * plan.context > 1
            kind = "pipeline" if pipeline else "tensor" if tensor else "zero" if plan.zero else "data"
            return cls(plan, _words(plan), kind, predicted_s)
        name = str(plan)
        kind = "zero" if name.startswith("zero") else "data" if name == PLAIN else "tensor"
        return cls(plan, name, kind, predicted_s)

    @property
    def is_plain(self) -> bool:
        """Return whether it is data parallelism alone."""
        return self.kind == "data"


def _words(plan: Parallelism) -> str:
    tensor = "x".join(map(str, plan.tensor_mesh)) if plan.tensor_mesh[1] > 1 else str(plan.tensor_size)
    words = [f"dp {plan.data}"] + ([f"zero {plan.zero}"] if plan.zero else [])
    words += [f"cp {plan.context}"] if plan.context > 1 else []
    words += [f"tp {tensor} by {plan.strategy}"] if plan.tensor_size > 1 else []
    words += [f"pp {plan.pipeline} by {plan.schedule}"] if plan.pipeline > 1 else []
    return ", ".join([*words, f"micro-batch {plan.micro_batch}"])


@dataclass(frozen=True)
class Trials:
    """What `parallelize(model, "auto", trials=...)` tries, and for how long.

    Attributes:
        tokens, targets: a batch as `ParallelModel.loss` takes it, to make steps with.
        plans: what is tried beside data parallelism and ZeRO-3, each with its predicted seconds or None: degrees,
            or names of strategies of one mesh axis.
        most: the most trials.
        seconds: after which none begins.
        steps: of a trial, after one that is not counted.
        within: the share by which another plan must be faster than plain data parallelism.
        results: a file beside the machine's constants, in which measured times are kept.
    """

    tokens: Tensor
    targets: Tensor
    plans: Sequence[tuple[Any, float | None]] = ()
    most: int = 4
    seconds: float = 60.0
    steps: int = 3
    within: float = 0.05
    results: str | Path | None = None

    def candidates(self) -> list[Trial]:
        """Return what is tried: the plans that were given, and both plain ones."""
        given = [Trial.of(plan, seconds) for plan, seconds in self.plans]
        said = {trial.kind: trial.predicted_s for trial in reversed(given)}
        plain = [Trial.of(PLAIN, said.get("data")), Trial.of(SHARDED, said.get("zero"))]
        others = [trial for trial in given if trial.kind not in ("data", "zero")]
        factors = corrections_of(self.results)
        every = [replace(trial, factor=factors.get(trial.kind, 1.0)) for trial in (*plain, *others)]
        first, rest = every[: len(plain)], every[len(plain) :]
        rest.sort(key=lambda trial: math.inf if trial.expected_s is None else trial.expected_s)
        return [*first, *rest][: self.most]


@dataclass(frozen=True)
class TrialTable:
    """What was predicted and what was measured, and what was chosen."""

    trials: tuple[Trial, ...]
    within: float
    chosen: Trial = field(init=False)

    def __post_init__(self) -> None:
        """Choose. Raises PlanError where nothing ran."""
        ran = [trial for trial in self.trials if trial.measured_s is not None]
        if not ran:
            reasons = "; ".join(f"{trial.words}: {trial.refused}" for trial in self.trials)
            raise PlanError(f"no plan could be tried: {reasons}")
        best = min(ran, key=_measured_s)
        plain = [t for t in ran if t.is_plain and _measured_s(t) <= (1 + self.within) * _measured_s(best)]
        object.__setattr__(self, "chosen", min(plain, key=_measured_s) if plain else best)

    def __str__(self) -> str:
        lines = []
        for trial in sorted(self.trials, key=_measured_s):
            said = "" if trial.expected_s is None else f"{1e3 * trial.expected_s:.1f} ms"
            took = f"{1e3 * _measured_s(trial):.1f} ms" if trial.measured_s is not None else trial.refused
            mark = "*" if trial is self.chosen else " "
            lines.append(f"{mark} {trial.words:40} predicted {said or '-':>10}  measured {took}")
        return "\n".join(lines)


def _measured_s(trial: Trial) -> float:
    return math.inf if trial.measured_s is None else trial.measured_s


def run_trials(
    candidates: Sequence[Trial],
    start: Callable[[Any], Callable[[], object]],
    *,
    steps: int = 3,
    seconds: float = 60.0,
    within: float = 0.05,
    needed_bytes: int = 0,
) -> TrialTable:
    """Run plans for a few steps each, and return the table; all ranks of the world call it with the same ones.

    Args:
        start: returns what makes one step by a plan. It is called and dropped before the next one.
        steps: of each, after one that is not counted.
        seconds: after which no trial begins, nor a step of one that has made one.
        needed_bytes: what a rank needs for a trial.

    Raises:
        PlanError: none could be run.
    """
    free_bytes = least_of(available_bytes())
    began, table = time.monotonic(), []
    for trial in candidates:
        passed_s = -least_of(-(time.monotonic() - began))
        if needed_bytes > free_bytes:
            lacks = f"{format_bytes(needed_bytes)} needed on each rank, {format_bytes(int(free_bytes))} free"
            table.append(replace(trial, refused=lacks))
        elif passed_s > seconds:
            table.append(replace(trial, refused=f"{seconds:g} s had passed"))
        else:
            table.append(_tried(trial, start, steps, began + seconds))
        gc.collect()
    return TrialTable(tuple(table), within)


def _tried(trial: Trial, start: Callable[[Any], Callable[[], object]], steps: int, until: float) -> Trial:
    try:
        step = start(trial.plan)
    except MeshweaveError as error:  # on all ranks: it is the plan or the model that does not do
        return replace(trial, refused=" ".join(str(error).split()))
    times: list[float] = []
    for number in range(steps + 1):
        began = time.monotonic()
        step()
        took_s = -least_of(-(time.monotonic() - began))
        if number or steps == 0:
            times.append(took_s)
        if times and least_of(until - time.monotonic()) < 0:
            break
    return replace(trial, measured_s=statistics.median(times))


def least_of(value: float) -> float:
    """Return the least of a number on all ranks; all of them call it."""
    own = torch.tensor([value], dtype=torch.float64)
    if dist.get_backend() == "nccl":
        own = own.cuda()
    dist.all_reduce(own, dist.ReduceOp.MIN)
    least: float = own.item()
    return least


def available_bytes() -> float:
    """Return the free bytes of memory for a rank: of its GPU, or its share of this host's."""
    if dist.get_backend() == "nccl":
        return float(torch.cuda.mem_get_info()[0])
    if not _MEMORY.exists():
        return math.inf
    fields = dict(line.split(":", 1) for line in _MEMORY.read_text("utf-8").splitlines())
    return 1024 * float(fields["MemAvailable"].split()[0]) / int(dist.get_world_size())


def needed_bytes_of(module: nn.Module) -> int:
    """Return what a trial needs on a rank at most: the model again, its gradients, and two states of an optimizer.

    Raises LayoutError where the model has no memory.
    """
    total = 0
    for parameter in module.parameters():
        if parameter.device.type == "meta":
            raise LayoutError("a model on the meta device cannot be tried; give a plan, or fill it first")
        total += parameter.numel() * parameter.element_size()
    return 4 * total


def by_trial(
    module: nn.Module,
    device_mesh: DeviceMesh | None,
    trials: Trials | None,
    make: Callable[..., Any],
    *,
    check: bool,
) -> Any:
    """Return the `ParallelModel` of a module by the fastest plan tried; all ranks of the world call it.

    Args:
        make: puts a plan into a module, by a mesh or its own, and returns its `ParallelModel`.
        check: whether the one that stays is proved.

    Raises:
        LayoutError: there is a mesh, or nothing to try.
        PlanError: nothing could be tried.
    """
    if trials is None or device_mesh is not None:
        raise LayoutError("plan 'auto' takes trials=mw.nn.Trials(tokens, targets), and makes its own mesh")

    def start(plan: Any) -> Callable[[], object]:
        made = make(copy.deepcopy(module), plan, mesh_for(plan, module), check=False)
        optimizer = torch.optim.AdamW(
            [each for each in made.module.parameters() if each.requires_grad], lr=0.0
        )

        def step() -> None:
            optimizer.zero_grad()
            made.step(trials.tokens, trials.targets)
            optimizer.step()

        return step

    table = run_trials(
        trials.candidates(), start, steps=trials.steps, seconds=trials.seconds, within=trials.within,
        needed_bytes=needed_bytes_of(module),
    )  # fmt: skip
    if trials.results is not None:
        if dist.get_rank() == 0:
            keep_results(trials.results, table)
        dist.barrier()
    plan = table.chosen.plan
    model = make(module, plan, mesh_for(plan, module), check=check)
    model.trials = table
    return model


def mesh_for(plan: Any, module: nn.Module) -> DeviceMesh | None:
    """Return a mesh of all ranks for the name of a strategy; None for degrees, which make their own."""
    if isinstance(plan, Parallelism):
        return None
    kind = next(module.parameters()).device.type
    return init_device_mesh(kind, (dist.get_world_size(),))


# --- what is kept --------------------------------------------------------------------------------------------


def keep_results(path: str | Path, table: TrialTable) -> None:
    """Add the measured times of a table to a file."""
    rows = _kept(path) + [
        {
            "kind": trial.kind,
            "words": trial.words,
            "predicted_s": trial.predicted_s,
            "measured_s": trial.measured_s,
        }
        for trial in table.trials
        if trial.measured_s is not None
    ]
    Path(path).write_text(json.dumps({"trials": rows}, indent=1) + "\n", encoding="utf-8")


def corrections_of(path: str | Path | None) -> dict[str, float]:
    """Return by kind of plan the median of measured to predicted times in a file."""
    ratios: dict[str, list[float]] = {}
    for row in _kept(path) if path is not None else []:
        if row["predicted_s"]:
            ratios.setdefault(row["kind"], []).append(row["measured_s"] / row["predicted_s"])
    return {kind: statistics.median(values) for kind, values in ratios.items()}


def _kept(path: str | Path) -> list[dict[str, Any]]:
    if not Path(path).exists():
        return []
    try:
        rows: list[dict[str, Any]] = json.loads(Path(path).read_text(encoding="utf-8"))["trials"]
    except (ValueError, KeyError, TypeError):
        raise LayoutError(f"{path} is no file of kept trials; give another, or remove it") from None
    return rows
