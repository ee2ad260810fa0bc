"""Why the winner of a ranking wins, what is lost in it, and what would make fit what does not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, product

from meshweave.algorithms.step.checks import can_be_laid_out
from meshweave.algorithms.step.space import (
    MIN_CONTEXT_TOKENS,
    StepSpace,
    ranks_of,
)
from meshweave.algorithms.step.user_names import FIELDS_OF_SPACE, SHORT_NAMES
from meshweave.algorithms.table import SCHEDULES, STRATEGIES
from meshweave.base.units import format_bytes, format_s
from meshweave.tune.plan_records import DegreesRecord, StepRecord, StepsRecord
from meshweave.tune.step_search.remedies import remedies_text
from meshweave.tune.step_search.search import StepRanking

_EXCHANGE = "exchange of tokens with experts"
PART_NAMES = {
    "compute": "computing",
    "recompute": "recomputation",
    "ends": "embedding and loss",
    "tensor": "tensor-parallel communication",
    "context": "context-parallel communication",
    "bubble": "pipeline bubble",
    "transfers": "transfers between stages",
    "data": "data-parallel communication",
    "optimizer": "optimizer",
    "host": "waiting for the host",
    "software": "software",
}
"""What the parts of a step are called."""
_REMEDIES = {
    "bubble": "a larger batch has more micro-batches for as much bubble",
    "tensor": "fewer tensor ranks exchange less, where memory allows",
    "context": "fewer context ranks exchange less, where memory allows",
    "data": "a larger batch reduces gradients less often per token",
    "transfers": "fewer stages send less",
    "ends": "tensor ranks would share them",
    "optimizer": "more replicas would share it under ZeRO",
    "host": "layers in CUDA graphs are issued at once, larger micro-batches need fewer kernels for as much work, "
    "and so do fused ones",
    "software": "its constants are those of the stack",
    "recompute": "more memory a chip, or more chips, would save recomputation",
}
_LEAST_SHARE = 0.02
_MOST_TRIED = 1000
"""The configurations that are tried to see whether any can be laid out."""


def refusal_text(ranking: StepRanking) -> str:
    """Return one line of text: why no configuration is ranked, and what would help."""
    problem = ranking.space.problem
    chips = problem.cluster.num_chips
    start = f"no configuration of {problem.model.name} on {counted(chips, 'chip')} of {problem.cluster.name}"
    if ranking.smallest is not None:
        choice, size = ranking.smallest
        kept_free = f", {problem.reserve_text} kept free" if problem.reserve else ""
        return (
            f"{start} fits in {format_bytes(ranking.memory_bytes)} a chip{kept_free}: the smallest takes "
            f"{format_bytes(size)} ({choice_text(choice)}), {remedies_text(ranking)}"
            f"{_or_fewer_fixed(ranking.space)}"
        )
    if ranking.count.reason:
        return f"{start} can be laid out: {ranking.count.reason}"
    return f"{start}: {_division_text(ranking)}"


def _or_fewer_fixed(space: StepSpace) -> str:
    return "" if space.options == StepSpace(space.problem).options else ", or fix less"


def _division_text(ranking: StepRanking) -> str:
    """Return which number of chips, or which batch, would have a configuration."""
    space = ranking.space
    problem, options = space.problem, space.options
    chips = problem.cluster.num_chips
    fixed = {
        "tp": None if options.tensor is None else tuple(map(ranks_of, options.tensor)),
        "pp": options.pipeline,
        "cp": options.context,
        "dp": options.data,
    }
    if reason := _experts_reason(space):
        return reason
    given = {name: values for name, values in fixed.items() if values is not None}
    least = math.prod(min(values) for values in given.values())
    sizes = " x ".join(f"{name} {' or '.join(map(str, values))}" for name, values in given.items())
    if least > chips:
        ranks = f" is {least} ranks," if len(given) > 1 else " is"
        return f"{sizes}{ranks} more than its {counted(chips, 'chip')}"
    for name, values in given.items():
        if reason := _degree_reason(name, values, space):
            return f"{name} {' or '.join(map(str, values))} {reason}"
    if given and all(chips % math.prod(each) for each in product(*given.values())):
        return f"{sizes} does not divide its {counted(chips, 'chip')}"
    if len(given) == len(fixed) and all(chips != math.prod(each) for each in product(*given.values())):
        return f"{sizes} is {least} ranks, fewer than its {counted(chips, 'chip')}; leave out dp"
    if options.virtual_stages is not None and 1 not in options.virtual_stages:
        wanted = " or ".join(map(str, options.virtual_stages))
        if not any(SCHEDULES[s].takes_stages(n) for s in options.schedules for n in options.virtual_stages):
            return (
                f"vp {wanted} is no number of stages a rank of {' or '.join(options.schedules)}; leave out vp"
            )
        return (
            f"vp {wanted} needs pp of at least 2 with at most "
            f"{problem.model.num_layers} stages, and micro-batches in whole groups of pp; leave out vp"
        )
    micro_batches = options.micro_batches or ()
    batch = math.prod((chips, *micro_batches[:1]))
    has_batch = _has_layout(StepSpace(replace(problem, batch=batch), options))
    if not has_batch and (reason := _too_much_reason(space)):
        return reason
    size = f" in micro-batches of {' or '.join(map(str, micro_batches))}" if micro_batches else ""
    model = problem.model
    heads = model.layer.attentions[0].heads
    most = f"{counted(model.num_layers, 'stage')} and tensor ranks that divide {heads} heads"
    return (
        f"no number of replicas{f' with {sizes}' if given else ''} divides both {counted(chips, 'chip')} and the "
        f"batch of {problem.batch}{size}, with at most {most}; give "
        f"{f'a batch that is a multiple of {batch}, or ' if has_batch else ''}another number of chips"
    )


def _has_layout(space: StepSpace) -> bool:
    """Return whether one of the first configurations of a space can be laid out."""
    return any(map(partial(can_be_laid_out, space.problem), islice(space.choices(), _MOST_TRIED)))


def _too_much_reason(space: StepSpace) -> str:
    """Return without which of the values that are given something could be laid out; "" for none of them."""
    options, free = space.options, StepSpace(space.problem).options
    names = {field: name for name, field in (*SHORT_NAMES.items(), *FIELDS_OF_SPACE.items())}
    freeing = []
    for field, value in vars(options).items():
        other = getattr(free, field)
        if value is None or value == other:
            continue
        if _has_layout(StepSpace(space.problem, replace(options, **{field: other}))):
            freeing.append(f"{names.get(field, field)} {' or '.join(map(_value_text, value))}")
    return f"what is fixed excludes all; leave out {', or '.join(freeing)}" if freeing else ""


def _experts_reason(space: StepSpace) -> str:
    """Return why none of the degrees of experts that are given can be laid out; "" where some can, or none are."""
    options, model = space.options, space.problem.model
    given = {"ep": options.expert, "etp": options.expert_tensor}
    words = " x ".join(f"{name} {' or '.join(map(str, values))}" for name, values in given.items() if values)
    if not words or any(map(space.experts, space.degrees)):
        return ""
    count = max(graph.num_experts for _, graph in model.runs)
    if count == 1:
        return f"{words} is for experts, of which its model has none; leave it out"
    if options.expert is not None and all(count % value for value in options.expert):
        return f"{words} does not divide its {counted(count, 'expert')}"
    most = max((sizes.data * sizes.context * sizes.tensor for sizes in space.degrees), default=0)
    return f"{words} does not divide the ranks of a stage, at most {most}; give less" if most else ""


def _degree_reason(name: str, values: Sequence[int], space: StepSpace) -> str:
    """Return why none of the values of a degree can be laid out on its own; "" where one of them can."""
    problem = space.problem
    model, chips = problem.model, problem.cluster.num_chips
    if all(chips % value for value in values):
        return f"does not divide its {counted(chips, 'chip')}"
    if name == "dp" and all(problem.batch % value for value in values):
        return f"does not divide the batch of {problem.batch}"
    if name == "pp" and min(values) > model.num_layers:
        return f"is more than its {counted(model.num_layers, 'layer')}"
    if name == "cp" and all(
        problem.sequence % value or problem.sequence < value * MIN_CONTEXT_TOKENS for value in values
    ):
        return f"leaves no equal parts of {MIN_CONTEXT_TOKENS} tokens of a sequence of {problem.sequence}"
    is_1d = all(STRATEGIES[name].is_one_dimensional for name in space.options.strategies)
    heads = model.layer.attentions[0].heads
    if name == "tp" and is_1d and all(heads % value for value in values):
        return f"does not divide its {heads} heads"
    return ""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, with a plural s unless it is 1."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


_OF_EXPERTS = (("ep", "expert"), ("etp", "expert_tensor"))


def choice_text(choice: object) -> str:
    """Return a `Parallelism` or `DegreesRecord` in one line.

    It has the degrees and the micro-batch; then, where there are such, the schedule, ZeRO, recomputation and an
    order of ranks that is not the default.
    """
    record = choice if isinstance(choice, DegreesRecord) else None
    fields = dict(record) if record is not None else vars(choice)
    tensor = fields["tensor"]
    mesh = str(tensor) if isinstance(tensor, int) else "x".join(map(str, tensor))
    words = [f"dp {fields['data']}", f"pp {fields['pipeline']}"]
    if fields["context"] > 1:
        words.append(f"cp {fields['context']}")
    words.append(f"tp {mesh}")
    words += [f"{short} {fields[name]}" for short, name in _OF_EXPERTS if fields.get(name, 1) > 1]
    if ranks_of(tensor) > 1:
        words.append(str(fields["strategy"]))
    parts = [" ".join(words), f"micro-batch {fields['micro_batch']}"]
    if fields["pipeline"] > 1:
        virtual = fields["virtual_stages"]
        parts.append(f"{fields['schedule']}{f' x {virtual} stages a rank' if virtual > 1 else ''}")
    if fields["zero"]:
        parts.append(f"ZeRO-{fields['zero']}")
    if fields["recompute"] != "none":
        parts.append(f"{fields['recompute']} recomputation")
    if (order := order_text(fields)) != "":
        parts.append(order)
    return ", ".join(parts)


def order_text(fields: dict[str, object]) -> str:
    """Return in words the order of the degrees above 1, innermost first; "" if it is the default.

    `fields` are those of a `Parallelism`, by name.
    """
    sizes = {name: fields[name] for name in ("data", "pipeline", "context", "tensor")}
    order = [name for name in fields["order"] if sizes[name] != 1]  # type: ignore[attr-defined]
    usual = [name for name in ("tensor", "context", "data", "pipeline") if sizes[name] != 1]
    return "" if order == usual else f"inside out: {', '.join(order)}"


def part_name(part: str, *degrees: DegreesRecord) -> str:
    """Return the words for a part of a step (a field of `StepParts`) in configurations of these `degrees`.

    The part "tensor" has the exchange of tokens with experts in it. The words say so where some `degrees` have
    ranks of experts; where all of them have one tensor rank, they name that exchange alone.
    """
    if part != "tensor" or all(each.expert * each.expert_tensor == 1 for each in degrees):
        return PART_NAMES.get(part, part)
    if all(each.tensor_ranks == 1 for each in degrees):
        return _EXCHANGE
    return f"{PART_NAMES[part]} and {_EXCHANGE}"


def difference_text(best: StepRecord, other: StepRecord) -> str:
    """Return in words how much slower or faster `other` is than `best`, and which parts of a step differ most."""
    slower = other.step_s - best.step_s
    parts = {
        name: other.parts_s.get(name, 0.0) - best.parts_s.get(name, 0.0)
        for name in dict.fromkeys((*best.parts_s, *other.parts_s))
    }
    largest = sorted(parts.items(), key=lambda item: -abs(item[1]))[:3]
    words = [
        f"{'+' if seconds > 0 else '-'}{format_s(abs(seconds))} {part_name(name, best.degrees, other.degrees)}"
        for name, seconds in largest
        if abs(seconds) > 0.1 * max(abs(slower), 1e-9)
    ]
    change = f"{100 * abs(slower) / best.step_s:.1f} % {'faster' if slower < 0 else 'slower'}"
    return change + (f": {', '.join(words)}" if words else "")


def preference_text(steps: StepsRecord) -> str:
    """Return in words why the runner-up, though faster, is not the best: no published run has its strategy.

    It is "" where the best is the fastest.
    """
    if not steps.margin or steps.runner_up is None:
        return ""
    strategy = steps.runner_up.degrees.strategy
    return (
        f"not chosen: no published run has {strategy}, so that it must win by {100 * steps.margin:.3g} %; "
        "--margin 0 takes it"
    )


def defaults_text(steps: StepsRecord) -> str:
    """Return in words what `mw.step` gives by its defaults, and which of them differ from the best; "" if none do.

    Where the defaults cannot be laid out it is the reason, or "" if that is not known.
    """
    if steps.defaults is None:
        reason = steps.defaults_refused
        return f"mw.step by its defaults cannot be laid out: {reason}" if reason else ""
    ours, theirs = dict(steps.best.degrees), dict(steps.defaults.degrees)
    differing = [
        f"{name} {_value_text(value)} (best {_value_text(ours[name])})"
        for name, value in theirs.items()
        if value != ours[name]
    ]
    fits = "" if steps.defaults.memory_bytes <= steps.memory_limit_bytes else ", which does not fit"
    return (
        f"mw.step by its defaults has {100 * steps.defaults.mfu:.1f} % MFU in "
        f"{format_bytes(steps.defaults.memory_bytes)}{fits}: {', '.join(differing)}"
        if differing
        else ""
    )


def _value_text(value: object) -> str:
    """Return a value as --fix takes it: a mesh as 2x4, an order as its names with hyphens."""
    if not isinstance(value, tuple):
        return str(value)
    return ("x" if isinstance(value[0], int) else "-").join(map(str, value))


def losses(record: StepRecord) -> Sequence[tuple[str, float]]:
    """Return (field of `StepParts`, share of the step from 0 to 1) for all but "compute", the largest first."""
    lost = ((name, seconds / record.step_s) for name, seconds in record.parts_s.items() if name != "compute")
    return sorted(lost, key=lambda item: -item[1])


def advice(steps: StepsRecord) -> str:
    """Return one sentence: the largest part of the step besides computing, and what would lessen it.

    Below 2 % of the step it says that faster kernels alone would help.
    """
    name, share = next(iter(losses(steps.best)), ("", 0.0))
    if share < _LEAST_SHARE:
        rate = steps.best.mfu * steps.best.step_s / max(steps.best.parts_s.get("compute", 0.0), 1e-12)
        return (
            f"nearly all of the step is computing, at {100 * rate:.0f} % of the chips' peak: only faster kernels "
            "would shorten it"
        )
    degrees = steps.best.degrees
    called = part_name(name, degrees)
    remedy = _exchange_remedy(degrees) if _EXCHANGE in called else _REMEDIES.get(name)
    text = f"{called} takes {100 * share:.0f} % of the step"
    return f"{text}: {remedy}" if remedy else text


def _exchange_remedy(degrees: DegreesRecord) -> str:
    """Return what would lessen communication of tensor ranks and of experts: degrees that are above 1."""
    sizes = {"tp": degrees.tensor_ranks, "ep": degrees.expert, "etp": degrees.expert_tensor}
    lower = " or ".join(f"{name} below {size}" for name, size in sizes.items() if size > 1)
    return f"{lower} exchanges less, where memory allows"
