"""A bound program whose released products are kernels that count their tiles (T3's track and trigger).

One-sided ops are those of `execute.torch.one_sided`. Here the regions of a product run in one kernel, in the
order in which the program lists them, and an op that touches a region waits for the region's counter: a stream
on CUDA (`cuStreamWaitValue32`), a thread on a CPU. So a region is sent on while the kernel still computes
others. Updates are atomic additions, in the product's epilogue or in a kernel of their own, in order of arrival.

Kernels that add run beside the product: where a program has such ops, the product leaves them multiprocessors.
Copies need none, since copy engines make them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import Tensor

from meshweave.base.errors import UnsupportedError
from meshweave.execute.cuda.kernels import accumulate, check_atomic_add
from meshweave.execute.cuda.regions import TrackedRegions, launches
from meshweave.execute.cuda.tiling import ADDING_PROGRAMS, Block, num_tiles, product_block
from meshweave.execute.cuda.tracked_product import (
    TrackedProduct,
    TrackedRegion,
    multiprocessors,
    share_a_kernel,
)
from meshweave.execute.memory.base import Key, RemoteMemory, Slot
from meshweave.execute.torch.analysis import RankAnalysis
from meshweave.execute.torch.buffers import torch_dtype
from meshweave.execute.torch.compute import Binder
from meshweave.execute.torch.one_sided import OneSidedAccess
from meshweave.execute.torch.views import Action, StridedView, chain_actions
from meshweave.ir.analysis.matching import Node
from meshweave.ir.program import BoundOp
from meshweave.ir.program.ops import UPDATE, Accumulate, Matmul, Op
from meshweave.ir.program.release import Release
from meshweave.ir.program.views import View

TILES: Key = ("tile counters", 0)  # no buffer has a name with blanks


class TrackedAccess(OneSidedAccess):
    """Binds one-sided ops and matmuls whose kernels count finished output tiles; see the module docstring."""

    def check_memory(self, memory: RemoteMemory) -> None:
        """Raise UnsupportedError where other ranks' parts of `memory` are not mapped into this process."""
        if not memory.is_aliased:
            raise UnsupportedError(
                f"tracked products store to memory that ranks map, {memory.kind} memory is not"
            )

    @property
    def _regions(self) -> TrackedRegions:
        assert self._analysis.regions is not None
        return self._analysis.regions

    def own_slots(self, analysis: RankAnalysis) -> dict[Key, Slot]:
        """Return {`TILES`: the slot of this rank's tile counters, one int32 for each region of a product}.

        Kernels of any rank may add to the counters.
        """
        assert analysis.regions is not None
        return {TILES: Slot.of_counters(analysis.regions.num_counters)}

    def set_binder(self, binder: Binder) -> None:
        """Keep `binder`, which makes tensors of this rank's views, and decide which regions share a kernel."""
        super().set_binder(binder)
        ops, rank = self._analysis.ops, self._rank
        self._tensors = {index: self._region(index) for at, index in self._regions.product_of if at == rank}
        alike = {
            (one, other)
            for product in {nodes for nodes in self._regions.product_of.values() if nodes[0][0] == rank}
            for (_, one), (_, other) in itertools.pairwise(product)
            if share_a_kernel(self._tensors[one], self._tensors[other])
        }
        to_start, edges = self._counters.to_start, self._analysis.edges
        lanes = [bound.op.lane for bound in ops]
        waits = [
            {
                *(other for other in edges[index] if lanes[other] != lanes[index]),
                *((count.counter, count.needed) for count in to_start.get((rank, index), ())),
                *(("tiles", *node) for node in self._analysis.awaited_regions[index]),
            }
            for index in range(len(ops))
        ]
        self._launches = launches(rank, self._regions, waits, lanes, alike, edges)

    def bind(self, index: int, bound: BoundOp, bind_local_or_matched: Callable[[BoundOp], Action]) -> Action:
        """Return a function without arguments that runs op number `index` of this rank, after what it waits for.

        The first region of a kernel launches it, and the kernel's other regions do nothing.

        Args:
            bound: the op, resolved for this rank.
            bind_local_or_matched: binds an op that has nothing to do with remote memory.

        Raises UnsupportedError where the memory or the kernels cannot run the op, BindError for a fence without
        this rank.
        """
        if index in self._launches.joined:
            return chain_actions([])
        before = self._wait_for_tiles(index, bound.label)
        if index not in self._launches.members:
            return chain_actions([*before, super().bind(index, bound, bind_local_or_matched)])
        if counts := self._counters.to_start.get((self._rank, index)):
            before.append(self._wait_for(counts, f"which {bound.label} reads"))
        adds = any(
            mode == UPDATE
            for at, other in enumerate(self._analysis.ops)
            if (self._rank, at) not in self._regions.counter_of
            for mode, _ in other.op.accesses()
        )
        programs = multiprocessors(self._context.device)
        product = TrackedProduct(
            [self._tensors[member] for member in self._launches.members[index]],
            block=self._block((self._rank, index)),
            num_programs=max(programs - ADDING_PROGRAMS * adds, 1),
        )
        return chain_actions([*before, product])

    # -- regions ---------------------------------------------------------------------------------------------

    def _op(self, node: Node) -> Matmul:
        op = self._program.ops_by_rank[node[0]][node[1]].op
        assert isinstance(op, Matmul)
        return op

    def _block(self, node: Node) -> Block:
        ops = [self._op(other) for other in self._regions.product_of[node]]
        return product_block(ops, torch_dtype(self._program.buffer_of[ops[0].out.buffer].dtype).itemsize)

    def _region(self, index: int) -> TrackedRegion:
        op = self._op((self._rank, index))
        a, b, out = (self._matrix(view) for view in (op.a, op.b, op.out))
        holder, number = self._regions.counter_of[self._rank, index]
        counter = self._window.remote[holder, TILES].tensor[number]
        a, b = a.t() if op.transpose_a else a, b.t() if op.transpose_b else b
        return TrackedRegion(a, b, out, counter, op.release or Release())

    def _matrix(self, view: View) -> Tensor:
        tensor = self._binder.view(view).direct
        assert tensor is not None, view
        return tensor

    def _wait_for_tiles(self, index: int, label: str) -> list[Action]:
        """Return what waits for the regions that an op touches."""
        nodes = self._analysis.awaited_regions[index]
        if not nodes:
            return []
        views = dict.fromkeys(str(replace(self._op(node).out, rank=None)) for node in nodes)
        what = f"region {' and '.join(views)} of rank {self._rank}, which {label} touches"
        numbers = [self._regions.counter_of[node][1] for node in nodes]
        totals = [num_tiles(self._op(node), self._block(node)) for node in nodes]
        wait_for = self._window.await_counts(TILES, numbers, [rank for rank, _ in nodes], what)
        return [lambda: wait_for([self._run * total for total in totals])]

    # -- updates ---------------------------------------------------------------------------------------------

    def _update(self, op: Op, out: View, src: StridedView) -> list[Action]:
        if isinstance(op, Accumulate) and op.op != "sum":
            raise UnsupportedError(f"beside tracked products memory is updated by sums, not by '{op.op}'")
        slot, pairs, before = self._paired(op.lane, out, src)
        check_atomic_add(slot.tensor.dtype, self._context.device)
        if any(piece.ndim > 2 for piece, _ in pairs):
            raise UnsupportedError(
                f"beside tracked products memory is updated in up to two dims, not in {out} of rank {slot.rank}"
            )
        return [*before, *(partial(accumulate, piece, value, ADDING_PROGRAMS) for piece, value in pairs)]
