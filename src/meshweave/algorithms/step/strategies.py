"""The strategies of a layer, with rings of context parallelism around them."""

from __future__ import annotations

from meshweave.algorithms.block import BlockAlgorithm, BlockProblem
from meshweave.algorithms.block.roles import IDLE, RING, AxisRole, Roles
from meshweave.algorithms.block.two_d import IncludedProducts
from meshweave.algorithms.step.problem import Parallelism
from meshweave.algorithms.table import STRATEGIES
from meshweave.base.errors import LayoutError


def strategy_of(parallelism: Parallelism) -> BlockAlgorithm:
    """Return the strategy of a layer; with context parallelism, a ring of context ranks is added around it.

    Raises:
        UnsupportedError: there is no such strategy.
        LayoutError: it shares the batch alone or sequences, as data and context parallelism do, has not two mesh
            axes, or divides tokens over its rows where there are context ranks.
    """
    entry = STRATEGIES.named(parallelism.strategy)
    if (reason := refusal_in_step(entry)) is not None:
        raise LayoutError(f"{entry.name} {reason}")
    if parallelism.context == 1:
        return entry
    if entry.roles[0].residual == "batch":
        raise LayoutError(f"{entry.name} shares tokens already; give context=1")
    return StrategyAround(entry, (RING,))


def refusal_in_step(entry: BlockAlgorithm) -> str | None:
    """Return why a strategy cannot be that of a step's tensor-parallel ranks; None if it can."""
    roles = entry.roles
    if len(roles) != 2:
        return f"has {len(roles)} mesh axes; a step has strategies of two"
    if roles[0].residual == "batch" and roles[1] is IDLE:
        return "shares the batch; give data= and zero= instead of this strategy"
    if roles[0].operand_in == "sequence":
        return "shares sequences; give context= instead of this strategy"
    return None


class StrategyAround(BlockAlgorithm):
    """A strategy (`inner`) on the last two mesh axes, with the roles `around` on the axes before them.

    A role says which dim of each tensor of a layer a mesh axis splits.
    """

    source = "Liu et al., Ring Attention with Blockwise Transformers, 2023"

    def __init__(self, inner: BlockAlgorithm, around: tuple[AxisRole, ...]) -> None:
        self.name = f"{inner.name} with {' and '.join(role.name for role in around)}"  # type: ignore[misc]
        self.title = f"{inner.title} with {' and '.join(role.name for role in around)}"  # type: ignore[misc]
        self.roles: tuple[AxisRole, ...] = (*around, *inner.roles)  # type: ignore[misc]
        self._product_2d = inner.product_2d if isinstance(inner, IncludedProducts) else ""

    def roles_of(self, problem: BlockProblem) -> Roles:
        """Return the roles of all mesh axes in order, with the 2D product that the inner strategy includes."""
        return Roles(super().roles_of(problem).axes, self._product_2d)
