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
from meshweave.ir.program import Program
from meshweave.ir.program.ops import Call
from meshweave.ir.work import Compute, call_work

Calls = Mapping[str, Callable[..., Any]]

PaceCall = Callable[[Compute, Callable[[], Any]], Any]
"""Runs a call, given its work and what computes it, in the time that the work would take."""

_pace_call: PaceCall | None = None


def set_call_pace(pace: PaceCall | None) -> None:
    """Have `pace` run every call of this process from now on; None runs them as fast as they are."""
    global _pace_call
    _pace_call = pace


class CallTable:
    """The functions of `call` ops, and the stashes of one rank. Only calls of a known `program` can be paced."""

    def __init__(self, functions: Calls, program: Program | None = None) -> None:
        self._functions, self._program = functions, program
        self._stashes: dict[tuple[object, ...], dict[Any, Any]] = {}

    def bind(self, op: Call) -> Callable[..., Sequence[Any]]:
        """Return a function from the ins to the outs. Raises BindError where none is bound to the op's name.

        What it returns raises BindError where shapes are not as the op declares.
        """
        if op.fn not in self._functions:
            raise BindError(f"no function is bound to call '{op.fn}'{did_you_mean(op.fn, self._functions)}")
        function, args, expected = self._functions[op.fn], op.args, [view.shape for view in op.outs]
        stashes, key = self._stashes, (op.stash, *op.args)
        work = None if self._program is None else call_work(self._program, op)

        def compute(ins: Sequence[Any]) -> Any:
            if op.stash:
                stash = stashes.pop(key, {}) if op.part == "weight_grad" else stashes.setdefault(key, {})
                return function(stash, *ins, *args)
            return function(*ins, *args)

        def run(*ins: Any) -> Sequence[Any]:
            if _pace_call is None or work is None:
                result = compute(ins)
            else:
                result = _pace_call(work, lambda: compute(ins))
            if result is None:
                result = ()
            outs: Sequence[Any] = result if isinstance(result, (tuple, list)) else (result,)
            shapes = [tuple(out.shape) for out in outs]
            if shapes != expected:
                raise BindError(f"call '{op.fn}' must return shapes {expected}, not {shapes}")
            return outs

        return run
