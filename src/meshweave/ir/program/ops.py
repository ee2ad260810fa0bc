"""The operations of a program.

Every op says which views it reads and writes, in which lane it is issued, and in a template its numbers
are expressions. A view without a rank belongs to the executing rank. Shapes below are those of views.

Collectives run `over` a mesh axis ("tp.row": the group of ranks that differ in that coordinate), a whole
mesh ("tp") or listed global ranks; members are in the order of the coordinate. `sizes` gives what member
`peer` contributes (all_gather) or receives (reduce_scatter) along `dim`; None means equal parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from meshweave.ir.program.call_dims import CallPart
from meshweave.ir.program.expressions import Index
from meshweave.ir.program.release import CollectiveStep, Release
from meshweave.ir.program.views import View

Over = str | tuple[int, ...]
Sizes = Index | tuple[int, ...] | None

READ: Literal["read"] = "read"
WRITE: Literal["write"] = "write"
UPDATE: Literal["update"] = "update"
Mode = Literal["read", "write", "update"]
"""How an op accesses a view. An update adds to what is there; updates of an element may come in any order."""


@dataclass(frozen=True, kw_only=True)
class Op:
    """Base of operations. `lane` is the issue queue, `name` an optional label for people and for messages."""

    kind: ClassVar[str] = ""
    is_joint: ClassVar[bool] = False
    """Whether all members of `over` take part in one event."""
    lane: str
    name: str = ""

    @property
    def title(self) -> str:
        """Return what messages call the op: its name, or else its kind."""
        return self.name or self.kind

    def accesses(self) -> tuple[tuple[Mode, View], ...]:
        """Return (`Mode`, view) of every access, reads first, then writes or updates; remote views included."""
        raise AssertionError(f"{type(self).__name__} declares no accesses")

    @property
    def reads(self) -> tuple[View, ...]:
        """Return the views that the op reads."""
        return tuple(view for mode, view in self.accesses() if mode == READ)

    @property
    def writes(self) -> tuple[View, ...]:
        """Return the views that the op writes or updates."""
        return tuple(view for mode, view in self.accesses() if mode != READ)


@dataclass(frozen=True, kw_only=True)
class Collective(Op):
    """Base of ops in which all members of the group `over` take part."""

    is_joint: ClassVar[bool] = True
    over: Over


# --- compute ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Matmul(Op):
    """out (M, N) = or, accumulating, += a (M, K) @ b (K, N); a stored (K, M) / b (N, K) where transposed."""

    kind: ClassVar[str] = "matmul"
    out: View
    a: View
    b: View
    transpose_a: bool = False
    transpose_b: bool = False
    accumulate: Index = 0
    release: Release | None = None

    def accesses(self) -> tuple[tuple[Mode, View], ...]:
        """Return reads of the operands and a write of the result; also its read where it accumulates.

        Where its `release` updates, the result is an update instead of a write.
        """
        update = self.release is not None and self.release.update
        own: tuple[tuple[Mode, View], ...] = ((READ, self.out),) if self.accumulate and not update else ()
        return ((READ, self.a), (READ, self.b), *own, (UPDATE if update else WRITE, self.out))


@dataclass(frozen=True, kw_only=True)
class MoveOp(Op):
    """Base of ops that read `src` and write `out`."""

    out: View
    src: View

    def accesses(self) -> tuple[tuple[Mode, View], ...]:
        """Return a read of `src` and a write of `out`."""
        return ((READ, self.src), (WRITE, self.out))


@dataclass(frozen=True, kw_only=True)
class StoreOp(MoveOp):
    """Base of ops that write `src` to `out` and may release it tile by tile."""

    release: Release | None = None

    def accesses(self) -> tuple[tuple[Mode, View], ...]:
        """Return a read of `src` and a write of `out`, an update where its release updates."""
        update = self.release is not None and self.release.update
        return ((READ, self.src), (UPDATE if update else WRITE, self.out))


@dataclass(frozen=True, kw_only=True)
class Copy(StoreOp):
    """out = src, of equal shape."""

    kind: ClassVar[str] = "copy"


@dataclass(frozen=True, kw_only=True)
class Add(MoveOp):
    """out += src, of equal shape."""

    kind: ClassVar[str] = "add"

    def accesses(self) -> tuple[tuple[Mode, View], ...]:
        """Return reads of `src` and `out`, and a write of `out`."""
        return ((READ, self.src), (READ, self.out), (WRITE, self.out))


@dataclass(frozen=True, kw_only=True)
class Zero(Op):
    """out = 0."""

    kind: ClassVar[str] = "zero"
    out: View

    def accesses(self) -> tuple[tuple[Mode, View], ...]:
        """Return a write of `out`."""
        return ((WRITE, self.out),)


@dataclass(frozen=True, kw_only=True)
class Call(Op):
    """outs = fn(*ins): a callable that is bound at execution, with what its time depends on.

    `part` says which part of a differentiable stage this is. What a part keeps for later ones is the stash of
    that name and those `args` (say, the micro-batch): the forward part keeps some, a recomputation makes again
    what it did not keep, the input gradient keeps something for the weight gradient. Each part waits for the one
    before it. A call of part "free" frees the buffers that it reads: what was in them is not used again.
    What a call of part "in_place" writes lies in the memory of what it reads (matrices of a bucket, updated
    weights); a run may copy it.

    Attributes:
        stash_bytes: bytes that this part adds to the stash.
        freed_bytes: bytes of the stash that this part frees at its end; a weight gradient frees all that is left.
        flops, bytes: FLOPs, and bytes read and written. Where `work` is named, 0 means what `cost.calls` counts
            for it: FLOPs from `shape`, and the bytes of all views, each once.
        work: what the call does, a key of `CALL_DIMS`. It chooses the rate and the count of FLOPs.
        shape: the sizes that `CALL_DIMS` names for this work, of this rank's share.
        dtype: the dtype in which it computes; "" for that of its first output (or input), of attention of its
            first input.
    """

    kind: ClassVar[str] = "call"
    fn: str
    outs: tuple[View, ...]
    ins: tuple[View, ...]
    flops: Index = 0
    bytes: Index = 0
    stash_bytes: Index = 0
    freed_bytes: Index = 0
    stash: str = ""
    part: CallPart = ""
    args: tuple[Index, ...] = ()
    work: str = ""
    shape: tuple[Index, ...] = ()
    dtype: str = ""

    def accesses(self) -> tuple[tuple[Mode, View], ...]:
        """Return reads of all ins, then writes of all outs."""
        return (*((READ, view) for view in self.ins), *((WRITE, view) for view in self.outs))


# --- collectives --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DataCollective(MoveOp, Collective):
    """Base of collectives with a `src` to read and an `out` to write on every member."""


@dataclass(frozen=True, kw_only=True)
class AllGather(DataCollective):
    """out = the members' src, concatenated along `dim`."""

    kind: ClassVar[str] = "all_gather"
    dim: int
    sizes: Sizes = None


@dataclass(frozen=True, kw_only=True)
class ReduceScatter(DataCollective):
    """out = this member's part along `dim` of the reduction of all src."""

    kind: ClassVar[str] = "reduce_scatter"
    dim: int
    sizes: Sizes = None
    op: str = "sum"


@dataclass(frozen=True, kw_only=True)
class AllReduce(DataCollective):
    """out = the reduction of all src, which has the same shape. `out` may be `src`."""

    kind: ClassVar[str] = "all_reduce"
    op: str = "sum"


@dataclass(frozen=True, kw_only=True)
class Broadcast(DataCollective):
    """out = src of member number `root`, in `packets` pipelined parts. Other members' src may be empty."""

    kind: ClassVar[str] = "broadcast"
    root: Index
    packets: Index = 1


@dataclass(frozen=True, kw_only=True)
class Reduce(DataCollective):
    """out of member number `root` = the reduction of all src. The others' out is not written, and may be empty."""

    kind: ClassVar[str] = "reduce"
    root: Index
    packets: Index = 1
    op: str = "sum"


@dataclass(frozen=True, kw_only=True)
class AllToAll(DataCollective):
    """out = what the members send to this one, concatenated along `concat_dim` (`recv_sizes`).

    Every member cuts src along `split_dim`; part `peer` of `send_sizes` goes to that member.
    """

    kind: ClassVar[str] = "all_to_all"
    split_dim: int
    concat_dim: int
    send_sizes: Sizes = None
    recv_sizes: Sizes = None


@dataclass(frozen=True, kw_only=True)
class Permute(DataCollective):
    """src goes to the member `shift` places on (modulo their number), out comes from `shift` places back.

    It cannot deadlock (every receive is posted first) and only neighbours wait for each other.
    `step` says which step of a lowered collective this is, or None.
    """

    kind: ClassVar[str] = "permute"
    shift: Index = 1
    step: CollectiveStep | None = None


@dataclass(frozen=True, kw_only=True)
class Exchange(Collective):
    """A transfer of copies of tokens to their experts or back, which has a time and no data.

    Routing decides in a run what each rank sends. So the op can be timed, by the price of its transfer, but
    neither run nor proved. It begins when all members are there, and all of them end at once.

    Attributes:
        carries: "dispatch" or "combine"; without a `library` "all_gather", "reduce_scatter" or "all_reduce".
        num_ranks: members of the whole group; `over` lists fewer where alike ones are left out (`cost.folded`).
        part_bytes: bytes of one copy of a token; of a collective, of the largest part.
        tokens: number of tokens of each rank.
        experts, chosen: number of all experts, and of those that each token goes to.
        groups, top_groups: number of groups of experts, and of those groups that a token may go to.
        load: copies that the most loaded rank gets, divided by the average of all ranks.
        library: what sends the copies (`cost.exchange`); "" for a collective.
    """

    kind: ClassVar[str] = "exchange"
    outs: tuple[View, ...]
    ins: tuple[View, ...]
    carries: str
    num_ranks: int
    part_bytes: int
    tokens: int = 0
    experts: int = 1
    chosen: int = 1
    groups: int = 1
    top_groups: int = 1
    load: float = 1.0
    library: str = ""

    def accesses(self) -> tuple[tuple[Mode, View], ...]:
        """Return reads of all ins, then writes of all outs."""
        return (*((READ, view) for view in self.ins), *((WRITE, view) for view in self.outs))


@dataclass(frozen=True, kw_only=True)
class Fence(Collective):
    """Ends an epoch: one-sided ops of all members before it are complete after it, everywhere.

    The end of the program is a fence of all its ranks.
    """

    kind: ClassVar[str] = "fence"

    def accesses(self) -> tuple[tuple[Mode, View], ...]:
        """Return nothing: a fence orders accesses and makes none."""
        return ()


# --- point to point and one-sided -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Send(Op):
    """Gives src to the matching recv of global rank `peer`, and ends when that has taken it (rendezvous).

    Sends and recvs of two ranks are matched in order per lane and tag. `step` is that of a lowered collective,
    or None.
    """

    kind: ClassVar[str] = "send"
    src: View
    peer: Index
    tag: Index = 0
    step: CollectiveStep | None = None

    def accesses(self) -> tuple[tuple[Mode, View], ...]:
        """Return a read of what is sent."""
        return ((READ, self.src),)


@dataclass(frozen=True, kw_only=True)
class Recv(Op):
    """out = src of the matching send of global rank `peer`, or with `update` out += src."""

    kind: ClassVar[str] = "recv"
    out: View
    peer: Index
    tag: Index = 0
    update: bool = False
    """Add what arrives to `out` instead of storing it."""

    def accesses(self) -> tuple[tuple[Mode, View], ...]:
        """Return a write of `out`; with `update` a read of it before that."""
        return ((READ, self.out), (WRITE, self.out)) if self.update else ((WRITE, self.out),)


@dataclass(frozen=True, kw_only=True)
class Get(MoveOp):
    """out = src, where src belongs to another rank; ordered by fences. Ends when `out` holds the elements."""

    kind: ClassVar[str] = "get"


@dataclass(frozen=True, kw_only=True)
class Put(StoreOp):
    """out = src, where out belongs to another rank; ordered by fences, or tracked where it has a release.

    Ends when `src` may be overwritten; untracked, what it writes is there only after the next fence.
    """

    kind: ClassVar[str] = "put"


@dataclass(frozen=True, kw_only=True)
class Accumulate(MoveOp):
    """out += src, where out belongs to another rank; these commute between fences. Ends as a put does."""

    kind: ClassVar[str] = "accumulate"
    op: str = "sum"

    def accesses(self) -> tuple[tuple[Mode, View], ...]:
        """Return a read of `src` and an update of the other rank's `out`."""
        return ((READ, self.src), (UPDATE, self.out))


OP_TYPES: dict[str, type[Op]] = {
    op.kind: op
    for op in (
        Matmul, Copy, Add, Zero, Call,
        AllGather, ReduceScatter, AllReduce, Broadcast, Reduce, AllToAll, Permute, Exchange, Fence,
        Send, Recv, Get, Put, Accumulate,
    )
}  # fmt: skip

COMPUTE_KINDS = frozenset({"matmul", "copy", "add", "zero", "call"})
