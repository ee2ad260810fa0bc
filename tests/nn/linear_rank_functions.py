"""More that the ranks of test_matmul run: gradients, linear layers, refusals, and ranks that disagree or die."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from matmul_rank_functions import (
    S0,
    S1,
    S2,
    SS,
    Check,
    P,
    Placements,
    R,
    global_value,
    integers,
    placed,
    square,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional as F

import meshweave
from meshweave.base.errors import MeshweaveError
from meshweave.execute.torch.context import TorchContext

# --- gradients ----------------------------------------------------------------------------------------------


def gradients(check: Check) -> None:
    mesh, whole_a, whole_b = square(), integers((5, 6), 1), integers((6, 7), 2)
    for of_a, of_b in check.some([(False, True), (False, False), (True, False), (True, True)], 3):
        a = placed(whole_a, mesh, (S0, P)).requires_grad_(of_a)
        b = placed(whole_b, mesh, (R, S1)).requires_grad_(of_b)
        check.product(f"needs {of_a} {of_b}", a, b, (S1, S0))
    with torch.no_grad():
        a = placed(whole_a, mesh, (S0, P)).requires_grad_()
        c = meshweave.matmul(a, placed(whole_b, mesh, (R, S1)), context=check.context)
        check.that("no_grad", not c.requires_grad)
    # A gradient that is expanded in memory, one that is transposed, one that is partial, and two that add up.
    losses = [
        ("sum", lambda c: c.sum()),
        ("local", lambda c: c.to_local().sum()),
        ("transposed", lambda c: (c.t() * placed(integers((7, 5), 4), c.device_mesh, (S1, S0))).sum()),
        ("twice", lambda c: c.sum() + 2 * c.sum()),
    ]
    for name, loss in losses:
        a, b = (
            placed(whole_a, mesh, (S0, S1)).requires_grad_(),
            placed(whole_b, mesh, (S1, S0)).requires_grad_(),
        )
        dense_a, dense_b = whole_a.clone().requires_grad_(), whole_b.clone().requires_grad_()
        loss(meshweave.matmul(a, b, (S0, S1), context=check.context)).backward()
        weight = {"transposed": integers((7, 5), 4).t(), "twice": torch.full((5, 7), 3.0)}.get(
            name, torch.ones(5, 7)
        )
        (dense_a @ dense_b * weight).sum().backward()
        check.equal(f"{name} A'", a.grad, dense_a.grad)
        check.equal(f"{name} B'", b.grad, dense_b.grad)
    a, b = placed(whole_a, mesh, (S0, S1)).requires_grad_(), placed(whole_b, mesh, (S1, S0)).requires_grad_()
    c = meshweave.matmul(a, b, (S0, S1), context=check.context)
    c.backward(placed(torch.ones(5, 7, dtype=c.dtype), mesh, (P, S0)))
    check.equal("a partial gradient", a.grad, torch.ones(5, 7, dtype=c.dtype) @ whole_b.t())
    c = meshweave.matmul(a, b, (S0, S1), context=check.context)
    check.refused(
        "a second derivative",
        "UnsupportedError",
        "differentiable once",
        lambda: torch.autograd.grad(c.sum(), a, create_graph=True),
    )


# --- linear layers ------------------------------------------------------------------------------------------


def under(check: Check, **options: Any) -> Any:
    return meshweave.nn.universal_linear(context=check.context, **options)


def biases(check: Check) -> None:
    """A bias of any placements for a result of any placements, forward and backward."""
    mesh, line = square(), init_device_mesh("cpu", (4,))
    x, w, bias, weight = (
        integers((2, 3, 6), 1),
        integers((5, 6), 2),
        integers((5,), 3),
        integers((2, 3, 5), 4),
    )
    dense = [one.clone().requires_grad_() for one in (x, w, bias)]
    expected = F.linear(*dense)
    expected.backward(weight)
    outs: list[Placements | None] = [
        None,
        (S0, S2),
        (S2, S2),
        (P, P),
        (S1, P),
        (R, S2),
        (SS(2, split_factor=2), R),
    ]
    lies: list[Placements] = [(R, R), (S0, R), (S0, S0), (P, S0), (P, P), (R, P)]
    cases = [(out, lies[at % 6]) for number, out in enumerate(outs) for at in (number, 2 * number + 3)]
    for number, (out, lie) in check.some(enumerate(cases), 11):
        x_, w_ = ((S0, R), (R, S0)) if number % 2 else ((S1, S2), (S0, S1))
        parts = [placed(x, mesh, x_), placed(w, mesh, w_), placed(bias, mesh, lie)]
        for one in parts:
            one.requires_grad_()
        with under(check, out=out):
            y = F.linear(*parts)
        case = f"bias {lie} -> {y.placements}"
        check.that(case, out is None or y.placements == tuple(out))
        check.equal(case, y, expected.detach())
        y.backward(placed(weight, mesh, [R if isinstance(p, Partial) else p for p in y.placements]))
        for name, one, whole in zip(("x", "w", "bias"), parts, dense, strict=True):
            like = tuple(R if isinstance(p, Partial) else p for p in one.placements)
            check.that(f"{case}: {name} lies {one.grad.placements}", one.grad.placements == like)
            check.equal(f"{case}: {name}'", one.grad, whole.grad)
    with under(check, out=(S0, P)):
        y = F.linear(placed(x, mesh, (S0, R)), placed(w, line, (S0,)), bias=placed(bias, line, (S0,)))
    check.equal("a bias on another mesh", y, expected.detach())


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.up, self.down = nn.Linear(6, 10, dtype=torch.float64), nn.Linear(10, 5, dtype=torch.float64)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


# The placements of x, of the weights and biases of both layers.
STYLES: dict[str, tuple[Placements, list[Placements]]] = {
    "megatron": ((S0, R), [(R, S0), (R, S0), (R, S1), (R, R)]),
    "fsdp": ((S0, S0), [(S0, S0), (S0, S0), (S0, S0), (S0, S0)]),
    "mixed": ((S0, S1), [(S1, S0), (R, S0), (S0, R), (S0, S0)]),
}


def training(check: Check) -> None:
    """Two steps of SGD of a model of torch's own layers equal those of the dense one."""
    mesh, xs, ys = square(), integers((2, 3, 7, 6), 1), integers((2, 3, 7, 5), 2)
    for style, (of_x, of_parameters) in check.some(STYLES.items(), 3):
        dense, model = Mlp(), Mlp()
        names = [name for name, _ in model.named_parameters()]
        for name, placements in zip(names, of_parameters, strict=True):
            layer = model.get_submodule(name.partition(".")[0])
            whole = dense.get_parameter(name).detach()
            setattr(layer, name.partition(".")[2], nn.Parameter(placed(whole, mesh, placements)))
        steps = [torch.optim.SGD(one.parameters(), lr=1e-3) for one in (dense, model)]
        for number in range(2):
            loss = ((dense(xs[number]) - ys[number]) ** 2).sum()
            loss.backward()
            with under(check):
                x = placed(xs[number], mesh, of_x)
                found = model(x)
                target = placed(ys[number], mesh, found.placements)
                found_loss = ((found - target) ** 2).sum()
            found_loss.backward()  # outside
            check.that(f"{style}: loss", torch.allclose(global_value(found_loss.reshape(1)), loss.detach()))
            for step in steps:
                step.step()
                step.zero_grad()
        for name in names:
            one, whole = model.get_parameter(name), dense.get_parameter(name)
            same = torch.allclose(global_value(one), whole.detach(), rtol=1e-12, atol=1e-12)
            check.that(f"{style}: {name} after two steps", same)


def scope(check: Check) -> None:
    """Where the context holds, and what it leaves alone."""
    mesh = square()
    x, w = placed(integers((4, 6), 1), mesh, (S0, R)), placed(integers((6, 6), 2), mesh, (R, S0))
    plain_x, plain_w = integers((4, 6), 1), integers((6, 6), 2)
    ours, theirs = (P, S1), F.linear(x, w).placements
    check.that("the placements tell who computed", theirs != ours)
    with under(check, out=ours):
        check.that("plain tensors", torch.equal(F.linear(plain_x, plain_w), plain_x @ plain_w.t()))
        with under(check, out=(R, R)):
            check.that("the inner one", F.linear(x, w).placements == (R, R))
        check.that("the outer one again", F.linear(x, w).placements == ours)
        check.that("products are DTensor's", (x @ w).placements != ours)
        for name, call in {
            "input": lambda: F.linear(plain_x, w),
            "weight": lambda: F.linear(x, plain_w),
            "bias": lambda: F.linear(x, w, plain_w[0]),
        }.items():
            check.refused(f"a plain {name}", "LayoutError", f"with a plain {name}: make every one", call)
        check.refused(
            "shapes",
            "LayoutError",
            "input of shape (4, 6) and weight of shape (6,)",
            lambda: F.linear(x, w[0]),
        )
        short = placed(integers((5,), 1), mesh, (R, R))
        check.refused(
            "bias", "LayoutError", "bias has shape (5,); it must be (6,)", lambda: F.linear(x, w, short)
        )
        half = w.to(torch.bfloat16)
        check.refused(
            "dtypes", "BindError", "input torch.float64 and weight torch.bfloat16", lambda: F.linear(x, half)
        )
    try:
        with under(check, out=ours):
            raise KeyError("left")
    except KeyError:
        pass
    check.that("after an exception", F.linear(x, w).placements == theirs)
    with under(check, out=ours, matmul=True):
        for name, c in {
            "@": x @ w,
            "matmul": torch.matmul(x, w),
            "mm": torch.mm(x, w),
            "method": x.matmul(w),
            "mm method": x.mm(w),
        }.items():
            check.that(f"{name}: {c.placements}", c.placements == ours)
            check.equal(name, c, plain_x @ plain_w)
        check.that("plain products", torch.equal(plain_x @ plain_w, torch.mm(plain_x, plain_w)))
        batch = x.view(1, 4, 6) @ w.view(1, 6, 6)
        check.that("products that are none of ours", isinstance(batch, DTensor))
    single, layer = x.to(torch.float32), placed(plain_w.float(), mesh, (S0, S1))
    with under(check, out=ours), torch.autocast("cpu", dtype=torch.bfloat16):
        check.that("autocast", F.linear(single, layer).dtype == torch.bfloat16)
        check.that("autocast of doubles", F.linear(x, w).dtype == torch.float64)


# --- refusals -----------------------------------------------------------------------------------------------


def refusals(check: Check) -> None:
    mesh = square()
    a, b = placed(integers((4, 6), 1), mesh, (S0, R)), placed(integers((6, 4), 2), mesh, (R, S1))
    half = DeviceMesh("cpu", torch.tensor([0, 1]))
    local = integers((6, 4), 2)
    away = DTensor.from_local(local, half, [R], run_check=False)
    yes_no = DTensor.from_local(local.bool(), mesh, [R, R], run_check=False)
    greatest = DTensor.from_local(local, mesh, [Partial("max"), R], run_check=False)
    stack = DTensor.from_local(local.view(1, 6, 4), mesh, [R, R], run_check=False)

    def call(*operands: Any, **how: Any) -> Any:
        return lambda: meshweave.matmul(*operands, context=check.context, **how)

    for case, kind, words, attempt in (
        ("plain", "LayoutError", "two DTensors, not DTensor and Tensor", call(a, local)),
        ("shapes", "LayoutError", "a of shape (4, 6) cannot be multiplied by b of shape (4, 6)", call(a, a)),
        ("dims", "LayoutError", "b of shape (1, 6, 4): (..., K) by (K, N)", call(a, stack)),
        ("dtypes", "BindError", "a torch.float64 and b torch.float32", call(a, b.float())),
        ("bool", "BindError", "b torch.bool", call(a, yes_no)),
        ("other ranks", "LayoutError", "must be on the same ranks", call(a, away)),
        ("reduction", "LayoutError", "has no counterpart in a layout", call(a, greatest)),
        ("stationary", "LayoutError", "stationary is 'd'; it must be", call(a, b, stationary="d")),
        (
            "transport",
            "UnsupportedError",
            "(did you mean 'shared'?); there are auto, messages, shared, mpi",
            call(a, b, transport="shard"),
        ),
        ("symmetric", "UnsupportedError", "needs CUDA", call(a, b, out=(S1, S0), transport="symmetric")),
        ("one placement", "LayoutError", "out is Shard(dim=0); it must be a sequence", call(a, b, S0)),
        ("too few", "LayoutError", "1 placements for the 2 dims", call(a, b, [S0])),
        ("no such dim", "LayoutError", "names dim 2 of a tensor of 2 dims", call(a, b, (S2, R))),
        ("no placements", "LayoutError", "has no counterpart", call(a, b, ("S0", "R"))),
        ("cluster", "DescriptionError", "cray", call(a, b, cluster="cray-1")),
        ("cluster file", "DescriptionError", "none.toml", call(a, b, cluster=Path("none.toml"))),
        (
            "limits",
            "LayoutError",
            "it must be a meshweave.algorithms.StageLimits",
            call(a, b, limits=[1, 2, 1]),
        ),
    ):
        check.refused(case, kind, words, attempt)
    check.product("after all these", a, b, (S1, S0))


# --- ranks that disagree, ranks that die --------------------------------------------------------------------


def disagreements(context: Any, payload: Mapping[str, Any]) -> list[str]:
    """What each mismatch says on this rank, and at the end what a product that all agree on gives."""
    mesh = square()
    ours = TorchContext(liveness=context.liveness, deadline_s=20)
    a, b = placed(integers((8, 6), 1), mesh, (S0, R)), placed(integers((6, 8), 2), mesh, (R, S1))
    wide = placed(integers((6, 9), 2), mesh, (R, S1))
    other = context.rank == 3
    said = []
    for first, second in (
        (((a, b, (S1, S0)), {}), ((a, b, (R, S0)), {})),
        (((a, b, (S0, R)), {}), ((a, b, (S0, S1)), {})),  # the one that asks for the latter needs nobody
        (((a, b, (S1, R)), {"stationary": "a"}), ((a, b, (S1, R)), {"stationary": "b"})),
        (((a, b, (P, S0)), {}), ((a, wide, (P, S0)), {})),
        (((a, b, (R, R)), {}), ((a, b, (R, R)), {"transport": "shared"})),
        (((a, b, (P, S1)), {}), ((a.float(), b.float(), (P, S1)), {})),
    ):
        operands, how = second if other else first
        try:
            meshweave.matmul(*operands, context=ours, **how)
            said.append("nothing")
        except MeshweaveError as error:
            said.append(f"{type(error).__name__}: {error}")
    c = meshweave.matmul(a, b, (S1, S0), context=ours)
    said.append(
        "right" if torch.equal(global_value(c), integers((8, 6), 1) @ integers((6, 8), 2)) else "wrong"
    )
    ours.close()
    return said


def dies(context: Any, payload: Mapping[str, Any]) -> None:
    """A rank is killed in the middle of a loop of products."""
    mesh = square()
    ours = TorchContext(liveness=context.liveness, deadline_s=20)
    a, b = placed(integers((64, 48), 1), mesh, (S0, S1)), placed(integers((48, 32), 2), mesh, (S1, S0))
    for turn in range(10**6):
        if context.rank == 2 and turn == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        meshweave.matmul(a, b, (S1, S0), transport=payload["transport"], context=ours)
