"""`export`: one row of a plan as settings of other software."""

from __future__ import annotations

from collections.abc import Callable

from meshweave.base.errors import LayoutError, UnsupportedError, require_known
from meshweave.tune.exports.deepspeed import to_deepspeed
from meshweave.tune.exports.fsdp2 import to_accelerate, to_axolotl
from meshweave.tune.exports.hugging_face import to_hugging_face
from meshweave.tune.exports.maxtext import to_maxtext
from meshweave.tune.exports.megatron_bridge import to_megatron_bridge
from meshweave.tune.exports.megatron_lm import to_megatron_lm
from meshweave.tune.exports.row import Export, PlannedRow
from meshweave.tune.exports.torchtitan import to_torchtitan
from meshweave.tune.plan import Plan
from meshweave.tune.plan_description import planned_model

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


def export(plan: Plan, target: str, row: int = 1) -> Export:
    """Return a configuration of a plan of a step as settings of other software.

    Args:
        target: one of `TARGETS`.
        row: the configuration, by its place in the ranking from 1.

    Raises:
        UnsupportedError: there is no such target, or it does not have the strategy; the error names the first row
            of the plan that it has.
        LayoutError: the plan has no such row.
        DescriptionError: it is a plan of products, or of an older format and its model is not in the catalog.
    """
    require_known(target, TARGETS, "there is no export to", UnsupportedError, "there are")
    ranked = plan.step.ranked
    if not 1 <= row <= len(ranked):
        raise LayoutError(f"the plan has no row {row}; it has {len(ranked)}")
    model, convert = planned_model(plan), TARGETS[target]
    rows = [PlannedRow(plan, model, record.degrees) for record in ranked]
    try:
        return convert(rows[row - 1])
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
