"""Dispatch and combine in rounds: in round r a rank sends to the one r places on, and receives from that r back.

A message has the rows of one source rank for one expert, a cell, so that they arrive where the products of the
expert read them and nothing is copied. No two messages of a round share a sender or a receiver (Thakur and
Gropp, EuroPVM/MPI '03, section 4.3).
"""

from __future__ import annotations

from collections.abc import Iterator

from meshweave.algorithms.experts.algorithm import UnchosenExperts
from meshweave.algorithms.experts.layer import LayerText
from meshweave.algorithms.experts.problem import ExpertsProblem
from meshweave.algorithms.fused.product import NoChoice


class PairwiseExchange:
    """An exchange in rounds: in each, every rank sends to one rank and receives from one.

    In a dispatch, rank i sends to ranks i + 1, i + 2, ... in turn, modulo the number of ranks.
    """

    def temps(self, layer: LayerText, tensor: str, use: str) -> Iterator[str]:
        """Yield nothing: rows need no buffer between source and destination."""
        return iter(())

    def dispatch(self, layer: LayerText, src: str, dst: str, tensor: str) -> Iterator[str]:
        """Yield, as program text, a copy of rows that stay on a rank, then permutes of all others, `src` to `dst`.

        Buffer `src` has the packed rows of a rank's tokens, buffer `dst` gets the rows for its experts; `tensor`
        is not read.
        """
        yield from own_cells(layer, layer.received(dst, "ep.x"), layer.packed(src, "ep.x"))
        source, target = layer.peer(f"{layer.count - 1} - r"), layer.peer("1 + r")
        out, sent = layer.received(dst, source), layer.packed(src, target)
        yield from other_cells(layer, f'permute({out}, {sent}, over="ep.x", shift=r + 1, lane=go)')

    def combine(self, layer: LayerText, src: str, dst: str, tensor: str) -> Iterator[str]:
        """Yield, as program text, a copy of rows that stay on a rank, then permutes of all others, `src` to `dst`.

        Buffer `src` has the rows of a rank's experts, buffer `dst` gets the packed rows of its tokens; `tensor` is
        not read.
        """
        yield from own_cells(layer, layer.packed(dst, "ep.x"), layer.received(src, "ep.x"))
        source, owner = layer.peer(f"{layer.count - 1} - r"), layer.peer("1 + r")
        out, sent = layer.packed(dst, owner), layer.received(src, source)
        shift = f"{layer.count - 1} - r"
        yield from other_cells(layer, f'permute({out}, {sent}, over="ep.x", shift={shift}, lane=back)')


def own_cells(layer: LayerText, out: str, src: str) -> Iterator[str]:
    """Yield the text of a loop over a rank's experts `e` that copies view `src` to view `out` on the same rank."""
    yield f"for e in range({layer.own}):"
    yield f"    copy({out}, {src}, lane=compute)"


def other_cells(layer: LayerText, statement: str) -> Iterator[str]:
    """Yield the text of `statement` in loops over all other ranks and over the experts of a rank.

    Loop index `r`, from 0, stands for the rank `r` + 1 places after this one, and `e` for the expert. Nothing is
    yielded if there is one rank.
    """
    if layer.count > 1:
        yield f"for r in range({layer.count - 1}):"
        yield f"    for e in range({layer.own}):"
        yield f"        {statement}"


class PairwiseRounds(UnchosenExperts):
    """Rounds in which each rank sends to one rank and receives from another."""

    name = "experts_pairwise"
    title = "Experts by pairwise rounds"
    shares_nics = True
    source = "Thakur and Gropp, EuroPVM/MPI '03, section 4.3"

    def text(self, problem: ExpertsProblem, config: NoChoice) -> str:
        """Return the program for any routing as text for `parse`; the row counts of `counts` are inputs of it."""
        return LayerText(problem, self.title, PairwiseExchange()).text()
