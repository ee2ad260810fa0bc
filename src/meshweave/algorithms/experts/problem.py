"""A layer of experts: tokens go to experts on other ranks, are multiplied, and summed where they came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from meshweave.algorithms.experts.routing import Routing, cell_counts, host_counts, within_capacity
from meshweave.base.errors import LayoutError, require_known
from meshweave.base.units import DTYPES
from meshweave.describe.layout.mesh import Mesh

Part = Literal["layer", "training", "dispatch", "weighted_dispatch", "combine"]
Activation = Literal["silu", "relu"]
PARTS: tuple[Part, ...] = ("layer", "training", "dispatch", "weighted_dispatch", "combine")


@dataclass(frozen=True)
class ExpertsProblem:
    """Tokens of every rank of a mesh, and experts, of which consecutive ones belong to a rank.

    Tensors: X (ranks * tokens, hidden); Choices (ranks * tokens, top_k), the experts of each token, -1 for one
    that is dropped; Gates, their weights, in the same shape; W1 (experts, hidden, 2 inner) and W2 (experts,
    inner, hidden), with which expert e makes (act(x G) * x U) W2[e] of a row x, where W1[e] is G beside U; Y
    (ranks * tokens, hidden), for each token the sum of these, each times its gate.

    Attributes:
        mesh: the ranks, of two axes (hosts, ranks of a host) or of one, on which each rank is a host.
        tokens: number of tokens of each rank.
        top_k: experts of a token.
        num_experts: experts on all ranks together.
        hidden, inner: features of a token, and inner features of an expert.
        part: "layer": forward. "training": forward and backward, of a gradient dY. "dispatch", "combine": one
            of the two exchanges; "weighted_dispatch": rows of dY times their gates, the gradient of "combine".
        activation: act, "silu" or "relu".
        routing: where choices are drawn from, for estimates, simulations and tests; a run has its own.
        capacity: the most tokens of one rank for one expert; later ones are dropped. None drops none.

    Raises:
        LayoutError: the ranks do not divide the experts, `top_k` is not 1 to `num_experts`, another size or
            `capacity` is under 1, the mesh has more than two axes, or part, activation or dtype is unknown.
    """

    mesh: Mesh
    tokens: int
    top_k: int
    num_experts: int
    hidden: int
    inner: int
    dtype: str = "float32"
    part: Part = "layer"
    activation: Activation = "silu"
    routing: Routing = field(default_factory=Routing)
    capacity: int | None = None

    def __post_init__(self) -> None:
        ranks = self.mesh.num_ranks
        if self.num_experts % ranks:
            raise LayoutError(f"{self.num_experts} experts are no multiple of {ranks} ranks")
        if not 1 <= self.top_k <= self.num_experts:
            raise LayoutError(f"a token takes {self.top_k} of {self.num_experts} experts")
        if len(self.mesh.shape) > 2 or min(self.tokens, self.hidden, self.inner) < 1:
            raise LayoutError("tokens, hidden and inner are at least 1, on a mesh (hosts, ranks) or (ranks)")
        if self.part not in PARTS or self.activation not in ("silu", "relu"):
            raise LayoutError(f"there is no part '{self.part}' with activation '{self.activation}'")
        if self.capacity is not None and self.capacity < 1:
            raise LayoutError(f"a capacity of {self.capacity} tokens takes none")
        require_known(self.dtype, DTYPES, "unknown dtype", LayoutError)

    def __str__(self) -> str:
        return (
            f"{self.part} of {self.tokens} tokens on each of {self.num_ranks} ranks, {self.top_k} of "
            f"{self.num_experts} experts, {self.hidden} x {self.inner}, {self.routing}"
        )

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks on the mesh."""
        return self.mesh.num_ranks

    @property
    def local_experts(self) -> int:
        """Return the number of experts on each rank."""
        return self.num_experts // self.num_ranks

    @property
    def hosts(self) -> int:
        """Return the number of hosts: the size of the mesh's first axis."""
        return self.mesh.shape[0]

    @property
    def local_ranks(self) -> int:
        """Return the number of ranks on each host."""
        return self.num_ranks // self.hosts

    @property
    def most_rows(self) -> int:
        """Return the most tokens that one rank can send to one expert: `tokens`, or `capacity` if that is less."""
        return self.tokens if self.capacity is None else min(self.tokens, self.capacity)

    @cached_property
    def choices(self) -> NDArray[np.int32]:
        """Return the experts of each token by `routing`, (ranks * tokens, top_k), -1 for a dropped choice."""
        drawn = self.routing.draw(self.num_ranks * self.tokens, self.top_k, self.num_experts)
        return within_capacity(drawn, self.num_ranks, self.num_experts, self.capacity)

    @property
    def num_dropped(self) -> int:
        """Return how many (token, expert) pairs `capacity` drops, on all ranks together."""
        return int((self.choices < 0).sum())

    def counts(self, slices: int = 1) -> dict[str, NDArray[Any]]:
        """Return the tables of counts (`counts_of`) for the problem's own `choices`.

        Args:
            slices: number of slices into which each rank's tokens are cut.
        """
        return self.counts_of(self.choices, slices)

    def counts_of(self, choices: NDArray[Any], slices: int = 1) -> dict[str, NDArray[Any]]:
        """Return how many tokens go where, as tables by name.

        "n0", "n1", ... are (experts, source ranks), one for each slice: how many of a rank's tokens in the slice
        have that expert. "m" is (hosts, source ranks): how many tokens of a rank have an expert on that host.

        Args:
            choices: experts of each token, (ranks * tokens, top_k), -1 for a dropped choice.
            slices: number of slices into which each rank's tokens are cut.
        """
        by_rank = choices.reshape(self.num_ranks, self.tokens, self.top_k)
        size = -(-self.tokens // slices)
        out = {
            f"n{number}": cell_counts(by_rank[:, number * size : (number + 1) * size], self.num_experts)
            for number in range(slices)
        }
        return out | {"m": host_counts(by_rank, self.num_experts, self.hosts)}
