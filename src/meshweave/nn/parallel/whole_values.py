"""Values of DTensors as on one process, where torch gives each rank others without a word.

Of a norm of gradients whose parts ranks have, torch gives `item()` and `float()` this rank's term. Training loops
log it, and optimizers scale their steps by it. It is summed first. Random values that torch draws into parts on
CPUs are the same in each part, where generators are alike. Each rank draws all of them, and keeps its part.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from meshweave.execute.torch import compat, compat_values
from meshweave.execute.torch.call_order import call_order
from meshweave.nn.parallel.step_agreement import StepAgreement

_WHAT = (
    "all ranks to read one value, such as a norm of gradients, that is a sum of what ranks have: each of them "
    "calls item() or float() of it"
)
_models: weakref.WeakKeyDictionary[StepAgreement, bool] = weakref.WeakKeyDictionary()
"""Those on several ranks, in the order in which they were parallelised."""
_handled: list[bool] = []


def watch_values(agreement: StepAgreement) -> None:
    """Make reading a DTensor's value, and drawing random values into it, give the global ones from now on.

    It holds as long as a parallelised model lives. Reading a value (`item()`, `float()`) of which each rank has a
    part or a term is then a call of all ranks of its mesh. It raises BindError, DeadlineError or RankLostError
    where others are in another call, late or missing.
    """
    if not _handled:
        compat_values.handle_reads(_read)
        compat_values.handle_draws(_drawn)
        _handled.append(True)
    if not agreement.strategy.is_alone:
        _models[agreement] = True


def _is_in_parts(tensor: Any) -> bool:
    """Return whether ranks, this one among them, have parts or terms of a DTensor that is not only traced."""
    return (
        len(_models) > 0
        and tensor.device_mesh.size() > 1
        and tensor.device_mesh.get_coordinate() is not None
        and not all(each.is_replicate() for each in tensor.placements)
        and not compat.is_traced(compat.local_tensor(tensor))
    )


def _read(op: Any, args: Any, kwargs: Any) -> Any:
    """Return the value of a DTensor of one element as a number; collective where ranks have terms of it."""
    tensor: DTensor = args[0]
    if not _is_in_parts(tensor):
        return NotImplemented
    models = list(_models)[::-1]
    own = [each for each in models if each.strategy.device_mesh == tensor.device_mesh]
    context = (own or models)[0].context(tensor.device)
    ranks = tuple(tensor.device_mesh.mesh.flatten().tolist())
    order = call_order(context)
    others = [rank for rank in ranks if rank != context.rank]
    with order.sequence(ranks).bind(_WHAT), context.guard(_WHAT, others):
        try:
            return tensor.detach().full_tensor().item()
        except RuntimeError:
            order.explain_failure()
            raise


def _drawn(op: Any, args: Any, kwargs: Any) -> Any:
    """Return a DTensor with this rank's part of random values, which are drawn in whole."""
    tensor = args[0]
    if (
        tensor.device.type != "cpu"
        or not _is_in_parts(tensor)
        or any(p.is_partial() for p in tensor.placements)
    ):
        return NotImplemented
    whole: Tensor = op(torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"), *args[1:], **kwargs)
    made = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
    if not op._schema.is_mutable:
        return made
    compat.local_tensor(tensor).copy_(compat.local_tensor(made))
    return tensor
