"""What is known of a model on a cluster before a plan: what is predicted, executed and refused, and why.

Nothing here decides: each line asks what a plan would ask, kernels, recipes, stacks and the table of algorithms,
and says the answer of that place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from pydantic import BaseModel, ConfigDict

from meshweave.algorithms.step import Parallelism, StepProblem, load_stack
from meshweave.algorithms.step.checks import check_step
from meshweave.algorithms.step.executed import check_executed
from meshweave.algorithms.step.precision import PRECISIONS
from meshweave.algorithms.step.space import tensor_strategies
from meshweave.algorithms.step.stack_checks import check_parallelism, check_problem
from meshweave.algorithms.step.stacks import DEFAULT_STACK, IDEAL, default_stack, fitted_as, stack_names
from meshweave.algorithms.table import SCHEDULES, STRATEGIES
from meshweave.base.errors import MeshweaveError
from meshweave.describe.layout.shapes import near_square
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.kernels import SystolicConstants
from meshweave.describe.machine.left_out import costs_left_out, unmeasured_kernels
from meshweave.describe.machine.levels import level_sizes
from meshweave.describe.model.transformer import Transformer
from meshweave.describe.scores import evidence_on

_MOST = 16
"""The highest tensor degree that is tried where no host bounds it."""
Verdict = Literal["measured", "modelled", "not priced", "executed", "refused"]
"""How well something is known: `measured` by somebody on this chip, `modelled` from a datasheet, another kernel or
another stack; or whether it runs."""


class SupportLine(BaseModel):
    """One item of support: its subject, a verdict, and the evidence or the reason in words."""

    model_config = ConfigDict(frozen=True)

    subject: str
    verdict: Verdict
    why: str


class Support(BaseModel):
    """The support for training a model on a cluster: what is measured, modelled, executed or refused.

    Attributes:
        prediction: kernels, links, recipes of precision, what of the model has no price.
        stacks: whether each software stack runs the model, and on which runs it was tried.
        strategies: which tensor degrees each strategy takes in the runtime of this library, or why no plan has it.
        schedules: the pipeline schedules that this runtime takes.
        runs: how far published runs on this chip were predicted.
    """

    model_config = ConfigDict(frozen=True)

    model: str
    cluster: str
    num_chips: int
    sequence: int
    dtype: str
    prediction: tuple[SupportLine, ...]
    stacks: tuple[SupportLine, ...]
    strategies: tuple[SupportLine, ...]
    schedules: tuple[SupportLine, ...]
    runs: str


def support_of(
    model: Transformer, cluster: Cluster, *, sequence: int = 2048, dtype: str = "bfloat16"
) -> Support:
    """Return the support for training a model on a cluster, by subject.

    Args:
        sequence: tokens of a sequence, on which it depends which windows and positions count.
        dtype: element type of activations and weights.

    Raises:
        DescriptionError: the chip has no rate for the dtype.
    """
    problem = StepProblem(model, cluster, cluster.num_chips, sequence, dtype)
    return Support(
        model=model.name,
        cluster=cluster.name,
        num_chips=cluster.num_chips,
        sequence=sequence,
        dtype=dtype,
        prediction=tuple(_predicted(problem)),
        stacks=tuple(_of_stack(problem, name) for name in (*stack_names(), IDEAL)),
        strategies=tuple(_of_strategy(problem, name) for name in tensor_strategies()),
        schedules=tuple(_of_schedules(problem)),
        runs=evidence_on(cluster.chip.name, is_routed=model.is_routed)[1],
    )


def _predicted(problem: StepProblem) -> Iterator[SupportLine]:
    chip, dtype, kernels = problem.cluster.chip, problem.dtype, problem.cluster.chip.kernels
    for text in problem.model.not_priced_at(problem.sequence):
        yield SupportLine(subject="model", verdict="not priced", why=text)
    unmeasured = unmeasured_kernels(chip, dtype)
    source = "" if kernels is None else f"kernels {kernels.reference or kernels.name} of the catalog"
    is_compiled = kernels is not None and isinstance(kernels.product(dtype), SystolicConstants)
    of_products = f"{source}, fitted on cycles that a compiler expects" if is_compiled else source
    yield SupportLine(
        subject=f"products in {dtype}",
        verdict="modelled" if unmeasured or is_compiled else "measured",
        why=unmeasured or of_products,
    )
    has_attention = kernels is not None and kernels.attention_of(dtype) is not None
    why = (
        source
        if has_attention
        else "no kernel of attention was measured: it is priced as products are, times a stack's share"
    )
    yield SupportLine(
        subject=f"attention in {dtype}", verdict="measured" if has_attention else "modelled", why=why
    )
    has_collectives = kernels is not None and bool(kernels.collectives)
    free = costs_left_out(problem.cluster).removeprefix("note: ")
    why = "rates, latencies and launches of the cluster's description"
    yield SupportLine(
        subject="communication",
        verdict="measured" if has_collectives else "modelled",
        why=source if has_collectives else free or why,
    )
    for name, recipe in PRECISIONS.items():
        try:
            reading = recipe.reading_on(chip)
        except MeshweaveError as error:
            yield SupportLine(subject=name, verdict="refused", why=str(error))
            continue
        yield SupportLine(
            subject=name, verdict="modelled" if reading else "measured", why=reading or recipe.source
        )


def _of_stack(problem: StepProblem, name: str) -> SupportLine:
    """Return whether a stack runs the model, and which published runs it was tried on."""
    problem = replace(problem, stack=load_stack(name))
    try:
        check_problem(problem)
    except MeshweaveError as error:
        return SupportLine(subject=name, verdict="refused", why=str(error))
    reading = problem.attention_reading
    if name == IDEAL:
        why = "; ".join(filter(None, ("kernels and links alone; no software adds", reading)))
        return SupportLine(subject=name, verdict="modelled", why=why)
    fitted, chip = fitted_as(name), problem.cluster.chip.name
    why = "" if fitted == name else f"no run of it was published: the constants are those of {fitted}"
    tried, evidence = evidence_on(chip, fitted, is_routed=problem.model.is_routed)
    why = "; ".join(filter(None, (why, evidence, reading)))
    is_measured = tried and fitted == name and not reading
    return SupportLine(subject=name, verdict="measured" if is_measured else "modelled", why=why)


def _of_strategy(problem: StepProblem, name: str) -> SupportLine:
    """Return which tensor degrees within a host, or up to `_MOST`, a strategy takes, and why not the others."""
    problem = replace(problem, stack=load_stack(DEFAULT_STACK))
    chips = problem.cluster.num_chips
    inside = (level_sizes(problem.cluster.network) or (_MOST,))[0]
    degrees = [degree for degree in range(2, min(inside, _MOST) + 1) if chips % degree == 0]
    taken: list[int] = []
    reason = f"no degree from 2 to {min(inside, _MOST)} divides {chips} chips"
    for degree in degrees:
        try:
            check_executed(problem, _choice(name, degree, chips))
        except MeshweaveError as error:
            reason = str(error)
        else:
            taken.append(degree)
    if not taken:
        return SupportLine(subject=name, verdict="refused", why=reason)
    why = f"tensor {', '.join(map(str, taken))}"
    if len(taken) < len(degrees):
        why += f"; others not: {reason}"
    if reason := _not_priced(problem, [_choice(name, degree, chips) for degree in taken]):
        why += f"; no plan has it: {reason}"
    return SupportLine(subject=name, verdict="executed", why=why)


def _not_priced(problem: StepProblem, choices: Sequence[Parallelism]) -> str:
    """Return why no plan by the model's usual stack has any of the configurations; "" where one may."""
    problem, reason = replace(problem, stack=load_stack(default_stack(problem.model))), ""
    for choice in choices:
        try:
            check_step(problem, choice)
        except MeshweaveError as error:
            reason = str(error)
        else:
            return ""
    return reason


def _choice(name: str, degree: int, chips: int) -> Parallelism:
    """Return a configuration with so many tensor ranks: a line of them, or the squarest mesh."""
    rows = degree if STRATEGIES[name].is_one_dimensional else near_square(degree)[0]
    return Parallelism(
        data=chips // degree, tensor=rows if rows == degree else (rows, degree // rows), strategy=name
    )


def _of_schedules(problem: StepProblem) -> Iterator[SupportLine]:
    stack = load_stack(DEFAULT_STACK)
    for name, entry in SCHEDULES.items():
        try:
            check_parallelism(stack, Parallelism(data=1, pipeline=2, schedule=name))
        except MeshweaveError as error:
            yield SupportLine(subject=name, verdict="refused", why=str(error))
            continue
        yield SupportLine(subject=name, verdict="executed", why=entry.title)
