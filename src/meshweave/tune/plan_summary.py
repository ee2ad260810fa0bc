"""What a plan comes to, in some lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from meshweave.algorithms.step.executed import sequence_refusal, zero_refusal
from meshweave.algorithms.step.problem import Parallelism
from meshweave.algorithms.step.stacks import IDEAL, fitted_as, is_executed_here
from meshweave.base.units import format_bytes, format_s
from meshweave.describe.model.model_file import transformer_from
from meshweave.describe.scores import error_of_runs_like, most_published_mfu
from meshweave.tune.plan_records import DegreesRecord, DescriptionRecord, StepRecord, StepsRecord
from meshweave.tune.step_search.reasons import (
    advice,
    choice_text,
    counted,
    defaults_text,
    difference_text,
    preference_text,
)


class PlannedProducts(Protocol):
    """An algorithm of a plan of products at its best."""

    algorithm: str
    mesh_shape: tuple[int, ...]
    block_s: float
    utilisation: float


class Planned(Protocol):
    """What a plan is made for, and what was chosen: the fields of a `Plan`."""

    model: str
    cluster: str
    num_chips: int
    batch: int
    sequence: int
    dtype: str
    steps: StepsRecord | None
    not_priced: tuple[str, ...]
    unmeasured: str
    description: DescriptionRecord | None

    @property
    def candidates(self) -> Sequence[PlannedProducts]:
        """Return the algorithms of a plan of products, the fastest first; none for a plan of a step."""


def headline(plan: Planned) -> str:
    """Return in words what is planned: model, chips, and tokens of a step."""
    return (
        f"{plan.model} on {counted(plan.num_chips, 'chip')} of {plan.cluster}: "
        f"{counted(plan.batch, 'sequence')} of {plan.sequence} tokens, {plan.dtype}"
    )


def chosen_text(plan: Planned) -> str:
    """Return in words what was chosen, and how long it takes."""
    if plan.steps is None and not plan.candidates:
        return "nothing that fits"
    if plan.steps is None:
        best = plan.candidates[0]
        return f"{best.algorithm} on {'x'.join(map(str, best.mesh_shape))}, {format_s(best.block_s)} a block"
    best_step = plan.steps.best
    return f"{choice_text(best_step.degrees)}, {format_s(best_step.step_s)} a step"


def product_lines(plan: Planned) -> Iterator[str]:
    """Yield the lines of a plan of products: each algorithm at its best."""
    yield headline(plan)
    for candidate in plan.candidates:
        mesh = "x".join(map(str, candidate.mesh_shape))
        utilisation = f"{100 * candidate.utilisation:.1f} % of the peak"
        yield f"{candidate.algorithm}: {format_s(candidate.block_s)} a block on {mesh}, {utilisation}"


def step_lines(plan: Planned, steps: StepsRecord, price: float | None) -> Iterator[str]:
    """Yield the lines of text on the plan of a step.

    They are the best and the runner-up with reasons, how far predictions were off on published runs, and what to
    do next.

    Args:
        price: dollars of a chip-hour, which adds the price of tokens; None leaves it out.
    """
    yield headline(plan) + (f", products of layers in {steps.precision}" if steps.precision else "")
    if steps.priced_as:
        yield f"note: {steps.priced_as}"
    if plan.unmeasured:
        yield plan.unmeasured
    for text in filter(None, (steps.attention_as, *plan.not_priced)):
        yield f"note: {text}"
    yield f"\nbest       {choice_text(steps.best.degrees)}"
    yield f"           {_speed(steps, bool(plan.unmeasured))}"
    yield f"           {_numbers(steps.best, steps, price)}"
    if is_executed_here(steps.stack):
        best = Parallelism(**dict(steps.best.degrees))
        for refusal in filter(None, (sequence_refusal(best, plan.sequence), zero_refusal(best))):
            yield f"           {refusal}"
    if reason := steps.reason_above(steps.best.mfu) or _above_published(plan, steps):
        yield f"           {reason}"
    if steps.runner_up is None:
        yield "runner-up  there is no other that fits"
    else:
        yield f"runner-up  {choice_text(steps.runner_up.degrees)}"
        yield f"           {difference_text(steps.best, steps.runner_up)}"
    if text := preference_text(steps):
        yield f"           {text}"
    if text := defaults_text(steps):
        yield f"defaults   {text}"
    if plan.description is not None:
        yield f"error      {_error(plan.description, steps)}"
    yield f"next       {advice(steps)}"


def product_rows(plan: Planned) -> Iterator[dict[str, Any]]:
    """Yield for each algorithm of a plan of products {column: value}, the fastest first.

    Columns are "algorithm", "mesh_shape", "block_s" (seconds) and "utilisation".
    """
    names = ("algorithm", "mesh_shape", "block_s", "utilisation")
    for candidate in plan.candidates:
        yield {name: getattr(candidate, name) for name in names}


def step_rows(steps: StepsRecord) -> Iterator[dict[str, Any]]:
    """Yield for each configuration of a plan of a step {column: value}, in the order of the ranking.

    Columns are its degrees, "step_s", "tokens_per_s_per_chip", "mfu", "hfu", "memory_bytes", "<part>_s" for the
    seconds of each part of the step, and "<kind>_bytes" for each kind of memory.
    """
    names = ("step_s", "tokens_per_s_per_chip", "mfu", "hfu", "memory_bytes")
    for record in steps.ranked:
        yield {
            **{name: getattr(record.degrees, name) for name in DegreesRecord.model_fields},
            **{name: getattr(record, name) for name in names},
            **{f"{part}_s": seconds for part, seconds in record.parts_s.items()},
            **{f"{kind}_bytes": count for kind, count in record.memory_parts.items()},
        }


def _error(description: DescriptionRecord, steps: StepsRecord) -> str:
    """Return in words how far predictions were off for published runs of such models on the chip."""
    return error_of_runs_like(
        description.cluster["chip"]["name"],
        fitted_as(steps.stack),
        is_low=bool(steps.precision),
        is_routed=transformer_from(description.model, "description.model").is_routed,
        asked="kernels and links alone" if steps.stack == IDEAL else steps.stack,
    )


def _above_published(plan: Planned, steps: StepsRecord) -> str:
    """Return in one line that no saved run was published with such a utilization, and why; "" where one was.

    Of steps in 16 bits: those below have other peaks.
    """
    most = most_published_mfu()
    if most is None or steps.precision or steps.best.mfu <= most.mfu:
        return ""
    shown = f"{100 * most.mfu:.1f} %, the most that a saved published run has ({most.stack} on {most.chip})"
    unmeasured, alone = (
        "products are priced at a datasheet's rate",
        "nothing slows kernels that were measured alone",
    )
    why = unmeasured if plan.unmeasured else alone
    return f"above {shown}: {why}"


def _speed(steps: StepsRecord, is_unmeasured: bool) -> str:
    """Return the time of the best with the stack, and that of kernels and communication alone.

    Args:
        is_unmeasured: whether no kernel of the chip was measured, which stands beside the number.
    """
    best, ideal = steps.best, steps.ideal
    rate = ", at a datasheet's rate" if is_unmeasured else ""
    text = f"{format_s(best.step_s)} a step, {100 * best.mfu:.1f} % MFU ({steps.pairs} pairs{rate})"
    if ideal is None:
        return f"{text}, kernels and links alone" if steps.stack == IDEAL else text
    return (
        f"{text} on {steps.stack}; kernels and links alone {format_s(ideal.step_s)}, {100 * ideal.mfu:.1f} %"
    )


def _numbers(record: StepRecord, steps: StepsRecord, price: float | None) -> str:
    text = (
        f"{record.tokens_per_s_per_chip:.0f} tokens/s per chip, "
        f"{format_bytes(record.memory_bytes)} of {steps.limit_text}"
    )
    return text if price is None else f"{text}, {record.usd_per_million_tokens(price):.3g} per million tokens"
