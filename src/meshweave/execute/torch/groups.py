"""What bound programs share: process groups, one per channel and set of ranks, and the deadline of each wait."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist

from meshweave.base.errors import BindError, DeadlineError, MeshweaveError, RankLostError
from meshweave.execute.ranks.liveness import Liveness
from meshweave.execute.torch.lanes import Crew
from meshweave.ir.program import Program
from meshweave.ir.program.expressions import evaluate
from meshweave.ir.program.ops import Collective, Permute, Recv, Send

GroupKey = tuple[int, tuple[int, ...]]
"""A channel (see `channels`), and the global ranks in ascending order."""


class Wait(Protocol):
    """A guarded wait: what is left of its deadline."""

    @property
    def timeout(self) -> timedelta: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class _PlainWait:
    """The guard where nobody listens for heartbeats: it can say what was waited for, not because of whom."""

    __slots__ = ("_what", "timeout")

    def __init__(self, what: str, timeout: timedelta) -> None:
        self._what, self.timeout = what, timeout

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, RuntimeError):
            words = " ".join(str(error).split())
            if "timed out" in words.lower() or "timeout" in words.lower():
                raise DeadlineError(f"gave up waiting for {self._what} after {self.timeout}") from error
            why = words.partition(". ")[0]
            if any(word in words.lower() for word in ("connect", "peer", "socket", "pipe", "closed")):
                raise RankLostError(
                    f"the connection broke while waiting for {self._what}: {why}", ()
                ) from error


class TorchContext:
    """This process among the ranks of `torch.distributed`, as bound programs see it.

    Groups are made once per (channel, ranks) and shared by all programs that are bound in this context. Making
    them is collective among the ranks of a group: all ranks of a program bind the same programs in the same
    order. Programs on disjoint ranks, such as replicas, know nothing of each other.

    Args:
        liveness: names the ranks that are missing when a wait fails; without it an error can only say what
            was waited for.
        deadline_s: seconds that any one wait for other ranks may take.
        device: where buffers live.
    """

    def __init__(
        self,
        *,
        liveness: Liveness | None = None,
        deadline_s: float = 60.0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.liveness, self.deadline_s = liveness, deadline_s
        self.device = torch.device(device)
        self.is_distributed = dist.is_available() and dist.is_initialized()
        self.rank: int | None = dist.get_rank() if self.is_distributed else None
        self.num_ranks: int = dist.get_world_size() if self.is_distributed else 1
        self.crew = Crew(deadline_s)
        self._timeout = timedelta(seconds=deadline_s)
        self._groups: dict[tuple[GroupKey, tuple[int, ...]], Any] = {}
        """By what a group is for and the ranks of the programs that made it: all of these know it, or none."""

    @classmethod
    def default(cls, device: torch.device | str = "cpu") -> TorchContext:
        """The context of a device in the default process group, without liveness; made once and kept."""
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        known = _defaults.get(str(device))
        if known is None or known[0] is not world:
            known = _defaults[str(device)] = (world, cls(device=device))
        return known[1]

    def prepare(self, program: Program) -> None:
        """Makes the groups that `program` needs and that are not there yet. `bind` calls it.

        A program on all ranks of the world makes its groups together. One on some of them, such as one replica
        of several, makes them among its own ranks.

        Raises BindError where the program has ranks that the world does not have.
        """
        among_members = self.is_distributed and len(program.ranks) < self.num_ranks
        for key in group_keys(program, self.channels(program)):
            channel, ranks = key
            known = key, program.ranks
            if known in self._groups or (among_members and self.rank not in ranks):
                continue
            if not self.is_distributed:
                raise BindError(
                    f"program {program.name} communicates over ranks {ranks}: initialise torch.distributed"
                )
            if ranks[-1] >= self.num_ranks:
                raise BindError(
                    f"program {program.name} has a rank {ranks[-1]}, there are {self.num_ranks} ranks"
                )
            with self.guard(f"ranks {ranks} to form a group", ranks), _named_by_ranks():
                group = dist.new_group(
                    list(ranks),
                    timeout=self._timeout,
                    use_local_synchronization=among_members,
                    group_desc=f"meshweave {channel}",
                )
                if self.device.type == "cuda" and self.rank in ranks:
                    # NCCL connects a group at its first use, which must be one by all of its ranks.
                    dist.all_reduce(torch.zeros(1, device=self.device), group=group)
            self._groups[known] = group

    def channels(self, program: Program) -> dict[str, int]:
        """The channel of each communicating lane: see `channels`. NCCL runs a communicator's work in one
        order, so that there each lane has its own."""
        return channels(program, shared=self.device.type != "cuda")

    def group(self, program: Program, channel: int, ranks: Sequence[int]) -> Any:
        """The process group of a channel over `ranks`, in any order. `program` must have been prepared."""
        return self._groups[(channel, tuple(sorted(ranks))), program.ranks]

    def guard(self, what: str, peers: Iterable[int]) -> Wait:
        """Wraps one wait for other ranks; its `timeout` is what the wait may take."""
        if self.liveness is None:
            return _PlainWait(what, self._timeout)
        return self.liveness.guard(what, self.deadline_s, peers=peers)

    def close(self) -> None:
        """Ends the threads and destroys the groups. Programs bound in this context run no more."""
        self.crew.close()
        for group in self._groups.values():
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                with contextlib.suppress(RuntimeError, ValueError):  # the world may be gone already
                    dist.destroy_process_group(group)
        self._groups.clear()


class PerWorld:
    """Counts by set of ranks that begin anew with each default process group."""

    def __init__(self) -> None:
        self._world: Any = None
        self._counts: dict[tuple[int, ...], int] = {}

    def counts(self) -> dict[tuple[int, ...], int]:
        """Those of the default process group that there is now."""
        world = dist.group.WORLD
        if self._world is not world:
            self._world, self._counts = world, {}
        return self._counts


_made = PerWorld()
"""How many groups ranks have made among themselves."""


@contextlib.contextmanager
def _named_by_ranks() -> Iterator[None]:
    """Groups that form among their own ranks get a name that these derive alike.

    torch names such a group after how many groups its maker is in. The ranks of two meshes are in unequally many,
    and each would wait for the others under a name of its own.
    """
    home: Any = dist.distributed_c10d
    theirs, made = getattr(home, "_process_group_name", None), _made.counts()
    if theirs is None:  # a torch that names groups otherwise
        yield
        return

    def name(ranks: Sequence[int], use_hashed_name: bool) -> str:
        if not use_hashed_name:
            return str(theirs(ranks, use_hashed_name))
        key = tuple(ranks)
        made[key] = made.get(key, 0) + 1
        return f"meshweave_{hashlib.sha1(repr(key).encode()).hexdigest()}_{made[key]}"

    home._process_group_name = name
    try:
        yield
    finally:
        home._process_group_name = theirs


_defaults: dict[str, tuple[Any, TorchContext]] = {}  # by device, with the world that each was made for


def channels(program: Program, *, shared: bool = True) -> dict[str, int]:
    """A number for each lane that communicates; lanes of one number have their process groups in common.

    Each group of gloo has a connection per pair of ranks, and a thread that wakes up 100 times a second. Lanes
    share one only where they never meet on a connection: two directions of a ring in one connection slow each
    other down. Without `shared` each lane has its own.
    """
    reach: dict[str, _Reach] = {}
    for op, ranks in program.placed_ops():
        if isinstance(op, (Send, Recv)):
            reach.setdefault(op.lane, _Reach()).add_messages(program, op, ranks)
        elif isinstance(op, (Permute, Collective)):
            reach.setdefault(op.lane, _Reach()).add_group(op.over)
    members: list[list[_Reach]] = []
    found: dict[str, int] = {}
    for lane, mine in reach.items():
        fits = (
            number
            for number, others in enumerate(members)
            if shared and not any(mine.meets(program, other) for other in others)
        )
        found[lane] = next(fits, len(members))
        if found[lane] == len(members):
            members.append([])
        members[found[lane]].append(mine)
    return found


class _Reach:
    """Who talks to whom in a lane: all along some mesh axes, certain pairs of ranks (the lower one first), or,
    where it does not follow from the program as written, anybody."""

    def __init__(self) -> None:
        self.axes: dict[str, None] = {}
        self.pairs: set[tuple[int, int]] = set()
        self.is_open = False

    def add_group(self, over: str | tuple[int, ...]) -> None:
        if isinstance(over, str):
            self.axes[over] = None
        else:
            self.is_open = True

    def add_messages(self, program: Program, op: Send | Recv, ranks: Iterable[int]) -> None:
        """Where the peer follows from a rank's coordinates alone, the pairs that it makes."""
        for rank in ranks:
            peer = op.peer
            if not isinstance(peer, int):
                try:
                    peer = evaluate(peer, program.environment(rank))
                except (MeshweaveError, LookupError, ArithmeticError):
                    self.is_open = True
                    return
            self.pairs.add((min(rank, peer), max(rank, peer)))

    def meets(self, program: Program, other: _Reach) -> bool:
        """Whether some pair of ranks may be in both."""
        if self.is_open or other.is_open or not self.pairs.isdisjoint(other.pairs):
            return True
        return (
            any(_cross(a, b) for a in self.axes for b in other.axes)
            or any(_along(program, axis, pair) for axis in self.axes for pair in other.pairs)
            or any(_along(program, axis, pair) for axis in other.axes for pair in self.pairs)
        )


def _cross(a: str, b: str) -> bool:
    """Whether groups of two meshes or mesh axes may have a pair of ranks in common."""
    (mesh, _, axis), (other_mesh, _, other_axis) = a.partition("."), b.partition(".")
    return not (mesh == other_mesh and axis and other_axis and axis != other_axis)


def _along(program: Program, over: str, pair: tuple[int, int]) -> bool:
    """Whether a pair of ranks belongs to one group of a mesh, or mesh axis."""
    name, _, axis = over.partition(".")
    mesh = program.mesh_of.get(name)
    if mesh is None or not all(rank in mesh for rank in pair):
        return mesh is None
    return not axis or pair[1] in mesh.group(pair[0], axis)


def group_keys(program: Program, channel_of: Mapping[str, int]) -> list[GroupKey]:
    """All groups that some rank of a program needs, in an order that every rank derives alike.

    They are read off the program as written: no rank instantiates what the others do. A lane's messages and
    ring steps need a group over all ranks of the program; a collective needs the groups of its axis.
    """
    keys: dict[GroupKey, None] = {}
    for op in program.ops():
        if isinstance(op, (Permute, Send, Recv)):
            keys[channel_of[op.lane], program.ranks] = None
        elif isinstance(op, Collective):
            for ranks in _groups_of(program, op.over):
                keys[channel_of[op.lane], tuple(sorted(ranks))] = None
    return [(channel, ranks) for channel, ranks in keys if len(ranks) > 1]


def _groups_of(program: Program, over: str | tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if not isinstance(over, str):
        yield over
        return
    name, _, axis = over.partition(".")
    if name not in program.mesh_of:
        raise BindError(f"'{over}' names no mesh; declared are {', '.join(program.mesh_of)}")
    mesh = program.mesh_of[name]
    if axis:
        yield from mesh.groups(axis)
    else:
        yield mesh.ranks
