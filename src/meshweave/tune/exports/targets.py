"""`export`: one row of a plan as settings of other software."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from meshweave.algorithms.step.stacks import IDEAL, SAME_STACK, stack_names
from meshweave.base.errors import LayoutError, MeshweaveError, UnsupportedError, require_known
from meshweave.base.units import format_bytes, format_s
from meshweave.tune.exports.deepspeed import to_deepspeed
from meshweave.tune.exports.fsdp2 import to_accelerate, to_axolotl
from meshweave.tune.exports.hugging_face import to_hugging_face
from meshweave.tune.exports.maxtext import to_maxtext
from meshweave.tune.exports.megatron_bridge import to_megatron_bridge
from meshweave.tune.exports.megatron_lm import to_megatron_lm
from meshweave.tune.exports.row import Export, PlannedRow
from meshweave.tune.exports.torchtitan import to_torchtitan
from meshweave.tune.plan import Plan
from meshweave.tune.plan_description import planned_cluster, planned_model
from meshweave.tune.step_cases import planned_step

TARGETS: dict[str, Callable[[PlannedRow], Export]] = {
    "megatron-lm": to_megatron_lm,
    "megatron-bridge": to_megatron_bridge,
    "torchtitan": to_torchtitan,
    "maxtext": to_maxtext,
    "deepspeed": to_deepspeed,
    "accelerate": to_accelerate,
    "axolotl": to_axolotl,
    "hf": to_hugging_face,
}
"""What makes the export of a row for other software, or raises UnsupportedError."""
_ON_TPUS = ("maxtext",)


def stack_of(target: str) -> str:
    """Return the name of the software stack by which a target's times and memory are predicted; "" for none."""
    name = SAME_STACK.get(target, target)
    return name if name in stack_names() else ""


def export(plan: Plan, target: str, row: int = 1) -> Export:
    """Return a configuration of a plan of a step as settings of other software.

    Args:
        target: one of `TARGETS`.
        row: the configuration, by its place in the ranking from 1.

    Raises:
        UnsupportedError: there is no such target, it does not run on the chips of the plan, or it does not have
            the strategy; then the error names the first row of the plan that it has, if any.
        LayoutError: the plan has no such row.
        DescriptionError: it is a plan of products, or of an older format and its model or cluster is not in the
            catalog.
    """
    require_known(target, TARGETS, "there is no export to", UnsupportedError, "there are")
    ranked = plan.step.ranked
    if not 1 <= row <= len(ranked):
        raise LayoutError(f"the plan has no row {row}; it has {len(ranked)}")
    chip = planned_cluster(plan).chip.name
    if chip.startswith("TPU") and target not in _ON_TPUS:
        raise UnsupportedError(
            f"the export to {target} is for GPUs, and the plan for {chip}; export to maxtext"
        )
    model, convert = planned_model(plan), TARGETS[target]
    rows = [PlannedRow(plan, model, record.degrees) for record in ranked]
    try:
        return replace(convert(rows[row - 1]), priced=_priced(plan, target, row))
    except UnsupportedError as error:
        other = next((n for n, each in enumerate(rows, 1) if _is_expressible(convert, each)), None)
        hint = "no row of the plan can be" if other is None else f"row {other} of the plan can be"
        raise UnsupportedError(f"{error}; {hint}") from None


def _is_expressible(convert: Callable[[PlannedRow], Export], row: PlannedRow) -> bool:
    try:
        convert(row)
    except UnsupportedError:
        return False
    return True


def _priced(plan: Plan, target: str, row: int) -> str:
    """Return for whom a row was priced, and what it comes to on the target; "" where it was priced for that."""
    own, theirs = plan.step.stack, stack_of(target)
    if own == theirs:
        return ""
    said = f"Row {row} is priced for {_words(own)}, and not for {target}"
    if not theirs:
        return (
            f"The times and memory of row {row} are those of {_words(own)}. There are no predictions for "
            f"{target}: what it takes there may differ."
        )
    again = f"plan for it with --stack {theirs}"
    try:
        step = planned_step(plan, place=row, stack=theirs)
    except MeshweaveError as error:
        return f"{said}; {error}; {again}."
    limit, before = plan.step.memory_limit_bytes, plan.step.ranked[row - 1]
    fits = "" if step.memory.total <= limit else f"; it does not fit the {format_bytes(limit)} there are"
    return (
        f"{said}. There it is predicted to take {format_s(step.time_s)} and "
        f"{format_bytes(step.memory.total)}, for {format_s(before.step_s)} and "
        f"{format_bytes(before.memory_bytes)} here{fits}; {again}."
    )


def _words(stack: str) -> str:
    return "kernels and links alone" if stack == IDEAL else f"the stack {stack}"
