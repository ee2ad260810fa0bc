"""How a layer lies on ranks and what its nodes move, read off what the roles of a strategy write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

from meshweave.algorithms.block.assembly import batch_dims, write_skeleton
from meshweave.algorithms.block.nodes import record_of
from meshweave.algorithms.block.pieces import LayersPiece
from meshweave.algorithms.block.problem import BlockConfig, BlockProblem, ExpertRanks
from meshweave.algorithms.block.roles import TOKENS, Roles, num_parts
from meshweave.algorithms.block.skeleton_writer import SkeletonWriter
from meshweave.algorithms.block.writer import COMPUTE, Stored
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.model.nodes import NodeWeight
from meshweave.ir.skeleton import Part, Task
from meshweave.ir.work import CopyExchange, Transfer

_IN_PARTS = ("all_gather", "reduce_scatter", "all_to_all")
"""The kinds whose `Transfer.part_bytes` is one of as many parts as there are ranks."""


@dataclass(frozen=True)
class Moved:
    """A number of equal transfers of a node of the layer's graph.

    Attributes:
        kind: the collective or message, as in `Transfer.kind`, such as "all_gather".
        axis: the mesh axis along which ranks communicate, such as "row".
        num_ranks: the number of ranks that take part in one transfer.
        num_bytes: the bytes of one transfer: of an all-gather, reduce-scatter or all-to-all one rank's part times
            `num_ranks`, of an all-reduce the tensor, of a message the message, of a dispatch or combine all copies
            of one rank's tokens.
        times: how many equal transfers there are.
    """

    kind: str
    axis: str
    num_ranks: int
    num_bytes: int
    times: int


@dataclass(frozen=True)
class Shards:
    """Into how many shards a tensor is cut.

    Attributes:
        sides: number of parts along each dim; for an activation (along the tokens, along the features).
        experts: number of parts into which the experts of a weight are divided; 1 for other tensors.
    """

    sides: tuple[int, ...]
    experts: int = 1

    @property
    def count(self) -> int:
        """Return the number of different shards of the tensor: the product of all numbers of parts."""
        return prod(self.sides) * self.experts


@dataclass(frozen=True)
class LaidLayer:
    """How a layer is sharded over ranks, and what it moves. Its graph has nodes (ops) and edges (activations).

    Attributes:
        axes: (name, number of ranks) of each mesh axis of more than one rank.
        tokens: the tokens of all ranks together.
        edges, weights: the shards of each activation and weight, by its name in the graph.
        before, within, after: the transfers of each node in the forward part, by the name of its output edge:
            before its first computation, between computations, and after its last one.
        moved: the transfers of the forward and the backward part together, reductions of gradients included.
    """

    axes: tuple[tuple[str, int], ...]
    tokens: int
    edges: dict[str, Shards]
    weights: dict[str, Shards]
    before: dict[str, tuple[Moved, ...]]
    within: dict[str, tuple[Moved, ...]]
    after: dict[str, tuple[Moved, ...]]
    moved: tuple[Moved, ...]


def laid_out(problem: BlockProblem, config: BlockConfig, roles: Roles) -> LaidLayer:
    """Return how the first layer of a problem is sharded, and what its nodes transfer on rank 0.

    `config.chunks` is ignored: the batch is not cut. Embedding and head are ignored, too.
    """
    alone = replace(problem, layers=1, training=False, vocabulary=0)
    config, mesh = replace(config, chunks=1), problem.mesh
    writer = SkeletonWriter(alone, config, mesh, batch_dims(roles))
    layers = LayersPiece(alone, roles, writer)
    layers.declare()
    place, written = layers.layers[0], 0
    before: dict[str, tuple[Moved, ...]] = {}
    within: dict[str, tuple[Moved, ...]] = {}
    after: dict[str, tuple[Moved, ...]] = {}
    for at in place.nodes:
        record_of(at.node).write(at, layers)
        tasks = writer.skeleton().phases[0].tasks
        for of_nodes, part in zip((before, within, after), _parts(tasks[written:]), strict=True):
            of_nodes[at.node.out] = moved_by(part)
        written = len(tasks)
    whole = write_skeleton(replace(alone, training=True), config, roles, mesh).phases
    return LaidLayer(
        tuple((axis, size) for axis, size in zip(mesh.axes, mesh.shape, strict=True) if size > 1),
        problem.batch * problem.sequence,
        {edge: _edge(layers.stored[place.home(edge)], mesh) for edge in place.graph.features},
        {
            weight.name: _weight(weight, layers.stored[place.own(weight.name)], mesh, problem.experts)
            for weight in place.graph.parameters
        },
        before,
        within,
        after,
        moved_by(task for phase in whole for task in phase.tasks),
    )


def moved_by(tasks: Iterable[Task | Part]) -> tuple[Moved, ...]:
    """Return the transfers among a rank's tasks, with one `Moved` for all that are equal.

    Transfers inside included programs (`Part`) count; transfers of no bytes are left out.
    """
    counts: Counter[tuple[str, str, int, int]] = Counter()
    for work, times in _transfers(tasks):
        copies = work.tokens * work.chosen if isinstance(work, CopyExchange) else 1
        size = work.part_bytes * (work.num_ranks if work.kind in _IN_PARTS else copies)
        counts[work.kind, work.axis.rpartition(".")[2], work.num_ranks, size] += times
    return tuple(Moved(*key, times) for key, times in counts.items() if key[-1])


def _transfers(tasks: Iterable[Task | Part]) -> Iterator[tuple[Transfer, int]]:
    for task in tasks:
        if isinstance(task, Part):
            for phase in task.skeleton.phases:
                yield from ((work, times * phase.turns) for work, times in _transfers(phase.tasks))
        elif isinstance(task.work, Transfer):
            yield task.work, task.times


def _parts(tasks: tuple[Task | Part, ...]) -> tuple[tuple[Task | Part, ...], ...]:
    """Return the tasks before the first computation, those up to the last one, and those after it."""
    computing = [i for i, task in enumerate(tasks) if isinstance(task, Part) or task.lane == COMPUTE]
    if not computing:
        return (), tasks, ()
    first, last = computing[0], computing[-1] + 1
    return tasks[:first], tasks[first:last], tasks[last:]


def _edge(stored: Stored, mesh: Mesh) -> Shards:
    return Shards((num_parts(stored.dims, mesh.shape, TOKENS), _cut(stored, -1, mesh)))


def _weight(weight: NodeWeight, stored: Stored, mesh: Mesh, experts: ExpertRanks | None) -> Shards:
    if weight.kind == "experts":
        ranks = experts or ExpertRanks()
        cut = tuple(ranks.tensor if side.dim == "inner" else 1 for side in weight.sides)
        return Shards(cut, ranks.expert)
    return Shards(tuple(_cut(stored, number, mesh) for number in range(len(weight.sides))))


def _cut(stored: Stored, number: int, mesh: Mesh) -> int:
    own = stored.sides[number].dim
    return num_parts(stored.dims, mesh.shape, (own,)) if own else 1
