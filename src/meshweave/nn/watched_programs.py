"""What is compared of programs that ran in a step: their transfers and products, measured and simulated."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshweave.cost.machine import Machine
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.levels import level_under
from meshweave.ir.program import Program
from meshweave.ir.program.ops import Collective, Matmul, Recv, Send
from meshweave.simulate import simulate
from meshweave.trace import Span, Trace


@dataclass(frozen=True)
class WatchedTransfer:
    """A collective or a message of a program.

    Attributes:
        op: its name.
        axis: the mesh axes along which its ranks differ, as "axis x" or "axes x and y"; or "ranks 0, 3".
        ends: (global rank, index of the op among the ops of that rank) for each rank that takes part; of a message
            the sender first.
        is_joint: True for a collective, False for a message.
        level: the position in `link_levels` of the cluster of the links that it takes; None where none of those.
    """

    op: str
    axis: str
    ends: tuple[tuple[int, int], ...]
    is_joint: bool
    level: int | None


@dataclass(frozen=True)
class SimulatedRun:
    """A simulation of a program: the predicted times of its ops, and which ops of ranks belong together.

    Attributes:
        trace: the simulated spans, from time 0 on.
        durations: {global rank: {index of an op among the ops of that rank: picoseconds}}.
        transfers: the collectives and messages between different ranks.
        products: {global rank: ((name of a matrix product, its index among the ops of that rank), ...)}.
    """

    trace: Trace
    durations: Mapping[int, Mapping[int, int]]
    transfers: tuple[WatchedTransfer, ...]
    products: Mapping[int, tuple[tuple[str, int], ...]]

    @classmethod
    def of(cls, program: Program, cluster: Cluster) -> SimulatedRun:
        """Return the simulated run of a program on a cluster, rank r on its chip r. Raises as `simulate` does."""
        program = program.expanded
        trace = simulate(program, Machine(cluster, program.meshes, logical=True)).trace()
        durations: dict[int, dict[int, int]] = defaultdict(dict)
        for span in trace.spans:
            durations[span.rank][span.index] = span.end_ps - span.start_ps
        products = {
            rank: tuple(
                (bound.op.title, at)
                for at, bound in enumerate(program.ops_on_rank(rank))
                if isinstance(bound.op, Matmul)
            )
            for rank in program.ranks
        }
        return cls(trace, durations, tuple(_transfers(program, cluster)), products)

    def spans(self, rank: int) -> list[Span]:
        """Return the simulated spans (start and end in picoseconds) of the ops of a global rank."""
        return [span for span in self.trace.spans if span.rank == rank]


def _transfers(program: Program, cluster: Cluster) -> Iterator[WatchedTransfer]:
    def transfer(op: str, ends: Sequence[tuple[int, int]], is_joint: bool) -> WatchedTransfer:
        ranks = [rank for rank, _ in ends]
        return WatchedTransfer(op, _axis(program, ranks), tuple(ends), is_joint, level_under(cluster, ranks))

    joint: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    messages: dict[Any, tuple[list[tuple[int, int]], list[tuple[int, int]], str]] = {}
    names: dict[Any, str] = {}
    for rank in program.ranks:
        seen: Counter[Any] = Counter()
        for at, bound in enumerate(program.ops_on_rank(rank)):
            op = bound.op
            if isinstance(op, Collective):
                group = tuple(op.over) if not isinstance(op.over, str) else (op.over,)
                key = bound.key, group
                joint[key, seen[key]].append((rank, at))
                names[key, seen[key]] = op.title
                seen[key] += 1
            elif isinstance(op, Send | Recv):
                assert isinstance(op.peer, int)
                peer = op.peer
                ends = (rank, peer) if isinstance(op, Send) else (peer, rank)
                sent, received, _ = messages.setdefault((ends, op.tag), ([], [], op.title))
                (sent if isinstance(op, Send) else received).append((rank, at))
    for where, members in joint.items():
        if len(members) > 1:  # one rank alone uses no link
            yield transfer(names[where], members, True)
    for sent, received, name in messages.values():
        for both in zip(sent, received, strict=False):
            yield transfer(name, both, False)


def _axis(program: Program, ranks: Sequence[int]) -> str:
    """Return the mesh axes along which ranks differ, or the ranks where no mesh has all of them."""
    for mesh in program.meshes:
        if all(rank in mesh for rank in ranks):
            coords = [mesh.coords(rank) for rank in ranks]
            differing = [
                axis
                for axis, of in zip(mesh.axes, zip(*coords, strict=True), strict=True)
                if len(set(of)) > 1
            ]
            if len(differing) == 1:
                return f"axis {differing[0]}"
            if differing:
                return f"axes {' and '.join(differing)}"
    return f"ranks {', '.join(map(str, sorted(set(ranks))))}"


Pair = tuple[int, int]
"""Measured and predicted picoseconds."""


@dataclass
class StepTally:
    """Sums over the programs of a step: each value is (measured, predicted) picoseconds.

    Attributes:
        links: of transfers, by (op, axis); a transfer takes the shortest time of its ranks.
        products: of matrix products, by (op, global rank).
        late: how long others waited for a rank in collectives, by (op, global rank): the longest time of the ranks
            less that of this one.
        levels: of transfers, by ("", position in `link_levels`).
    """

    links: dict[tuple[str, str], Pair] = field(default_factory=dict)
    products: dict[tuple[str, int], Pair] = field(default_factory=dict)
    late: dict[tuple[str, int], Pair] = field(default_factory=dict)
    levels: dict[tuple[str, int], Pair] = field(default_factory=dict)

    def add(self, prediction: SimulatedRun, measured: Mapping[int, Mapping[int, int]]) -> None:
        """Add one run of a program to the sums.

        Args:
            prediction: the simulation of the program.
            measured: {global rank: {index of an op among the ops of that rank: picoseconds}}; a missing op took 0.
        """
        expected = prediction.durations
        for transfer in prediction.transfers:
            took = [measured[rank].get(at, 0) for rank, at in transfer.ends]
            should = [expected[rank].get(at, 0) for rank, at in transfer.ends]
            add_pair(self.links, (transfer.op, transfer.axis), min(took), min(should))
            if transfer.level is not None:
                add_pair(self.levels, ("", transfer.level), min(took), min(should))
            if transfer.is_joint:
                for (rank, _), own, due in zip(transfer.ends, took, should, strict=True):
                    add_pair(self.late, (transfer.op, rank), max(took) - own, max(should) - due)
        for rank, products in prediction.products.items():
            for op, at in products:
                add_pair(self.products, (op, rank), measured[rank].get(at, 0), expected[rank].get(at, 0))

    def told(self) -> list[list[tuple[str, str | int, int, int]]]:
        """Return the sums `links`, `products`, `late`, `levels`, each as [(op, where, measured, predicted)].

        `where` is the axis, the global rank or the level; measured and predicted are in picoseconds.
        """
        sums = self.links, self.products, self.late, self.levels
        return [[(op, where, *pair) for (op, where), pair in each.items()] for each in sums]


def add_pair(sums: dict[Any, Pair], key: Any, measured: int, predicted: int) -> None:
    """Add (measured, predicted) picoseconds to `sums[key]`, which counts as (0, 0) where there is none."""
    before = sums.get(key, (0, 0))
    sums[key] = before[0] + measured, before[1] + predicted
