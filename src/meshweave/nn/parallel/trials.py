"""Choice by trial: plans are run for a few steps each, and the fastest is taken.

What a planner predicts is what its constants say. Where steps are short, a trial costs less than an error: the
planner's best, plain data parallelism and ZeRO-3 run on the user's model and batch, on copies of the model. Plain
data parallelism wins where no other is faster by more than a share. Measured times are kept, by kind of plan, and
correct what is predicted the next time.
"""

from __future__ import annotations

import copy
import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshweave.algorithms.block.data_parallel import DataParallel, ZeroThree
from meshweave.algorithms.step import Parallelism
from meshweave.base.errors import (
    DeadlineError,
    LayoutError,
    MeshweaveError,
    PlanError,
    RankLostError,
    printable,
)
from meshweave.base.units import format_bytes
from meshweave.execute.torch.call_order import share_refusal
from meshweave.execute.torch.context import TorchContext
from meshweave.nn.parallel.agreed import agree, without_addresses
from meshweave.nn.parallel.all_ranks import AllRanks
from meshweave.nn.parallel.planned_here import plans_here
from meshweave.nn.parallel.trial_memory import available_bytes, needed_bytes_of
from meshweave.nn.parallel.trial_results import (
    check_numbers,
    corrections_of,
    is_number,
    keep_results,
    usable_corrections,
)

PLAIN, SHARDED = DataParallel.name, ZeroThree.name
"""The strategy that wins where others are about as fast, and the other one that is always tried."""
_TITLE = "trials of plans"


@dataclass(frozen=True)
class Trial:
    """A plan that is tried.

    Attributes:
        plan: what `parallelize` takes.
        words: the plan's name in tables.
        kind: "data", "zero", "tensor" or "pipeline": measured times of a kind correct predictions of that kind.
        predicted_s: the seconds that a planner predicts of a step; None without a prediction.
        factor: the median ratio of measured to predicted times of earlier trials of its kind; 1 without any.
        measured_s: the median seconds of a step, each on its slowest rank; None where it was not run.
        refused: why it was not run; "" where it was.
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
        """Return the predicted seconds of a step times `factor`; None where there is no prediction."""
        return None if self.predicted_s is None else self.factor * self.predicted_s

    @classmethod
    def of(cls, plan: Any, predicted_s: float | None = None) -> Trial:
        """Return the trial of `plan`, a `Parallelism` or the name of a strategy, before it has run."""
        if isinstance(plan, Parallelism):
            pipeline, tensor = plan.pipeline > 1, plan.tensor_size * plan.context > 1
            kind = "pipeline" if pipeline else "tensor" if tensor else "zero" if plan.zero else "data"
            return cls(plan, _words(plan), kind, predicted_s)
        name = str(plan)
        kind = "zero" if name.startswith("zero") else "data" if name == PLAIN else "tensor"
        return cls(plan, name, kind, predicted_s)

    @property
    def stands_for(self) -> str:
        """Return the name of the strategy if the plan is plain data parallelism or ZeRO-3 alone, else "".

        These two are tried in any case, so such a plan is not tried again. Plans count as one of them whatever
        their micro-batch, and whatever they say of what only tensor or pipeline ranks use.
        """
        if not isinstance(self.plan, Parallelism):
            return self.words if self.words in (PLAIN, SHARDED) else ""
        alone = Parallelism(self.plan.data, micro_batch=self.plan.micro_batch)
        names = {alone: PLAIN, replace(alone, zero=3): SHARDED}
        same = {name: getattr(alone, name) for name in ("strategy", "order", "schedule", "virtual_stages")}
        return names.get(replace(self.plan, **same), "")

    @property
    def is_plain(self) -> bool:
        """Return whether the plan is data parallelism alone."""
        return self.kind == "data"


def _words(plan: Parallelism) -> str:
    tensor = "x".join(map(str, plan.tensor_mesh)) if plan.tensor_mesh[1] > 1 else str(plan.tensor_size)
    words = [f"dp {plan.data}"] + ([f"zero {plan.zero}"] if plan.zero else [])
    words += [f"cp {plan.context}"] if plan.context > 1 else []
    words += [f"tp {tensor} by {plan.strategy}"] if plan.tensor_size > 1 else []
    words += [f"pp {plan.pipeline} by {plan.schedule}"] if plan.pipeline > 1 else []
    again = [f"recompute {plan.recompute}"] if plan.recompute != "none" else []
    return ", ".join([*words, f"micro-batch {plan.micro_batch}", *again])


@dataclass(frozen=True)
class Trials:
    """What `parallelize(model, "auto", trials=...)` tries, and for how long.

    Attributes:
        tokens, targets: a batch as `ParallelModel.loss` takes it, to make steps with.
        plans: pairs (plan, its predicted seconds or None) to try beside data parallelism and ZeRO-3. A pair of
            one of these two, which are tried in any case, gives its predicted seconds. A plan is degrees, or the
            name of a strategy of one mesh axis. None for the plans that the planner ranks first, with constants
            of this machine that it measures before.
        most: the most trials.
        seconds: no trial begins after so many; measurements for the planner count, up to half of them.
        steps: the counted steps of a trial, after one that is not counted; with 0 that one counts.
        within: the share by which another plan must be faster than plain data parallelism to be chosen.
        results: a file in which rank 0 keeps measured times, by which later predictions are corrected; None for
            none.

    Raises:
        LayoutError: tokens or targets are no tensors, a number is not of its kind, or `plans` are no such pairs.
    """

    tokens: Tensor
    targets: Tensor
    plans: Sequence[tuple[Any, float | None]] | None = None
    most: int = 4
    seconds: float = 60.0
    steps: int = 3
    within: float = 0.05
    results: str | Path | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, Tensor) or not isinstance(self.targets, Tensor):
            raise LayoutError("trials take a batch: Trials(tokens, targets), two tensors")
        if isinstance(self.most, bool) or not isinstance(self.most, int) or self.most < 1:
            raise LayoutError(f"trials are at least 1, not most={printable(self.most)}")
        check_numbers(self.steps, self.seconds, self.within)
        if self.plans is not None:
            object.__setattr__(self, "plans", tuple(self.plans))  # of a zip, which is read once
        for each in self.plans or ():
            is_pair = isinstance(each, tuple | list) and len(each) == 2
            if not is_pair or not (each[1] is None or is_number(each[1], least=1e-12)):
                raise LayoutError(
                    f"a plan to try is a pair: the plan, and its predicted seconds or None; not {printable(each)}"
                )

    @property
    def words(self) -> dict[str, str]:
        """Return as text by name what must be the same on all ranks: plans and limits."""
        plans = {str(n): without_addresses(repr(plan)) for n, (plan, _) in enumerate(self.plans or ())}
        how = {name: str(getattr(self, name)) for name in ("most", "seconds", "steps", "within")}
        return {**plans, "planned here": str(self.plans is None), **how}

    def candidates(self, factors: Mapping[str, float] | None = None) -> list[Trial]:
        """Return at most `most` trials: data parallelism, ZeRO-3, then other given plans by expected time.

        Predicted seconds of the first two are those of given plans that are the same. Plans without a prediction
        come last.

        Args:
            factors: for each kind of plan the ratio of measured to predicted times; None for those in
                `results`, which is then read: LayoutError where it is no file of trials.
        """
        given = [Trial.of(plan, seconds) for plan, seconds in self.plans or ()]
        said = {trial.stands_for: trial.predicted_s for trial in reversed(given)}
        plain = [Trial.of(name, said.get(name)) for name in (PLAIN, SHARDED)]
        others = [trial for trial in given if not trial.stands_for]
        factors = corrections_of(self.results) if factors is None else factors
        every = [replace(trial, factor=factors.get(trial.kind, 1.0)) for trial in (*plain, *others)]
        first, rest = every[: len(plain)], every[len(plain) :]
        rest.sort(key=lambda trial: math.inf if trial.expected_s is None else trial.expected_s)
        return [*first, *rest][: self.most]


@dataclass(frozen=True)
class TrialTable:
    """What was predicted and what was measured of each plan, and which was chosen.

    Attributes:
        trials: all plans that were tried or refused.
        within: the share by which another plan must be faster than plain data parallelism to be chosen.
        chosen: plain data parallelism, where no plan is faster by more than `within`; else the fastest.

    Raises:
        PlanError: no trial ran.
    """

    trials: tuple[Trial, ...]
    within: float
    chosen: Trial = field(init=False)

    def __post_init__(self) -> None:
        """Choose a trial. Raises PlanError where none ran."""
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
    context: TorchContext | None = None,
) -> TrialTable:
    """Run plans for a few steps each, and return the table. Collective over all ranks of the world.

    All ranks give the same arguments. A trial that raises an error of this library, for its plan, model or batch,
    counts as not run, for that reason. Lost ranks and other errors end all trials, on all ranks.

    Args:
        candidates: the trials, run in this order.
        start: is given a plan, and returns a function that makes one step by it, dropped before the next plan.
        steps: the counted steps of each, after one that is not counted; with 0 that one counts.
        seconds: after which no trial begins, and one that has made a counted step ends.
        within: the share by which another plan must be faster than plain data parallelism to be chosen.
        needed_bytes: the bytes of memory that a rank needs for a trial; none is run where a rank has fewer free.
        context: deadline and liveness of waits between steps; default: that of the default process group.

    Raises:
        PlanError: none could be run.
        LayoutError: ranks try other plans, or a number is not of its kind.
        BindError: another rank has met an error.
        RankLostError, DeadlineError: other ranks are missing or late.
    """
    among = AllRanks.of(context)
    with share_refusal(among.context, among.ranks, _TITLE):
        check_numbers(steps, seconds, within)
        plans = {str(n): without_addresses(repr(each.plan)) for n, each in enumerate(candidates)}
        settings = {"steps": str(steps), "seconds": str(seconds), "within": str(within)}
        agree(among.context, among.ranks, {"trials": {**plans, **settings}}, "all to try the same plans")
        free_bytes = among.least(available_bytes())
        began, table = time.monotonic(), []
        for trial in candidates:
            passed_s = among.most(time.monotonic() - began)
            if needed_bytes > free_bytes:
                needed, free = format_bytes(needed_bytes), format_bytes(int(free_bytes))
                table.append(replace(trial, refused=f"{needed} needed on each rank, {free} free"))
            elif passed_s > seconds:
                table.append(replace(trial, refused=f"{seconds:g} s had passed"))
            else:
                table.append(_tried(trial, start, steps, began + seconds, among))
            gc.collect()
        return TrialTable(tuple(table), within)


def _tried(
    trial: Trial, start: Callable[[Any], Callable[[], object]], steps: int, until: float, among: AllRanks
) -> Trial:
    times: list[float] = []
    step, refused = _refusal_of(lambda: start(trial.plan))
    number = 0
    while among.least(not refused) and number <= steps:
        began = time.monotonic()
        _, refused = _refusal_of(step)
        took_s = among.most(time.monotonic() - began)
        if number or steps == 0:
            times.append(took_s)
        if times and among.least(until - time.monotonic()) < 0:
            number = steps
        number += 1
    if not among.least(not refused):
        return replace(trial, refused=refused or "another rank refuses it")
    return replace(trial, measured_s=statistics.median(times))


def _refusal_of(call: Callable[[], Any]) -> tuple[Any, str]:
    """Return the result of a call, and why there is none: the plan, the model or the batch does not do."""
    try:
        return call(), ""
    except (RankLostError, DeadlineError):
        raise
    except MeshweaveError as error:
        return None, " ".join(str(error).split()) or type(error).__name__


def by_trial(
    module: nn.Module,
    device_mesh: DeviceMesh | None,
    trials: Trials | None,
    make: Callable[..., Any],
    *,
    check: bool,
    context: TorchContext | None = None,
) -> Any:
    """Return the `ParallelModel` of a module by the fastest plan tried; all ranks of the world call it.

    Args:
        device_mesh, trials: as given to `parallelize`; the mesh is to be None, and trials are to be given.
        make: called as `make(module, plan, device_mesh, check=...)`; the mesh is None for a `Parallelism`.
        check: whether the plan that is chosen is proved; trials are not.

    Raises:
        LayoutError: there is a mesh, or no trials; the model has no memory, or no parameters; ranks try other
            plans; or `trials.results` is no file of trials, or cannot be written.
        PlanError: nothing could be tried.
        BindError: another rank has met an error.
        RankLostError, DeadlineError: other ranks are missing or late.
    """
    if not isinstance(trials, Trials) or device_mesh is not None:
        raise LayoutError("plan 'auto' takes trials=mw.nn.Trials(tokens, targets), and makes its own mesh")
    among, results = AllRanks.of(context), trials.results
    with share_refusal(among.context, among.ranks, _TITLE):
        factors = among.of_first(lambda: usable_corrections(results), "the first rank to read kept trials")
        agree(among.context, among.ranks, {"trials": trials.words}, "all to try the same plans")
        began, needed_bytes = time.monotonic(), needed_bytes_of(module)
        free_bytes = among.least(available_bytes())
        if trials.plans is None and needed_bytes <= free_bytes:
            planned = plans_here(module, trials.tokens, trials.targets, make, free_bytes, context)
            gc.collect()
            trials = replace(trials, plans=planned)
        table = run_trials(
            trials.candidates(factors), _starter(module, trials, make), steps=trials.steps,
            seconds=among.least(max(trials.seconds - (time.monotonic() - began), trials.seconds / 2)),
            within=trials.within, needed_bytes=needed_bytes, context=context,
        )  # fmt: skip
        among.of_first(lambda: keep_results(results, table.trials), "the first rank to keep the trials")
    plan = table.chosen.plan
    model = make(module, plan, mesh_for(plan, module), check=check)
    model.trials = table
    return model


def _starter(
    module: nn.Module, trials: Trials, make: Callable[..., Any]
) -> Callable[[Any], Callable[[], object]]:
    """Return what puts a plan into a copy of a model, and returns what makes one step of it."""

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

    return start


def mesh_for(plan: Any, module: nn.Module) -> DeviceMesh | None:
    """Return a one-dim mesh of all ranks for the name of a strategy; None for a `Parallelism`.

    Its device type is that of the module's first parameter.
    """
    if isinstance(plan, Parallelism):
        return None
    kind = next(module.parameters()).device.type
    return init_device_mesh(kind, (dist.get_world_size(),))
