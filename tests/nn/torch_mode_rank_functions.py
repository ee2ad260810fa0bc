"""What the ranks of test_torch_modes run: autocast, inference mode, torch.compile, and the default transport."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from matmul_rank_functions import S0, S1, Check, P, R, integers, placed, square
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import meshweave
from meshweave.nn.transports import resolve_transport


def autocast(check: Check) -> None:
    """Dtypes are those of torch's own product, and gradients those of the operands."""
    mesh = square()
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        a = placed(integers((8, 6), 1, dtype), mesh, (S0, R)).requires_grad_()
        b = placed(integers((6, 4), 2, dtype), mesh, (R, S1)).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = torch.ones(2, 2, dtype=dtype) @ torch.ones(2, 2, dtype=dtype)
            c = meshweave.matmul(a, b, (S0, S1), context=check.context)
            with meshweave.nn.universal_linear(context=check.context):
                y = torch.nn.functional.linear(a, b.t())
            local = meshweave.nn.matmul2d(
                torch.ones(2, 2, dtype=dtype), torch.ones(2, 2, dtype=dtype), mesh=mesh, shape=(4, 4, 4),
                context=check.context,
            )  # fmt: skip
        for name, result in (("matmul", c), ("linear", y), ("matmul2d", local)):
            check.that(f"{name} of {dtype} is {result.dtype}", result.dtype == expected.dtype)
        c.sum().backward()
        check.that(f"gradient of {dtype} is {a.grad.dtype}", a.grad.dtype == dtype and b.grad.dtype == dtype)


def inference(check: Check) -> None:
    """A kind of product first met under inference mode also runs outside, and the other way round."""
    mesh = square()
    for transport in ("messages", "auto"):
        for out in ((S1, S0), (R, R)):
            a, b = placed(integers((8, 6), 1), mesh, (S0, S1)), placed(integers((6, 12), 2), mesh, (S1, P))
            with torch.inference_mode():
                inside = meshweave.matmul(a, b, out, transport=transport, context=check.context)
            a.requires_grad_()
            outside = meshweave.matmul(a, b, out, transport=transport, context=check.context)
            check.that(f"{transport} to {out}", torch.equal(inside.to_local(), outside.to_local()))
            with torch.inference_mode():
                again = meshweave.matmul(a, b, out, transport=transport, context=check.context)
            check.that(f"{transport} to {out} again", torch.equal(inside.to_local(), again.to_local()))
    ones = torch.ones(2, 2, dtype=torch.int32)
    for number in range(2):
        with torch.inference_mode(number == 0):
            local = meshweave.nn.matmul2d(ones, ones, mesh=mesh, shape=(4, 4, 4), context=check.context)
        check.that(f"matmul2d {number}", bool((local == 4).all()))


def compiled(check: Check) -> None:
    """Products and layers stay whole in one graph, with the values and gradients of eager ones."""
    compare_with_eager(check, ("aot_eager",))
    compile_for_two_meshes(check)


def compile_for_two_meshes(check: Check) -> None:
    """Graphs for meshes of one shape and other ranks run products of their own."""
    a, b, meshes = (
        integers((8, 6), 1),
        integers((6, 4), 2),
        tuple(DeviceMesh("cpu", ranks) for ranks in ([[0, 1], [2, 3]], [[0, 2], [1, 3]])),
    )
    function = torch.compile(
        lambda a, b: meshweave.matmul(a, b, (S0, S1), context=check.context),
        backend="aot_eager",
        fullgraph=True,
    )
    for mesh in (*meshes, *meshes):
        c = function(placed(a, mesh, (S0, S1)), placed(b, mesh, (S0, S1)))
        check.equal(f"compiled on {mesh.mesh.tolist()}", c, a @ b)


def compiled_by_inductor(check: Check) -> None:
    """The same of each backend; inductor would sort products of shards of unequal sizes rank by rank."""
    compare_with_eager(check, ("eager", "inductor"))


def compare_with_eager(check: Check, backends: tuple[str, ...]) -> None:
    """Compare outputs, gradients and placements of a function with products in it, whole and compiled."""
    mesh = square()
    x, w = placed(integers((8, 6), 1), mesh, (S0, R)), placed(integers((6, 8), 2), mesh, (R, S1))
    layer, bias = placed(integers((7, 8), 3), mesh, (S0, S1)), placed(integers((7,), 4), mesh, (R, S0))
    local_a, local_b = integers((4, 3), 5 + mesh.get_rank()), integers((3, 5), 9 + mesh.get_rank())
    u = placed(integers((6, 4), 7), mesh, (S0, S1))
    tensors = [one.requires_grad_() for one in (x, w, layer, bias, local_a, local_b)]

    def function(x: Any, w: Any, layer: Any, bias: Any, a: Any, b: Any) -> tuple[DTensor, torch.Tensor]:
        y = meshweave.matmul(x.sin(), w, context=check.context)
        with meshweave.nn.universal_linear((S0, P), context=check.context):
            z = torch.nn.functional.linear(y, layer, bias)
        c = meshweave.nn.matmul2d(a * 2, b, mesh=mesh, shape=(8, 10, 6), slices=2, context=check.context)
        c = c + meshweave.matmul(u, u.t(), algorithm="meshslice", context=check.context).to_local().sum()
        return z * 2, c

    def run(function: Any) -> list[torch.Tensor]:
        for one in tensors:
            one.grad = None
        z, c = function(*tensors)
        torch.autograd.backward([z.full_tensor().sum(), c.sum()])
        grads = [one.grad for one in tensors]
        check.that("placements", [grad.placements for grad in grads[:4]] == lain)
        return [z.to_local(), c, *(grad.to_local() for grad in grads[:4]), *grads[4:]]

    lain = [one.placements for one in tensors[:4]]
    expected = run(function)
    for backend in backends:
        results = run(torch.compile(function, backend=backend, fullgraph=True))
        for number, (one, other) in enumerate(zip(results, expected, strict=True)):
            check.that(f"result {number} of {backend}", torch.allclose(one, other, rtol=1e-12))


def default(check: Check) -> None:
    """The ranks of a host share memory by default, also those of a mesh that is not all of them."""
    mesh = square()
    context = check.context
    check.that("all ranks", resolve_transport("auto", (0, 1, 2, 3), context) == "shared")
    pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))["tensor"]
    a, b = integers((4, 6), 1), integers((6, 8), 2)
    half = pair.get_local_rank()
    local_a = DTensor.from_local(a[:, 3 * half : 3 * half + 3], pair, [S1])
    local_b = DTensor.from_local(b[3 * half : 3 * half + 3], pair, [S0])
    c = meshweave.matmul(local_a, local_b, [R], context=context)
    check.that("a mesh of two", torch.equal(c.to_local(), a @ b))
    ranks = tuple(pair.mesh.tolist())
    check.that("two ranks", resolve_transport("auto", ranks, context) == "shared")
    generator = torch.Generator().manual_seed(context.rank or 0)
    x = DTensor.from_local(torch.randn(32, 64, generator=generator), mesh, (P, S1), run_check=False)
    y = DTensor.from_local(torch.randn(64, 48, generator=generator), mesh, (S0, P), run_check=False)
    outs = ((P, P), (R, R), (S0, R), (S1, S0), (P, S0))
    for out, stationary in check.some(itertools.product(outs, ("auto", "a", "b", "c")), 5):
        first = meshweave.matmul(x, y, out, stationary, context=context).to_local()
        same = [
            torch.equal(first, meshweave.matmul(x, y, out, stationary, context=context).to_local())
            for _ in range(8)
        ]
        check.that(f"bits of {out}, {stationary}", all(same))
