"""The transfer of an edge's tensor, or of its gradient, from the mesh of one stage to that of another.

Where each rank of one mesh sends all that it has to one rank of the other, a transfer is a send and a
receive. Else it is a reshard: the messages of a plan of `algorithms.reshard`, for one micro-batch. It is not an
include, which is one op that all ranks issue at one place: the two meshes issue a transfer at different places of
different loops. Each rank's body has that rank's ops of the plan in place of the send or receive.

Where a layout splits a dim besides rows, a sender takes its part from the whole that the stage made, and
receivers gather theirs into the whole that the stage reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from meshweave.algorithms.pipeline.problem import Edge, PipelineProblem, Stage
from meshweave.algorithms.reshard.plan import plan_reshard
from meshweave.algorithms.reshard.problem import ReshardProblem, TensorMove
from meshweave.algorithms.reshard.program import reshard_program
from meshweave.cost.fabric import HostTopology
from meshweave.describe.layout import Layout, Shard
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.program import Buffer, On, Program, Statement
from meshweave.ir.program.expressions import Index, Var
from meshweave.ir.program.ops import AllGather, Op, Recv, Send
from meshweave.ir.program.views import FULL, Range, View

SIGNAL_DTYPE = "uint8"
UNIFORM_BYTES_PER_S = 10**9
"""The rate between any two chips where no network is given."""


@dataclass(frozen=True)
class BoundarySide:
    """One end of a boundary: a stage, and the layout of a micro-batch's tensor on its mesh.

    Attributes:
        mesh: the ranks, under the mesh's name in the program.
        layout: the layout of the whole tensor (rows, ...) on that mesh.
        shape: shape of what the stage writes or reads on one rank: (its rows, all of the other dims).
        splits: (axis, dim) of each mesh axis, data axes excepted, that shards a dim, in mesh order.
    """

    mesh: Mesh
    layout: Layout
    shape: tuple[int, ...]
    splits: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, problem: PipelineProblem, edge: Edge, number: int, mesh: Mesh) -> BoundarySide:
        """Return the end of an edge at stage `number`; `mesh` is the stage's mesh in the program."""
        stage: Stage = problem.stages[number]
        layout = replace(problem.layout_at(edge, number), mesh=mesh)
        splits = tuple(
            (axis, placement.dim)
            for axis, placement in zip(mesh.axes, layout.placements, strict=True)
            if axis not in stage.data_axes and isinstance(placement, Shard)
        )
        return cls(mesh, layout, (problem.rows // stage.data_parallelism, *edge.shape), splits)

    def part_shape(self, num_splits: int | None = None) -> tuple[int, ...]:
        """Return the shape of a rank's shard of `shape`, cut by the first `num_splits` of `splits`; None: all."""
        shape = list(self.shape)
        for axis, dim in self.splits[:num_splits]:
            shape[dim] //= self.mesh.size(axis)
        return tuple(shape)

    def part_start(self, coordinates: Mapping[str, Index]) -> tuple[Index, ...]:
        """Return for each dim of `shape` the index at which a rank's shard begins, from its mesh coordinates."""
        start: list[Index] = [0] * len(self.shape)
        for number, (axis, dim) in enumerate(self.splits):
            start[dim] = start[dim] + coordinates[axis] * self.part_shape(number + 1)[dim]
        return tuple(start)


@dataclass(frozen=True)
class Boundary:
    """The buffers and transfers of one edge in one direction.

    Attributes:
        kind: "h" for activations, "g" for gradients.
        sender, receiver: the two sides.
        slots: slots of each buffer by name; 1 for a name that is not in it.
        chunks: messages, at most, into which a transfer between equal layouts is cut.
        strategy, network: of the reshard, where the layouts differ.
        has_signals: whether one byte is sent in place of the tensor.
        is_local: whether both stages are of one pipeline rank: nothing is sent.
    """

    edge: Edge
    kind: str
    sender: BoundarySide
    receiver: BoundarySide
    slots: Mapping[str, int] = field(hash=False)
    chunks: int
    strategy: str
    network: HostTopology | None
    has_signals: bool
    is_local: bool

    @property
    def name(self) -> str:
        """Return what names of the edge's buffers begin with: kind and the two stages, such as "h0_1"."""
        return f"{self.kind}{self.edge.name}"

    def _slots(self, name: str) -> int:
        return self.slots.get(name, 1)

    def out_view(self, micro_batch: Index) -> View:
        """Return the view, of one micro-batch, that the sending stage writes."""
        return self._whole(self.name if self.is_local else f"{self.name}_out", micro_batch)

    def in_view(self, micro_batch: Index) -> View:
        """Return the view, of one micro-batch, that the receiving stage reads."""
        return self._whole(self.name if self.is_local else f"{self.name}_in", micro_batch)

    def _whole(self, name: str, micro_batch: Index) -> View:
        dims = 1 if self.has_signals else len(self.sender.shape)
        return View(name, (FULL,) * dims, micro_batch % self._slots(name))

    @property
    def _arrives_in(self) -> str:
        """Return the buffer in which what is received arrives."""
        return f"{self.name}_part" if self.receiver.splits and not self.has_signals else f"{self.name}_in"

    @cached_property
    def buffers(self) -> tuple[Buffer, ...]:
        """Return the buffers of both sides, with shards to gather and reshard scratch; one if nothing is sent."""
        if self.is_local:
            return (self._buffer(self.name, self.sender, self.sender.shape),)
        buffers = [
            self._buffer(f"{self.name}_out", self.sender, self.sender.shape),
            self._buffer(f"{self.name}_in", self.receiver, self.receiver.shape),
        ]
        if not self.has_signals:
            count = len(self.receiver.splits)
            for number in range(count, 0, -1):
                buffers.append(
                    self._buffer(self._part_name(number), self.receiver, self.receiver.part_shape(number))
                )
            if self.mesh is not None:
                scratch = (buffer for buffer in self._plan.buffers if buffer.kind == "scratch")
                buffers += [
                    replace(buffer, name=f"{self.name}_{buffer.name}", mesh=self.mesh.name)
                    for buffer in scratch
                ]
        return tuple(buffers)

    def _part_name(self, number: int) -> str:
        """Return the buffer of parts that are split along the first `number` splits."""
        if number == 0:
            return f"{self.name}_in"
        return f"{self.name}_part" if number == len(self.receiver.splits) else f"{self.name}_part{number}"

    def _buffer(self, name: str, side: BoundarySide, shape: tuple[int, ...]) -> Buffer:
        slots = self._slots(f"{self.name}_in" if "_part" in name else name)
        if self.has_signals:
            shape = (self._num_signals,) if name.endswith("_in") else (1,)
        dtype = SIGNAL_DTYPE if self.has_signals else self.edge.dtype
        return Buffer(name, "scratch", side.mesh.name, dtype, shape=shape, slots=slots)

    # --- which ranks send what to which -----------------------------------------------------------------

    @property
    def _tensor_shape(self) -> tuple[int, ...]:
        rows = self.sender.shape[0]
        for axis, placement in zip(self.sender.mesh.axes, self.sender.layout.placements, strict=True):
            rows *= self.sender.mesh.size(axis) if placement == Shard(0) else 1
        return (rows, *self.edge.shape)

    @cached_property
    def is_aligned(self) -> bool:
        """Return whether rank k of the sender's mesh has just the elements that rank k of the receiver's needs.

        False, too, if `network` is given, no signals are sent, and several ranks hold equal elements, which a
        reshard sends once.
        """
        sources, targets = self.sender.mesh.ranks, self.receiver.mesh.ranks
        held = [self.sender.layout.intervals(self._tensor_shape, source) for source in sources]
        if self.network is not None and not self.has_signals and len(set(held)) < len(held):
            return False
        wanted = [self.receiver.layout.intervals(self._tensor_shape, target) for target in targets]
        return held == wanted

    @cached_property
    def mesh(self) -> Mesh | None:
        """Return a mesh of both sides' ranks for the scratch of a reshard; None without reshard or scratch."""
        if self.is_local or self.has_signals or self.is_aligned:
            return None
        if all(buffer.kind != "scratch" for buffer in self._plan.buffers):
            return None
        ranks = tuple(sorted((*self.sender.mesh.ranks, *self.receiver.mesh.ranks)))
        return Mesh(f"{self.name}_ranks", (len(ranks),), ("rank",), ranks)

    @cached_property
    def _plan(self) -> Program:
        return _reshard(
            self._tensor_shape, self.edge.dtype, self.sender.layout, self.receiver.layout, self.strategy,
            self.network,
        )  # fmt: skip

    @cached_property
    def _signals(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Return for each receiving rank the ranks whose elements it wants, one of each group of equal ones."""
        shape, sources = self._tensor_shape, self.sender.mesh.ranks
        signals = []
        for number, target in enumerate(self.receiver.mesh.ranks):
            wanted = self.receiver.layout.intervals(shape, target)
            owners: dict[Any, list[int]] = {}
            for source in sources:
                box = self.sender.layout.intervals(shape, source)
                if all(
                    any(a < d and c < b for a, b in x for c, d in y) for x, y in zip(box, wanted, strict=True)
                ):
                    owners.setdefault(box, []).append(source)
            signals.append((target, tuple(of[number % len(of)] for of in owners.values())))
        most = max(len(of) for _, of in signals)
        return tuple((target, (*of, *of[-1:] * (most - len(of)))) for target, of in signals)

    @property
    def _num_signals(self) -> int:
        return 1 if self.is_local or self.is_aligned else len(self._signals[0][1])

    # --- statements -------------------------------------------------------------------------------------

    def statements(
        self, sends: bool, micro_batch: Index, lane: str, label: str, *, one_lane: bool
    ) -> Iterator[Statement]:
        """Yield the statements of one side (sender or receiver) of a transfer, for that side's mesh.

        Args:
            sends: whether the side is that of the sender.
            micro_batch: number of the micro-batch.
            lane: the lane of the transfer, or the beginning of the names of a reshard's lanes.
            label: the name of every op.
            one_lane: whether all ops of a reshard are in `lane`. Else each is in `{lane}_{its lane in the plan}`.
        """
        if self.is_aligned:
            yield from self._direct(sends, micro_batch, lane, label)
        elif self.has_signals:
            yield from self._signalled(sends, micro_batch, lane, label)
        else:
            yield from self._resharded(sends, micro_batch, lane, label, one_lane=one_lane)
        if not sends and not self.has_signals:
            yield from self._gathers(micro_batch, lane, label)

    def _direct(self, sends: bool, micro_batch: Index, lane: str, label: str) -> Iterator[Statement]:
        here, there = (self.sender, self.receiver) if sends else (self.receiver, self.sender)
        offset = there.mesh.ranks[0] - here.mesh.ranks[0]
        pairs = list(zip(here.mesh.ranks, there.mesh.ranks, strict=True))
        views = [self._piece(sends, micro_batch, number) for number in range(self._num_pieces)]
        if all(other - rank == offset for rank, other in pairs):
            peer = pairs[0][1] if len(pairs) == 1 else Var("rank") + offset
            yield from (_message(sends, view, peer, micro_batch, lane, label) for view in views)
            return
        for rank, other in pairs:
            yield On((rank,), tuple(_message(sends, view, other, micro_batch, lane, label) for view in views))

    @property
    def _cut_dim(self) -> int:
        """Return the dim along which a transfer is cut: rows if there are enough, else the longest."""
        shape = self.receiver.part_shape()
        return 0 if shape[0] >= self.chunks else max(range(len(shape)), key=lambda dim: shape[dim])

    @property
    def _num_pieces(self) -> int:
        return 1 if self.has_signals else min(self.chunks, self.receiver.part_shape()[self._cut_dim])

    def _piece(self, sends: bool, micro_batch: Index, number: int) -> View:
        """Return what one message of a transfer between equal layouts reads or writes."""
        if self.has_signals:
            return self.out_view(micro_batch) if sends else self.in_view(micro_batch)
        shape, count, cut = self.receiver.part_shape(), self._num_pieces, self._cut_dim
        start: tuple[Index, ...] = (0,) * len(shape)
        mesh = self.sender.mesh
        if sends and self.sender.splits:
            start = self.sender.part_start({axis: Var(f"{mesh.name}.{axis}") for axis in mesh.axes})
        selectors = []
        for dim, size in enumerate(shape):
            low, high = (size * number // count, size * (number + 1) // count) if dim == cut else (0, size)
            is_split = sends and any(of == dim for _, of in self.sender.splits)
            is_whole = (low, high) == (0, size) and not is_split
            selectors.append(FULL if is_whole else Range(start[dim] + low, start[dim] + high))
        name = f"{self.name}_out" if sends else self._arrives_in
        slots = self._slots(f"{self.name}_{'out' if sends else 'in'}")
        return View(name, tuple(selectors), micro_batch % slots)

    def _signalled(self, sends: bool, micro_batch: Index, lane: str, label: str) -> Iterator[Statement]:
        for target, sources in self._signals:
            for number, source in enumerate(sources):
                if sends:
                    view, rank, peer = self.out_view(micro_batch), source, target
                else:
                    whole = self.in_view(micro_batch)
                    view, rank, peer = replace(whole, selectors=(Range(number, number + 1),)), target, source
                yield On((rank,), (_message(sends, view, peer, micro_batch, lane, label),))

    def _resharded(
        self, sends: bool, micro_batch: Index, lane: str, label: str, *, one_lane: bool
    ) -> Iterator[Statement]:
        mesh = self.sender.mesh if sends else self.receiver.mesh
        ops: dict[int, list[Op]] = {rank: [] for rank in mesh.ranks}
        for statement in self._plan.body:
            assert isinstance(statement, On) and not isinstance(statement.where, str)
            (rank,) = statement.where
            if rank in mesh:
                for op in statement.body:
                    assert isinstance(op, Op)
                    changes: dict[str, Any] = {
                        "name": label,
                        "lane": lane if one_lane else f"{lane}_{op.lane}",
                    }
                    changes |= {
                        role: self._placed(getattr(op, role), rank, micro_batch)
                        for role in ("src", "out")
                        if hasattr(op, role)
                    }
                    if isinstance(op, (Send, Recv)):
                        changes["tag"] = micro_batch
                    ops[rank].append(replace(op, **changes))
        for rank, of_rank in ops.items():
            if of_rank:
                yield On((rank,), tuple(of_rank))

    def _placed(self, view: View, rank: int, micro_batch: Index) -> View:
        """Return the view of this program that stands for one of the reshard plan's."""
        if view.buffer == "x0":
            mesh = self.sender.mesh
            coordinates: Mapping[str, Index] = dict(zip(mesh.axes, mesh.coords(rank), strict=True))
            start = self.sender.part_start(coordinates)
            selectors = tuple(
                Range(selector.start + low, selector.stop + low)  # type: ignore[operator]
                for selector, low in zip(view.selectors, start, strict=True)
            )
            return View(f"{self.name}_out", selectors, micro_batch % self._slots(f"{self.name}_out"))
        if view.buffer == "y0":
            return View(self._arrives_in, view.selectors, micro_batch % self._slots(f"{self.name}_in"))
        return replace(view, buffer=f"{self.name}_{view.buffer}")

    def _gathers(self, micro_batch: Index, lane: str, label: str) -> Iterator[Statement]:
        mesh, slot = self.receiver.mesh, micro_batch % self._slots(f"{self.name}_in")
        dims = (FULL,) * len(self.receiver.shape)
        for number in range(len(self.receiver.splits), 0, -1):
            axis, dim = self.receiver.splits[number - 1]
            yield AllGather(
                out=View(self._part_name(number - 1), dims, slot),
                src=View(self._part_name(number), dims, slot),
                over=f"{mesh.name}.{axis}",
                dim=dim,
                lane=lane,
                name=label,
            )


def boundary_of(
    problem: PipelineProblem,
    edge: Edge,
    kind: str,
    meshes: tuple[Mesh, Mesh],
    slots: Mapping[str, int],
    *,
    chunks: int = 1,
    strategy: str = "broadcast",
    network: HostTopology | None = None,
    signals: bool = False,
) -> Boundary:
    """Return an edge's boundary: for `kind` "h" of activations, source to target, for "g" of gradients, back.

    `meshes` are (mesh of the source stage, mesh of the target stage). `signals` is whether one byte is sent in
    place of the tensor. `slots`, `chunks`, `strategy` and `network` are as in `Boundary`.
    """
    sides: Sequence[BoundarySide] = (
        BoundarySide.of(problem, edge, edge.source, meshes[0]),
        BoundarySide.of(problem, edge, edge.target, meshes[1]),
    )
    sender, receiver = sides if kind == "h" else sides[::-1]
    return Boundary(
        edge, kind, sender, receiver, slots, chunks, strategy, network, signals, problem.is_local(edge)
    )


@lru_cache(maxsize=256)
def _reshard(
    shape: tuple[int, ...], dtype: str, src: Layout, dst: Layout, strategy: str, network: HostTopology | None
) -> Program:
    """Return the program of a reshard: "x0" on the mesh of `src` becomes "y0" on that of `dst`."""
    problem = ReshardProblem((TensorMove("T", shape, dtype, src, dst),))
    if network is None:
        count = problem.ranks[-1] + 1
        network = HostTopology(tuple(range(count)), (0,) * count, UNIFORM_BYTES_PER_S, UNIFORM_BYTES_PER_S)
    return reshard_program(plan_reshard(problem, network, strategy=strategy))


def _message(sends: bool, view: View, peer: Index, tag: Index, lane: str, label: str) -> Op:
    if sends:
        return Send(src=view, peer=peer, tag=tag, lane=lane, name=label)
    return Recv(out=view, peer=peer, tag=tag, lane=lane, name=label)
