"""The calling convention of `call` ops, which all executors share.

The function bound to a name is called as `fn(*ins, *args)`, where an op declares a stash as
`fn(stash, *ins, *args)`: `stash` is a dict that the forward part fills and the gradient parts of the same
stash, args and rank find, until the weight-gradient part has ended. The ins may alias buffers and must not
be changed; what is stashed of them must be copied. It returns the outs: one, a sequence of several, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshweave.base.errors import BindError, did_you_mean
from meshweave.ir.program.ops import Call

Calls = Mapping[str, Callable[..., Any]]


class CallTable:
    """The functions of `call` ops, and the stashes of one rank."""

    def __init__(self, functions: Calls) -> None:
        self._functions = functions
        self._stashes: dict[tuple[object, ...], dict[Any, Any]] = {}

    def bind(self, op: Call) -> Callable[..., Sequence[Any]]:
        """Return a function from the ins to the outs. Raises BindError where none is bound to the op's name.

        What it returns raises BindError where shapes are not as the op declares.
        """
        if op.fn not in self._functions:
            raise BindError(f"no function is bound to call '{op.fn}'{did_you_mean(op.fn, self._functions)}")
        function, args, expected = self._functions[op.fn], op.args, [view.shape for view in op.outs]
        stashes, key = self._stashes, (op.stash, *op.args)

        def run(*ins: Any) -> Sequence[Any]:
            if op.stash:
                stash = stashes.pop(key, {}) if op.part == "weight_grad" else stashes.setdefault(key, {})
                result = function(stash, *ins, *args)
            else:
                result = function(*ins, *args)
            if result is None:
                result = ()
            outs: Sequence[Any] = result if isinstance(result, (tuple, list)) else (result,)
            shapes = [tuple(out.shape) for out in outs]
            if shapes != expected:
                raise BindError(f"call '{op.fn}' must return shapes {expected}, not {shapes}")
            return outs

        return run
