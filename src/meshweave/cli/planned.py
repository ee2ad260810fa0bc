"""What several verbs read off a plan and their `--layer` and `--pass` options."""

from __future__ import annotations

from collections.abc import Iterator

from meshweave.algorithms.matmul2d import Config
from meshweave.algorithms.matmul2d.common.passes import PASSES, PassName
from meshweave.base.errors import DescriptionError, nearest
from meshweave.tune import Plan
from meshweave.tune.plan import Candidate, LayerPlan, PassPlan


def check_layer(plan: Plan, layer: str) -> None:
    """Raises DescriptionError where a plan has no such layer."""
    known = [item.name for item in plan.best.layers]
    if layer not in known:
        raise DescriptionError(
            f"the plan has no layer '{layer}'{nearest(layer, known)}; it has {', '.join(known)}"
        )


def read_passes(text: str) -> tuple[PassName, ...]:
    """ "all" or the name of one pass. Raises DescriptionError."""
    if text == "all":
        return PASSES
    found = tuple(name for name in PASSES if name == text)
    if not found:
        raise DescriptionError(
            f"there is no pass '{text}'{nearest(text, PASSES)}; give all or {', '.join(PASSES)}"
        )
    return found


def products(
    candidate: Candidate, layer: str, passes: tuple[PassName, ...]
) -> Iterator[tuple[LayerPlan, PassPlan]]:
    """The planned products of a layer in the order of the passes."""
    chosen = next(item for item in candidate.layers if item.name == layer)
    return ((chosen, item) for item in chosen.passes if item.name in passes)


def product_title(layer: str, name: str, algorithm: str, config: Config) -> str:
    """`ff1 backward data, meshslice S=8`."""
    title = f"{layer} {name.replace('_', ' ')}, {algorithm}"
    return f"{title} {config}" if config.slice_count > 1 else title
