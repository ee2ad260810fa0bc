"""The private names of torch about gradients of parameters, a part of `compat` and under the same rules."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor


def is_autograd_compiled() -> bool:
    """Return whether compiled autograd is enabled, or this code runs in a backward pass that it compiled.

    Relies on `compiled_autograd_enabled` and `in_compiled_autograd_region` of `torch._dynamo.compiled_autograd`
    (torch 2.9 and 2.13). Where that module was not imported the answer is no.
    """
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    names = ("compiled_autograd_enabled", "in_compiled_autograd_region")
    return compiled is not None and any(getattr(compiled, name, True) for name in names)


def is_transformed() -> bool:
    """Return whether this code runs inside a transform of `torch.func`, such as grad or vmap.

    Relies on `torch._C._functorch.peek_interpreter_stack` (torch 2.9 and 2.13); where it is gone the answer is no.
    """
    functions = getattr(torch._C, "_functorch", None)
    peek: Callable[[], Any] | None = getattr(functions, "peek_interpreter_stack", None)
    return peek is not None and peek() is not None


def gradient_dtype(parameter: Tensor) -> torch.dtype | None:
    """Return the dtype that the gradient of a parameter must have; None for any.

    Relies on `Tensor.grad_dtype` (torch 2.13); without it the result is the dtype of the parameter.
    """
    dtype: torch.dtype | None = getattr(parameter, "grad_dtype", parameter.dtype)
    return dtype


def only_accumulated(parameters: Sequence[Tensor], edges: Sequence[tuple[Any, int]]) -> list[bool]:
    """Return for each parameter whether the running backward pass would only add to its gradient, and run no hook.

    That holds for a leaf without hooks whose AccumulateGrad node runs in this pass and is referenced by the graph
    alone: code that registers hooks of a node has to keep a reference to it.

    Args:
        edges: for each parameter (its AccumulateGrad node or None, 0), as in a node's `next_functions`.

    Relies on `Tensor._backward_hooks` and `_post_accumulate_grad_hooks`, and on
    `torch._C._will_engine_execute_node`, which fails for leaves in `torch.autograd.grad` (torch 2.9 and 2.13).
    Where one is gone the answer is no.
    """
    will_run, alone = getattr(torch._C, "_will_engine_execute_node", None), _one_owner()
    return [
        will_run is not None
        and count == alone
        and parameter.requires_grad
        and getattr(node, "variable", None) is parameter
        and not getattr(parameter, "_backward_hooks", True)
        and not getattr(parameter, "_post_accumulate_grad_hooks", True)
        and _runs(will_run, node)
        for parameter, (node, _), count in zip(parameters, edges, _owners(edges), strict=True)
    ]


def _runs(will_run: Callable[[Any], bool], node: Any) -> bool:
    try:
        return will_run(node)
    except RuntimeError:  # in `torch.autograd.grad`
        return False


def _owners(edges: Sequence[tuple[Any, int]]) -> list[int]:
    """Return a count of references to the node of each edge, to compare with `_one_owner`."""
    return [sys.getrefcount(edge[0]) for edge in edges]


@cache
def _one_owner() -> int:
    """Return what `_owners` counts of a leaf that its graph alone has."""
    with torch.inference_mode(False), torch.enable_grad():
        result = 2 * torch.ones((), device="cpu", requires_grad=True)
    return _owners(result.grad_fn.next_functions)[0]
