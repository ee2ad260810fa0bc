"""Which products of a plan to look at: by algorithm, layer and pass, each by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshweave.algorithms.matmul2d import Matmul2dConfig
from meshweave.algorithms.matmul2d.common.passes import PASSES, PassName
from meshweave.base.errors import DescriptionError, require_known
from meshweave.tune.plan import Candidate, LayerPlan, PassPlan, Plan


@dataclass(frozen=True)
class PlannedProduct:
    """One product of a plan, with the candidate and the layer that it belongs to."""

    candidate: Candidate
    layer: LayerPlan
    pass_plan: PassPlan

    def title(self, config: Matmul2dConfig | None = None) -> str:
        """Return the product in words, as `ff1 backward data, meshslice S=8`, with `config` or the planned one."""
        return product_title(
            self.layer.name, self.pass_plan.name, self.candidate.algorithm, config or self.pass_plan.config
        )


def product_title(layer: str, name: str, algorithm: str, config: Matmul2dConfig) -> str:
    """Return a product in words, as `ff1 backward data, meshslice S=8`; without `config` where nothing is sliced.

    Args:
        layer: name of the layer, such as "ff1".
        name: name of the pass, such as "backward_data".
        algorithm: name of the algorithm.
    """
    title = f"{layer} {name.replace('_', ' ')}, {algorithm}"
    return f"{title} {config}" if config.slice_count > 1 else title


def select_layers(plan: Plan, names: Iterable[str]) -> tuple[str, ...]:
    """Return `names` if all are layers of the plan.

    Raises:
        DescriptionError: one is not, for which the error names a similar one, or it is the plan of a step.
    """
    known, names = [layer.name for layer in plan.best.layers], tuple(names)
    for name in names:
        require_known(name, known, "the plan has no layer", DescriptionError, "it has")
    return names


def select_passes(names: Iterable[str]) -> tuple[PassName, ...]:
    """Return `names`, each once, in the order forward, backward_data, backward_weight.

    Raises:
        DescriptionError: a name is none of these.
    """
    names = tuple(names)
    for name in names:
        require_known(name, PASSES, "there is no pass", DescriptionError, "give all or")
    return tuple(name for name in PASSES if name in names)


def select_candidates(plan: Plan, algorithms: Sequence[str] | None) -> list[Candidate]:
    """Return the candidates of these algorithms, in this order; None for all, the fastest first.

    Raises:
        DescriptionError: the plan lacks an algorithm, or it is the plan of a step.
    """
    if algorithms is None:
        return [plan.best, *plan.candidates[1:]]
    known = [candidate.algorithm for candidate in plan.candidates]
    for name in algorithms:
        require_known(name, known, "the plan has no algorithm", DescriptionError, "it has")
    return [plan.candidate(name) for name in algorithms]


def select_products(
    plan: Plan,
    *,
    algorithms: Sequence[str] | None = None,
    layers: Sequence[str] | None = None,
    passes: Sequence[str] | None = None,
) -> list[PlannedProduct]:
    """Return the products of a plan by algorithm, then layer, then pass; None selects all of a kind.

    Algorithms are in the order of `algorithms`, layers in that of the plan, passes in that of training.

    Raises:
        DescriptionError: the plan has no such algorithm or layer, there is no such pass, or it is the plan of a
            step.
    """
    wanted_passes = PASSES if passes is None else select_passes(passes)
    wanted_layers = None if layers is None else select_layers(plan, layers)
    return [
        PlannedProduct(candidate, layer, pass_plan)
        for candidate in select_candidates(plan, algorithms)
        for layer in candidate.layers
        if wanted_layers is None or layer.name in wanted_layers
        for pass_plan in layer.passes
        if pass_plan.name in wanted_passes
    ]
