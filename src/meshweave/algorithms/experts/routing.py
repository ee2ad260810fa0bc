"""Which experts tokens take: drawn from a distribution with a seed, and counted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from meshweave.base.errors import LayoutError


@dataclass(frozen=True)
class Routing:
    """A distribution of tokens over experts.

    Attributes:
        kind: "balanced": all experts have equally many tokens, or one more. "power": the i-th of the experts,
            in an order drawn by the seed, is taken in proportion to i ** -exponent. "table": experts are taken in
            proportion to `table`, such as the tokens of each that a run has recorded.
        seed: of the random numbers that `draw` uses.
        exponent: of the power law; read by "power" alone.
        table: the weight of each expert; read by "table" alone.

    Raises:
        LayoutError: the kind is none of these; or the kind "table" has no table, another kind has one, or the
            table has a weight below 0 or none above it; or the exponent or a weight is not finite.
    """

    kind: Literal["balanced", "power", "table"] = "balanced"
    seed: int = 0
    exponent: float = 1.0
    table: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ("balanced", "power", "table"):
            raise LayoutError(f"routing is balanced, power or table, not '{self.kind}'")
        if not all(map(math.isfinite, (self.exponent, *self.table))):
            raise LayoutError(
                f"exponent {self.exponent} and weights {self.table} of a routing must be finite"
            )
        if (self.kind == "table") != bool(self.table) or (
            self.table and not (min(self.table) >= 0 and max(self.table) > 0)
        ):
            raise LayoutError("a routing by table has a table of weights, none below 0 and one above it")

    def __str__(self) -> str:
        detail = f" {self.exponent:g}" if self.kind == "power" else ""
        return f"{self.kind}{detail} routing, seed {self.seed}"

    def draw(self, num_tokens: int, top_k: int, num_experts: int) -> NDArray[np.int32]:
        """Return `top_k` different experts, from 0, for each token: (num_tokens, top_k).

        Balanced routing takes experts in turn. With the other kinds a token draws experts without replacement, in
        proportion to their weights (the greatest after Gumbel noise: Kool et al., ICML '19).

        Raises:
            LayoutError: the table has weights for another number of experts, or above 0 for fewer than `top_k`.
        """
        draw = np.random.default_rng(self.seed)
        if self.kind == "balanced":
            order = draw.permutation(num_experts)
            return (
                order[np.arange(num_tokens * top_k) % num_experts].reshape(num_tokens, top_k).astype(np.int32)
            )
        if self.kind == "power":
            weights = draw.permutation(np.arange(1.0, num_experts + 1) ** -self.exponent)
        else:
            weights = np.array(self.table)
            if len(weights) != num_experts:
                raise LayoutError(f"the table has weights of {len(weights)} experts, not of {num_experts}")
            if (num_drawn := np.count_nonzero(weights)) < top_k:
                raise LayoutError(
                    f"the table has {num_drawn} weights above 0, and a token takes {top_k} experts"
                )
        with np.errstate(divide="ignore"):
            scores = np.log(weights) + draw.gumbel(size=(num_tokens, num_experts))
        return np.argsort(-scores, axis=1, kind="stable")[:, :top_k].astype(np.int32)


def within_capacity(
    choices: NDArray[Any], num_ranks: int, num_experts: int, capacity: int | None
) -> NDArray[np.int32]:
    """Return a copy of `choices` in which each expert keeps at most `capacity` tokens of each rank; others are -1.

    The earliest tokens are kept.

    Args:
        choices: experts from 0, (tokens of all ranks, top_k), rank after rank, equally many tokens each.
        capacity: None to drop nothing.
    """
    kept: NDArray[np.int32] = choices.astype(np.int32, order="C")
    if capacity is None:
        return kept
    for rank in kept.reshape(num_ranks, -1):
        for expert in range(num_experts):
            rank[np.flatnonzero(rank == expert)[capacity:]] = -1
    return kept


def cell_counts(choices: NDArray[Any], num_experts: int) -> NDArray[np.int64]:
    """Return how many tokens of each rank go to each expert, (experts, ranks).

    `choices` are (ranks, tokens, top_k), -1 for a dropped one.
    """
    return np.stack([np.bincount(each[each >= 0], minlength=num_experts) for each in choices], axis=1)


def host_counts(choices: NDArray[Any], num_experts: int, hosts: int) -> NDArray[np.int64]:
    """Return how many tokens of each rank have an expert on each host, (hosts, ranks).

    `choices` are (ranks, tokens, top_k), -1 for a dropped one.
    """
    host = np.where(choices >= 0, choices // (num_experts // hosts), -1)
    return np.stack([(host == each).any(axis=2).sum(axis=1) for each in range(hosts)])
