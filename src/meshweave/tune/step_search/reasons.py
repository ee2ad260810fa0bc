"""Why the winner of a ranking wins, what is lost in it, and what would make fit what does not."""

from __future__ import annotations

from collections.abc import Sequence

from meshweave.base.units import format_bytes, format_s
from meshweave.tune.plan_records import DegreesRecord, StepRecord, StepsRecord
from meshweave.tune.step_search.remedies import remedies_text
from meshweave.tune.step_search.search import StepRanking
from meshweave.tune.step_search.space import ranks_of

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
    "software": "software",
}
"""What the parts of a step are called."""
_REMEDIES = {
    "bubble": "a larger batch has more micro-batches for as much bubble",
    "tensor": "fewer tensor ranks exchange less, where memory allows",
    "context": "fewer context ranks exchange less, where memory allows",
    "data": "a larger batch reduces gradients less often per token",
    "transfers": "fewer stages send less",
    "recompute": "more memory a chip, or more chips, would save recomputation",
}
_LEAST_SHARE = 0.02


def refusal_text(ranking: StepRanking) -> str:
    """Return one line: why no configuration is ranked, and what would be right."""
    problem, options = ranking.space.problem, ranking.space.options
    chips = problem.cluster.num_chips
    start = f"no configuration of {problem.model.name} on {chips} chips of {problem.cluster.name}"
    if ranking.smallest is not None:
        choice, size = ranking.smallest
        return (
            f"{start} fits in {format_bytes(ranking.memory_bytes)} a chip: the smallest takes "
            f"{format_bytes(size)} ({choice_text(choice)}), {remedies_text(ranking)}{_or_fewer_fixed(options)}"
        )
    if ranking.count.reason:
        return f"{start} can be laid out: {ranking.count.reason}"
    return f"{start} divides evenly: {_division_text(ranking)}"


def _or_fewer_fixed(options: object) -> str:
    return "" if options == type(options)() else ", or fix less"


def _division_text(ranking: StepRanking) -> str:
    """Return which number of chips, or which batch, would have a configuration."""
    space = ranking.space
    problem, options = space.problem, space.options
    chips = problem.cluster.num_chips
    given = {
        name: values
        for name, values in (
            ("data", options.data),
            ("pipeline", options.pipeline),
            ("context", options.context),
            ("tensor", options.tensor),
        )
        if values is not None
    }
    if given:
        sizes = ", ".join(f"{name} {' or '.join(map(str, values))}" for name, values in given.items())
        return (
            f"{sizes} leave no whole number of replicas that divides the batch of {problem.batch}, or more stages "
            f"than the {problem.model.num_layers} layers, or do not divide its {problem.model.num_heads} heads"
        )
    return (
        f"{chips} chips have no replicas that divide the batch of {problem.batch} with at most "
        f"{problem.model.num_layers} stages and tensor ranks that divide {problem.model.num_heads} heads; give a "
        f"batch that is a multiple of {chips}, or another number of chips"
    )


def choice_text(choice: object) -> str:
    """Return a configuration in words: degrees, then what is not the default of them."""
    record = choice if isinstance(choice, DegreesRecord) else None
    fields = dict(record) if record is not None else vars(choice)
    tensor = fields["tensor"]
    mesh = str(tensor) if isinstance(tensor, int) else "x".join(map(str, tensor))
    words = [f"dp {fields['data']}", f"pp {fields['pipeline']}"]
    if fields["context"] > 1:
        words.append(f"cp {fields['context']}")
    words.append(f"tp {mesh}")
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
    """Return the order of degrees of more than one rank in words; "" where it is that of the default."""
    sizes = {name: fields[name] for name in ("data", "pipeline", "context", "tensor")}
    order = [name for name in fields["order"] if sizes[name] != 1]  # type: ignore[attr-defined]
    usual = [name for name in ("tensor", "context", "data", "pipeline") if sizes[name] != 1]
    return "" if order == usual else f"inside out: {', '.join(order)}"


def difference_text(best: StepRecord, other: StepRecord) -> str:
    """Return what another configuration costs beside the best: the parts that differ most, largest first."""
    slower = other.step_s - best.step_s
    parts = {
        name: other.parts_s.get(name, 0.0) - best.parts_s.get(name, 0.0)
        for name in dict.fromkeys((*best.parts_s, *other.parts_s))
    }
    largest = sorted(parts.items(), key=lambda item: -abs(item[1]))[:3]
    words = [
        f"{'+' if seconds > 0 else '-'}{format_s(abs(seconds))} {PART_NAMES.get(name, name)}"
        for name, seconds in largest
        if abs(seconds) > 0.1 * max(slower, 1e-9)
    ]
    return f"{100 * slower / best.step_s:.1f} % slower" + (f": {', '.join(words)}" if words else "")


def losses(record: StepRecord) -> Sequence[tuple[str, float]]:
    """Return the parts of a step besides computing, with their share of its time, the largest first."""
    lost = ((name, seconds / record.step_s) for name, seconds in record.parts_s.items() if name != "compute")
    return sorted(lost, key=lambda item: -item[1])


def advice(steps: StepsRecord) -> str:
    """Return one sentence: what takes most besides computing, and what would lessen it."""
    name, share = next(iter(losses(steps.best)), ("", 0.0))
    if share < _LEAST_SHARE:
        return "nearly all of the step is computing: only faster products would shorten it"
    remedy = _REMEDIES.get(name)
    text = f"{PART_NAMES.get(name, name)} takes {100 * share:.0f} % of the step"
    return f"{text}: {remedy}" if remedy else text
