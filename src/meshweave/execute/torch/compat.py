"""The private names of torch that meshweave uses, each behind one documented function.

Only this module and its parts `compat_*` touch names of torch that begin with an underscore, or replace functions.
`tests/execute/test_compat.py` has a test per function, which fails on a torch where what the function relies on
has changed; it has run with torch 2.13, and the names were compared with the sources of torch 2.9. A name that is
gone raises an UnsupportedError that gives the version of torch.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshweave.base.errors import UnsupportedError

if TYPE_CHECKING:  # more than a second to import, and programs run without DTensors
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

CHECKED_VERSIONS = "2.9 and 2.13"
"""The releases of torch that the functions of this module were checked with."""

DTensorSpec = Any
"""What torch keeps with a DTensor: mesh, placements, global shape and strides. Hashable; equal specs are equal."""

ShardOrder = tuple[tuple[int, tuple[int, ...]], ...]
"""(tensor dim, mesh dims in the order in which they shard it), as `DTensorSpec.shard_order` has it."""


@cache
def _private(module: str, name: str) -> Any:
    """Return a name of a module of torch, imported at first use. Raises UnsupportedError where there is none."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        raise _missing(f"{module}.{name}") from None


def _missing(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"torch {torch.__version__} has no {what}; meshweave was checked with torch {CHECKED_VERSIONS}"
    )


# --- imports ----------------------------------------------------------------------------------------------------


def import_all_of_dtensor() -> None:
    """Import what torch imports at the first use of a DTensor, `torch._dynamo` too; takes 1 to 2 s of a core."""
    importlib.import_module("torch.distributed.tensor")
    importlib.import_module("torch._dynamo")


# --- DTensor ----------------------------------------------------------------------------------------------------

_SPEC = "torch.distributed.tensor._dtensor_spec"


def local_tensor(tensor: DTensor) -> Tensor:
    """Return this rank's local tensor of a DTensor, detached: the same memory, after a wait if it is in transfer.

    Relies on `DTensor._local_tensor` and `_functional_collectives.AsyncCollectiveTensor` (torch 2.9 and 2.13).
    The public `to_local` costs an autograd node. Raises UnsupportedError where either is gone.
    """
    try:
        local: Tensor = tensor._local_tensor
    except AttributeError:
        raise _missing("DTensor._local_tensor") from None
    if type(local) is not Tensor and isinstance(
        local, _private("torch.distributed._functional_collectives", "AsyncCollectiveTensor")
    ):
        local = local.wait()
    return local.detach() if local.requires_grad else local


def local_tensors(values: Iterable[Any]) -> list[Any]:
    """Return the values in order, each DTensor among them replaced by its `local_tensor`."""
    from torch.distributed.tensor import DTensor

    made = []
    for value in values:
        if isinstance(value, DTensor):
            local: Any = getattr(value, "_local_tensor", None)  # where it is gone `local_tensor` says so
            value = local if type(local) is Tensor and not local.requires_grad else local_tensor(value)
        made.append(value)
    return made


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy `sources[i]` into `targets[i]`, of equal shape, for all `i` by one call.

    Relies on `torch._foreach_copy_` (torch 2.9 and 2.13). Raises UnsupportedError where it is gone.
    """
    if targets:
        _private("torch", "_foreach_copy_")(list(targets), list(sources))


def add_each(sums: Sequence[Tensor], terms: Sequence[Tensor]) -> None:
    """Add `terms[i]` to `sums[i]`, of equal shape, in place, for all `i` by one call.

    Relies on `torch._foreach_add_` (torch 2.9 and 2.13). Raises UnsupportedError where it is gone.
    """
    if sums:
        _private("torch", "_foreach_add_")(list(sums), list(terms))


def views_of(flat: Tensor, alike: Sequence[Tensor]) -> list[Tensor]:
    """Return consecutive views of the 1-D tensor `flat`, view i with the shape of `alike[i]`.

    Relies on `torch._utils._unflatten_dense_tensors` (torch 2.9 and 2.13). Raises UnsupportedError where it is
    gone.
    """
    return list(_private("torch._utils", "_unflatten_dense_tensors")(flat, alike))


def spec_of(tensor: DTensor) -> DTensorSpec:
    """Return the DTensorSpec of a DTensor, hashable and equal for DTensors of one layout, shape and dtype.

    Relies on `DTensor._spec` (torch 2.9 and 2.13). Raises UnsupportedError where it is gone.
    """
    try:
        return tensor._spec
    except AttributeError:
        raise _missing("DTensor._spec") from None


def make_spec(
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    dtype: torch.dtype,
    shard_order: ShardOrder | None = None,
) -> DTensorSpec:
    """Return the DTensorSpec of a row-major tensor of global `shape`.

    Args:
        shard_order: the order in which mesh dims shard each tensor dim; None for from left to right.

    Relies on `_dtensor_spec.DTensorSpec(mesh, placements, tensor_meta=, shard_order=)`, `TensorMeta(shape, stride,
    dtype)` (torch 2.9 and 2.13) and `ShardOrderEntry(tensor_dim, mesh_dims)` (2.13; 2.9 knows no order).

    Raises:
        UnsupportedError: a name is gone, or `shard_order` was given and this torch has none.
    """
    strides = torch.empty(tuple(shape), device="meta").stride()
    meta = _private(_SPEC, "TensorMeta")(torch.Size(shape), strides, dtype)
    options = {}
    if shard_order is not None:
        entry = _private(_SPEC, "ShardOrderEntry")
        options["shard_order"] = tuple(entry(dim, mesh_dims) for dim, mesh_dims in shard_order)
    try:
        return _private(_SPEC, "DTensorSpec")(mesh, tuple(placements), tensor_meta=meta, **options)
    except TypeError as error:
        raise _missing(f"DTensorSpec(mesh, placements, tensor_meta=, shard_order=) ({error})") from None


def from_spec(local: Tensor, spec: DTensorSpec) -> DTensor:
    """Return the DTensor with this rank's local tensor `local` and layout `spec`; nothing is checked or sent.

    It shares the memory of `local` and requires no gradient; autograd does not reach `local`, as it does with
    `DTensor.from_local`, which takes no shard order. Relies on `DTensor.__new__(DTensor, local, spec,
    requires_grad=)` (torch 2.9 and 2.13). `DTensor.__init__` does nothing, and takes as long again.

    Raises:
        UnsupportedError: DTensor takes other arguments.
    """
    kind = _private("torch.distributed.tensor", "DTensor")
    try:
        return kind.__new__(kind, local, spec, requires_grad=False)
    except TypeError as error:
        raise _missing(f"DTensor.__new__(DTensor, local, spec, requires_grad=) ({error})") from None


def apply_directly(function: type[torch.autograd.Function], *given: Any) -> Any:
    """Return the result of an autograd function, as its `apply` does.

    `Function.apply` looks at each argument for wrappers of functorch first. Where no transform of functorch is
    active this is left out, by `torch._C._FunctionBase.apply` (torch 2.9 and 2.13).
    """
    direct = getattr(super(torch.autograd.Function, function), "apply", None)
    is_transformed = getattr(torch._C, "_are_functorch_transforms_active", None)
    if direct is None or is_transformed is None or is_transformed():
        return function.apply(*given)
    return direct(*given)


def plain_functions() -> contextlib.AbstractContextManager[None]:
    """Return a context in which functions of torch do not call `__torch_function__` of tensor subclasses.

    It is `torch._C.DisableTorchFunctionSubclass` (torch 2.9 and 2.13), which torch's notes on extending it name
    for this use. Raises UnsupportedError where it is gone.
    """
    plain: contextlib.AbstractContextManager[None] = _private("torch._C", "DisableTorchFunctionSubclass")()
    return plain


def is_traced(tensor: Tensor) -> bool:
    """Return whether a tensor has no data because torch only traces the computation (fake or functional tensor).

    Relies on `torch._subclasses.fake_tensor.FakeTensor` and `functional_tensor.FunctionalTensor` (torch 2.9 and
    2.13). Raises UnsupportedError where either is gone.
    """
    if type(tensor) is Tensor:
        return False
    subclasses = "torch._subclasses"
    fake = _private(f"{subclasses}.fake_tensor", "FakeTensor")
    return isinstance(tensor, (fake, _private(f"{subclasses}.functional_tensor", "FunctionalTensor")))


def outside_of_traces() -> contextlib.AbstractContextManager[None]:
    """Return a context without torch's dispatch modes, so that tensors made in it are real while torch traces.

    Relies on `torch.utils._python_dispatch._disable_current_modes` (torch 2.9 and 2.13). Raises UnsupportedError
    where it is gone.
    """
    disabled: contextlib.AbstractContextManager[None] = _private(
        "torch.utils._python_dispatch", "_disable_current_modes"
    )()
    return disabled


def is_in_backward() -> bool:
    """Return whether autograd runs a backward pass in this thread.

    Relies on `torch._C._current_graph_task_id` (torch 2.9 and 2.13), as torch's own FSDP2 does.

    Raises:
        UnsupportedError: the function is gone.
    """
    return int(_private("torch._C", "_current_graph_task_id")()) != -1


def bare_step(kind: type) -> Callable[..., Any]:
    """Return the function `step(self, closure)` of the optimizer class `kind` without the wrapper that runs hooks.

    Relies on `Optimizer.profile_hook_step`, which marks the wrapper as `hooked` and keeps the wrapped function
    (torch 2.9 and 2.13).
    """
    step: Callable[..., Any] = vars(kind).get("step") or getattr(kind, "step")  # noqa: B009
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


def other_step_hooks(optimizer: Any) -> list[tuple[dict[int, Any], int, Any]]:
    """Return (table, key, hook) of each hook that a step of `optimizer` runs, but those that meshweave sets.

    Relies on `Optimizer._optimizer_step_pre_hooks` and `_optimizer_step_post_hooks`, and, for all optimizers,
    `torch.optim.optimizer._global_optimizer_pre_hooks` and `_global_optimizer_post_hooks` (torch 2.9 and 2.13).
    """
    names = "_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"
    for_all = [_private("torch.optim.optimizer", name) for name in names]
    tables = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks, *for_all]
    known = [(table, key, hook) for table in tables for key, hook in table.items()]
    return [each for each in known if not str(getattr(each[2], "__module__", "")).startswith("meshweave.")]


def keep_in_order(op: Any) -> None:
    """Make compilers keep the program order among calls of `op` and of other ops given to this function.

    Without it a compiler may reorder calls that do not depend on each other, differently on ranks with shards of
    other sizes. Graphs of AOTAutograd then have a token from each call to the next; see `keep_in_inductor`, too.

    Relies on `_register_effectful_op` and `_EffectType` of `torch._higher_order_ops.effects` (torch 2.9 and
    2.13). Raises UnsupportedError where either is gone.
    """
    _private(_EFFECTS, "_register_effectful_op")(op, _private(_EFFECTS, "_EffectType").ORDERED)


_EFFECTS = "torch._higher_order_ops.effects"


def keep_in_inductor(op: Any) -> None:
    """Make inductor keep the order of an op that was given to `keep_in_order`; call it where the op is traced.

    Inductor of torch 2.13 puts the dependency of an op on the op before under the name of its buffer, and looks
    it up by the name of its operation, so that it reorders them all the same. No-op where inductor is not in
    use. Relies on `lowerings` and `fallback_handler` of `torch._inductor.lowering`, on
    `torch._inductor.virtualized.V` and on `effectful_ops`, `operations`, `additional_star_deps` of its graph
    (torch 2.13; 2.9 does not look at the last, and keeps the order).
    """
    lowering = sys.modules.get("torch._inductor.lowering")
    if lowering is None or op in lowering.lowerings:
        return
    fall_back = lowering.fallback_handler(op, add_to_fallback_set=False)
    ordered = _private(_EFFECTS, "_EffectType").ORDERED
    virtualized = importlib.import_module("torch._inductor.virtualized")

    def lower(*arguments: Any, **named: Any) -> Any:
        graph = virtualized.V.graph
        before, num_operations = graph.effectful_ops.get(ordered), len(graph.operations)
        result = fall_back(*arguments, **named)
        for operation in graph.operations[num_operations:] if before is not None else ():
            graph.additional_star_deps[operation.get_operation_name()].add(before.get_name())
        return result

    lowering.lowerings[op] = lower


def shard_order(spec: DTensorSpec) -> ShardOrder | None:
    """Return the order in which mesh dims shard each tensor dim; None where this torch knows no such order.

    Relies on `DTensorSpec.shard_order` (torch 2.13; None in 2.9).
    """
    order: ShardOrder | None = getattr(spec, "shard_order", None)
    return order


def explicit_shard_order(spec: DTensorSpec) -> ShardOrder | None:
    """Return the shard order that a copy of `spec` has to be given; None where placements alone decide it.

    Relies on `DTensorSpec.use_strided_shard_as_shard_order` (torch 2.13; None in 2.9): torch sets it where
    strided shards among the placements already say the order.
    """
    return None if getattr(spec, "use_strided_shard_as_shard_order", True) else shard_order(spec)


def decoded_shard_order(spec: DTensorSpec) -> ShardOrder | None:
    """Return the shard order that torch derives from the strided shards of `spec`; None where it derives none.

    Relies on `DTensorSpec._maybe_convert_StridedShard_to_shard_order` and `use_strided_shard_as_shard_order`
    (torch 2.13). A torch without the latter derives none.

    Raises:
        UnsupportedError: torch derives an order from `spec`, and the function that does so is gone.
    """
    if not getattr(spec, "use_strided_shard_as_shard_order", False):
        return None
    decode = getattr(type(spec), "_maybe_convert_StridedShard_to_shard_order", None)
    if decode is None:
        raise _missing("DTensorSpec._maybe_convert_StridedShard_to_shard_order")
    order: ShardOrder | None = decode(spec.placements, spec.mesh)
    return order


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Return torch's placement `_StridedShard(dim, split_factor=split_factor)`.

    Relies on `placement_types._StridedShard` (torch 2.9 and 2.13). Raises UnsupportedError where it is gone.
    """
    return _strided_shard_class()(dim, split_factor=split_factor)


def is_strided_shard(placement: Placement) -> bool:
    """Return whether a placement is a `_StridedShard`.

    Relies on `placement_types._StridedShard` (torch 2.9 and 2.13). Raises UnsupportedError where it is gone.
    """
    return isinstance(placement, _strided_shard_class())


def is_sharded(placement: Placement) -> bool:
    """Return whether a placement is a `Shard` or a `_StridedShard` (in torch 2.9 one kind of `Shard`)."""
    return isinstance(placement, (_private("torch.distributed.tensor", "Shard"), _strided_shard_class()))


def _strided_shard_class() -> Any:
    return _private("torch.distributed.tensor.placement_types", "_StridedShard")


# --- symmetric memory -------------------------------------------------------------------------------------------


def symmetric_memory() -> Any:
    """Return torch's module of symmetric memory, with `empty(size, dtype=, device=)`, `rendezvous(tensor, group)`.

    Relies on `torch.distributed._symmetric_memory` (torch 2.9 and 2.13).

    Raises:
        UnsupportedError: the module is gone.
    """
    try:
        return importlib.import_module("torch.distributed._symmetric_memory")
    except ImportError as error:
        raise UnsupportedError(f"this torch has no symmetric memory: {error}") from None


def wraps_tensors(tensor: Any) -> bool:
    """Return whether a tensor is of a subclass that wraps other tensors, such as a quantised tensor.

    Relies on `torch.utils._python_dispatch.is_traceable_wrapper_subclass`.
    """
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return bool(is_traceable_wrapper_subclass(tensor))
