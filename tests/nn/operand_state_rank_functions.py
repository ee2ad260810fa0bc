"""What the ranks of test_operand_state run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from matmul_rank_functions import S0, S1, Check, R, integers, placed, square
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import meshweave


def stepped(one: DTensor, **how: bool) -> None:
    """Step by one kernel for all parameters, which counts no change of DTensors."""
    one.grad = torch.ones_like(one)
    torch.optim.AdamW([one], lr=0.5, **how).step()
    one.grad = None


CHANGES: dict[str, Callable[[DTensor], object]] = {
    "as a whole": lambda one: one.mul_(3),
    "in this rank's part": lambda one: one.to_local().mul_(3),
    "by foreach": partial(stepped, foreach=True),
    "by a fused step": partial(stepped, fused=True),
}


def leaf(shape: tuple[int, ...], mesh: DeviceMesh, *placements: object) -> DTensor:
    return placed(integers(shape, 1), mesh, placements).requires_grad_()  # type: ignore[arg-type]


def changed(check: Check) -> None:
    """A gradient would be of other operands than the product: autograd's error, however they are changed."""
    mesh, ring = square(), init_device_mesh("cpu", (4,))
    matmul = partial(meshweave.matmul, context=check.context)

    def linear(x: DTensor, w: DTensor) -> DTensor:
        with meshweave.nn.universal_linear(context=check.context):
            return torch.nn.functional.linear(x, w)

    scatter = partial(meshweave.nn.linear_reduce_scatter, context=check.context)
    gather = partial(meshweave.nn.all_gather_linear, context=check.context)
    cases: dict[str, Callable[[], tuple[DTensor, DTensor, Callable[..., Tensor]]]] = {
        "matmul": lambda: (leaf((8, 6), mesh, S0, R), leaf((6, 4), mesh, R, S1), matmul),
        "matmul of a view": lambda: (
            leaf((8, 6), mesh, S0, R), leaf((4, 6), mesh, R, S1), lambda a, b: matmul(a, b.t())
        ),
        "2D": lambda: (
            leaf((8, 6), mesh, S0, S1), leaf((6, 4), mesh, S0, S1), partial(matmul, algorithm="meshslice")
        ),
        "2D of a view": lambda: (
            leaf((8, 6), mesh, S0, S1),
            leaf((4, 6), mesh, S0, S1),
            lambda a, b: matmul(a, b.t(), algorithm="meshslice"),
        ),
        "linear": lambda: (leaf((8, 6), mesh, S0, R), leaf((4, 6), mesh, S0, R), linear),
        "reduce-scatter": lambda: (leaf((8, 8), ring, S1), leaf((4, 8), ring, S1), scatter),
        "all-gather": lambda: (leaf((8, 8), ring, S0), leaf((4, 8), ring, S0), gather),
    }  # fmt: skip
    for (name, case), (how, change) in ((case, one) for case in cases.items() for one in CHANGES.items()):
        a, b, product = case()
        c = product(a, b)
        with torch.no_grad():
            change(b)
        try:
            c.sum().backward()
        except RuntimeError as error:
            check.that(f"{name} {how}: {error}", "inplace" in str(error))
        else:
            check.that(f"{name} {how}: no error", False)


def harmless(check: Check) -> None:
    """What no gradient reads may change, and so may all once the backward pass has run."""
    mesh = square()
    for how, change in CHANGES.items():
        a, b = leaf((8, 6), mesh, S0, S1), placed(integers((6, 4), 2), mesh, (S0, S1))
        for algorithm in (None, "meshslice") if how == "as a whole" else (None,):
            c = meshweave.matmul(a, b, algorithm=algorithm, context=check.context)
            with torch.no_grad():
                change(a)
            c.sum().backward()
        both = leaf((6, 4), mesh, S0, S1)
        for _ in range(2):
            c = meshweave.matmul(a, both, context=check.context)
            c.sum().backward()
            with torch.no_grad():
                change(both)
        with torch.autograd.graph.save_on_cpu():
            c = meshweave.matmul(a, both * 1, context=check.context)
        c.sum().backward()
        check.that(how, both.grad is not None)


def outside(check: Check) -> None:
    """Who is not in the mesh is told so at once, and those in it go on."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    first = DeviceMesh("cpu", [0, 1])
    wide = DeviceMesh("cpu", [[0, 1]])
    is_in, rank = first.get_coordinate() is not None, dist.get_rank()
    check.that("the mesh of all", mesh.get_coordinate() is not None)

    def part(shape: tuple[int, ...]) -> Tensor:
        return torch.ones(shape) if is_in else torch.empty(0)

    def on(shape: tuple[int, int], dim: int, mesh: DeviceMesh = first) -> DTensor:
        local = (shape[0] // 2, shape[1]) if dim == 0 else (shape[0], shape[1] // 2)
        placements = [S0 if dim == 0 else S1] if mesh.ndim == 1 else [S0, S1]
        size = torch.Size(shape)
        return DTensor.from_local(
            part(local), mesh, placements, run_check=False, shape=size, stride=(shape[1], 1)
        )

    def linear() -> DTensor:
        with meshweave.nn.universal_linear(context=check.context):
            return torch.nn.functional.linear(on((8, 6), 0), on((4, 6), 0))

    nn, context = meshweave.nn, check.context
    calls: dict[str, Callable[[], Tensor]] = {
        "matmul": lambda: meshweave.matmul(on((8, 6), 0), on((6, 4), 1), context=context),
        "matmul of a 2D mesh": lambda: meshweave.matmul(
            on((8, 6), 1, wide), on((6, 4), 1, wide), algorithm="meshslice", context=context
        ),
        "matmul2d": lambda: nn.matmul2d(
            part((8, 3)), part((6, 2)), mesh=wide, shape=(8, 4, 6), context=context
        ),
        "linear": linear,
        "linear_reduce_scatter": lambda: nn.linear_reduce_scatter(
            on((8, 6), 1), on((4, 6), 1), context=context
        ),
        "all_gather_linear": lambda: nn.all_gather_linear(
            part((4, 6)), part((2, 6)), device_mesh=first, context=context
        ),
    }
    for name, call in calls.items():
        if is_in:
            check.that(f"{name} in the mesh", call().numel() > 0)
        else:
            check.refused(name, "LayoutError", f"rank {rank} is not in", call)


def fused_autocast(check: Check) -> None:
    """Fused layers have the dtypes of a linear layer, and gradients those of the operands."""
    ring = init_device_mesh("cpu", (4,))
    for name, one in (("linear_reduce_scatter", S1), ("all_gather_linear", S0)):
        for dtype in (torch.float32, torch.bfloat16):
            x = placed(integers((8, 8), 1, dtype), ring, (one,)).requires_grad_()
            weight = placed(integers((4, 8), 2, torch.float32), ring, (one,)).requires_grad_()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = getattr(meshweave.nn, name)(x, weight, context=check.context)
            check.that(f"{name} of {dtype} is {y.dtype}", y.dtype == torch.bfloat16)
            y.sum().backward()
            check.that(f"gradients of {name}", (x.grad.dtype, weight.grad.dtype) == (dtype, torch.float32))
