"""Local ops as bound actions: views, operands and staging are settled here, once."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from meshweave.base.errors import UnsupportedError
from meshweave.execute.calls import CallTable
from meshweave.execute.torch.batched import bind_batched, product_dtype
from meshweave.execute.torch.threads import with_num_threads
from meshweave.execute.torch.views import (
    Action,
    Staging,
    StridedView,
    bind_view,
    chain_actions,
    share_memory,
)
from meshweave.ir.program import BoundOp
from meshweave.ir.program.expressions import number_of
from meshweave.ir.program.ops import Add, Call, Copy, Matmul, Op, Zero
from meshweave.ir.program.views import View

Slots = MutableMapping[tuple[str, int], Tensor]
"""The memory of each (buffer, slot)."""


@dataclass(frozen=True)
class Binder:
    """One rank's memory, and how its local ops become actions: functions without arguments.

    `memory` has the tensor of each (buffer name, slot). `remote_buffer` returns the whole buffer slot of a view of
    another rank's memory as a tensor; None where that cannot be one. `num_threads` are the CPU threads that each
    matmul runs on; None leaves that to torch.
    """

    rank: int
    memory: Slots
    staging: Staging
    calls: CallTable
    remote_buffer: Callable[[View], Tensor] | None = None
    num_threads: int | None = None
    _views: dict[View, StridedView] = field(default_factory=dict)

    def view(self, view: View) -> StridedView:
        """Return a resolved view (integers, no expressions) as tensors that alias its buffer slot.

        A view of another rank's memory aliases what `remote_buffer` returns.
        """
        bound_view = self._views.get(view)
        if bound_view is None:
            assert isinstance(view.slot, int)
            if view.rank is None:
                buffer = self.memory[view.buffer, view.slot]
            else:
                assert self.remote_buffer is not None, view
                buffer = self.remote_buffer(view)
            bound_view = self._views[view] = bind_view(view, buffer)
        return bound_view

    def overlap(self, out: View, src: View) -> bool:
        """Return whether the two views may share elements, also where their buffers were given one memory."""
        if out.buffer == src.buffer or out.rank is not None or src.rank is not None:
            return out.overlaps(src)
        a, b = (self.memory[view.buffer, number_of(view.slot)] for view in (out, src))
        return share_memory(a, b)

    def local(self, bound: BoundOp) -> Action:
        """Return the action of a compute op: matmul, copy, add, zero or call.

        Raises UnsupportedError where the op uses another rank's memory and there is no `remote_buffer`, BindError
        for a call that no function is bound to.
        """
        op = bound.op
        if self.remote_buffer is None:
            self.refuse_remote(bound)
        match op:
            case Matmul():
                return with_num_threads(self.num_threads, self._matmul(op))
            case Copy(release=release):
                update = release is not None and release.update
                return chain_actions(self.move(op.lane, op.out, op.src, add=update))
            case Add():
                return chain_actions(self.move(op.lane, op.out, op.src, add=True))
            case Zero():
                return chain_actions([tensor.zero_ for _, tensor in self.view(op.out).pieces])
            case Call():
                return self._call(op)
        raise AssertionError(op)

    def refuse_remote(self, bound: BoundOp) -> None:
        """Raise UnsupportedError for an op that reads or writes another rank's memory."""
        if any(view.rank is not None for _, view in bound.op.accesses()):
            raise UnsupportedError(
                f"{bound.label} of rank {self.rank} reaches into another rank's memory: "
                "lower one-sided ops to messages first"
            )

    def move(self, lane: str, out: View, src: View, *, add: bool = False) -> list[Action]:
        """Return the actions that copy view `src` to `out`, or with `add` add it, for an op of `lane`; [] for a
        copy of a view to itself.
        """
        if out == src and not add:
            return []
        apart = out != src and out.overlaps(src)
        return self.staging.transfer(lane, self.view(out), self.view(src), add=add, apart=apart)

    def _matmul(self, op: Matmul) -> Action:
        if len(op.a.selectors) > 2 or len(op.b.selectors) > 2:
            return bind_batched(self, op)
        out = self.view(op.out)
        dtype = product_dtype(out, self.view(op.a), self.view(op.b))
        a, before_a = self._operand(op, "a", op.a, dtype)
        b, before_b = self._operand(op, "b", op.b, dtype)
        a, b = a.t() if op.transpose_a else a, b.t() if op.transpose_b else b
        add = bool(op.accumulate) or (op.release is not None and op.release.update)
        target = out.direct
        is_read = self.overlap(op.out, op.a) or self.overlap(op.out, op.b)
        if target is None or dtype != out.dtype or not _has_unit_stride(target) or is_read:
            product = self.staging.get(op.lane, "product", out.shape, dtype)
            after = self.staging.transfer(op.lane, out, StridedView.of(product), add=add)
            return chain_actions([*before_a, *before_b, partial(torch.mm, a, b, out=product), *after])
        if add:
            return chain_actions([*before_a, *before_b, partial(torch.addmm, target, a, b, out=target)])
        return chain_actions([*before_a, *before_b, partial(torch.mm, a, b, out=target)])

    def _operand(self, op: Op, use: str, view: View, dtype: torch.dtype) -> tuple[Tensor, list[Action]]:
        """A tensor that a matrix product takes as it is, and what fills it where it is no alias."""
        bound_view = self.view(view)
        if (
            bound_view.direct is not None
            and bound_view.dtype == dtype
            and _has_unit_stride(bound_view.direct)
        ):
            return bound_view.direct, []
        packed = self.staging.get(op.lane, use, bound_view.shape, dtype)
        return packed, self.staging.transfer(op.lane, StridedView.of(packed), bound_view)

    def _call(self, op: Call) -> Action:
        function = self.calls.bind(op)
        before: list[Action] = []
        ins: list[Tensor] = []
        for number, view in enumerate(op.ins):
            bound_view = self.view(view)
            tensor = bound_view.direct
            if tensor is None:
                tensor = self.staging.get(op.lane, f"in {number}", bound_view.shape, bound_view.dtype)
                before += self.staging.transfer(op.lane, StridedView.of(tensor), bound_view)
            ins.append(tensor)
        outs = [self.view(view) for view in op.outs]
        staging, lane = self.staging, op.lane
        written = {tensor.untyped_storage().data_ptr() for out in outs for _, tensor in out.pieces}

        def apart(value: Tensor, out: StridedView) -> Tensor:
            """Return a result, or a copy where it lies in memory that results go to and not in its place."""
            if value.untyped_storage().data_ptr() not in written:
                return value
            here = out.direct
            is_there = here is not None and (value.data_ptr(), value.stride()) == (
                here.data_ptr(),
                here.stride(),
            )
            return value if is_there else value.clone()

        def run() -> None:
            for action in before:
                action()
            made = [apart(value, out) for out, value in zip(outs, function(*ins), strict=True)]
            for out, value in zip(outs, made, strict=True):
                for action in staging.transfer(lane, out, StridedView.of(value)):
                    action()

        return run


def _has_unit_stride(matrix: Tensor) -> bool:
    """Whether BLAS takes a matrix as it lies in memory, transposed or not."""
    (rows, columns), (down, across) = matrix.shape, matrix.stride()
    fits = (across == 1 and down >= max(columns, 1)) or (down == 1 and across >= max(rows, 1))
    return bool(fits or matrix.numel() <= 1)
