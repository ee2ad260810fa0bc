"""The private names of torch about how ops on DTensors run: a part of `compat`, under the same rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from meshweave.execute.torch.compat import _missing, local_tensor

Handler = Callable[..., Any]
"""Returns the result of an op, its arguments and those by name; NotImplemented where torch is to compute it."""


def handle_reads(handler: Handler) -> None:
    """Have `handler` return the value of a DTensor of one element from now on, as for `item` and `float`.

    Where the handler returns NotImplemented, the value is that of this rank's local tensor, as torch has it, even
    where that is one term of a sum over ranks. Raises UnsupportedError where torch's table of handlers is gone.
    """

    def read(op: Any, args: Any, kwargs: Any) -> Any:
        made = handler(op, args, kwargs)
        return op(local_tensor(args[0])) if made is NotImplemented else made

    _handlers()[torch.ops.aten._local_scalar_dense.default] = read


def _handlers() -> dict[Any, Handler]:
    """Return the functions that torch calls for ops on DTensors, by op.

    Relies on `DTensor._op_dispatcher._custom_op_handlers` (torch 2.9 and 2.13). Raises UnsupportedError where it
    is gone.
    """
    from torch.distributed.tensor import DTensor

    try:
        handlers: dict[Any, Handler] = DTensor._op_dispatcher._custom_op_handlers
    except AttributeError:
        raise _missing("DTensor._op_dispatcher._custom_op_handlers") from None
    return handlers


def handle_draws(handler: Handler) -> None:
    """Have `handler` run random ops on DTensors, such as `normal_` and `rand_like`, from now on.

    Where the handler returns NotImplemented, torch draws: each rank for its own shard; on CPUs ranks whose
    generators are in one state get equal values. Raises UnsupportedError where torch's table of handlers is gone.
    """
    handlers = _handlers()

    def draw(op: Any, args: Any, kwargs: Any) -> Any:
        made = handler(op, args, kwargs)
        if made is NotImplemented:
            del handlers[op]
            try:
                made = op(*args, **kwargs)
            finally:
                handlers[op] = draw
        return made

    names = "normal_ uniform_ rand_like randn_like randint_like randint_like.low_dtype bernoulli_.float"
    for name in names.split():
        base, _, overload = name.partition(".")
        handlers[getattr(getattr(torch.ops.aten, base), overload or "default")] = draw
