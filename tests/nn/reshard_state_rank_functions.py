"""More that the ranks of test_reshard run: gradients, state dicts, refusals, and ranks that disagree or die."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from reshard_rank_functions import (
    S0,
    S1,
    S2,
    SS,
    Check,
    P,
    Placements,
    R,
    as_torch_lays,
    integers,
    laid,
    over,
)
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

import meshweave
from meshweave.base.errors import MeshweaveError
from meshweave.execute.torch.context import TorchContext
from meshweave.nn.shard_spec import ShardSpec

# --- gradients --------------------------------------------------------------------------------------------------


def gradients(check: Check) -> None:
    """Of functions on the destination, which its outsiders call, too, or not."""
    first, last = over(0, 1), over(2, 3)
    whole, weight = integers((4, 6)), integers((4, 6), 2)
    ones = torch.ones_like(whole)

    def forward() -> tuple[DTensor, DTensor]:
        x = laid(whole, first, [S0]).requires_grad_()
        return x, meshweave.reshard(x, last, [S1], context=check.context)

    for name, loss, expected in (
        ("sum", lambda y: y.sum(), ones),
        ("weighted", lambda y: (y * laid(weight, last, [S1])).sum(), weight),
        ("redistributed", lambda y: (y.redistribute(last, [S0]) * laid(weight, last, [S0])).sum(), weight),
        ("transposed", lambda y: (y.t() * laid(weight.t().contiguous(), last, [S0])).sum(), weight),
        ("twice", lambda y: y.sum() + 2 * (y * y).sum(), ones + 4 * whole),
    ):
        x, y = forward()
        loss(y).backward()
        check.lies(name, x.grad, expected, first, [S0])
        x, y = forward()
        (loss(y) if dist.get_rank() in (2, 3) else y.sum()).backward()
        check.lies(f"{name}, the sources just sum", x.grad, expected, first, [S0])
    x, y = forward()
    if dist.get_rank() in (2, 3):
        (y.to_local() * as_torch_lays(weight, last, [S1])).sum().backward()
    else:
        y.backward(torch.empty_like(y))
    check.lies("of local parts", x.grad, weight, first, [S0])
    for place in (P, R, S0):
        x, y = forward()
        y.backward(laid(weight, last, [place]))
        check.lies(f"a gradient placed {place}", x.grad, weight, first, [S0])
    x, y = forward()
    z = meshweave.reshard(3 * y, over(1, 2), [R], context=check.context)
    z.sum().backward()
    check.lies("two in a row", x.grad, 3 * ones, first, [S0])
    x, y = forward()
    (grad,) = torch.autograd.grad((y * y * y).sum(), x, create_graph=True)
    check.lies("the first derivative", grad.detach(), 3 * whole**2, first, [S0])
    (second,) = torch.autograd.grad((grad * laid(weight, first, [S0])).sum(), x)
    check.lies("the second derivative", second, 6 * whole * weight, first, [S0])
    with torch.no_grad():
        check.that("no_grad", not forward()[1].requires_grad)
    for there in ((SS(0, split_factor=2), S0), (S0, S1)):
        square = over((0, 1), (2, 3))
        x = laid(integers((8, 4)), first, [S0]).requires_grad_()
        y = meshweave.reshard(x, square, there, context=check.context)
        y.backward(laid(integers((8, 4), 2), square, (S1, P)))
        check.lies(f"a sum as gradient of {there}", x.grad, integers((8, 4), 2), first, [S0])


# --- state dicts ------------------------------------------------------------------------------------------------


def state_of() -> tuple[dict[str, Tensor], dict[str, DTensor], dict[str, Placements]]:
    """Two stages of a model, on two meshes, and where all of it shall lie."""
    dense = {
        "up.weight": integers((6, 5), 1, torch.float32),
        "down.weight": integers((5, 6), 2, torch.bfloat16),
        "norm.scale": integers((5,), 3, torch.float64),
        "mask": integers((4, 4), 4) > 0,
        "step": torch.tensor(17),
        "a.last": integers((3, 4, 2), 5, torch.float32),
        "bytes": integers((9,), 6).abs().to(torch.uint8),
        "none": integers((0, 3), 7),
    }
    first, last = over(0, 1), over((2,), (3,))
    places: dict[str, tuple[DeviceMesh, Placements]] = {
        "up.weight": (first, [S0]),
        "down.weight": (last, [S1, R]),
        "norm.scale": (first, [P]),
        "mask": (last, [R, S0]),
        "step": (first, [R]),
        "a.last": (last, [S2, S0]),
        "bytes": (first, [S0]),
        "none": (first, [S1]),
    }
    wanted = {name: [S0 if whole.ndim else R] for name, whole in dense.items()} | {"a.last": [Shard(-2)]}
    return dense, {name: laid(whole, *places[name]) for name, whole in dense.items()}, wanted


def states(check: Check) -> None:
    dense, state, wanted = state_of()
    target = over(1, 2, 3)
    counted = wanted | {"a.last": [S1]}

    def right(case: str, found: dict[str, DTensor]) -> None:
        check.that(f"{case}: order", list(found) == list(state))
        for name, whole in dense.items():
            check.lies(f"{case}: {name}", found[name], whole, target, counted[name])

    for _ in range(2):
        right("state", meshweave.nn.reshard_state_dict(state, target, wanted, context=check.context))
    turned = dict(reversed(state.items())) if dist.get_rank() == 1 else state  # each has its own order
    found = meshweave.nn.reshard_state_dict(
        turned, target, lambda name, _: wanted[name], context=check.context
    )
    check.that("its own order", list(found) == list(turned))
    right("a function", {name: found[name] for name in state})
    into = {
        name: laid(torch.zeros_like(dense[name]), target, counted[name])
        for name in ("up.weight", "step", "mask")
    }
    lie = {name: one._local_tensor.data_ptr() for name, one in into.items()}
    parameter = torch.nn.Parameter(into["up.weight"])
    into["up.weight"] = parameter
    found = meshweave.nn.reshard_state_dict(state, target, wanted, into=into, context=check.context)
    right("into", found)
    check.that("the same tensors", all(found[name] is one for name, one in into.items()))
    check.that(
        "the same memory", all(one._local_tensor.data_ptr() == lie[name] for name, one in into.items())
    )
    across = laid(torch.zeros(6, 5), target, [S0])
    if across._local_tensor.numel():
        across = DTensor(across._local_tensor.t().contiguous().t(), across._spec, requires_grad=False)
    some = {"up.weight": state["up.weight"]}
    meshweave.nn.reshard_state_dict(some, target, wanted, into={"up.weight": across}, context=check.context)
    same = torch.equal(across._local_tensor, as_torch_lays(dense["up.weight"], target, [S0]))
    check.that("into what lies the other way round", same)
    check.that("nothing", meshweave.nn.reshard_state_dict({}, target, {}, context=check.context) == {})
    for extra in (4096, 10**6):
        found = meshweave.nn.reshard_state_dict(
            state, target, wanted, extra_bytes=extra, context=check.context
        )
        right(f"{extra} bytes", found)
    # Many small messages instead of a few large ones.
    whole, side = integers((64, 640)), over(2, 3)
    big = {"big": laid(whole, over(0, 1), [S0])}
    for extra in (10_000, 60_000):
        found = meshweave.nn.reshard_state_dict(
            big, side, {"big": [S1]}, extra_bytes=extra, context=check.context
        )
        check.lies(f"{extra} bytes for all", found["big"], whole, side, [S1])
    check.refused(
        "too little",
        "LayoutError",
        "extra_bytes is 100, and rank",
        lambda: meshweave.nn.reshard_state_dict(
            big, side, {"big": [S1]}, extra_bytes=100, context=check.context
        ),
    )


def state_refusals(check: Check) -> None:
    _, state, wanted = state_of()
    target = over(1, 2, 3)
    one = {"up.weight": state["up.weight"]}

    def call(given: Mapping[str, Any], placements: Any = wanted, **how: Any) -> Any:
        return lambda: meshweave.nn.reshard_state_dict(
            given, target, placements, context=check.context, **how
        )

    short = laid(torch.zeros(6, 4), target, [S0])
    for case, words, attempt in (
        (
            "plain",
            "up.weight is a Tensor, and the state has no DTensor that says which ranks have it: distribute",
            call({"up.weight": torch.ones(6, 5)}),
        ),
        ("missing", "there are no placements for up.weight", call(one, {"up.wight": [S0]})),
        (
            "placements",
            "up.weight: placements: Shard(dim=2) names dim 2",
            call(one, {"up.weight": [S2]}),
        ),
        ("limit", "extra_bytes is -1", call(one, extra_bytes=-1)),
        ("unknown", "into has up, which is not in the state", call(one, into={"up": short})),
        (
            "shape",
            "into has up.weight of torch.float32 and shape (6, 4)",
            call(one, into={"up.weight": short}),
        ),
        ("plain into", "into has a Tensor for up.weight", call(one, into={"up.weight": torch.ones(2, 5)})),
    ):
        check.refused(case, "LayoutError", words, attempt)
    # Memory that is read and written at once.
    first = over(0, 1)
    source = {"w": laid(integers((4, 3), 1), first, [S0])}

    def in_place() -> Any:
        return meshweave.nn.reshard_state_dict(source, first, {"w": [S1]}, into=source, context=check.context)

    check.refused("placed otherwise", "LayoutError", "into has w of torch.float64 and shape (4, 3)", in_place)
    view = DTensor(
        source["w"]._local_tensor,
        ShardSpec(first, (S0,)).torch_spec((4, 3), torch.float64),
        requires_grad=False,
    )

    def on_itself() -> Any:
        into = {"w": view}
        return meshweave.nn.reshard_state_dict(source, first, {"w": [S0]}, into=into, context=check.context)

    if dist.get_rank() in (0, 1):
        words = "w of into lies in the memory of w, which is read"
        check.refused("on itself", "LayoutError", words, on_itself)
    else:
        check.that("on itself, without a part", on_itself() == {"w": view})


# --- plain tensors and optimizer states -------------------------------------------------------------------------


def plain(check: Check) -> None:
    """Plain tensors arrive as plain tensors on the destination, from all source meshes or one."""
    first, last, rank = over(0, 1), over(2, 3), dist.get_rank()
    whole = integers((4, 3), 1)
    steps = {"step": torch.tensor(7.0), "mask": integers((3, 2), 2) > 0, "count": torch.tensor(3)}
    for case, here, there in (
        ("apart", first, last),
        ("overlap", first, over(1, 2, 3)),
        ("same", first, first),
    ):
        mine = steps if rank in (0, 1) else {name: torch.zeros_like(one) for name, one in steps.items()}
        for _ in range(2):
            state = {"w": laid(whole, here, [S0])} | mine
            arrived = meshweave.nn.reshard_state_dict(state, there, {"w": [S1]}, context=check.context)
            check.that(f"{case}: order", list(arrived) == list(state))
            check.lies(f"{case}: w", arrived["w"], whole, there, [S1])
            for name, expected in steps.items():
                got = arrived[name]
                check.that(
                    f"{case}: {name} is plain", not isinstance(got, DTensor) and got.dtype == expected.dtype
                )
                is_there = rank in there.mesh.tolist()
                check.that(
                    f"{case}: {name} is {got}", torch.equal(got, expected) if is_there else not got.numel()
                )
    stages = {"a": laid(whole, first, [S0]), "b": laid(whole, over(1, 2), [S0]), "step": torch.tensor(5)}
    into = {"step": torch.tensor(0)}
    arrived = meshweave.nn.reshard_state_dict(
        stages, over(3), lambda name, _: [R], into=into, context=check.context
    )
    check.lies("of two stages", arrived["b"], whole, over(3), [R])
    check.that("into", rank != 3 or (arrived["step"] is into["step"] and into["step"].item() == 5))
    state = {"w": laid(whole, first, [S0]), "step": torch.tensor(rank)}
    words = "must be the same on all source ranks, and differs between rank 0 and rank 1"

    def different() -> Any:
        return meshweave.nn.reshard_state_dict(state, last, {"w": [S1]}, context=check.context)

    for _ in range(2):
        check.refused("different values", "BindError", words, different)
    for case, words, given, placements in (
        ("sharded", "step is a plain tensor, which arrives whole", state, {"w": [S1], "step": [S0]}),
        (
            "another type",
            "step is a set; a state dict has tensors, numbers",
            state | {"step": {1}},
            {"w": [S1]},
        ),
        (
            "twice",
            "the state has two tensors named w.v",
            {"w": {"v": state["w"]}, "w.v": state["w"]},
            {"w.v": [S1]},
        ),
    ):

        def refused(given: Any = given, placements: Any = placements) -> Any:
            return meshweave.nn.reshard_state_dict(given, last, placements, context=check.context)

        check.refused(case, "LayoutError", words, refused)


def optimizer(check: Check) -> None:
    """The state of AdamW after two steps, as torch gives it, from four ranks to two."""
    four = over(0, 1, 2, 3)
    for case, target in (("a part", over(0, 1)), ("permuted", over(3, 1))):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 4)).to(torch.bfloat16)
        for layer in model:
            for name, one in list(layer.named_parameters()):
                layer.register_parameter(
                    name, torch.nn.Parameter(distribute_tensor(one.detach(), four, [S0]))
                )
        adam = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        for seed in range(2):
            for one in model.parameters():
                one.grad = distribute_tensor(integers(one.shape, seed, torch.bfloat16), four, [S0])
            adam.step()
        state = get_optimizer_state_dict(model, adam)
        whole = {
            name: {key: one.full_tensor() if isinstance(one, DTensor) else one for key, one in each.items()}
            for name, each in state["state"].items()
        }
        arrived = meshweave.nn.reshard_state_dict(state, target, lambda name, _: [S0], context=check.context)
        check.that(f"{case}: groups", arrived["param_groups"] == state["param_groups"])
        for name, each in whole.items():
            for key, expected in each.items():
                got = arrived["state"][name][key]
                if key == "step":
                    is_there = dist.get_rank() in target.mesh.tolist()
                    same = got.dtype == expected.dtype and (torch.equal(got, expected) or not is_there)
                    check.that(f"{case}: step of {name} is {got}", same and not isinstance(got, DTensor))
                else:
                    check.lies(f"{case}: {name} {key}", got, expected, target, [S0])


# --- refusals ---------------------------------------------------------------------------------------------------


def refusals(check: Check) -> None:
    first, last = over(0, 1), over(2, 3)
    x = laid(integers((4, 6)), first, [S0])
    wide = laid(integers((4, 6)).to(torch.complex128), first, [S0])
    greatest = DTensor(
        laid(integers((4, 6)), first, [R])._local_tensor,
        ShardSpec(first, (Partial("max"),)).torch_spec((4, 6), x.dtype),
        requires_grad=False,
    )

    def call(tensor: Any, mesh: Any, placements: Any, **how: Any) -> Any:
        return lambda: meshweave.reshard(tensor, mesh, placements, context=check.context, **how)

    for case, kind, words, attempt in (
        (
            "plain",
            "LayoutError",
            "reshard takes a DTensor, not a Tensor: distribute_tensor(",
            call(x._local_tensor, last, [S0]),
        ),
        ("no mesh", "LayoutError", "device_mesh is a list; it must be a DeviceMesh", call(x, [2, 3], [S0])),
        (
            "one placement",
            "LayoutError",
            "placements is Shard(dim=0); it must be a sequence",
            call(x, last, S0),
        ),
        ("too many", "LayoutError", "2 placements for the 1 dims", call(x, last, [S0, R])),
        ("no such dim", "LayoutError", "names dim 2 of a tensor of 2 dims", call(x, last, [S2])),
        ("no such negative dim", "LayoutError", "names dim -3", call(x, last, [Shard(-3)])),
        ("no placement", "LayoutError", "has no counterpart", call(x, last, ["S0"])),
        ("a sum", "LayoutError", "is a sum yet to be made", call(x, last, [P])),
        ("reduction", "LayoutError", "has no counterpart in a layout", call(greatest, last, [R])),
        (
            "dtype",
            "BindError",
            "torch.complex128 is no dtype that reshard moves: float64,",
            call(wide, last, [R]),
        ),
        ("cluster", "DescriptionError", "cray", call(x, last, [R], cluster="cray-1")),
        ("chips", "LayoutError", "do not fit the 1 chips", call(x, last, [R], cluster="p3.8xlarge:1")),
    ):
        check.refused(case, kind, words, attempt)
    # A mistake of some ranks: the others are told, for it is the first reshard of its kind.
    is_mine = dist.get_rank() in (0, 1)
    tall = laid(integers((9, 6)), first, [S0])
    wrong = DTensor(torch.zeros(3, 6, dtype=x.dtype), tall._spec, requires_grad=False) if is_mine else tall
    said = (
        ("LayoutError", "the tensor is (3, 6) on rank")
        if is_mine
        else ("BindError", "rank 0 refuses reshard of 9x6: LayoutError: the tensor is (3, 6) on rank")
    )
    check.refused("a local part", *said, call(wrong, last, [S1]))
    check.moved("after all these", (4, 6), (first, [S0]), (last, [S1]))


# --- ranks that disagree, ranks that die ------------------------------------------------------------------------


def disagreements(context: Any, payload: Mapping[str, Any]) -> list[str]:
    """What each mismatch says on this rank, after what a reshard says that all agree on."""
    ours = TorchContext(liveness=context.liveness, deadline_s=20)
    first, last, other = over(0, 1), over(2, 3), context.rank == 3
    x, wide = laid(integers((4, 6)), first, [S0]), laid(integers((4, 9)), first, [S0])
    turned, single = laid(integers((4, 6)), first, [S1]), laid(integers((4, 6)).float(), first, [S0])
    wants = laid(integers((4, 6)), first, [S0]).requires_grad_()
    target = over(1, 3)
    said = []

    def attempt(call: Any) -> None:
        try:
            call()
            said.append("nothing")
        except MeshweaveError as error:
            said.append(f"{type(error).__name__}: {error}")

    for one, another in (
        ((x, last, [S1]), (x, last, [S0])),
        ((x, last, [S1]), (wide, last, [S1])),
        ((x, last, [S1]), (turned, last, [S1])),
        ((x, last, [S1]), (single, last, [S1])),
        ((x, last, [S1]), (wants, last, [S1])),
        ((x, last, [S1]), (x, last, [S2])),
        ((x, last, [S1]), (x, last, [S1, R])),
    ):
        attempt(lambda asked=another if other else one: meshweave.reshard(*asked, context=ours))
    _, state, wanted = state_of()
    fewer = {name: one for name, one in state.items() if name != "step"}
    attempt(
        lambda: meshweave.nn.reshard_state_dict(
            fewer if other else state, over(1, 2, 3), wanted, context=ours
        )
    )
    y = meshweave.reshard(x, last, [S1], context=ours)
    said.append(
        "right" if torch.equal(y._local_tensor, as_torch_lays(integers((4, 6)), last, [S1])) else "wrong"
    )
    # The last one: afterwards ranks are out of step.
    attempt(lambda: meshweave.reshard(x, target if other else last, [S0], context=ours))
    ours.close()
    return said


def dies(context: Any, payload: Mapping[str, Any]) -> None:
    """A rank is killed in the middle of a loop of reshards there and back."""
    ours = TorchContext(liveness=context.liveness, deadline_s=20)
    x = laid(integers((64, 48)), over(0, 1), [S0]).requires_grad_()
    for turn in range(10**6):
        if context.rank == 2 and turn == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        meshweave.reshard(x, over(2, 3), [S1], context=ours).sum().backward()
