"""Ops of a program whose work is known but not their values: calls, and exchanges with the same price."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from meshweave.algorithms.block.nodes.experts import MESH_OF_EXPERTS
from meshweave.ir.program.call_dims import CallPart
from meshweave.ir.program.expressions import Var, select
from meshweave.ir.program.ops import Call, Exchange, Op
from meshweave.ir.program.views import View
from meshweave.ir.work import Compute, CopyExchange, Transfer, Work

TIMED_LANES = {MESH_OF_EXPERTS: "exchanges"}
"""What lanes of a skeleton are called in a program, where a mesh has their name."""

Views = tuple[View, ...]


def timed_op(works: Sequence[Work], lane: str, outs: Views, ins: Views) -> Op:
    """Return an op that computes no values and costs some work; it reads the views `ins` and writes `outs`.

    Args:
        works: one work for all ranks, or one for each rank of a group that shares experts, in the order of ranks.
            The first one must be that of the rank with the most copies of tokens; for an exchange it is the only
            one that counts, since all ranks wait for that rank.
        lane: the name of the op's lane.
    """
    first = works[0]
    if not isinstance(first, Compute):
        return _exchange(first, lane, outs, ins)
    calls = [_call(work, lane, outs, ins) for work in works if isinstance(work, Compute)]
    at = Var(f"{MESH_OF_EXPERTS}.rank")
    return replace(
        calls[0],
        flops=select([call.flops for call in calls], at),
        bytes=select([call.bytes for call in calls], at),
        shape=tuple(select(sizes, at) for sizes in zip(*(call.shape for call in calls), strict=True)),
    )


def _exchange(work: Transfer, lane: str, outs: Views, ins: Views) -> Exchange:
    own = {each.name for each in fields(CopyExchange)} - {each.name for each in fields(Transfer)}
    terms = {name: getattr(work, name) for name in own} if isinstance(work, CopyExchange) else {}
    return Exchange(
        outs=outs,
        ins=ins,
        carries=work.kind,
        over=work.axis,
        num_ranks=work.num_ranks,
        part_bytes=work.part_bytes,
        **terms,
        lane=lane,
        name=f"{work.kind} copies" if terms else "",
    )


def _call(work: Compute, lane: str, outs: Views, ins: Views) -> Call:
    """Return a call of a product, of several equal ones, or of what `work` calls."""
    parts: dict[str, CallPart] = {"input_grad": "input_grad", "weight_grad": "weight_grad"}
    name, shape, moved = work.call, work.shape, work.bytes
    if work.kind == "matmul":
        m, n, k = work.dims
        moved = (m * k + k * n + m * n) * work.num_products * work.item_bytes
        name, shape = ("matmul", work.dims)
        if work.num_products > 1:
            name, shape = "matmul_batch", (*work.dims, work.num_products)
    return Call(
        fn=name,
        outs=outs,
        ins=ins,
        flops=work.flops,
        bytes=moved,
        work=name,
        shape=shape,
        part=parts.get(work.part, ""),
        dtype=work.dtype,
        lane=lane,
    )
