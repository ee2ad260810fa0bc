"""Dispatch and combine in rounds: in round r a rank sends to the one r places on, and hears the one r back.

A message has the rows of one cell, so rows arrive where the products of their expert read them and nothing is
copied. No two messages of a round share a sender or a receiver (Thakur and Gropp, EuroPVM/MPI '03, section 4.3).
"""

from __future__ import annotations

from collections.abc import Iterator

from meshweave.algorithms.experts.algorithm import ExpertsAlgorithm
from meshweave.algorithms.experts.layer import LayerText
from meshweave.algorithms.experts.problem import ExpertsProblem
from meshweave.algorithms.fused.product import NoChoice
from meshweave.describe.machine.cluster import Cluster


class PairwiseExchange:
    """The rounds, as an exchange of a layer."""

    def temps(self, layer: LayerText, tensor: str, use: str) -> Iterator[str]:
        """Yield nothing: rows go from end to end."""
        return iter(())

    def dispatch(self, layer: LayerText, src: str, dst: str, tensor: str) -> Iterator[str]:
        """Yield a copy of the own rows, then the rounds."""
        yield from own_cells(layer, layer.received(dst, "ep.x"), layer.packed(src, "ep.x"))
        source, target = layer.peer(f"{layer.count - 1} - r"), layer.peer("1 + r")
        out, sent = layer.received(dst, source), layer.packed(src, target)
        yield from self._rounds(layer, f'permute({out}, {sent}, over="ep.x", shift=r + 1, lane=go)')

    def combine(self, layer: LayerText, src: str, dst: str, tensor: str) -> Iterator[str]:
        """Yield a copy of the own rows, then the rounds backwards: to whom rows came from first."""
        yield from own_cells(layer, layer.packed(dst, "ep.x"), layer.received(src, "ep.x"))
        source, owner = layer.peer(f"{layer.count - 1} - r"), layer.peer("1 + r")
        out, sent = layer.packed(dst, owner), layer.received(src, source)
        shift = f"{layer.count - 1} - r"
        yield from self._rounds(layer, f'permute({out}, {sent}, over="ep.x", shift={shift}, lane=back)')

    def _rounds(self, layer: LayerText, statement: str) -> Iterator[str]:
        if layer.count > 1:
            yield f"for r in range({layer.count - 1}):"
            yield f"    for e in range({layer.own}):"
            yield f"        {statement}"


def own_cells(layer: LayerText, out: str, src: str) -> Iterator[str]:
    """Yield the copies of the cells that stay on their rank."""
    yield f"for e in range({layer.own}):"
    yield f"    copy({out}, {src}, lane=compute)"


class PairwiseRounds(ExpertsAlgorithm[NoChoice]):
    """Rounds in which each rank has one partner to send to and one to hear."""

    name = "experts_pairwise"
    title = "Experts by pairwise rounds"
    shares_nics = True
    source = "Thakur and Gropp, EuroPVM/MPI '03, section 4.3"

    def candidates(self, problem: ExpertsProblem, cluster: Cluster | None = None) -> Iterator[NoChoice]:
        """Yield the one config."""
        yield NoChoice()

    def text(self, problem: ExpertsProblem, config: NoChoice) -> str:
        """Return the program with counts in its text form."""
        return LayerText(problem, self.title, PairwiseExchange()).text()
