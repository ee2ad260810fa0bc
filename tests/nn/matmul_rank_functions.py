"""What the ranks of test_matmul run; started through `meshweave.execute.ranks.launch`.

Functions that take `check` add what is wrong to it, and run on all ranks of a world of four.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from sections import Findings, run
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import meshweave
from meshweave.algorithms import StageLimits
from meshweave.describe.layout import layouts as ours
from meshweave.execute.torch.context import TorchContext
from meshweave.nn.dtensor import layout_of

R, P, SS = Replicate(), Partial(), _StridedShard
S0, S1, S2, S3 = (Shard(dim) for dim in range(4))
KINDS: tuple[Placement, ...] = (S0, S1, R, P)
Placements = Sequence[Placement]


def integers(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Small integers, so that every order of summation gives the same."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, tuple(shape), generator=generator).to(dtype)


def terms_of(layout: ours.Layout) -> list[int]:
    """The axes along which a layout is partial."""
    return [axis for axis, one in enumerate(layout.placements) if isinstance(one, ours.Partial)]


def placed(whole: Tensor, mesh: DeviceMesh, placements: Placements, order: Any = None) -> DTensor:
    """A DTensor of a global value; where it is partial, of unequal terms that sum up to it."""
    more = {} if order is None else {"shard_order": order}
    contiguous = torch.empty(whole.shape, device="meta").stride()
    meta = TensorMeta(whole.shape, contiguous, whole.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta, **more)
    layout, rank = layout_of(spec), dist.get_rank()
    matrix = whole.reshape(math.prod(whole.shape[:-1]), whole.shape[-1])
    rows, columns = (torch.from_numpy(index) for index in layout.indices(tuple(matrix.shape), rank))
    local = matrix[rows][:, columns]
    local = local.reshape(ours.Layout(layout.mesh, layout.placements).local_shape(tuple(whole.shape), rank))
    partial = terms_of(layout)
    if partial:
        coords, others = layout.mesh.coords(rank), math.prod(layout.mesh.shape[axis] for axis in partial) - 1
        is_first = all(coords[axis] == 0 for axis in partial)
        local = local - 3 * others if is_first else torch.full_like(local, 3)
    return DTensor(local.contiguous(), spec, requires_grad=False)


def global_value(tensor: DTensor) -> Tensor:
    """The whole tensor, on every rank, put together by hand; copies must be equal."""
    layout = layout_of(tensor)
    local = tensor.detach().to_local()
    matrix = local.reshape(math.prod(local.shape[:-1]), local.shape[-1])
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, matrix.contiguous())
    partial, terms = terms_of(layout), {}
    rows_of_all, columns_of_all = math.prod(tensor.shape[:-1]), tensor.shape[-1]
    for rank in layout.mesh.ranks:
        key = tuple(layout.mesh.coords(rank)[axis] for axis in partial)
        values, filled = terms.setdefault(
            key,
            (
                torch.zeros(rows_of_all, columns_of_all, dtype=tensor.dtype),
                torch.zeros(rows_of_all, columns_of_all, dtype=torch.bool),
            ),
        )
        rows, columns = layout.indices((rows_of_all, columns_of_all), rank)
        at = torch.from_numpy(rows)[:, None], torch.from_numpy(columns)[None, :]
        assert parts[rank].shape == (len(rows), len(columns)), f"{layout}: rank {rank} has another shape"
        assert torch.equal(values[at][filled[at]], parts[rank][filled[at]]), f"{layout}: copies differ"
        values[at], filled[at] = parts[rank], True
    total = sum(values for values, _ in terms.values())
    assert isinstance(total, Tensor)
    return total.reshape(tensor.shape)


class Check(Findings):
    """Collects what is wrong."""

    def equal(self, case: str, found: DTensor, expected: Tensor) -> None:
        if found.dtype != expected.dtype or not torch.equal(global_value(found), expected):
            self.wrong.append(case)

    def product(
        self, case: str, a: DTensor, b: DTensor, out: Placements | None = None, **how: Any
    ) -> DTensor:
        """Forward and backward against dense autograd, a and b being leaves, or views of such."""
        dense_a, dense_b = (global_value(one).requires_grad_(one.requires_grad) for one in (a, b))
        c = meshweave.matmul(a, b, out, context=self.context, **how)
        case = f"{case}: {a.placements} @ {b.placements} -> {c.placements}"
        self.that(f"{case}: asked for {out}", out is None or tuple(out) == tuple(c.placements))
        dense_c = dense_a @ dense_b
        self.equal(f"{case}: C", c, dense_c.detach())
        if not c.requires_grad:
            return c
        weight = integers(dense_c.shape, 3, c.dtype)
        of_c = placed(weight, c.device_mesh, [R if isinstance(p, Partial) else p for p in c.placements])
        # Not `backward`: what a leaf accumulates is detached, and there torch 2.13 forgets a shard order.
        wanted = [one for one in (a, b) if one.requires_grad]
        found = torch.autograd.grad(c, wanted, of_c, allow_unused=True)
        dense = torch.autograd.grad(dense_c, [one for one in (dense_a, dense_b) if one.requires_grad], weight)
        for one, grad, expected in zip(wanted, found, dense, strict=True):
            name = f"{case}: {'A' if one is a else 'B'}'"
            like = tuple(R if isinstance(p, Partial) else p for p in one.placements)
            self.that(f"{name} lies {grad.placements}", grad.placements == like)
            self.that(f"{name} is elsewhere", grad.device_mesh == one.device_mesh)
            same = getattr(grad._spec, "shard_order", None) == getattr(one._spec, "shard_order", None)
            self.that(f"{name} has another shard order", same or like != one.placements)
            self.equal(name, grad, expected)
        return c


def sections(context: Any, payload: Mapping[str, Any]) -> dict[str, list[str]]:
    return run(context, payload, Check, "matmul_rank_functions")


def square() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "col"))


def two_d(check: Check) -> None:
    """A 2D algorithm by `matmul`: the dataflow is which operand is given as its `.t()`."""
    mesh = square()
    for (m, n, k), (algorithm, slices) in zip(
        ((24, 16, 32), (13, 11, 17), (5, 40, 9)),
        (("meshslice", 3), ("wang", 1), ("meshslice", (1, 2, 1))),
        strict=True,
    ):
        whole_a, whole_b, weight = integers((m, k), 1), integers((k, n), 2), integers((m, n), 3)
        for dataflow in ("os", "ls", "rs"):
            case = f"{algorithm} {dataflow} of {m}, {n}, {k}"
            stored_a = whole_a.t() if dataflow == "rs" else whole_a
            stored_b = whole_b.t() if dataflow == "ls" else whole_b
            a, b = (placed(one, mesh, (S0, S1)).requires_grad_() for one in (stored_a, stored_b))
            left, right = a.t() if dataflow == "rs" else a, b.t() if dataflow == "ls" else b
            c = meshweave.matmul(left, right, algorithm=algorithm, slices=slices, context=check.context)
            check.that(case, torch.equal(c.full_tensor(), whole_a @ whole_b) and c.placements == (S0, S1))
            (c * placed(weight, mesh, (S0, S1))).sum().backward()
            grad_a, grad_b = weight @ whole_b.t(), whole_a.t() @ weight
            expected = (
                (grad_a.t() if dataflow == "rs" else grad_a),
                (grad_b.t() if dataflow == "ls" else grad_b),
            )
            for name, one, dense in zip("ab", (a, b), expected, strict=True):
                same = one.grad.placements == (S0, S1) and torch.equal(one.grad.full_tensor(), dense)
                check.that(f"{case}: gradient of {name}", same)


def two_d_refused(check: Check) -> None:
    """What a 2D algorithm does not take is refused, and not passed over."""
    mesh = square()
    a, b = placed(integers((8, 6), 1), mesh, (S0, S1)), placed(integers((6, 4), 2), mesh, (S0, S1))
    apart = placed(integers((6, 4), 2), mesh, (S0, R))
    other = placed(integers((6, 4), 2), init_device_mesh("cpu", (4,)), (S0,))
    wrong: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "does not take transport, overlap": (a, b, {"transport": "messages", "overlap": "fused"}),
        "at most one of them as its": (a, apart, {}),
        r"and gives such a result.*to \[Shard\(dim=1\)": (a, b, {"out": (S1, S0)}),
        "on one mesh of two dims": (a, other, {}),
        "did you mean 'meshslice'": (a, b, {"algorithm": "meshslise"}),
        "takes two DTensors": (a.to_local(), b, {}),
    }
    for told, (left, right, options) in wrong.items():
        try:
            meshweave.matmul(left, right, **{"algorithm": "meshslice", "context": check.context, **options})
        except meshweave.MeshweaveError as error:
            check.that(f"{told}: {error}", re.search(told, str(error)) is not None)
        else:
            check.that(f"{told}: not refused", False)


# --- products -----------------------------------------------------------------------------------------------


def every_pair(context: Any, payload: Mapping[str, Any]) -> list[str]:
    """Pairs of placements, every `step`-th of all, forward and backward, against dense autograd."""
    mesh = init_device_mesh("cpu", tuple(payload["mesh"]), mesh_dim_names=("row", "col"))
    check = Check(TorchContext(liveness=context.liveness, deadline_s=60))
    m, n, k = payload["sizes"]
    pairs = list(itertools.product(itertools.product(KINDS[: payload["kinds"]], repeat=2), repeat=2))
    whole_a, whole_b = integers((m, k), 1), integers((k, n), 2)
    for number in range(0, len(pairs), payload.get("step", 1)):
        left, right = pairs[number]
        out = None if number % 3 == 0 else pairs[(7 * number) % len(pairs)][number % 2]
        a, b = placed(whole_a, mesh, left).requires_grad_(), placed(whole_b, mesh, right).requires_grad_()
        check.product("pair", a, b, out, transport=payload["transport"])
    check.context.close()
    return check.wrong


def meshes(check: Check) -> None:
    """Operands on meshes of different shapes, or of other orders, over the same ranks."""
    ours_ = square()
    others = [
        init_device_mesh("cpu", (4, 1), mesh_dim_names=("x", "y")),
        init_device_mesh("cpu", (1, 4)),
        init_device_mesh("cpu", (4,)),
        DeviceMesh("cpu", torch.tensor([[3, 1], [0, 2]])),
        DeviceMesh("cpu", torch.tensor([2, 0, 3, 1])),
    ]
    whole_a, whole_b = integers((7, 6), 1), integers((6, 5), 2)
    pairs = [((S0, S1), (S0, S1)), ((S1, P), (S1, R)), ((R, S0), (P, S0))]
    for number, other in check.some(enumerate(others), 3):
        for left, right in check.some(pairs[number % 3 :] + pairs[: number % 3], 5):
            a = placed(whole_a, ours_, left).requires_grad_()
            b = placed(whole_b, other, right[: other.ndim]).requires_grad_()
            check.product(f"mesh {number}", a, b, None if number % 2 else (S1, S0))
        a = placed(whole_a, other, (S0, S1)[: other.ndim]).requires_grad_()
        b = placed(whole_b, ours_, (S1, S0)).requires_grad_()
        check.product(f"mesh {number} first", a, b)


def orders(check: Check) -> None:
    """Strided shards and shard orders, alike or not on the contracted dim."""
    mesh = square()
    strided, turned = (SS(0, split_factor=2), S0), lambda dim: (ShardOrderEntry(dim, (1, 0)),)
    across = (SS(1, split_factor=2), S1)
    whole_a, whole_b = integers((8, 8), 1), integers((8, 8), 2)
    lefts = [((S1, S1), None), (across, None), ((S1, S1), turned(1)), ((SS(0, split_factor=2), R), None)]
    rights = [((S0, S0), None), (strided, None), ((S0, S0), turned(0)), ((P, SS(1, split_factor=2)), None)]
    outs: list[Placements | None] = [None, strided, (P, S1), across]
    pairs = [(left, rights[(at + by) % 4]) for by in (0, 1, 3) for at, left in enumerate(lefts)]
    for number, (left, right) in check.some(enumerate(pairs), 7):
        a, b = placed(whole_a, mesh, *left).requires_grad_(), placed(whole_b, mesh, *right).requires_grad_()
        check.product(f"orders {number}", a, b, outs[(number + number // 4) % 4])
    # Uneven, in an order that is given.
    a = placed(integers((7, 9), 1), mesh, (S1, S1), turned(1)).requires_grad_()
    check.product("uneven order", a, placed(integers((9, 3), 2), mesh, (S0, S0)).requires_grad_(), (S0, S0))


def inconsistent_orders(check: Check) -> None:
    """The contracted dim is cut by the same axes, in another order on each side (pytorch#166598).

    DTensor of torch 2.13 still multiplies what lies together by chance, and is wrong everywhere ([[40, 46, ...]]).
    """
    mesh = square()
    whole = torch.arange(16.0).reshape(4, 4)
    a, b = placed(whole, mesh, (S1, S1)), placed(whole, mesh, (SS(0, split_factor=2), S0))
    outs: list[Placements | None] = [None, (P, P), (S0, S1), (R, R), (S1, S1)]
    for out in check.some(outs, 2):
        check.equal(f"166598 -> {out}", meshweave.matmul(a, b, out, context=check.context), whole @ whole)


def batched(check: Check) -> None:
    """Left operands of three and four dims and of one."""
    mesh, w = square(), integers((6, 5), 2)
    cases: list[tuple[tuple[int, ...], Placements, Placements, Placements | None]] = [
        ((3, 5, 6), (S0, S1), (R, S1), (S0, S1)),
        ((3, 5, 6), (S0, S2), (R, S0), None),
        ((3, 5, 6), (S1, S1), (S0, S1), (S1, S2)),
        ((3, 5, 6), (P, S2), (S1, S0), (S0, P)),
        ((3, 5, 6), (R, S0), (P, R), (S2, S0)),
        ((2, 3, 3, 6), (S0, S2), (S0, S1), (S0, S3)),
        ((2, 3, 3, 6), (S1, S3), (S1, S0), None),
        ((2, 3, 3, 6), (S2, P), (R, R), (S2, R)),
        ((1, 1, 6), (S0, S1), (S1, R), (Shard(0), R)),
        ((6,), (S0, S0), (S0, S1), (S0, S0)),
        ((6,), (R, P), (S1, R), None),
        ((6,), (S0, R), (S0, R), (P, R)),
    ]
    for shape, left, right, out in check.some(cases, 7):
        a, b = (
            placed(integers(shape, 1), mesh, left).requires_grad_(),
            placed(w, mesh, right).requires_grad_(),
        )
        check.product(f"shape {shape}", a, b, out)
    a, b = placed(integers((3, 5, 6), 1), mesh, (S0, R)), placed(w, mesh, (R, S1))
    c = meshweave.matmul(a, b, (S0, Shard(-1)), context=check.context)
    check.that("a negative dim", c.placements == (S0, S2))
    check.equal("a negative dim", c, global_value(a) @ w)


def transposed(check: Check) -> None:
    """Operands that lie the other way round in memory, as views or by themselves."""
    mesh = square()
    cases: list[tuple[Placements, Placements, Placements | None]] = [
        ((S1, S0), (S1, S0), None),
        ((R, S1), (S0, R), (S0, S1)),
        ((P, S0), (S1, S1), (R, P)),
    ]
    for left, right, out in check.some(cases, 4):
        a, w = placed(integers((6, 7), 1), mesh, left), placed(integers((5, 6), 2), mesh, right)
        a.requires_grad_(), w.requires_grad_()
        check.product("transposed", a.t(), w.t(), out)
        meshweave.matmul(a.t(), w.t(), (S0, S1), context=check.context).sum().backward()
        check.equal("the leaf of a view", w.grad, (integers((6, 7), 1).sum(1) * torch.ones(5, 1)).double())
        # Local parts that are strided where the DTensor does not say so.
        b = placed(integers((6, 5), 2), mesh, right)
        local = b.to_local().t().contiguous().t()
        strided = DTensor(local, b._spec, requires_grad=False).requires_grad_()
        check.product("strided locals", a.detach().t().requires_grad_(), strided, out)


def dtypes(check: Check) -> None:
    mesh = square()
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.int64, torch.int32)
    placements: list[tuple[Placements, Placements, Placements | None]] = [
        ((S0, S1), (S0, S1), None),
        ((P, S1), (S0, R), (S1, S0)),
        ((S1, S1), (S0, S0), (P, R)),
    ]
    for dtype, (left, right, out) in check.some(itertools.product(dtypes, placements), 7):
        a = placed(integers((5, 6), 1, dtype), mesh, left)
        b = placed(integers((6, 3), 2, dtype), mesh, right)
        is_real = dtype.is_floating_point
        check.product(f"{dtype}", a.requires_grad_(is_real), b.requires_grad_(is_real), out)


def empty(check: Check) -> None:
    """Ranks that hold nothing, and sizes of nothing."""
    line, mesh = init_device_mesh("cpu", (4,)), square()
    for m, n, k in check.some([(0, 3, 2), (1, 3, 3), (2, 3, 0), (3, 1, 1), (5, 3, 1)], 2):
        whole_a, whole_b = integers((m, k), 1), integers((k, n), 2)
        for left, right, out in check.some([(S1, S0, None), (S0, S0, S1), (P, S1, P)], 3):
            a, b = (
                placed(whole_a, line, [left]).requires_grad_(),
                placed(whole_b, line, [right]).requires_grad_(),
            )
            check.product(f"{m}, {n}, {k}", a, b, None if out is None else [out])
        a = placed(whole_a, mesh, (S0, S0)).requires_grad_()
        check.product(f"{m}, {n}, {k}", a, placed(whole_b, mesh, (S1, S0)).requires_grad_(), (S1, S1))


def chosen(check: Check) -> None:
    """`stationary`, and each kind of `out`."""
    mesh = square()
    outs: list[Placements | None] = [
        None,
        (P, P),
        (R, P),
        (R, R),
        (SS(0, split_factor=2), S0),
        (S1, SS(1, split_factor=2)),
    ]
    variants = itertools.product(("a", "b", "c"), outs)
    for number, (stationary, out) in check.some(enumerate(variants), 13):
        left, right = (((S0, S1), (P, S0)), ((R, S0), (S1, R)), ((S1, P), (S0, S0)))[number % 3]
        a = placed(integers((8, 6), 1), mesh, left).requires_grad_()
        b = placed(integers((6, 8), 2), mesh, right).requires_grad_()
        check.product(f"stationary {stationary}", a, b, out, stationary=stationary)
    for cluster in check.some(["h100-node", "local-cpu"], 2):
        a, b = placed(integers((8, 6), 1), mesh, (S0, S1)), placed(integers((6, 8), 2), mesh, (S0, S1))
        check.product(cluster, a.requires_grad_(), b.requires_grad_(), cluster=cluster)
    kinds = [
        ("greedy", StageLimits(2, 3, 2)),
        ("direct", StageLimits(2, 2, 2)),
        ("exhaustive", StageLimits()),
    ]
    for schedule, limits in check.some(kinds, 2):
        a, b = placed(integers((8, 6), 1), mesh, (S0, S1)), placed(integers((6, 8), 2), mesh, (S1, S0))
        check.product(schedule, a.requires_grad_(), b.requires_grad_(), schedule=schedule, limits=limits)
