"""A fused layer: products start on the rows that have come, and rows go back as soon as their product is done.

Two grains of the same idea. Tokens are cut into slices, as MeshSlice cuts a dim of a product: while experts
multiply one slice the next is on its way. Within a slice, the products of one source's rows wait for its message
alone, and the message back waits for these products alone: the dependence that T3 tracks and triggers, on cells in
place of tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshweave.algorithms.contract import Array
from meshweave.algorithms.experts.algorithm import ExpertsAlgorithm
from meshweave.algorithms.experts.layer import LayerText
from meshweave.algorithms.experts.pairwise import PairwiseExchange
from meshweave.algorithms.experts.problem import ExpertsProblem
from meshweave.base.errors import LayoutError
from meshweave.describe.machine.cluster import Cluster

MOST_SLICES = 8
_SLICED = ("layer", "training")
"""The parts that may be cut: packed rows stay inside of them."""


@dataclass(frozen=True)
class TokenSlices:
    """How a fused layer is cut into slices of tokens, and its products into sources.

    Attributes:
        count: number of slices of each rank's tokens.
        by_source: whether an expert multiplies the rows of each source rank in a product of their own; else all
            its rows of a slice are one product.
    """

    count: int = 1
    by_source: bool = True

    def __str__(self) -> str:
        return f"{self.count} slice{'s' * (self.count > 1)}" + (", by source" if self.by_source else "")


class FusedExperts(ExpertsAlgorithm[TokenSlices]):
    """A layer that overlaps the messages of some token slices and source ranks with the products of others."""

    name = "experts_fused"
    title = "Fused experts"
    shares_nics = True
    source = "Pati et al., T3, ASPLOS '24; Nam et al., MeshSlice, ISCA '25; Zhang et al., Comet, MLSys '25"

    def candidates(self, problem: ExpertsProblem, cluster: Cluster | None = None) -> Iterator[TokenSlices]:
        """Yield one slice with `by_source`, then 2, 4 and 8 slices, each without and with `by_source`.

        From the first number that would leave a slice without tokens, they are left out. A dispatch or combine
        alone has one slice. `cluster` is ignored.
        """
        yield TokenSlices()
        count = 2 if problem.part in _SLICED else MOST_SLICES + 1
        while count <= MOST_SLICES and _has_tokens(problem, count):
            yield TokenSlices(count, False)
            yield TokenSlices(count, True)
            count *= 2

    def text(self, problem: ExpertsProblem, config: TokenSlices) -> str:
        """Return the program for any routing as text for `parse`; the row counts of `counts` are inputs of it.

        Raises:
            LayoutError: a slice would have no tokens; or there are several slices of a dispatch or combine alone,
                whose packed rows are one tensor.
        """
        if config.count < 1 or not _has_tokens(problem, config.count):
            raise LayoutError(
                f"{self.title}: {config.count} slices of {problem.tokens} tokens leave one empty; give fewer, or 1"
            )
        if config.count > 1 and problem.part not in _SLICED:
            raise LayoutError(f"{self.title}: a {problem.part} alone is not cut into slices; give 1")
        return LayerText(problem, self.title, PairwiseExchange(), config.count, config.by_source).text()

    def counts(
        self, problem: ExpertsProblem, config: TokenSlices, choices: Array | None = None
    ) -> dict[str, Array]:
        """Return the tables of row counts for a routing, by name; the program needs "n0", "n1", ..., all slices.

        "n{i}" is (experts, source ranks): the number of rows that slice i of a rank's tokens has for an expert.
        "m" is (hosts, source ranks): the number of a rank's tokens that have an expert on a host.

        Args:
            choices: experts of each token, (ranks * tokens, top_k), -1 if dropped; None for the problem's own.
        """
        return problem.counts_of(problem.choices if choices is None else choices, config.count)


def _has_tokens(problem: ExpertsProblem, count: int) -> bool:
    """Return whether each of `count` slices of a rank's tokens has some."""
    return -(-problem.tokens // count) * (count - 1) < problem.tokens
