"""Dispatch and combine by one all-to-all each: all rows for a rank go to it in one message.

What a rank receives lies by source. Copies bring it in the order of experts, whose products then are one for each
expert; with one expert a rank the two orders are one, and there is nothing to copy.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshweave.algorithms.experts.algorithm import UnchosenExperts
from meshweave.algorithms.experts.layer import LayerText
from meshweave.algorithms.experts.problem import ExpertsProblem
from meshweave.algorithms.fused.product import NoChoice


class DirectAllToAll(UnchosenExperts):
    """All rows of one rank for another in one message of an all-to-all."""

    name = "experts_direct"
    title = "Experts by all-to-all"
    source = "Lepikhin et al., GShard, arXiv 2006.16668, section 3.2"

    def text(self, problem: ExpertsProblem, config: NoChoice) -> str:
        """Return the program as text, for any routing: the numbers of rows are inputs (`counts`)."""
        return LayerText(problem, self.title, self).text()

    def temps(self, layer: LayerText, tensor: str, use: str) -> Iterator[str]:
        """Yield the declaration of a buffer for rows ordered by source; nothing if a rank has one expert."""
        if layer.own > 1:
            yield f"{tensor.lower()}_by_source = temp({tensor}, ep[S(0)], order=(1, 0, 2))"

    def dispatch(self, layer: LayerText, src: str, dst: str, tensor: str) -> Iterator[str]:
        """Yield, as text, an all-to-all from buffer `src` and copies into the order of experts in buffer `dst`.

        `src` has the packed rows of a rank's tokens, `dst` tensor `tensor`, the rows on the ranks of their
        experts. With one expert a rank there are no copies.
        """
        between = dst if layer.own == 1 else f"{tensor.lower()}_by_source"
        yield f'all_to_all({between}, {src}, over="ep.x", split_dim=0, concat_dim=1, lane=go)'
        if between != dst:
            yield from self._copies(layer, dst, between)

    def combine(self, layer: LayerText, src: str, dst: str, tensor: str) -> Iterator[str]:
        """Yield, as text, copies of buffer `src` into the order of sources, and an all-to-all into buffer `dst`.

        `src` has tensor `tensor`, the rows on the ranks of their experts, `dst` the packed rows of a rank's
        tokens. With one expert a rank there are no copies.
        """
        between = src if layer.own == 1 else f"{tensor.lower()}_by_source"
        if between != src:
            yield from self._copies(layer, between, src)
        yield f'all_to_all({dst}, {between}, over="ep.x", split_dim=1, concat_dim=0, lane=back)'

    def _copies(self, layer: LayerText, out: str, src: str) -> Iterator[str]:
        yield f"for s in range({layer.count}):"
        yield f"    for e in range({layer.own}):"
        yield f"        copy({layer.received(out, 's')}, {layer.received(src, 's')}, lane=compute)"
