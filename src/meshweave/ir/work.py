"""The work of one op: the FLOPs, bytes and group size that its time depends on, without views.

Both readings of time start here: a skeleton lists `Work` directly, and `work_of` reads it off a bound op.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from meshweave.base.errors import ProgramError, UnsupportedError
from meshweave.base.units import dtype_bytes
from meshweave.ir.analysis.edges import reads_in_place
from meshweave.ir.analysis.shapes import part_sizes
from meshweave.ir.program import Program, ops
from meshweave.ir.program.call_dims import ATTENTION_CALLS
from meshweave.ir.program.product_shapes import ProductShape, product_shape
from meshweave.ir.program.release import CollectiveStep


@dataclass(frozen=True, slots=True)
class Compute:
    """Arithmetic on one rank: `flops` on the compute engine, or `bytes` (read plus written) through memory.

    A call may declare both. `cost.calls` counts the FLOPs of one that declares none, by its `call` and
    `shape`.

    Attributes:
        kind: the kind of the op.
        dims: (m, n, k) of a product, of which there are `num_products` in a batch.
        item_bytes: bytes of one element of a product.
        dtype: the dtype of the arithmetic, which has a rate of its own; "" where nobody says.
        call, shape, part: of a call, its `work`, the sizes that it is counted by, and which part of a stage
            it is.
        joins: whether a product is launched with the one before, as part of one kernel.
    """

    kind: str
    flops: int = 0
    bytes: int = 0
    dims: tuple[int, int, int] = (0, 0, 0)
    item_bytes: int = 0
    num_products: int = 1
    dtype: str = ""
    call: str = ""
    shape: tuple[int, ...] = ()
    part: str = ""
    joins: bool = False


@dataclass(frozen=True, slots=True)
class Transfer:
    """Communication of one op.

    Attributes:
        kind: the kind of the op, or what an exchange carries.
        axis: the mesh axis ("tp.row") or whole mesh ("tp"), "" where the group is none of these.
        num_ranks: number of members of the group; 2 for a message and a one-sided access.
        part_bytes: bytes of the largest part that a member contributes (all_gather) or receives (reduce_scatter),
            or into which this one cuts its src (all_to_all), the part that it keeps among them; of a fence 0, of
            other kinds all that is sent or reduced.
        packets: the pipelined parts of a broadcast or reduce.
        step: which step of a lowered collective this is, or None.
        hops: the ring distance of a permute in the shorter direction. Since every member sends that far, each
            link carries that many messages.
    """

    kind: str
    axis: str
    num_ranks: int
    part_bytes: int
    packets: int = 1
    step: CollectiveStep | None = None
    hops: int = 1

    @property
    def launch(self) -> Transfer:
        """Return this broadcast or reduce with 1 rank and 0 bytes: work that takes as long as its launch alone."""
        return replace(self, num_ranks=1, part_bytes=0, packets=1)

    @property
    def hop(self) -> Transfer:
        """Return one packet of this broadcast or reduce over one hop: work of two ranks, with its own launch."""
        return replace(self, num_ranks=2, part_bytes=-(-self.part_bytes // self.packets), packets=1)


@dataclass(frozen=True, slots=True)
class CopyExchange(Transfer):
    """A dispatch or a combine: `part_bytes` of one copy of a token, `num_ranks` that share the experts.

    Attributes:
        tokens: number of tokens of each rank.
        experts, chosen: number of all experts, and of those that each token goes to.
        groups, top_groups: number of groups of experts, and of those groups that a token may go to.
        load: copies that the most loaded rank gets, divided by the average of all ranks.
        library: a name of `cost.exchange.libraries`.
    """

    tokens: int = 0
    experts: int = 1
    chosen: int = 1
    groups: int = 1
    top_groups: int = 1
    load: float = 1.0
    library: str = "all_to_all"


Work = Compute | Transfer


def matmul_work(m: int, n: int, k: int, dtype: str, num_products: int = 1) -> Compute:
    """Return the work of a batch of `num_products` products (m, k) x (k, n), of 2 m n k FLOPs each."""
    flops = 2 * m * n * k * num_products
    item = dtype_bytes(dtype)
    return Compute("matmul", flops, dims=(m, n, k), item_bytes=item, num_products=num_products, dtype=dtype)


def product_work(shape: ProductShape, dtype: str) -> Compute:
    """Return the work of a product of `shape`, which may have batch dims, with operands of `dtype`.

    Where one operand serves the whole batch, it is one product with the batch in m (or n); where the result is
    summed over the batch, one with the batch in k; else a batch of products.
    """
    m, n, k, num_products = shape.m, shape.n, shape.k, math.prod(shape.batch)
    if shape.sums_batch:
        return matmul_work(m, n, k * num_products, dtype)
    if not shape.batch_b:
        return matmul_work(m * num_products, n, k, dtype)
    if not shape.batch_a:
        return matmul_work(m, n * num_products, k, dtype)
    return matmul_work(m, n, k, dtype, num_products)


def move_work(num_elements: int, dtype: str, kind: str = "copy") -> Compute:
    """Return the work of a `kind` of move ("copy", "add" or "zero") of `num_elements` elements of `dtype`.

    Per element a copy moves 2 elements through memory, an add 3, a zero 1.
    """
    passes = {"copy": 2, "add": 3, "zero": 1}[kind]
    return Compute(kind, bytes=passes * num_elements * dtype_bytes(dtype))


def call_dtype(program: Program, op: ops.Call) -> str:
    """Return the dtype in which a call computes: the declared one, else that of its first output, or else input.

    Attention takes that of its first input, as in a ring its outputs, sums so far, are in another. "" where the
    call has no views.
    """
    if op.dtype:
        return op.dtype
    views = (op.ins or op.outs) if op.work in ATTENTION_CALLS else (op.outs or op.ins)
    return program.buffer_of[views[0].buffer].dtype if views else ""


def counts_view_bytes(op: ops.Call) -> bool:
    """Return whether the bytes of a call are those of its views: it names its `work` and declares 0 bytes."""
    return bool(op.work) and op.bytes == 0


def call_work(program: Program, op: ops.Call) -> Compute:
    """Return the work of a resolved call: the FLOPs and bytes that it declares.

    FLOPs of 0 are left to `cost.calls`; where it names its `work`, bytes of 0 stand for those of all its views.
    """
    assert isinstance(op.flops, int) and isinstance(op.bytes, int)
    num_bytes = op.bytes
    if counts_view_bytes(op):
        num_bytes = sum(program.view_bytes(view) for view in (*op.ins, *op.outs))
    shape = tuple(int(size) for size in op.shape)  # type: ignore[arg-type]
    return Compute(
        "call",
        op.flops,
        num_bytes,
        dtype=call_dtype(program, op),
        call=op.work,
        shape=shape,
        part=op.part,
    )


def exchange_work(op: ops.Exchange, axis: str) -> Transfer:
    """Return the transfer whose price is the time of an exchange over the mesh axis `axis` ("tp.row").

    Raises:
        ProgramError: its sizes are out of range, such as more chosen experts than there are, or what it
            `carries` is unknown.
    """
    if reason := _exchange_reason(op):
        raise ProgramError(reason, op=op.title)
    if not op.library:
        return Transfer(op.carries, axis, op.num_ranks, op.part_bytes)
    sizes = op.tokens, op.experts, op.chosen, op.groups, op.top_groups, op.load, op.library
    return CopyExchange(op.carries, axis, op.num_ranks, op.part_bytes, 1, None, 1, *sizes)


def _exchange_reason(op: ops.Exchange) -> str:
    """Return what is wrong with the terms of an exchange; "" where nothing is."""
    if op.num_ranks < 1 or op.part_bytes < 0:
        return f"has {op.num_ranks} ranks and parts of {op.part_bytes} bytes"
    kinds = ("dispatch", "combine") if op.library else ("all_gather", "reduce_scatter", "all_reduce")
    if op.carries not in kinds:
        return f"carries '{op.carries}'; {'with' if op.library else 'without'} a library it is {', '.join(kinds)}"
    if not op.library:
        return ""
    if op.tokens < 0 or not 1 <= op.chosen <= op.experts or op.experts % op.num_ranks:
        return f"has {op.tokens} tokens with {op.chosen} of {op.experts} experts on {op.num_ranks} ranks"
    if not 1 <= op.top_groups <= op.groups or op.experts % op.groups:
        return f"has {op.top_groups} of {op.groups} groups of {op.experts} experts"
    return "" if 0 < op.load < math.inf else f"has a load of {op.load}"


def axis_of(program: Program, group: tuple[int, ...]) -> str:
    """Return the name of the mesh axis ("tp.row") or whole mesh ("tp") that has this group of ranks, else "".

    The group must be in the order of the mesh. The first mesh that has it is taken, an axis before the whole
    mesh.
    """
    for mesh in program.meshes:
        if group[0] not in mesh:
            continue
        for axis in mesh.axes:
            if mesh.group(group[0], axis) == group:
                return f"{mesh.name}.{axis}"
        if mesh.ranks == group:
            return mesh.name
    return ""


def require_local_operands(op: ops.Op) -> None:
    """Raise UnsupportedError for a product, sum or copy that reads another rank's memory in place.

    The cost model has no price for such a read.
    """
    if reads_in_place(op):
        raise UnsupportedError(
            f"{op.name or op.kind} reads another rank's memory in place, which has no price; "
            "time the program before it is lowered to that"
        )


def work_of(program: Program, op: ops.Op) -> Work:
    """Return what the time of an op depends on: FLOPs and bytes of a product, or bytes and group of a transfer.

    The op is resolved: it has integers for all expressions.

    Raises:
        UnsupportedError: it reads another rank's memory in place.
        ProgramError: it is a product whose operands do not fit, or an exchange of sizes out of range.
    """
    require_local_operands(op)
    match op:
        case ops.Matmul():
            dims = len(op.out.selectors)
            shape = product_shape(op.a.shape, op.b.shape, op.transpose_a, op.transpose_b, dims)
            if isinstance(shape, str):
                raise ProgramError(shape, op=op.title)
            work = product_work(shape, program.buffer_of[op.a.buffer].dtype)
            return replace(work, joins=True) if joins_product(op) else work
        case ops.Copy() | ops.Add() | ops.Zero():
            return move_work(op.out.num_elements, program.buffer_of[op.out.buffer].dtype, op.kind)
        case ops.Call():
            return call_work(program, op)
        case ops.Send() | ops.Put() | ops.Get() | ops.Accumulate():
            step = op.step if isinstance(op, ops.Send) else None
            axis = step.axis if step else ""
            return Transfer(op.kind, axis, 2, program.view_bytes(op.src), step=step)
        case ops.Recv():
            return Transfer(op.kind, "", 2, program.view_bytes(op.out))
        case ops.Fence():
            assert isinstance(op.over, tuple)
            return Transfer("fence", axis_of(program, op.over), len(op.over), 0)
        case ops.Exchange():
            return exchange_work(op, op.over if isinstance(op.over, str) else axis_of(program, op.over))
        case ops.Permute() if not ring_hops(op):
            return move_work(op.out.num_elements, program.buffer_of[op.out.buffer].dtype)
        case ops.DataCollective():
            return _collective(program, op)
    raise AssertionError(op)


def joins_product(op: ops.Matmul) -> bool:
    """Return whether a product runs in one kernel with the product before it in its lane (`Release.joins`)."""
    return op.release is not None and op.release.joins


def ring_hops(op: ops.Permute) -> int:
    """Return the ring distance of a resolved permute in the shorter direction; 0 if all send to themselves."""
    assert isinstance(op.over, tuple) and isinstance(op.shift, int)
    ahead = op.shift % len(op.over)
    return min(ahead, len(op.over) - ahead)


def _collective(program: Program, op: ops.DataCollective) -> Transfer:
    assert isinstance(op.over, tuple)
    count = len(op.over)
    size = program.view_bytes(op.src)
    packets, step, hops = 1, None, 1
    match op:
        case ops.AllGather():
            view, sizes = op.out, part_sizes(op.sizes, op.out.shape[op.dim], count)
            size = box_bytes(program, view.shape, op.dim, max(sizes), op.out.buffer)
        case ops.ReduceScatter():
            sizes = part_sizes(op.sizes, op.src.shape[op.dim], count)
            size = box_bytes(program, op.src.shape, op.dim, max(sizes), op.src.buffer)
        case ops.AllToAll():
            sizes = part_sizes(op.send_sizes, op.src.shape[op.split_dim], count)
            size = box_bytes(program, op.src.shape, op.split_dim, max(sizes), op.src.buffer)
        case ops.Broadcast() | ops.Reduce():
            assert isinstance(op.packets, int)
            packets = op.packets
            if isinstance(op, ops.Broadcast):  # only the root's src is read; every member's out is written
                size = program.view_bytes(op.out)
        case ops.Permute():
            step, hops = op.step, ring_hops(op)
    return Transfer(op.kind, axis_of(program, op.over), count, size, packets, step, hops)


def box_bytes(program: Program, shape: tuple[int, ...], dim: int, size: int, buffer: str) -> int:
    """Return the bytes of a tensor of `shape`, but of `size` along `dim`, in the dtype of buffer `buffer`."""
    others = math.prod(extent for d, extent in enumerate(shape) if d != dim)
    return others * size * dtype_bytes(program.buffer_of[buffer].dtype)


def bytes_moved(program: Program, op: ops.Op, rank: int) -> int:
    """Return the logical bytes that the global rank `rank` moves in an op, which is resolved for it.

    all_gather, broadcast, recv, get and permute count bytes received from other ranks; reduce_scatter, reduce,
    put, accumulate and all_to_all count bytes sent to other ranks. all_reduce counts both of its halves, 2 (P -
    1) / P of its size. A send counts nothing, because its recv does; nor does an `Exchange`, whose bytes routing
    decides, or a product, add or copy with a remote view. A get, put or accumulate counts even where it names
    the rank's own memory.
    """
    match op:
        case ops.AllGather():
            return program.view_bytes(op.out) - program.view_bytes(op.src)
        case ops.ReduceScatter():
            return program.view_bytes(op.src) - program.view_bytes(op.out)
        case ops.AllReduce():
            assert isinstance(op.over, tuple)
            count = len(op.over)
            return 2 * (count - 1) * program.view_bytes(op.src) // count
        case ops.AllToAll():
            assert isinstance(op.over, tuple)
            me = op.over.index(rank)
            sizes = part_sizes(op.send_sizes, op.src.shape[op.split_dim], len(op.over))
            total = program.view_bytes(op.src)
            return total - total * sizes[me] // max(sum(sizes), 1)
        case ops.Broadcast() | ops.Reduce():
            assert isinstance(op.over, tuple)
            moved = op.out if isinstance(op, ops.Broadcast) else op.src
            return 0 if op.over[int(op.root)] == rank else program.view_bytes(moved)  # type: ignore[arg-type]
        case ops.Permute() if not ring_hops(op):
            return 0
        case ops.Permute() | ops.Recv() | ops.Get():
            return program.view_bytes(op.out)
        case ops.Put() | ops.Accumulate():
            return program.view_bytes(op.src)
    return 0


def traffic(program: Program, rank: int) -> dict[str, int]:
    """Return the logical bytes that the global rank `rank` moves, by mesh axis ("tp.row") or mesh ("tp").

    Includes are expanded, and `bytes_moved` says what counts. "" is for point to point and one-sided ops, and
    for groups that are neither. What moves nothing is not listed.
    """
    out: dict[str, int] = {}
    program = program.expanded
    for bound in program.ops_on_rank(rank):
        moved = bytes_moved(program, bound.op, rank)
        if moved:
            over = getattr(bound.op, "over", None)
            axis = axis_of(program, over) if over else ""
            out[axis] = out.get(axis, 0) + moved
    return out
