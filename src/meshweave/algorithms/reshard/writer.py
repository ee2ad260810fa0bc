"""From multicasts to the statements of a program.

Tensor number i has an input buffer "x{i}" on its source mesh and an output buffer "y{i}" on its destination mesh.
A rank passes on only what it has received into its output, so no other buffer is needed.

Every message stands at one place of the program, its send before its recv, and each lane runs its ops in program
order. So of all messages that are not done the first one can always proceed, and no order of multicasts deadlocks.

A rank that receives and sends does both at once: what it sends has lanes of its own (`ReshardPlan.sender_lanes`).

Completion signals. A NIC serves one multicast after another, but the ranks of a host know nothing of one another.
Where a NIC changes from one sender to another, the rank that received the last piece sends one element of it to
the next sender, which waits for it. This is a data dependence like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import count
from typing import Protocol

from meshweave.algorithms.reshard.problem import ReshardProblem
from meshweave.algorithms.reshard.tasks import TensorPiece, in_chunks, kinds_of_chunks, with_tail
from meshweave.cost.fabric import HostTopology
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.layout.meshes import ProgramMeshes
from meshweave.ir.program import Buffer, Lane, On, Program, Same, Statement, Tensor
from meshweave.ir.program.ops import Copy, Op, Recv, Send
from meshweave.ir.program.views import Range, View

INTER_HOST_LANES = ("far0", "far1")
INTRA_HOST_LANES = ("near0", "near1")
"""Successive hops of a chain use the two lanes alternately."""
RING_LANES = ("gather0", "gather1", "gather2")
"""The third is for the last hop of a ring with an odd number of ranks."""
SIGNAL_LANE, COPY_LANE = "turn", "copy"
LEAD_BYTES = 1 << 15
"""The most bytes of a multicast that may still be in flight when the next sender is signalled."""


class MessageSink(Protocol):
    """What a strategy writes the messages of a multicast to. Ranks are global numbers."""

    def chunks(
        self, pieces: Sequence[TensorPiece], count: int, tail: int | None = None
    ) -> Iterator[TensorPiece]:
        """Yield pieces in chunks, each of at most 1 / `count` of the bytes of all pieces, or one element.

        The caller writes all messages of a chunk before it asks for the next. If `tail` is not None and the last
        chunk has more than 2 x `tail` bytes, it is cut so that its last part has at most `tail` bytes, or one
        element. A sink that only counts may yield one chunk for many of equal shape.
        """

    def message(
        self, piece: TensorPiece, src: int, dst: int, lane: str, *, from_source: bool, signals: bool = True
    ) -> None:
        """Append a message with one piece from rank `src` to rank `dst`.

        Args:
            lane: name of the queue of ops, on both ranks, that the message is in.
            from_source: whether `src` sends from its source shard; else it passes on what it received.
            signals: whether later multicasts over the same NIC wait for this message, too.
        """

    def wait_for_receiver(self, receiver: int, waiter: int, lane: str) -> None:
        """Make later ops in `lane` of rank `waiter` wait until rank `receiver` has what this multicast sent to it.

        They wait for the last message, or for the one before it if the last is short.
        """


class TrafficCounter:
    """A `MessageSink` that counts the messages of multicasts and writes no ops.

    Attributes:
        bytes_across_hosts: bytes of all messages from one host to another.
        num_messages: number of all messages.
    """

    def __init__(self, network: HostTopology, sender_lanes: Mapping[int, str]) -> None:
        self._host_of, self._sender_lanes = network.host_of, sender_lanes
        self.bytes_across_hosts = 0
        self.num_messages = 0
        self.largest: dict[tuple[int, str, str], int] = {}
        """Bytes of the largest message that a rank sends ("out") or receives ("in"), by rank, lane, direction."""
        self._times = 1
        """How many chunks the present one stands for."""

    def chunks(
        self, pieces: Sequence[TensorPiece], count: int, tail: int | None = None
    ) -> Iterator[TensorPiece]:
        """Yield one chunk of each shape per piece; `message` counts it for all chunks of that shape.

        Args:
            count: a chunk has at most 1 / `count` of the bytes of all pieces, or one element.
            tail: the most bytes of the last part of the last chunk, as in `MessageSink.chunks`; None for no cut.
        """
        for chunk, times in kinds_of_chunks(pieces, count, tail):
            self._times = times
            yield chunk
        self._times = 1

    def _count(self, rank: int, lane: str, direction: str, num_bytes: int) -> None:
        if num_bytes > self.largest.get((rank, lane, direction), 0):
            self.largest[rank, lane, direction] = num_bytes

    def message(
        self, piece: TensorPiece, src: int, dst: int, lane: str, *, from_source: bool, signals: bool = True
    ) -> None:
        """Count a message of `piece` from rank `src` to rank `dst`, once for each chunk that it stands for.

        Inside a loop over `chunks` these are all chunks of the shape of the latest one. `from_source` and
        `signals` are not read.
        """
        self.num_messages += self._times
        if self._host_of[src] != self._host_of[dst]:
            self.bytes_across_hosts += self._times * piece.num_bytes
        lane += self._sender_lanes.get(src, "")
        self._count(src, lane, "out", piece.num_bytes)
        self._count(dst, lane, "in", piece.num_bytes)

    def wait_for_receiver(self, receiver: int, waiter: int, lane: str) -> None:
        """Do nothing: completion signals are not messages of the tensors."""

    def scratch_bytes(self, rank: int) -> int:
        """Return an upper bound of the bytes of the buffers in which a global rank packs messages.

        Per lane there is one buffer for outgoing and two for incoming messages. A buffer is as large as the
        largest message, rounded up to a power of two, and smaller ones from before are counted too.
        """
        largest = ((direction, size) for (of, _, direction), size in self.largest.items() if of == rank)
        return sum((8 if direction == "in" else 4) * size for direction, size in largest)


class ReshardWriter:
    """A `MessageSink` that writes the ops of a reshard. Tensor i is input "x{i}" and output "y{i}".

    A completion signal is a message of one element by which a rank that has received a multicast lets another rank
    use a NIC.
    """

    def __init__(self, problem: ReshardProblem, sender_lanes: Mapping[int, str]) -> None:
        self._problem, self._sender_lanes = problem, sender_lanes
        self._body: list[Statement] = []
        self._lanes: dict[str, None] = {}
        self._arrived: dict[int, tuple[TensorPiece, TensorPiece | None]] = {}
        """By rank, of this multicast: the piece with dims that arrived last, and the one before it."""
        self._signals: dict[tuple[str, int], Iterator[int]] = {}
        self._scratch: dict[str, tuple[str, tuple[int, ...]]] = {}

    def _on(self, rank: int, op: Op) -> None:
        self._lanes[op.lane] = None
        self._body.append(On((rank,), (op,)))

    @staticmethod
    def _source(piece: TensorPiece) -> View:
        return View(f"x{piece.tensor_index}", _box(piece.src_offsets, piece.shape))

    @staticmethod
    def _target(piece: TensorPiece) -> View:
        return View(f"y{piece.tensor_index}", _box(piece.dst_offsets, piece.shape))

    def chunks(
        self, pieces: Sequence[TensorPiece], count: int, tail: int | None = None
    ) -> Iterator[TensorPiece]:
        """Return the pieces in chunks, each of at most 1 / `count` of the bytes of all pieces, or one element.

        If `tail` is not None and the last chunk has more than 2 x `tail` bytes, it is cut (`with_tail`).
        """
        chunks = in_chunks(pieces, count)
        return chunks if tail is None else with_tail(chunks, tail)

    def message(
        self, piece: TensorPiece, src: int, dst: int, lane: str, *, from_source: bool, signals: bool = True
    ) -> None:
        """Append a send on rank `src` and a recv on rank `dst`, both in `lane` of `src`, to an output.

        Args:
            from_source: whether the send reads the input of `src`; else it reads its output.
            signals: whether `completion_piece` counts the message.
        """
        target = self._target(piece)
        if piece.shape and signals:
            before = self._arrived.get(dst)
            self._arrived[dst] = piece, before[0] if before else None
        lane += self._sender_lanes.get(src, "")
        self._on(src, Send(src=self._source(piece) if from_source else target, peer=dst, lane=lane))
        self._on(dst, Recv(out=target, peer=src, lane=lane))

    def wait_for_receiver(self, receiver: int, waiter: int, lane: str) -> None:
        """Append a completion signal from rank `receiver` to `waiter`, and the wait for it in `lane` of `waiter`.

        Append nothing if `receiver` has received nothing of this multicast.
        """
        last = self.completion_piece(receiver)
        if last is not None:
            self.wait_for(self.send_completion(last, receiver, waiter), self.dtype_of(last), waiter, lane)

    def begin_multicast(self) -> None:
        """Begin a new multicast: forget which pieces arrived in the one before."""
        self._arrived.clear()

    def completion_piece(self, rank: int) -> TensorPiece | None:
        """Return the piece of this multicast after whose arrival at a rank the next multicast may begin.

        It is the last piece, or the one before it if the last is short, so that the NIC is busy while the signal
        travels. Messages without `signals` and scalars do not count; None is returned if nothing else arrived.
        """
        last, before = self._arrived.get(rank, (None, None))
        return before if last is not None and before is not None and last.num_bytes <= LEAD_BYTES else last

    def dtype_of(self, piece: TensorPiece) -> str:
        """Return the dtype of the piece's tensor."""
        return self._problem.moves[piece.tensor_index].dtype

    def copy_locally(self, piece: TensorPiece, rank: int) -> None:
        """Append a copy of the piece from input to output on a rank that needs it and is a source of it."""
        self._on(rank, Copy(out=self._target(piece), src=self._source(piece), lane=COPY_LANE))

    def send_completion(self, last: TensorPiece, receiver: int, waiter: int) -> View:
        """Append a completion signal from rank `receiver` to rank `waiter` and return what to wait for.

        The result is a view of one element on `waiter`, for `wait_for`. If both ranks are the same, nothing is
        sent, and the view is of the last element of the piece itself.

        Args:
            last: the piece, not a scalar, that `receiver` must have.
        """
        end = tuple(offset + size - 1 for offset, size in zip(last.dst_offsets, last.shape, strict=True))
        element = View(f"y{last.tensor_index}", _box(end, (1,) * len(end)))
        if receiver == waiter:
            return element
        dtype = self.dtype_of(last)
        name = f"told_{dtype}_{len(end)}d"
        number = next(self._signals.setdefault((name, waiter), count()))
        most = max(number + 1, self._scratch[name][1][0] if name in self._scratch else 0)
        self._scratch[name] = dtype, (most, *(1,) * (len(end) - 1))
        signal = View(name, (Range(number, number + 1), *(Range(0, 1),) * (len(end) - 1)))
        self._on(receiver, Send(src=element, peer=waiter, lane=SIGNAL_LANE, name="turn"))
        self._on(waiter, Recv(out=signal, peer=receiver, lane=SIGNAL_LANE, name="turn"))
        return signal

    def wait_for(self, signal: View, dtype: str, rank: int, lane: str) -> None:
        """Make all later ops in `lane` of `rank` wait for a signal: append a copy of its one element.

        `dtype` is that of the element.
        """
        num_dims, lane = len(signal.selectors), lane + self._sender_lanes.get(rank, "")
        name = f"go_{dtype}_{num_dims}d_{lane}"
        self._scratch[name] = dtype, (1,) * num_dims
        self._on(rank, Copy(out=View(name, (Range(0, 1),) * num_dims), src=signal, lane=lane, name="gate"))

    # --- the program --------------------------------------------------------------------------------------

    def program(self, name: str) -> Program:
        """Return a program, called `name`, of all ops written so far."""
        program_meshes = ProgramMeshes()
        tensors: list[Tensor] = []
        buffers: list[Buffer] = []
        for index, move in enumerate(self._problem.moves):
            src, dst = program_meshes.add_layout(move.src), program_meshes.add_layout(move.dst)
            tensors += [
                Tensor(f"X{index}", move.shape, move.dtype),
                Tensor(f"Y{index}", move.shape, move.dtype),
            ]
            buffers += [
                Buffer(f"x{index}", "input", src.mesh.name, move.dtype, f"X{index}", src),
                Buffer(f"y{index}", "output", dst.mesh.name, move.dtype, f"Y{index}", dst),
            ]
        if self._scratch:
            ranks = self._problem.ranks
            everyone = program_meshes.add(Mesh("all", (len(ranks),), ("rank",), ranks)).name
            buffers += [
                Buffer(name, "scratch", everyone, dtype, shape=shape)
                for name, (dtype, shape) in self._scratch.items()
            ]
        meaning = tuple(Same(f"Y{index}", f"X{index}") for index in range(len(self._problem.moves)))
        lanes = tuple(map(Lane, sorted(self._lanes)))
        return Program(
            name, program_meshes.meshes, tuple(tensors), tuple(buffers), lanes, tuple(self._body), meaning
        )


@lru_cache(maxsize=1 << 16)
def _box(start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[Range, ...]:
    """Return the ranges of a box. They are shared, as the layers of a model have the same shapes."""
    return tuple(Range(lo, lo + size) for lo, size in zip(start, shape, strict=True))
