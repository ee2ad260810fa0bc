"""Custom ops of torch for what runs on a rank's tensors: `torch.compile` sees them and does not look inside.

A `LocalFunction` is something of Python that torch cannot trace: a bound program, with its agreement among ranks,
its buffers and its waits. `LocalOp` makes an op `meshweave::NAME` of such functions, with a fake kernel, which
knows shapes and runs nothing, and with a gradient. In a compiled graph it stays one node.

    _MULTIPLY = LocalOp("parallel_linear")

    class Linear(LocalFunction):            # made once per layer, before anything is compiled
        def forward(self, inputs): ...      # [x, weight] -> [y, what backward also needs]
        def empty(self, inputs): ...        # the same as empty tensors
        def backward(self, grads, inputs, kept, needed): ...

    (y,) = _MULTIPLY(function, [x, weight])

Ops of layers (`nn.parallel`) take numbers, for the sizes of a call are arguments of theirs: `number_of` gives a
number to what such an op runs, and `value_of` gives that back.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from meshweave.base.errors import BindError, UnsupportedError
from meshweave.execute.torch import compat

NAMESPACE = "meshweave"

Value = TypeVar("Value")

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")

_ORDINARY = (Tensor, torch.nn.Parameter)

_FUNCTIONS: WeakValueDictionary[str, LocalFunction] = WeakValueDictionary()


class LocalFunction(ABC):
    """A function of tensors of this rank that `LocalOp` runs as one op of a compiled graph.

    Args:
        title: what the function computes, in words.
        identity: text that says all that the shapes of outputs depend on beside the inputs, and all else in which
            functions may differ.

    Attributes:
        handle: the function's name in a graph: the title and a digest of `identity`. A later function with the
            same handle takes the place of an earlier one.
        num_results: how many of the outputs of `forward` are results; those after them are kept for `backward`.
    """

    num_results = 1

    def __init__(self, title: str, identity: str) -> None:
        digest = hashlib.blake2s(identity.encode(), digest_size=8).hexdigest()
        self.handle = f"{title} {digest}"
        _FUNCTIONS[self.handle] = self

    @abstractmethod
    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the results, then the tensors that `backward` gets as `kept`.

        All are in new memory, and none is an input.
        """

    @abstractmethod
    def empty(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors of the shapes, strides and dtypes of those of `forward`, with no values that count.

        The inputs are fake tensors without elements. Implementations run no kernels and do not communicate.
        """

    def backward(
        self,
        grads: Sequence[Tensor],
        inputs: Sequence[Tensor],
        kept: Sequence[Tensor],
        needed: Sequence[bool],
    ) -> list[Tensor]:
        """Return the gradients of the inputs whose entry in `needed` is True, in their order, in new memory.

        Args:
            grads: the gradients of the results, with zeros for a result that nothing depends on.
            inputs: the inputs of `forward`.
            kept: what `forward` returned after its results.
            needed: whether the gradient of each input is needed.

        Raises UnsupportedError where the function has no gradient.
        """
        raise UnsupportedError(f"{self.handle} has no gradient")


def function_of(handle: str) -> LocalFunction:
    """Return the `LocalFunction` of this process whose `handle` this is.

    Raises BindError where the module that made it has been deleted.
    """
    function = _FUNCTIONS.get(handle)
    if function is None:
        raise BindError(f"no function {handle!r} in this process: the module that made it is gone")
    return function


class LocalOp:
    """The ops `meshweave::NAME` and `meshweave::NAME_backward`; op(function, inputs) returns the results.

    The op takes any `LocalFunction`. torch.compile does not look inside, autocast casts none of its inputs, and it
    is differentiable once. Ranks must call ops in one order, and a compiler keeps the order of the program.

    Args:
        name: NAME, which no other op of this process has.
    """

    def __init__(self, name: str) -> None:
        self.name = f"{NAMESPACE}::{name}"
        backward = f"{self.name}_backward"
        torch.library.define(self.name, "(Tensor[] inputs, str function) -> Tensor[]", lib=_LIBRARY)
        torch.library.define(
            backward,
            "(Tensor[] grads, Tensor[] inputs, Tensor[] kept, bool[] needed, str function) -> Tensor[]",
            lib=_LIBRARY,
        )
        torch.library.impl(self.name, "CompositeExplicitAutograd", _forward, lib=_LIBRARY)
        torch.library.impl(backward, "CompositeExplicitAutograd", _backward, lib=_LIBRARY)
        torch.library.register_fake(self.name, self._fake_forward, lib=_LIBRARY)
        torch.library.register_fake(backward, self._fake_backward, lib=_LIBRARY)
        torch.library.register_autograd(self.name, self._gradient, setup_context=_save, lib=_LIBRARY)
        ops = getattr(torch.ops, NAMESPACE)
        self._forward, self._backward = getattr(ops, name).default, getattr(ops, f"{name}_backward").default
        compat.keep_in_order(self._forward)
        compat.keep_in_order(self._backward)

    def __call__(self, function: LocalFunction, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the results of `function`, without what it keeps.

        Outside of a compiler ordinary tensors take a shorter path through torch's autograd than an op has, with
        the same values: some 15 us a call instead of 100.
        """
        if not torch.compiler.is_compiling() and all(type(one) in _ORDINARY for one in inputs):
            return list(_Direct.apply(function, *inputs))
        outputs: list[Tensor] = self._forward(list(inputs), function.handle)
        return outputs[: function.num_results]

    def _fake_forward(self, inputs: Sequence[Tensor], function: str) -> list[Tensor]:
        compat.keep_in_inductor(self._forward)
        return function_of(function).empty(inputs)

    def _fake_backward(
        self,
        grads: Sequence[Tensor],
        inputs: Sequence[Tensor],
        kept: Sequence[Tensor],
        needed: Sequence[bool],
        function: str,
    ) -> list[Tensor]:
        compat.keep_in_inductor(self._backward)
        return [
            torch.empty_like(one, memory_format=torch.contiguous_format)
            for one, is_needed in zip(inputs, needed, strict=True)
            if is_needed
        ]

    def _gradient(self, ctx: Any, grads: Sequence[Tensor | None]) -> tuple[list[Tensor | None], None]:
        refuse_second_derivative(ctx.function)
        inputs, kept = ctx.saved_tensors[: ctx.num_inputs], ctx.saved_tensors[ctx.num_inputs :]
        needed = list(ctx.needs_input_grad[0])
        filled = [
            torch.zeros(like[0], dtype=like[1], device=like[2]) if grad is None else grad
            for grad, like in zip(grads, ctx.results, strict=False)
        ]
        gradients = iter(self._backward(filled, list(inputs), list(kept), needed, ctx.function))
        return [next(gradients) if is_needed else None for is_needed in needed], None


class _Direct(torch.autograd.Function):  # type: ignore[misc]
    """A `LocalFunction` on ordinary tensors, called without the op."""

    @staticmethod
    def forward(ctx: Any, function: LocalFunction, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the result, and keep what gradients need."""
        outputs = function.forward(inputs)
        results = outputs[: function.num_results]
        ctx.function, ctx.num_inputs = function, len(inputs)
        ctx.save_for_backward(*inputs, *outputs[function.num_results :])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the arguments; None for what has none."""
        function, saved = ctx.function, ctx.saved_tensors
        refuse_second_derivative(function.handle)
        needed = ctx.needs_input_grad[1:]
        gradients = iter(function.backward(grads, saved[: ctx.num_inputs], saved[ctx.num_inputs :], needed))
        return (None, *(next(gradients) if is_needed else None for is_needed in needed))


_VALUES: list[Hashable] = []
_NUMBERS: dict[Hashable, int] = {}


def number_of(value: Hashable) -> int:
    """Return an integer that stands for a value in arguments of ops in this process, equal for equal values.

    `value_of` gives the value back. Compiled graphs hold the number, so the value is kept until the process ends.
    """
    if value not in _NUMBERS:
        _NUMBERS[value] = len(_VALUES)
        _VALUES.append(value)
    return _NUMBERS[value]


def value_of(number: int, kind: type[Value]) -> Value:
    """Return the value to which `number_of` gave this number; raises AssertionError if its class is not `kind`."""
    value = _VALUES[number]
    assert isinstance(value, kind), (number, value)
    return value


def refuse_second_derivative(what: str) -> None:
    """Raise UnsupportedError in a backward pass that is itself to be differentiated (`create_graph=True`).

    `what` is the name of the function in the error. torch's `once_differentiable` would not do: it raises nothing
    where the incoming gradient requires no gradient, and terms are then missing. Nothing is raised while a
    compiler traces.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise UnsupportedError(f"{what} is differentiable once, and create_graph=True asks for more")


def _forward(inputs: Sequence[Tensor], function: str) -> list[Tensor]:
    return function_of(function).forward(inputs)


def _backward(*arguments: Any) -> list[Tensor]:
    *given, function = arguments
    return function_of(function).backward(*given)


def _save(ctx: Any, inputs: tuple[Sequence[Tensor], str], output: Sequence[Tensor]) -> None:
    tensors, ctx.function = inputs
    num_results = function_of(ctx.function).num_results
    ctx.set_materialize_grads(False)
    ctx.num_inputs = len(tensors)
    ctx.results = [(one.shape, one.dtype, one.device) for one in output[:num_results]]
    ctx.save_for_backward(*tensors, *output[num_results:])
