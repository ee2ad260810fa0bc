"""What the ranks of test_reshard run; started through `meshweave.execute.ranks.launch`.

Functions that take `check` add what is wrong to it, and run on all ranks of a world of four.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from sections import Findings, run
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import empty as dtensor_empty
from torch.distributed.tensor._dtensor_spec import ShardOrderEntry
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import meshweave
from meshweave.describe.layout import Layout
from meshweave.execute.torch import compat
from meshweave.nn.dtensor import layout_of
from meshweave.nn.shard_spec import ShardSpec

R, P, SS = Replicate(), Partial(), _StridedShard
S0, S1, S2 = (Shard(dim) for dim in range(3))
Placements = Sequence[Placement]


def integers(shape: Sequence[int], seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    """Small integers, so that every order of summation gives the same."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, tuple(shape), generator=generator).to(dtype)


def part(whole: Tensor, layout: Layout, rank: int) -> Tensor:
    """What a rank holds of a global value."""
    for dim, index in enumerate(layout.indices(tuple(whole.shape), rank)):
        whole = whole.index_select(dim, torch.from_numpy(index))
    return whole


def laid(whole: Tensor, mesh: DeviceMesh, placements: Placements, order: Any = None) -> DTensor:
    """A DTensor of a global value; where it is partial, of unequal terms that sum up to it. Without elements on
    ranks outside the mesh."""
    spec = ShardSpec(mesh, tuple(placements), order).torch_spec(whole.shape, whole.dtype)
    layout, rank = layout_of(spec, None), dist.get_rank()
    if rank not in layout.mesh:
        return DTensor(torch.empty(0, dtype=whole.dtype), spec, requires_grad=False)
    local = part(whole, layout, rank)
    partial = [layout.mesh.axis(axis) for axis in layout.partial_axes]
    if partial:
        coords, others = layout.mesh.coords(rank), math.prod(layout.mesh.shape[axis] for axis in partial) - 1
        is_first = all(coords[axis] == 0 for axis in partial)
        local = local - 3 * others if is_first else torch.full_like(local, 3)
    return DTensor(local.contiguous(), spec, requires_grad=False)


def as_torch_lays(whole: Tensor, mesh: DeviceMesh, placements: Placements) -> Tensor:
    """This rank's part by torch's own hand; without elements outside the mesh."""
    local: Tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
    return local


class Check(Findings):
    """Collects what is wrong."""

    def lies(
        self, case: str, found: DTensor, expected: Tensor, mesh: DeviceMesh, placements: Placements
    ) -> None:
        """Global shape, place and this rank's elements."""
        self.that(f"{case}: on {found.device_mesh}", found.device_mesh == mesh)
        self.that(f"{case}: placed {found.placements}", tuple(found.placements) == tuple(placements))
        self.that(f"{case}: {found.shape}", (found.shape, found.dtype) == (expected.shape, expected.dtype))
        self.that(f"{case}: stride {found.stride()}", found.stride() == expected.contiguous().stride())
        self.that(f"{case}: local stride", found._local_tensor.is_contiguous())
        local, wanted = found._local_tensor, as_torch_lays(expected, mesh, placements)
        same = local.shape == wanted.shape and same_bits(local, wanted)
        self.that(f"{case}: {local.tolist()}, not {wanted.tolist()}", same)

    def moved(
        self,
        case: str,
        shape: Sequence[int],
        source: tuple[DeviceMesh, Placements],
        target: tuple[DeviceMesh, Placements],
        order: Any = None,
        **how: Any,
    ) -> DTensor:
        """There, and the gradient back."""
        whole, weight = integers(shape), integers(shape, 2)
        ends = (f"{mesh.mesh.tolist()} {placements}" for mesh, placements in (source, target))
        case = f"{case} {tuple(shape)}: {' -> '.join(ends)}"
        x = laid(whole, *source, order).requires_grad_()
        y = meshweave.reshard(x, *target, context=self.context, **how)
        self.lies(case, y, whole, *target)
        self.that(f"{case}: requires no gradient", y.requires_grad)
        (grad,) = torch.autograd.grad(y, x, laid(weight, *target))
        back = tuple(R if isinstance(one, Partial) else one for one in source[1])
        if order is None:
            self.lies(f"{case}, gradient", grad, weight, source[0], back)
        else:
            self.that(
                f"{case}, gradient", same_bits(grad._local_tensor, laid(weight, *source, order)._local_tensor)
            )
            self.that(f"{case}, its order", grad._spec.shard_order == x._spec.shard_order)
        return y


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Also of dtypes that torch cannot compare."""
    if one.numel() == 0 or one.dtype.itemsize > 8:
        return one.shape == other.shape
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.dtype.itemsize]
    return torch.equal(one.view(carrier), other.view(carrier))


def sections(context: Any, payload: Mapping[str, Any]) -> dict[str, list[str]]:
    return run(context, payload, Check, "reshard_rank_functions")


def over(*ranks: Any) -> DeviceMesh:
    """Made once: a mesh takes process groups, and all ranks to make it."""
    if ranks not in _MADE:
        _MADE[ranks] = DeviceMesh("cpu", torch.tensor(ranks))
    return _MADE[ranks]


_MADE: dict[tuple[Any, ...], DeviceMesh] = {}


# --- there and back ---------------------------------------------------------------------------------------------


def meshes(check: Check) -> None:
    """Disjoint, overlapping and equal sets of ranks, and subsets of the world."""
    first, last = over(0, 1), over(2, 3)
    for here, there in ((S0, R), (S0, S1), (R, S0), (S1, S1), (R, R)):
        check.moved("apart", (5, 6), (first, [here]), (last, [there]))
    check.moved("back", (5, 6), (last, [S0]), (first, [S1]))
    check.moved("turned", (4, 6), (over((0, 1)), [S0, S1]), (over((2,), (3,)), [S0, S1]))
    check.moved("turned", (4, 6), (over((0, 1)), [S1, R]), (over((2,), (3,)), [R, S0]))
    check.moved("one to three", (7, 2), (over(0), [R]), (over(1, 2, 3), [S0]))
    check.moved("three to one", (7, 2), (over(1, 2, 3), [S0]), (over(0), [S1]))
    for here, there in ((S0, S0), (S0, R), (R, S1), (S1, S0)):
        check.moved("overlap", (7, 4), (over(0, 1, 2), [here]), (over(1, 2, 3), [there]))
    square = over((0, 1), (2, 3))
    check.moved("the same", (6, 5), (square, [S0, S1]), (square, [S1, R]))
    check.moved("the same", (6, 5), (square, [S0, S1]), (square, [S0, S1]))
    check.moved("another shape", (6, 5), (square, [S0, S1]), (over(0, 1, 2, 3), [S1]))
    check.moved("permuted", (6, 5), (over((3, 1), (0, 2)), [S0, S1]), (over(2, 0, 3, 1), [S0]))
    check.moved("permuted", (6, 5), (over(1, 0), [S0]), (over(3, 2), [S0]))
    check.moved("part of the world", (6, 5), (over(1, 3), [S0]), (over(3, 2), [S1]))
    check.moved("one to one", (6, 5), (over(1), [R]), (over(3), [S1]))
    check.moved("three dims", (3, 4, 5), (square, [S2, S0]), (over(0, 1, 2), [S1]))


def sums(check: Check) -> None:
    first, last, square = over(0, 1), over(2, 3), over((0, 1), (2, 3))
    for there in (S0, S1, R):
        check.moved("a sum", (4, 5), (first, [P]), (last, [there]))
    for here, there in (((P, S0), (S0, S1)), ((S1, P), (R, S0)), ((P, P), (S0, S1)), ((P, R), (S0, S0))):
        check.moved("sums", (4, 6), (square, here), (square, there))
    check.moved("sums", (4, 6), (square, (P, P)), (over(1), [R]))
    check.moved("a sum", (), (first, [P]), (last, [R]))
    check.moved("a sum, permuted", (4, 6), (over(1, 0), [P]), (last, [S0]))
    check.moved("sums, permuted", (4, 6), (over((3, 1), (0, 2)), (P, P)), (square, (S0, S1)))
    x = laid(integers((4, 6)), square, (P, S0)).requires_grad_()
    meshweave.reshard(x, over(0, 1), [S0], context=check.context).sum().backward()
    check.lies("after sum()", x.grad, torch.ones(4, 6, dtype=x.dtype), square, (R, S0))


def permuted_gradients(check: Check) -> None:
    """They arrive in other placements on a mesh whose ranks do not ascend."""
    first, turned, weight = over(0, 1), over(1, 0), integers((4, 6), 2)
    x = laid(integers((4, 6)), first, [S0]).requires_grad_()
    y = meshweave.reshard(x, turned, [S0], context=check.context)
    for place in (S1, R, P):
        (grad,) = torch.autograd.grad(y, x, laid(weight, turned, [place]), retain_graph=True)
        check.lies(f"gradient in {place}", grad, weight, first, [S0])


def strided(check: Check) -> None:
    square, line = over((0, 1), (2, 3)), over(0, 1, 2)
    for here in ((SS(0, split_factor=2), S0), (SS(1, split_factor=2), S1), (SS(0, split_factor=2), R)):
        check.moved("strided", (8, 8), (square, here), (line, [S0]))
        check.moved("strided", (8, 8), (line, [S0]), (square, here))
    check.moved("strided", (8, 4), (square, (SS(0, split_factor=2), S0)), (square, (S0, S0)))
    check.moved("strided sum", (8, 4), (square, (P, SS(1, split_factor=2))), (line, [R]))
    turned = (ShardOrderEntry(1, (1, 0)),)
    check.moved("an order", (8, 8), (square, (S1, S1)), (line, [S1]), order=turned)
    check.moved("an uneven order", (7, 9), (square, (S1, S1)), (over(3, 2), [S0]), order=turned)


def odd(check: Check) -> None:
    """Scalars, tensors and shards without elements, negative dims, locals that lie the other way round."""
    first, last = over(0, 1), over(2, 3)
    check.moved("scalar", (), (first, [R]), (last, [R]))
    check.moved("scalar", (), (over((0, 1), (2, 3)), [R, R]), (over(1), [R]))
    check.moved("vector", (5,), (first, [S0]), (over(1, 2, 3), [S0]))
    for shape in ((0,), (0, 3), (3, 0), (1, 3), (2, 1)):
        check.moved("empty", shape, (first, [S0]), (over(1, 2, 3), [S0]))
        check.moved("empty", shape, (over(1, 2, 3), [S0]), (first, [R]))
    x = laid(integers((4, 6)), first, [S0])
    y = meshweave.reshard(x, last, [Shard(-1)], context=check.context)
    check.lies("a negative dim", y, integers((4, 6)), last, [S1])
    y = meshweave.reshard(x.t(), last, [S0], context=check.context)
    check.lies("a transposed view", y, integers((4, 6)).t(), last, [S0])
    check.that("nothing requires a gradient", not y.requires_grad)
    x = laid(integers((4, 6), 1, torch.float32), first, [S0])
    negated = compat.from_spec(torch._neg_view(-compat.local_tensor(x)), compat.spec_of(x))
    y = meshweave.reshard(negated, last, [S1], context=check.context)
    check.lies("a view that is negated", y, integers((4, 6), 1, torch.float32), last, [S1])
    x = laid(integers((4, 6)), over(1), [R])
    y = meshweave.reshard(x, over(2), [R], context=check.context)
    check.lies("ranks in neither", y, integers((4, 6)), over(2), [R])


def outside(check: Check) -> None:
    """What a user makes on ranks outside the source mesh."""
    first, last, rank = over(0, 1), over(2, 3), dist.get_rank()
    whole = integers((4, 6), 1, torch.float32)
    if rank in (0, 1):
        xs = [distribute_tensor(whole, first, [S0])] * 2
    else:
        by_hand = {"shape": whole.shape, "stride": whole.stride()}
        xs = [
            dtensor_empty(4, 6, dtype=torch.float32, device_mesh=first, placements=[S0]),
            DTensor.from_local(torch.empty(0), first, [S0], run_check=False, **by_hand),
        ]
    for number, x in enumerate(xs):
        check.lies(
            f"way {number}", meshweave.reshard(x, last, [S1], context=check.context), whole, last, [S1]
        )


def dtypes(check: Check) -> None:
    first, last = over(0, 1), over(1, 2, 3)
    names = (
        "float64 float32 bfloat16 float16 int64 int32 int16 int8 uint8 bool float8_e4m3fn float8_e5m2 uint16"
    )
    for name in (*names.split(), "uint32", "uint64", "complex64"):
        dtype = getattr(torch, name)
        for shape in ((5, 3), ()):
            whole = integers(shape).abs().to(dtype)
            place = [S0] if shape else [R]
            y = meshweave.reshard(laid_bytes(whole, first, place), last, place, context=check.context)
            check.that(f"{name}: {y.dtype}", y.dtype == dtype)
            wanted = laid_bytes(whole, last, place)._local_tensor
            check.that(
                f"{name} {shape}",
                y._local_tensor.shape == wanted.shape and same_bits(y._local_tensor, wanted),
            )


def laid_bytes(whole: Tensor, mesh: DeviceMesh, placements: Placements) -> DTensor:
    """As `laid`, also of dtypes that torch cannot index."""
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[whole.dtype.itemsize]
    local = laid(whole.view(carrier), mesh, placements)._local_tensor.view(whole.dtype)
    return DTensor(
        local, ShardSpec(mesh, tuple(placements)).torch_spec(whole.shape, whole.dtype), requires_grad=False
    )


def clusters(check: Check) -> None:
    """Plans for machines other than this one move the same values."""
    p3 = meshweave.load_cluster("p3.8xlarge")
    two = replace(p3, network=replace(p3.network, num_hosts=2, chips_per_host=2))
    four = replace(p3, network=replace(p3.network, num_hosts=4, chips_per_host=1))
    for name, cluster in (("two hosts", two), ("four hosts", four), ("the catalog", "dgx-h100")):
        for here, there in ((S0, R), (R, S0), (S0, S1)):
            check.moved(name, (37, 6), (over(0, 1), [here]), (over(2, 3), [there]), cluster=cluster)
            check.moved(name, (37, 6), (over(0, 2), [here]), (over(1, 2, 3), [there]), cluster=cluster)
        check.moved(name, (6, 5), (over(0), [R]), (over(0, 1, 2, 3), [R]), cluster=cluster)


POOL: list[tuple[Any, ...]] = [
    (0,), (3,), (0, 1), (2, 3), (3, 0), (1, 2, 3), (2, 0, 1), (0, 1, 2, 3), (3, 1, 0, 2),
    ((0, 1), (2, 3)), ((3, 1), (0, 2)), ((2,), (1,)), ((1, 3),),
]  # fmt: skip


def draws(check: Check) -> None:
    """Meshes, placements and shapes by lot, the same on all ranks."""
    lot = random.Random(11)
    for number in check.some(range(40), 8):
        source, target = over(*lot.choice(POOL)), over(*lot.choice(POOL))
        shape = [lot.randrange(10) for _ in range(lot.randrange(1, 4))]
        dims = [Shard(dim) for dim in range(len(shape))]
        here = [lot.choice([*dims, R, P]) for _ in range(source.ndim)]
        there = [lot.choice([*dims, R]) for _ in range(target.ndim)]
        check.moved(f"draw {number}", shape, (source, here), (target, there))
