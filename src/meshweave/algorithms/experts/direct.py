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
        """Return the program for any routing as text for `parse`; the row counts of `counts` are inputs of it."""
        return LayerText(problem, self.title, self).text()

    def temps(self, layer: LayerText, tensor: str, use: str) -> Iterator[str]:
        """Yield the declaration, as program text, of a buffer for rows of `tensor` in the order of source ranks.

        Yield nothing if a rank has one expert. `use` is not read.
        """
        if layer.own > 1:
            yield f"{tensor.lower()}_by_source = temp({tensor}, ep[S(0)], order=(1, 0, 2))"

    def dispatch(self, layer: LayerText, src: str, dst: str, tensor: str) -> Iterator[str]:
        """Yield, as program text, an all-to-all from buffer `src`, and copies that sort by expert, into `dst`.

        Buffer `src` has the packed rows of a rank's tokens; buffer `dst` holds `tensor`, the rows for a rank's
        experts. If a rank has one expert there are no copies.
        """
        between = dst if layer.own == 1 else f"{tensor.lower()}_by_source"
        yield f'all_to_all({between}, {src}, over="ep.x", split_dim=0, concat_dim=1, lane=go)'
        if between != dst:
            yield from self._copies(layer, dst, between)

    def combine(self, layer: LayerText, src: str, dst: str, tensor: str) -> Iterator[str]:
        """Yield, as program text, copies that sort buffer `src` by source rank, and an all-to-all into `dst`.

        Buffer `src` holds `tensor`, the rows of a rank's experts; buffer `dst` gets the packed rows of a rank's
        tokens. If a rank has one expert there are no copies.
        """
        between = src if layer.own == 1 else f"{tensor.lower()}_by_source"
        if between != src:
            yield from self._copies(layer, between, src)
        yield f'all_to_all({dst}, {between}, over="ep.x", split_dim=1, concat_dim=0, lane=back)'

    def _copies(self, layer: LayerText, out: str, src: str) -> Iterator[str]:
        yield f"for s in range({layer.count}):"
        yield f"    for e in range({layer.own}):"
        yield f"        copy({layer.received(out, 's')}, {layer.received(src, 's')}, lane=compute)"
