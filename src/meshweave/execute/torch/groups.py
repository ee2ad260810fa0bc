"""The process groups of a program: which lanes share groups, and between which ranks each is formed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from meshweave.base.errors import BindError, MeshweaveError
from meshweave.ir.program import Program
from meshweave.ir.program.expressions import evaluate
from meshweave.ir.program.ops import Collective, Fence, Permute, Recv, Send
from meshweave.ir.program.statements import rewrite

Value = TypeVar("Value")
GroupKey = tuple[int, tuple[int, ...]]
"""A channel (see `assign_channels`), and the global ranks in ascending order."""


def assign_channels(program: Program, *, shared: bool = True) -> dict[str, int]:
    """Return {lane name: channel number} for lanes that communicate; lanes of a channel share process groups.

    Each group of gloo has a connection per pair of ranks, and a thread that wakes up 100 times a second. Lanes
    share a channel only where no pair of ranks communicates in both: two directions of a ring in one connection
    slow each other down. Without `shared` each lane has its own channel.
    """
    reach: dict[str, _RankPairs] = {}
    for op, ranks in program.ops_with_ranks():
        if isinstance(op, (Send, Recv)):
            reach.setdefault(op.lane, _RankPairs()).add_messages(program, op, ranks)
        elif isinstance(op, (Permute, Collective)):
            reach.setdefault(op.lane, _RankPairs()).add_group(op.over)
    members: list[list[_RankPairs]] = []
    channel_of: dict[str, int] = {}
    for lane, mine in reach.items():
        fits = (
            number
            for number, others in enumerate(members)
            if shared and not any(mine.may_overlap(program, other) for other in others)
        )
        channel_of[lane] = next(fits, len(members))
        if channel_of[lane] == len(members):
            members.append([])
        members[channel_of[lane]].append(mine)
    return channel_of


class _RankPairs:
    """The pairs of ranks that may communicate in a lane.

    They are all pairs along some mesh axes, and single pairs with the lower rank first. Where they do not follow
    from the program as written, they are all pairs.
    """

    def __init__(self) -> None:
        self.axes: dict[str, None] = {}
        self.pairs: set[tuple[int, int]] = set()
        self.is_open = False

    def add_group(self, over: str | tuple[int, ...]) -> None:
        """Add the pairs of a collective over a mesh or an axis of it; over listed ranks, all pairs."""
        if isinstance(over, str):
            self.axes[over] = None
        else:
            self.is_open = True

    def add_messages(self, program: Program, op: Send | Recv, ranks: Iterable[int]) -> None:
        """Add the pairs of a message, if the peer depends on the coordinates of the rank alone; else all pairs."""
        for rank in ranks:
            peer = op.peer
            if not isinstance(peer, int):
                try:
                    peer = evaluate(peer, program.environment(rank))
                except (MeshweaveError, LookupError, ArithmeticError):
                    self.is_open = True
                    return
            self.pairs.add((min(rank, peer), max(rank, peer)))

    def may_overlap(self, program: Program, other: _RankPairs) -> bool:
        """Return whether some pair of ranks may communicate in both lanes."""
        if self.is_open or other.is_open or not self.pairs.isdisjoint(other.pairs):
            return True
        return (
            any(_may_share_pair(a, b) for a in self.axes for b in other.axes)
            or any(_is_along(program, axis, pair) for axis in self.axes for pair in other.pairs)
            or any(_is_along(program, axis, pair) for axis in other.axes for pair in self.pairs)
        )


def _may_share_pair(a: str, b: str) -> bool:
    """Return whether groups of two meshes or mesh axes may have a pair of ranks in common."""
    (mesh, _, axis), (other_mesh, _, other_axis) = a.partition("."), b.partition(".")
    return not (mesh == other_mesh and axis and other_axis and axis != other_axis)


def _is_along(program: Program, over: str, pair: tuple[int, int]) -> bool:
    """Return whether a pair of ranks belongs to one group of a mesh or mesh axis."""
    name, _, axis = over.partition(".")
    mesh = program.mesh_of.get(name)
    if mesh is None or not all(rank in mesh for rank in pair):
        return mesh is None
    return not axis or pair[1] in mesh.group(pair[0], axis)


def group_keys(program: Program, channel_of: Mapping[str, int]) -> list[GroupKey]:
    """Return (channel, global ranks ascending) of each process group that some rank of a program needs.

    The order is the same on all ranks. `channel_of` gives the channel of each lane. A lane's messages and ring
    steps need a group of all ranks of the program; a collective needs the groups of its mesh axis. Raises
    BindError for a collective over a mesh that is not declared.
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


def without_fences(program: Program) -> Program:
    """Return the program without its fences, which need no process groups where a remote memory runs them."""
    return replace(program, body=rewrite(program.body, lambda op: () if isinstance(op, Fence) else (op,)))


def fence_groups(program: Program) -> list[tuple[int, ...]]:
    """Return all ranks of the program, then each other set of ranks of a fence; in one order on all ranks."""
    groups: dict[tuple[int, ...], None] = {program.ranks: None}
    for op in program.ops():
        if isinstance(op, Fence):
            for rank in program.ranks if isinstance(op.over, str) else program.ranks[:1]:
                name, _, axis = op.over.partition(".") if isinstance(op.over, str) else ("", "", "")
                if not axis or rank in program.mesh_of[name]:
                    groups[tuple(sorted(program.group(op.over, rank)))] = None
    return list(groups)


class PerWorld(Generic[Value]):
    """Values by key, such as counts by ranks, that begin anew with each default process group."""

    def __init__(self) -> None:
        self._world: Any = None
        self._kept: dict[Any, Value] = {}

    def kept(self) -> dict[Any, Value]:
        """Return the dict of values, for the caller to change; a new default process group begins with {}."""
        world = dist.group.WORLD
        if self._world is not world:
            self._world, self._kept = world, {}
        return self._kept


_num_named: PerWorld[int] = PerWorld()


def group_name(ranks: Sequence[int]) -> str:
    """Return a new name for a process group of `ranks`, numbered by the calls for these ranks so far.

    The name is equal on all ranks if each makes equally many calls with `ranks` in the same order.
    """
    num_named, key = _num_named.kept(), tuple(ranks)
    num_named[key] = num_named.get(key, 0) + 1
    return f"meshweave_{hashlib.sha1(repr(key).encode()).hexdigest()}_{num_named[key]}"
