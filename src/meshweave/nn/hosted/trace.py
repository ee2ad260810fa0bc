"""What flows from which module of a model into which: one forward pass of a copy, read off its autograd graph.

Results of modules that have parameters are marked in the graph. From the operand of a module the graph leads
back to the marks that it was computed from, and says by which ops. So nothing is assumed of names or of the code
between.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.base.errors import UnsupportedError
from meshweave.nn.hosted.expert_parts import is_experts
from meshweave.nn.prove.state import WideCasts

_SOFTMAX = ("Softmax", "ScaledDotProduct")


@dataclass
class ModuleCall:
    """One call of a module.

    A mark is a node in the autograd graph, with the path of the module whose result it is.

    Attributes:
        path: its name in the model.
        module: the module.
        operand: the first floating-point tensor that it was given; None where there was none.
        result: the tensor that it returned, marked; later code may change it in place. None for another result.
        made: a detached copy of `result`, which nothing changes.
        sources: the nearest marks that the operand was computed from: paths of modules.
        attended: whether a softmax stands between these and the operand.
        given: for a module of experts, all that it was given; else ().
    """

    path: str
    module: nn.Module
    operand: Tensor | None
    result: Tensor | None = None
    made: Tensor | None = None
    sources: frozenset[str] = frozenset()
    attended: bool = False
    given: tuple[Any, ...] = ()


@dataclass
class FlowTrace:
    """The calls of modules in a forward pass, and what flows between them; it keeps the autograd graph alive.

    A mark is a node in the autograd graph, with the path of the module whose result it is.

    Attributes:
        calls: the calls, in order.
        layer_sources: for each layer, by name, the nearest marks that its result was computed from.
        layer_results: for each layer, by name, the length of the tuple that it returns, 0 where it returns a
            tensor.
    """

    calls: list[ModuleCall] = field(default_factory=list)
    layer_sources: dict[str, frozenset[str]] = field(default_factory=dict)
    layer_results: dict[str, int] = field(default_factory=dict)
    _marks: dict[Any, str] = field(default_factory=dict)

    def marked(self, tensor: Tensor, name: str) -> Tensor:
        """Return a copy of a tensor with a mark `name` in its autograd graph; without a mark if it has no
        graph.
        """
        made: Tensor = _Mark.apply(tensor)
        if made.grad_fn is not None:
            self._marks[made.grad_fn] = name
        return made

    def sources(self, tensor: Tensor) -> tuple[frozenset[str], bool]:
        """Return (names, attended): the nearest marks a tensor was computed from; whether a softmax is between."""
        nodes = self._nodes(tensor)
        names = frozenset(self._marks[node] for node in nodes if node in self._marks)
        return names, any(word in node.name() for word in _SOFTMAX for node in nodes)

    def parameters(self, tensor: Tensor) -> set[Tensor]:
        """Return the parameters that a tensor was computed from, back to the nearest marks."""
        leaves = (getattr(node, "variable", None) for node in self._nodes(tensor))
        return {leaf for leaf in leaves if leaf is not None}

    def _nodes(self, tensor: Tensor) -> set[Any]:
        """Return the nodes of the graph from a tensor back to marks, these included."""
        seen, pending = set(), [tensor.grad_fn]
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node not in self._marks:
                pending += [following for following, _ in node.next_functions]
        return seen


class _Mark(torch.autograd.Function):  # type: ignore[misc]
    """A tensor as it is, with a node of its own in the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the tensor."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return the gradient as it is."""
        return grad


def traced(model: nn.Module, layers: str, tokens: Tensor) -> FlowTrace:
    """Return the calls of modules in one forward pass of `tokens` (batch, sequence), and what flows between them.

    Args:
        model: a copy, with memory, that hooks may be put on.
        layers: the name of its list of layers.

    Raises UnsupportedError where the model does not run on tokens alone.
    """
    trace = FlowTrace()
    with ExitStack() as stack:
        for path, module in model.named_modules():
            if path.rpartition(".")[0] == layers:
                _watch_layer(trace, path, module, stack)
            elif is_watched(module):
                _watch(trace, path, module, stack)
        try:
            with torch.enable_grad(), WideCasts():
                model(input_ids=tokens, use_cache=False)
        except Exception as error:
            raise UnsupportedError(
                f"{type(model).__name__} does not run on tokens alone, by which its parts are found: a copy with "
                f"few words, called with input_ids, raises {type(error).__name__}: {error}"
            ) from error
    return trace


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm: the name of its class says so, and it has no modules in it."""
    return "norm" in type(module).__name__.lower() and not list(module.children())


def is_watched(module: nn.Module) -> bool:
    """Return whether the trace records calls of a module.

    It does for modules of experts, norms, and modules that have parameters and no children.
    """
    if is_experts(module):
        return True
    if list(module.children()):
        return False
    return is_norm(module) or next(module.parameters(recurse=False), None) is not None


def _watch(trace: FlowTrace, path: str, module: nn.Module, stack: ExitStack) -> None:
    calls: list[ModuleCall] = []

    def before(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        call = ModuleCall(path, module, _first([*given, *named.values()]))
        if call.operand is not None:
            call.sources, call.attended = trace.sources(call.operand)
        if is_experts(module):
            call.given = (*given, *named.values())
        calls.append(call)
        trace.calls.append(call)

    def after(_: nn.Module, given: Any, result: Any) -> Any:
        call = calls.pop()
        if not isinstance(result, Tensor):
            return result
        call.result, call.made = trace.marked(result, path), result.detach().clone()
        return call.result

    stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
    stack.callback(module.register_forward_hook(after).remove)


def _watch_layer(trace: FlowTrace, path: str, layer: nn.Module, stack: ExitStack) -> None:
    def before(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if given:
            return (trace.marked(given[0], path), *given[1:]), named
        first = next(name for name, value in named.items() if isinstance(value, Tensor))
        return given, {**named, first: trace.marked(named[first], path)}

    def after(_: nn.Module, given: Any, result: Any) -> None:
        trace.layer_results[path] = len(result) if isinstance(result, tuple | list) else 0
        trace.layer_sources[path] = trace.sources(_first(_listed(result)))[0]

    stack.callback(layer.register_forward_pre_hook(before, with_kwargs=True).remove)
    stack.callback(layer.register_forward_hook(after).remove)


def _first(values: list[Any]) -> Tensor | None:
    reals = (value for value in values if isinstance(value, Tensor) and value.is_floating_point())
    return next(reals, None)


def _listed(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple | list) else [result]
