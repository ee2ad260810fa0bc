"""Local ops as bound actions: views, operands and staging are settled here, once."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from meshweave.base.errors import UnsupportedError
from meshweave.execute.calls import CallTable
from meshweave.execute.torch.views import Action, Staging, Strided, chain, strided
from meshweave.ir.program import BoundOp
from meshweave.ir.program.ops import Add, Call, Copy, Matmul, Op, Zero
from meshweave.ir.program.views import View

Slots = MutableMapping[tuple[str, int], Tensor]
"""The memory of each (buffer, slot)."""


@dataclass(frozen=True)
class Binder:
    """One rank's memory, and how its local ops are bound to it.

    `far` gives the buffer slot of a remote view as a tensor, where a transport can alias another rank's memory.
    """

    rank: int
    memory: Slots
    staging: Staging
    calls: CallTable
    far: Callable[[View], Tensor] | None = None
    _views: dict[View, Strided] = field(default_factory=dict)

    def view(self, view: View) -> Strided:
        """A resolved view of this rank's memory, or of another's where that is aliased."""
        found = self._views.get(view)
        if found is None:
            assert isinstance(view.slot, int)
            if view.rank is None:
                buffer = self.memory[view.buffer, view.slot]
            else:
                assert self.far is not None, view
                buffer = self.far(view)
            found = self._views[view] = strided(view, buffer)
        return found

    def local(self, bound: BoundOp) -> Action:
        """Binds a compute op. Raises UnsupportedError where it reaches into memory that nothing aliases."""
        op = bound.op
        if self.far is None:
            self.refuse_remote(bound)
        match op:
            case Matmul():
                return self._matmul(op)
            case Copy(release=release):
                update = release is not None and release.update
                return chain(self.move(op.lane, op.out, op.src, add=update))
            case Add():
                return chain(self.move(op.lane, op.out, op.src, add=True))
            case Zero():
                return chain([tensor.zero_ for _, tensor in self.view(op.out).pieces])
            case Call():
                return self._call(op)
        raise AssertionError(op)

    def refuse_remote(self, bound: BoundOp) -> None:
        """Raises UnsupportedError for an op that reads or writes another rank's memory."""
        if any(view.rank is not None for _, view in bound.op.accesses()):
            raise UnsupportedError(
                f"{bound.label} of rank {self.rank} reaches into another rank's memory: "
                "lower one-sided ops to messages first"
            )

    def move(self, lane: str, out: View, src: View, *, add: bool = False) -> list[Action]:
        """What copies or adds one local view to another; nothing for a copy to itself."""
        if out == src and not add:
            return []
        apart = out != src and out.overlaps(src)
        return self.staging.transfer(lane, self.view(out), self.view(src), add=add, apart=apart)

    def _matmul(self, op: Matmul) -> Action:
        out = self.view(op.out)
        a, before_a = self._operand(op, "a", op.a, out.dtype)
        b, before_b = self._operand(op, "b", op.b, out.dtype)
        a, b = a.t() if op.transpose_a else a, b.t() if op.transpose_b else b
        add = bool(op.accumulate) or (op.release is not None and op.release.update)
        target = out.direct
        if target is None or not _has_unit_stride(target) or op.out.overlaps(op.a) or op.out.overlaps(op.b):
            product = self.staging.get(op.lane, "product", out.shape, out.dtype)
            after = self.staging.transfer(op.lane, out, Strided.of(product), add=add)
            return chain([*before_a, *before_b, partial(torch.mm, a, b, out=product), *after])
        if add:
            return chain([*before_a, *before_b, partial(torch.addmm, target, a, b, out=target)])
        return chain([*before_a, *before_b, partial(torch.mm, a, b, out=target)])

    def _operand(self, op: Op, use: str, view: View, dtype: torch.dtype) -> tuple[Tensor, list[Action]]:
        """A tensor that a matrix product takes as it is, and what fills it where it is no alias."""
        found = self.view(view)
        if found.direct is not None and found.dtype == dtype and _has_unit_stride(found.direct):
            return found.direct, []
        packed = self.staging.get(op.lane, use, found.shape, dtype)
        return packed, self.staging.transfer(op.lane, Strided.of(packed), found)

    def _call(self, op: Call) -> Action:
        function = self.calls.bind(op)
        before: list[Action] = []
        ins: list[Tensor] = []
        for number, view in enumerate(op.ins):
            found = self.view(view)
            tensor = found.direct
            if tensor is None:
                tensor = self.staging.get(op.lane, f"in {number}", found.shape, found.dtype)
                before += self.staging.transfer(op.lane, Strided.of(tensor), found)
            ins.append(tensor)
        outs = [self.view(view) for view in op.outs]
        staging, lane = self.staging, op.lane

        def run() -> None:
            for action in before:
                action()
            for out, value in zip(outs, function(*ins), strict=True):
                for action in staging.transfer(lane, out, Strided.of(value)):
                    action()

        return run


def _has_unit_stride(matrix: Tensor) -> bool:
    """Whether BLAS takes a matrix as it lies in memory, transposed or not."""
    (rows, columns), (down, across) = matrix.shape, matrix.stride()
    fits = (across == 1 and down >= max(columns, 1)) or (down == 1 and across >= max(rows, 1))
    return bool(fits or matrix.numel() <= 1)
