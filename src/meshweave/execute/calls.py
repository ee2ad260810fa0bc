"""The calling convention of `call` ops, which all executors share.

The function bound to a name is called as `fn(*ins, *args)`, where an op declares a stash as
`fn(stash, *ins, *args)`: `stash` is a dict that the forward part fills and the later parts of the same
stash, args and rank find and change, until the weight-gradient part has ended. The ins may alias buffers and must
not be changed; what is stashed of them must be copied. It returns the outs: one, a sequence of several, or None. A
function that is marked by `of_rank` is given the rank before all of these: `fn(rank, *ins, *args)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from meshweave.base.errors import BindError, require_known
from meshweave.ir.program import Program
from meshweave.ir.program.ops import Call
from meshweave.ir.work import Compute, call_work

Calls = Mapping[str, Callable[..., Any]]

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
_TAKES_RANK = "takes_rank"


def of_rank(function: FunctionT) -> FunctionT:
    """Mark `function` as one that `call` ops give the global rank first: `function(rank, *ins, *args)`; return it.

    Use it where results depend on the rank, such as the rank's tokens of a batch.
    """
    setattr(function, _TAKES_RANK, True)
    return function


PaceCall = Callable[[Compute, Callable[[], Any]], Any]
"""Runs a call, given its work and what computes it, in the time that the work would take."""

_pace_call: PaceCall | None = None


def set_call_pace(pace: PaceCall | None) -> None:
    """Wrap every `call` op of this process in `pace`, for example to make it last as long as its modelled work.

    `pace(work, run)` must call `run()` and return its result; `work` is the modelled FLOPs, bytes and sizes of the
    op (`ir.work.Compute`). None removes the wrapper. Calls of a `CallTable` without a program are never wrapped.
    """
    global _pace_call
    _pace_call = pace


class CallTable:
    """The functions of `call` ops, and the stashes of one rank.

    A stash is a dict in which the forward part of a call keeps values for its backward parts, such as activations.

    Args:
        functions: the functions by the name in an op's `fn`.
        program: the program that the ops belong to; None: calls are never paced (`set_call_pace`).
        rank: the global rank, given to functions that are marked by `of_rank`.

    Attributes:
        peak_stash_bytes: the most bytes of arrays and tensors that all stashes of the rank held at once, counted
            after each part of a call but the last. Values inside lists and other containers are not counted.
    """

    def __init__(self, functions: Calls, program: Program | None = None, rank: int = 0) -> None:
        self._functions, self._program, self._rank = functions, program, rank
        self._stashes: dict[tuple[object, ...], dict[Any, Any]] = {}
        self._stash_sizes: dict[tuple[object, ...], int] = {}
        self._stash_bytes = self.peak_stash_bytes = 0

    def _count(self, key: tuple[object, ...], stash: Mapping[Any, Any], *, is_over: bool) -> None:
        """Count the bytes of a stash after a part; with `is_over` they are free from now on."""
        before = self._stash_sizes.pop(key, 0)
        size = 0 if is_over else sum(getattr(value, "nbytes", 0) for value in stash.values())
        if size:
            self._stash_sizes[key] = size
        self._stash_bytes += size - before
        self.peak_stash_bytes = max(self.peak_stash_bytes, self._stash_bytes)

    def bind(self, op: Call) -> Callable[..., Sequence[Any]]:
        """Return a function that runs the call: from the input arrays of `op` to a sequence of its outputs.

        Raises BindError where no function is named `op.fn`. The returned function raises BindError where the
        shapes of the results are not those of `op.outs`.
        """
        require_known(op.fn, self._functions, "no function is bound to call", BindError)
        function, args, expected = self._functions[op.fn], op.args, [view.shape for view in op.outs]
        if getattr(function, _TAKES_RANK, False):
            function = partial(function, self._rank)
        stashes, key = self._stashes, (op.stash, *op.args)
        work = None if self._program is None else call_work(self._program, op)

        def compute(ins: Sequence[Any]) -> Any:
            if op.stash:
                is_last = op.part == "weight_grad"
                stash = stashes.pop(key, {}) if is_last else stashes.setdefault(key, {})
                result = function(stash, *ins, *args)
                self._count(key, stash, is_over=is_last)
                return result
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
