"""A program of one rank on tensors that its caller gives anew at each run: nothing of theirs is copied.

`bind` gives a program memory of its own, into which each run copies its inputs. That is right where transfers
need buffers with fixed addresses. Where every remote view is of scratch in memory that ranks share (see
`lower.lower_to_shared_memory`), or there is none, ops can as well read operands and write the result where
the caller has them: an op is then a function of the tensors of this run.

A run waits for the other ranks twice at most: before it overwrites scratch that they may still read from the
run before, which they usually have done long ago, and in each fence of the program, until what it reads is
there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from meshweave.base.errors import BindError, UnsupportedError
from meshweave.execute.memory.base import Exposure, Key, RemoteMemory, Window
from meshweave.execute.torch.buffers import check_value
from meshweave.execute.torch.call_order import bound_call
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.one_sided import exposed_slots
from meshweave.execute.torch.views import Action, empty_in_order
from meshweave.ir.analysis.edges import exposed_buffers
from meshweave.ir.program import BoundOp, Program
from meshweave.ir.program.expressions import Index
from meshweave.ir.program.ops import Add, Copy, Fence, Matmul, Zero
from meshweave.ir.program.views import Range, View

Given = Sequence[Tensor]
"""The tensors of one run: the inputs in the order of the program's buffers, then the output."""

Operand = Callable[[Given], Tensor]
Step = Callable[[Given], object]


class InPlaceProgram:
    """A program with one output, bound to a rank and to its intermediate buffers, not to inputs and outputs.

    Calling it with the local tensors of all input buffers, in the order in which the program declares them, runs
    it and returns the local tensor of the output buffer in new memory.
    """

    def __init__(
        self, program: Program, rank: int, context: TorchContext, memory: RemoteMemory | None = None
    ) -> None:
        """Bind what global rank `rank` runs. Collective among the program's ranks where it has remote views.

        Args:
            memory: an aliased memory for the intermediate buffers that other ranks read. None for a program
                without remote views.

        Raises:
            BindError: the memory is closed, or cannot be had on some rank.
            UnsupportedError: the program has ops other than products without transposes, copies, adds, zeros
                and fences of all ranks; views that are no boxes; or inputs or outputs with remote views. Or it
                has remote views, and `memory` is None or not aliased.
            RankLostError, DeadlineError: see `TorchContext.guard`.
        """
        program = program.expanded
        self._program, self._rank, self._context, self._memory = program, rank, context, memory
        own = [buffer for buffer in program.buffers if rank in program.mesh_of[buffer.mesh]]
        inputs = [buffer.name for buffer in own if buffer.kind == "input"]
        (output,) = (buffer for buffer in own if buffer.kind == "output")
        self._inputs = [
            (name, program.local_shape(name, rank), getattr(torch, program.buffer_of[name].dtype))
            for name in inputs
        ]
        self._dtype: torch.dtype = getattr(torch, output.dtype)
        self._shape = program.local_shape(output.name, rank)
        self._place = {name: place for place, name in enumerate([*inputs, output.name])}
        exposed = exposed_buffers(program)
        if exposed & set(self._place):
            raise UnsupportedError(f"program {program.name} exposes its inputs or outputs: lower it first")
        self._window = self._expose(exposed) if exposed else None
        self._scratch: dict[Key, Tensor] = dict(self._window.own) if self._window else {}
        for buffer in own:
            for slot in range(buffer.slots if buffer.name not in self._place else 0):
                if (buffer.name, slot) not in self._scratch:
                    shape = program.local_shape(buffer.name, rank)
                    tensor = empty_in_order(shape, getattr(torch, buffer.dtype), buffer.order, context.device)
                    self._scratch[buffer.name, slot] = tensor
        self._begin: Action | None = None
        self._end: Action | None = None
        if self._window is not None:
            self._begin = self._window.await_arrivals(0, f"all ranks to begin program {program.name}")
            self._end = self._window.arrive(0)
        self._call = (
            None if self._window is None else bound_call(context, program.ranks, f"program {program.name}")
        )
        ops = program.ops_on_rank(rank)
        self._steps = tuple(self._step(bound) for bound in ops)
        self._single = self._single_product(ops, output.name) if self._window is None else None

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Run this rank's part; all ranks of the program run it together. See the class docstring.

        Raises:
            BindError: an input has another shape or dtype than the program's buffer, here or on another rank;
                other ranks are in another call; the process group of the context is gone.
            RankLostError, DeadlineError: other ranks are missing or late, see `TorchContext`.
            UnsupportedError: the memory is closed, an earlier run in this context failed, or another is under
                way.
            ValueError: there are more or fewer tensors than input buffers.
        """
        if self._call is not None:
            self._context.lane_threads.check_free()  # before this is a call, which others do not make
        try:
            for (name, shape, dtype), tensor in zip(self._inputs, inputs, strict=True):
                check_value(name, tensor, shape, dtype)
        except BindError as error:
            if self._call is not None:
                self._call.refuse(error)
            raise
        if self._single is not None:
            a, b = self._single
            return torch.mm(a(inputs), b(inputs))
        output = torch.empty(self._shape, dtype=self._dtype, device=inputs[0].device)
        given = (*inputs, output)
        if self._window is None or self._begin is None or self._end is None:
            for step in self._steps:
                step(given)
            return output
        assert self._memory is not None
        with self._call or nullcontext(), self._context.lane_threads.reserve():
            if self._memory.is_closed:
                raise UnsupportedError(f"the memory of program {self._program.name} is closed")
            self._begin()
            for step in self._steps:
                step(given)
            self._end()
            self._window.settle()
        return output

    def _expose(self, exposed: frozenset[str]) -> Window:
        program, memory = self._program, self._memory
        if memory is None or not memory.is_aliased:
            raise UnsupportedError(f"program {program.name} reads memory of other ranks that nothing aliases")
        wanted = exposed_slots(program, self._rank, exposed)
        return memory.expose(Exposure(program.ranks, [program.ranks], f"program {program.name}", wanted))

    def _single_product(self, ops: Sequence[BoundOp], output: str) -> tuple[Operand, Operand] | None:
        """Return the operands of the product that is all of the program and all of its output, if it is."""
        op = ops[0].op if len(ops) == 1 else None
        if isinstance(op, Matmul) and op.out.buffer == output and op.out.shape == self._shape:
            return self._operand(op.a), self._operand(op.b)
        return None

    # -- ops -------------------------------------------------------------------------------------------------

    def _step(self, bound: BoundOp) -> Step:
        match bound.op:
            case Fence(over=over) if self._window is not None and over == self._program.ranks:
                fence = self._window.fence(0, bound.label)
                return lambda given: fence()
            case Matmul(
                out=out, a=a, b=b, accumulate=accumulate, transpose_a=False, transpose_b=False, release=None
            ):
                return _matmul(self._operand(out), self._operand(a), self._operand(b), bool(accumulate))
            case Copy(out=out, src=src, release=None):
                target, source = self._operand(out), self._operand(src)
                return lambda given: target(given).copy_(source(given))
            case Add(out=out, src=src):
                target, source = self._operand(out), self._operand(src)
                return lambda given: target(given).add_(source(given))
            case Zero(out=out):
                target = self._operand(out)
                return lambda given: target(given).zero_()
        raise UnsupportedError(f"{bound.label} does not run on tensors that are given at each run")

    def _operand(self, view: View) -> Operand:
        """Return what gives the tensor of a view at a run."""
        start = [selector.start for selector in view.selectors if isinstance(selector, Range)]
        if len(start) != len(view.selectors):
            raise UnsupportedError(f"{view} is no box")
        shape = view.shape
        assert isinstance(view.slot, int)
        if view.rank is None and view.buffer in self._place:
            place = self._place[view.buffer]
            if shape == self._program.local_shape(view.buffer, self._rank):
                return lambda given: given[place]
            return lambda given: _part(given[place], start, shape)
        if view.rank is None:
            whole = self._scratch[view.buffer, view.slot]
        else:
            assert self._window is not None and isinstance(view.rank, int)
            whole = self._window.remote[view.rank, (view.buffer, view.slot)].tensor
        fixed = _part(whole, start, shape)
        return lambda given: fixed


def _part(tensor: Tensor, start: Sequence[Index], shape: Sequence[int]) -> Tensor:
    strides = tensor.stride()
    offset = 0
    for first, stride in zip(start, strides, strict=True):
        assert isinstance(first, int)
        offset += first * stride
    return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)


def _matmul(out: Operand, a: Operand, b: Operand, accumulate: bool) -> Step:
    if accumulate:

        def add(given: Given) -> None:
            target = out(given)
            torch.addmm(target, a(given), b(given), out=target)

        return add
    return lambda given: torch.mm(a(given), b(given), out=out(given))
