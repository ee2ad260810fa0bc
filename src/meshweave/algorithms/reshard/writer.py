"""From multicasts to the statements of a program.

For tensor number i there are an input buffer "x{i}" on its source mesh and an output "y{i}" on its destination
mesh. Whatever a rank passes on it has received into its output already, so that no buffer is needed beside
them.

Every message stands at one place of the program, its send before its recv, and each lane takes its ops in
program order: so the message that comes first of all open ones can always go, and no order of multicasts can
deadlock.

Turns. A NIC serves one multicast after another, but ranks of a host know nothing of one another. Where a NIC
goes over from one sender to another, the rank that got the last of what came before sends one element of it
to the next sender, which waits for that: a dependence in the data like any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import count
from typing import Protocol

from meshweave.algorithms.reshard.fabric import Fabric
from meshweave.algorithms.reshard.problem import ReshardProblem
from meshweave.algorithms.reshard.tasks import Piece
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.layout.meshes import Meshes
from meshweave.ir.program import Buffer, Lane, On, Program, Same, Statement, Tensor
from meshweave.ir.program.ops import Copy, Op, Recv, Send
from meshweave.ir.program.views import Range, View

FAR = ("far0", "far1")
NEAR = ("near0", "near1")
"""Between hosts and inside them; hops of a chain take turns between the two."""
GATHER = ("gather0", "gather1", "gather2")
"""Around rings; the third is for the last hop of an odd ring."""
TURN, COPY = "turn", "copy"
LEAD_BYTES = 1 << 15
"""Of a multicast, what may still be on its way when the next sender is told."""


class Messages(Protocol):
    """What a strategy says of a multicast."""

    def message(
        self, piece: Piece, src: int, dst: int, lane: str, *, from_source: bool, tells: bool = True
    ) -> None:
        """`src` sends a piece to `dst`: as a rank of the source mesh, or passing on what it has got.

        With `tells` a NIC is free when the last of these has arrived.
        """
        ...

    def wait(self, at: int, to: int, lane: str) -> None:
        """What follows in a lane of rank `to` waits until rank `at` has got what was sent to it last."""
        ...


class Tally:
    """Counts what a strategy says, without writing it."""

    def __init__(self, fabric: Fabric) -> None:
        self._host_of = fabric.host_of
        self.bytes_across_hosts = 0
        self.num_messages = 0
        self.largest: dict[tuple[int, str, str], int] = {}
        """Bytes of the largest view that a rank has to pack or to unpack, by rank, lane and what for."""

    def _use(self, rank: int, lane: str, use: str, num_bytes: int) -> None:
        if num_bytes > self.largest.get((rank, lane, use), 0):
            self.largest[rank, lane, use] = num_bytes

    def message(
        self, piece: Piece, src: int, dst: int, lane: str, *, from_source: bool, tells: bool = True
    ) -> None:
        self.num_messages += 1
        if self._host_of[src] != self._host_of[dst]:
            self.bytes_across_hosts += piece.num_bytes
        self._use(src, lane, "out", piece.num_bytes)
        self._use(dst, lane, "in", piece.num_bytes)

    def wait(self, at: int, to: int, lane: str) -> None:
        pass

    def scratch_bytes(self, rank: int) -> int:
        """At most what an executor packs messages into: per lane one for what goes out and two for what comes in,
        rounded up to a power of two, and the smaller ones that were there before."""
        mine = ((use, size) for (of, _, use), size in self.largest.items() if of == rank)
        return sum((8 if use == "in" else 4) * size for use, size in mine)


class Writer:
    """Collects the ops of a reshard."""

    def __init__(self, problem: ReshardProblem) -> None:
        self._problem = problem
        self._body: list[Statement] = []
        self._lanes: dict[str, None] = {}
        self._arrived: dict[int, tuple[Piece, Piece | None]] = {}
        """By rank the last piece with dims that a message of this multicast has brought, and the one before."""
        self._turns: dict[tuple[str, int], Iterator[int]] = {}
        self._scratch: dict[str, tuple[str, tuple[int, ...]]] = {}

    def _on(self, rank: int, op: Op) -> None:
        self._lanes[op.lane] = None
        self._body.append(On((rank,), (op,)))

    @staticmethod
    def _source(piece: Piece) -> View:
        return View(f"x{piece.item}", _box(piece.src, piece.shape))

    @staticmethod
    def _target(piece: Piece) -> View:
        return View(f"y{piece.item}", _box(piece.dst, piece.shape))

    def message(
        self, piece: Piece, src: int, dst: int, lane: str, *, from_source: bool, tells: bool = True
    ) -> None:
        into = self._target(piece)
        if piece.shape and tells:
            before = self._arrived.get(dst)
            self._arrived[dst] = piece, before[0] if before else None
        self._on(src, Send(src=self._source(piece) if from_source else into, peer=dst, lane=lane))
        self._on(dst, Recv(out=into, peer=src, lane=lane))

    def wait(self, at: int, to: int, lane: str) -> None:
        last = self.told_by(at)
        if last is not None:
            self.gate(self.turn(last, at, to), self.dtype_of(last), to, lane)

    def begin(self) -> None:
        """Before a multicast."""
        self._arrived.clear()

    def told_by(self, rank: int) -> Piece | None:
        """The piece of this multicast whose arrival at a rank lets the next one begin: the last but one, if the
        last is short, so that the NIC is busy while word of it goes round. None of scalars, which delay nobody."""
        last, before = self._arrived.get(rank, (None, None))
        return before if last is not None and before is not None and last.num_bytes <= LEAD_BYTES else last

    def dtype_of(self, piece: Piece) -> str:
        return self._problem.items[piece.item].dtype

    def keep(self, piece: Piece, rank: int) -> None:
        """`rank` holds what it needs."""
        self._on(rank, Copy(out=self._target(piece), src=self._source(piece), lane=COPY))

    def turn(self, last: Piece, at: int, to: int) -> View:
        """Rank `at` tells `to` that it has got all of `last`, a piece with dims; `gate` waits for what this
        gives."""
        end = tuple(a + n - 1 for a, n in zip(last.dst, last.shape, strict=True))
        element = View(f"y{last.item}", _box(end, (1,) * len(end)))
        if at == to:
            return element
        dtype = self.dtype_of(last)
        name = f"told_{dtype}_{len(end)}d"
        number = next(self._turns.setdefault((name, to), count()))
        most = max(number + 1, self._scratch[name][1][0] if name in self._scratch else 0)
        self._scratch[name] = dtype, (most, *(1,) * (len(end) - 1))
        told = View(name, (Range(number, number + 1), *(Range(0, 1),) * (len(end) - 1)))
        self._on(at, Send(src=element, peer=to, lane=TURN, name="turn"))
        self._on(to, Recv(out=told, peer=at, lane=TURN, name="turn"))
        return told

    def gate(self, told: View, dtype: str, rank: int, lane: str) -> None:
        """What follows in a lane of `rank` waits for a turn."""
        num_dims = len(told.selectors)
        name = f"go_{dtype}_{num_dims}d_{lane}"
        self._scratch[name] = dtype, (1,) * num_dims
        self._on(rank, Copy(out=View(name, (Range(0, 1),) * num_dims), src=told, lane=lane, name="gate"))

    # --- the program --------------------------------------------------------------------------------------

    def program(self, name: str) -> Program:
        """What was written so far."""
        meshes = Meshes()
        tensors: list[Tensor] = []
        buffers: list[Buffer] = []
        for number, item in enumerate(self._problem.items):
            src, dst = meshes.of(item.src), meshes.of(item.dst)
            tensors += [
                Tensor(f"X{number}", item.shape, item.dtype),
                Tensor(f"Y{number}", item.shape, item.dtype),
            ]
            buffers += [
                Buffer(f"x{number}", "input", src.mesh.name, item.dtype, f"X{number}", src),
                Buffer(f"y{number}", "output", dst.mesh.name, item.dtype, f"Y{number}", dst),
            ]
        if self._scratch:
            ranks = self._problem.ranks
            everyone = meshes.add(Mesh("all", (len(ranks),), ("rank",), ranks)).name
            buffers += [
                Buffer(name, "scratch", everyone, dtype, shape=shape)
                for name, (dtype, shape) in self._scratch.items()
            ]
        meaning = tuple(Same(f"Y{number}", f"X{number}") for number in range(len(self._problem.items)))
        lanes = tuple(map(Lane, sorted(self._lanes)))
        return Program(name, meshes.listed, tuple(tensors), tuple(buffers), lanes, tuple(self._body), meaning)


@lru_cache(maxsize=1 << 16)
def _box(start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[Range, ...]:
    """Shared: a rank passes on what it gets, and the layers of a model have the same shapes."""
    return tuple(Range(lo, lo + size) for lo, size in zip(start, shape, strict=True))
