"""Dispatch and combine by one-sided puts: a rank stores rows in the owner's memory, at places that counts give.

Nobody waits for a partner; one fence ends an exchange (as the universal product of slices does: Brock and Buluc).
"""

from __future__ import annotations

from collections.abc import Iterator

from meshweave.algorithms.experts.algorithm import UnchosenExperts
from meshweave.algorithms.experts.layer import LayerText
from meshweave.algorithms.experts.pairwise import other_cells, own_cells
from meshweave.algorithms.experts.problem import ExpertsProblem
from meshweave.algorithms.fused.product import NoChoice, rank_of


class PutToOwner(UnchosenExperts):
    """A layer in which ranks put rows into the memory of the expert's rank, and results into the source's.

    Each rank serves the rank after it first.
    """

    name = "experts_put"
    title = "Experts by one-sided puts"
    source = "Brock et al., one-sided universal matrix products, IPDPS '26; DeepEP's low-latency kernels"
    is_one_sided = True
    shares_nics = True

    def text(self, problem: ExpertsProblem, config: NoChoice) -> str:
        """Return the program for any routing as text for `parse`; the row counts of `counts` are inputs of it."""
        return LayerText(problem, self.title, self).text()

    def temps(self, layer: LayerText, tensor: str, use: str) -> Iterator[str]:
        """Yield nothing: rows need no buffer between source and destination."""
        return iter(())

    def dispatch(self, layer: LayerText, src: str, dst: str, tensor: str) -> Iterator[str]:
        """Yield, as program text, a copy of the rows that stay on a rank, puts of all others, and a fence.

        Rows go from buffer `src`, the packed rows of a rank's tokens, to buffer `dst` on the ranks of their
        experts; `tensor` is not read.
        """
        yield from own_cells(layer, layer.received(dst, "ep.x"), layer.packed(src, "ep.x"))
        peer = layer.peer("1 + r")
        owner = rank_of(layer.problem.mesh, peer)
        out, sent = layer.received(dst, "ep.x"), layer.packed(src, peer)
        yield from self._puts(layer, f"put(at({owner}, {out}), {sent}, lane=go)", "go")

    def combine(self, layer: LayerText, src: str, dst: str, tensor: str) -> Iterator[str]:
        """Yield, as program text, a copy of the rows that stay on a rank, puts of all others, and a fence.

        Rows go from buffer `src`, the rows of a rank's experts, to buffer `dst`, the packed rows on the ranks of
        their tokens; `tensor` is not read.
        """
        yield from own_cells(layer, layer.packed(dst, "ep.x"), layer.received(src, "ep.x"))
        peer = layer.peer("1 + r")
        source = rank_of(layer.problem.mesh, peer)
        out, sent = layer.packed(dst, "ep.x"), layer.received(src, peer)
        yield from self._puts(layer, f"put(at({source}, {out}), {sent}, lane=back)", "back")

    def _puts(self, layer: LayerText, statement: str, lane: str) -> Iterator[str]:
        yield from other_cells(layer, statement)
        yield f'fence(over="ep", lane={lane})'
