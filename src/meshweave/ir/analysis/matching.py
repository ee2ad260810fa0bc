"""Which ops of different ranks belong together.

Collectives are matched as communicators match them: the n-th one that a rank issues in a lane over a group
is the n-th one of every member. A send is matched with a recv in order, per lane, pair of ranks and tag.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from meshweave.base.errors import ProgramError
from meshweave.ir.analysis.shapes import check_joint
from meshweave.ir.program import BoundOp, Include, Program
from meshweave.ir.program import ops as op_types
from meshweave.ir.program.expressions import number_of

Node = tuple[int, int]
"""(rank, index in the rank's op list)."""


@dataclass(frozen=True)
class Joint:
    """Ops that take part in one event: all members of a collective, or a send with its recv.

    `kind` is the op's kind, or "message". `members` are (rank, index) in the order of the group; of a message,
    the sender first.
    """

    kind: str
    members: tuple[Node, ...]


@dataclass(frozen=True)
class MatchedProgram:
    """A program's per-rank ops with their partners.

    Attributes:
        ops: the resolved ops of each global rank in program order.
        joints: the events of several ops.
        joint_of: by op, as (rank, index), the index in `joints` of its event; for collectives, sends and recvs.
    """

    program: Program
    ops: Mapping[int, Sequence[BoundOp]]
    joints: tuple[Joint, ...]
    joint_of: Mapping[Node, int]

    def op(self, node: Node) -> op_types.Op:
        """Return the op of a node."""
        return self.ops[node[0]][node[1]].op

    def label(self, node: Node) -> str:
        """Return the name of a node for messages, such as `matmul 0.3.1`."""
        return self.ops[node[0]][node[1]].label


def match(program: Program) -> MatchedProgram:
    """Return the program with its collectives matched over their members, and each send with its recv.

    Raises:
        ProgramError: a partner is missing, or partners differ in order, kind, shape or dtype; the error names op
            and rank.
    """
    ops = program.ops_by_rank
    collectives: dict[tuple[str, tuple[int, ...]], dict[int, list[int]]] = defaultdict(
        lambda: defaultdict(list)
    )
    sends: dict[tuple[str, int, int, int], list[Node]] = defaultdict(list)
    recvs: dict[tuple[str, int, int, int], list[Node]] = defaultdict(list)
    for rank, listed in ops.items():
        for index, bound in enumerate(listed):
            op = bound.op
            if isinstance(op, op_types.Collective):
                assert isinstance(op.over, tuple)
                if rank not in op.over:
                    raise ProgramError(
                        f"runs over ranks {op.over} without being one", op=bound.label, rank=rank
                    )
                if len(set(op.over)) < len(op.over):
                    raise ProgramError(f"runs over ranks {op.over}, which repeat", op=bound.label, rank=rank)
                collectives[op.lane, op.over][rank].append(index)
            elif isinstance(op, op_types.Send):
                sends[op.lane, rank, _peer(program, op.peer, bound, rank), number_of(op.tag)].append(
                    (rank, index)
                )
            elif isinstance(op, op_types.Recv):
                recvs[op.lane, _peer(program, op.peer, bound, rank), rank, number_of(op.tag)].append(
                    (rank, index)
                )
    agreed: set[tuple[int, ...]] = set()
    joints = [
        joint
        for (_, over), members in collectives.items()
        for joint in _match_collectives(program, ops, over, members, agreed)
    ]
    joints += _match_messages(program, ops, sends, recvs)
    joint_of = {node: number for number, joint in enumerate(joints) for node in joint.members}
    return MatchedProgram(program, ops, tuple(joints), joint_of)


def _peer(program: Program, peer: Any, bound: BoundOp, rank: int) -> int:
    if peer not in program.ops_by_rank or peer == rank:
        raise ProgramError(f"peer {peer} is no other rank of the program", op=bound.label, rank=rank)
    return number_of(peer)


def _match_collectives(
    program: Program,
    ops: Mapping[int, Sequence[BoundOp]],
    over: tuple[int, ...],
    members: Mapping[int, list[int]],
    agreed: set[tuple[int, ...]],
) -> list[Joint]:
    form = program.resolved_ops.form
    joints = []
    for number in range(max(map(len, members.values()))):
        nodes = []
        for rank in over:
            if number >= len(members.get(rank, ())):
                other_rank, index = next((r, m[number]) for r, m in members.items() if len(m) > number)
                raise ProgramError(
                    f"rank {rank} never joins this collective over ranks {over}",
                    op=ops[other_rank][index].label,
                    rank=other_rank,
                )
            nodes.append((rank, members[rank][number]))
        bound = [ops[rank][index].op for rank, index in nodes]
        forms = tuple(map(form, bound))
        if forms not in agreed:
            _agree(program, ops, nodes)
            agreed.add(forms)
        joints.append(Joint(bound[0].kind, tuple(nodes)))
    return joints


def _agree(program: Program, ops: Mapping[int, Sequence[BoundOp]], nodes: Sequence[Node]) -> None:
    """Raise ProgramError unless all members issue one collective: equal kind, name, dtype, fields and sizes."""
    first_rank, first_index = nodes[0]
    first = ops[first_rank][first_index]
    for rank, index in nodes[1:]:
        bound = ops[rank][index]
        mine, theirs = _signature(program, bound.op), _signature(program, first.op)
        if mine != theirs:
            raise ProgramError(
                f"collectives in another order than on rank {first_rank}, which has {first.label} {theirs} "
                f"where this has {mine}",
                op=bound.label,
                rank=rank,
            )
    check_joint(program, [(rank, ops[rank][index]) for rank, index in nodes])


def _signature(program: Program, op: op_types.Op) -> tuple[Any, ...]:
    """Return what all members of a collective say alike."""
    dtype = program.buffer_of[op.src.buffer].dtype if isinstance(op, op_types.DataCollective) else ""
    kind: Any = type(op)
    return (op.kind, op.name, dtype, *(getattr(op, name) for name in _said_alike(kind)))


@cache
def _said_alike(kind: type[Any]) -> tuple[str, ...]:
    """Return the fields of a kind of collective that all members say alike, but for those that all kinds have."""
    if kind is Include:
        return "part", "meshes", "lanes"
    of_all = {each.name for each in fields(op_types.DataCollective)}
    return tuple(each.name for each in fields(kind) if each.name not in of_all | _OF_A_MEMBER)


_OF_A_MEMBER = {"outs", "ins", "send_sizes", "recv_sizes"}
"""Fields of a collective that are of one member."""


def _match_messages(
    program: Program,
    ops: Mapping[int, Sequence[BoundOp]],
    sends: Mapping[tuple[str, int, int, int], list[Node]],
    recvs: Mapping[tuple[str, int, int, int], list[Node]],
) -> list[Joint]:
    joints = []
    for channel in sorted(set(sends) | set(recvs)):
        lane, src, dst, tag = channel
        out, into = sends.get(channel, []), recvs.get(channel, [])
        if len(out) != len(into):
            rank, index = out[len(into)] if len(out) > len(into) else into[len(out)]
            other_rank, missing = (dst, "recv") if rank == src else (src, "send")
            raise ProgramError(
                f"rank {other_rank} has no matching {missing} in lane {lane} with tag {tag}",
                op=ops[rank][index].label,
                rank=rank,
            )
        for (a_rank, a_index), (b_rank, b_index) in zip(out, into, strict=True):
            send, recv = ops[a_rank][a_index].op, ops[b_rank][b_index].op
            assert isinstance(send, op_types.Send) and isinstance(recv, op_types.Recv)
            if send.src.shape != recv.out.shape:
                raise ProgramError(
                    f"sends shape {send.src.shape} to {ops[b_rank][b_index].label} of rank {b_rank}, "
                    f"which takes {recv.out.shape}",
                    op=ops[a_rank][a_index].label,
                    rank=a_rank,
                    buffer=send.src.buffer,
                )
            dtypes = [program.buffer_of[view.buffer].dtype for view in (send.src, recv.out)]
            if dtypes[0] != dtypes[1]:
                raise ProgramError(
                    f"takes {dtypes[1]} where {ops[a_rank][a_index].label} of rank {a_rank} sends {dtypes[0]}",
                    op=ops[b_rank][b_index].label,
                    rank=b_rank,
                    buffer=recv.out.buffer,
                )
            joints.append(Joint("message", ((a_rank, a_index), (b_rank, b_index))))
    return joints
