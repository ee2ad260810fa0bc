"""From multicasts to the statements of a program.

Tensor number i has an input buffer "x{i}" on its source mesh and an output buffer "y{i}" on its destination mesh.
A rank passes on only what it has received into its output, so no other buffer is needed.

Every message stands at one place of the program, its send before its recv, and each lane runs its ops in program
order. So of all messages that are not done the first one can always proceed, and no order of multicasts deadlocks.

Completion signals. A NIC serves one multicast after another, but the ranks of a host know nothing of one another.
Where a NIC changes from one sender to another, the rank that received the last piece sends one element of it to
the next sender, which waits for it. This is a data dependence like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    """The interface that a strategy writes the messages of a multicast to."""

    def chunks(
        self, pieces: Sequence[TensorPiece], count: int, tail: int | None = None
    ) -> Iterator[TensorPiece]:
        """Yield pieces in chunks of at most a `count`-th of all bytes, or of one element.

        The caller writes all messages of a chunk before it asks for the next. Unless `tail` is None, a last
        chunk of more than 2 x `tail` bytes is cut, so that its last part has at most `tail` bytes or one
        element. A sink that only counts may yield one chunk for many of equal shape.
        """

    def message(
        self, piece: TensorPiece, src: int, dst: int, lane: str, *, from_source: bool, signals: bool = True
    ) -> None:
        """Append a message of one piece from rank `src` to rank `dst`.

        Args:
            from_source: whether `src` sends from its source shard; else it passes on what it received.
            signals: whether other multicasts that want the NIC wait for this message, too.
        """

    def wait_for_receiver(self, receiver: int, waiter: int, lane: str) -> None:
        """Make what follows in `lane` of rank `waiter` wait until `receiver` has what this multicast sent to it.

        It waits for the last message, or for the one before that where the last is short.
        """


class TrafficCounter:
    """Counts the messages of multicasts without writing them."""

    def __init__(self, network: HostTopology) -> None:
        self._host_of = network.host_of
        self.bytes_across_hosts = 0
        self.num_messages = 0
        self.largest: dict[tuple[int, str, str], int] = {}
        """Bytes of the largest message that a rank sends ("out") or receives ("in"), by rank, lane, direction."""
        self._times = 1
        """How many chunks the present one stands for."""

    def chunks(
        self, pieces: Sequence[TensorPiece], count: int, tail: int | None = None
    ) -> Iterator[TensorPiece]:
        """Yield for each piece one chunk of each shape; messages of it count for all chunks of that shape.

        Args:
            count: a chunk has at most a `count`-th of the bytes of all pieces, or one element.
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
        """Count the messages of `piece` from rank `src` to rank `dst`, for all chunks of its shape.

        These are the chunks that the one that `chunks` yielded last stands for. `from_source` and `signals` are
        not read.
        """
        self.num_messages += self._times
        if self._host_of[src] != self._host_of[dst]:
            self.bytes_across_hosts += self._times * piece.num_bytes
        self._count(src, lane, "out", piece.num_bytes)
        self._count(dst, lane, "in", piece.num_bytes)

    def wait_for_receiver(self, receiver: int, waiter: int, lane: str) -> None:
        """Do nothing: completion signals are not messages of the tensors."""

    def scratch_bytes(self, rank: int) -> int:
        """Return an upper bound of the bytes that an executor of `rank` packs messages into.

        Per lane there is one buffer for outgoing and two for incoming messages, each rounded up to a power of two,
        and the smaller ones that were there before.
        """
        largest = ((direction, size) for (of, _, direction), size in self.largest.items() if of == rank)
        return sum((8 if direction == "in" else 4) * size for direction, size in largest)


class ReshardWriter:
    """Collects the ops of a reshard."""

    def __init__(self, problem: ReshardProblem) -> None:
        self._problem = problem
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
        """Yield chunks of at most a `count`-th of the bytes or one element; `tail` cuts the last chunk."""
        chunks = in_chunks(pieces, count)
        return chunks if tail is None else with_tail(chunks, tail)

    def message(
        self, piece: TensorPiece, src: int, dst: int, lane: str, *, from_source: bool, signals: bool = True
    ) -> None:
        """Append a send on `src` and the recv on `dst`, into its output.

        With `from_source` the send reads the input of `src`, else its output. `signals` is whether
        `completion_piece` counts the message.
        """
        target = self._target(piece)
        if piece.shape and signals:
            before = self._arrived.get(dst)
            self._arrived[dst] = piece, before[0] if before else None
        self._on(src, Send(src=self._source(piece) if from_source else target, peer=dst, lane=lane))
        self._on(dst, Recv(out=target, peer=src, lane=lane))

    def wait_for_receiver(self, receiver: int, waiter: int, lane: str) -> None:
        """Append a completion signal from `receiver` to `waiter`, and the wait for it in `lane`.

        Append nothing if `receiver` has received nothing.
        """
        last = self.completion_piece(receiver)
        if last is not None:
            self.wait_for(self.send_completion(last, receiver, waiter), self.dtype_of(last), waiter, lane)

    def begin_multicast(self) -> None:
        """Begin a multicast: forget which pieces arrived in the one before."""
        self._arrived.clear()

    def completion_piece(self, rank: int) -> TensorPiece | None:
        """Return the piece of this multicast whose arrival at a rank lets the next multicast begin.

        That is the last but one if the last is short, so that the NIC is busy while the signal travels. It is
        None where nothing arrived, or only scalars, which no rank waits for; messages without `signals` do not
        count.
        """
        last, before = self._arrived.get(rank, (None, None))
        return before if last is not None and before is not None and last.num_bytes <= LEAD_BYTES else last

    def dtype_of(self, piece: TensorPiece) -> str:
        """Return the dtype of the piece's tensor."""
        return self._problem.moves[piece.tensor_index].dtype

    def copy_locally(self, piece: TensorPiece, rank: int) -> None:
        """Append a copy on a rank that holds the piece in its source shard already."""
        self._on(rank, Copy(out=self._target(piece), src=self._source(piece), lane=COPY_LANE))

    def send_completion(self, last: TensorPiece, receiver: int, waiter: int) -> View:
        """Append a signal from `receiver` to `waiter` that all of `last`, a piece with dims, has arrived.

        Returns the view of one element that `wait_for` waits for: of the piece itself where both are one rank,
        and nothing is sent.
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
        """Make all that follows in `lane` of `rank` wait for a signal: append a copy of its element."""
        num_dims = len(signal.selectors)
        name = f"go_{dtype}_{num_dims}d_{lane}"
        self._scratch[name] = dtype, (1,) * num_dims
        self._on(rank, Copy(out=View(name, (Range(0, 1),) * num_dims), src=signal, lane=lane, name="gate"))

    # --- the program --------------------------------------------------------------------------------------

    def program(self, name: str) -> Program:
        """Return the program of all that was written so far, called `name`."""
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
