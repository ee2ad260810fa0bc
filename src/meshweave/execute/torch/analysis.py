"""What binding derives from a program. Each fact is derived once per bound program, when it is first needed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from meshweave.execute.cuda.regions import TrackedRegions, tracked_regions
from meshweave.execute.torch.counters import CompletionCounters, completion_counters
from meshweave.execute.torch.groups import assign_channels, fence_groups, without_fences
from meshweave.execute.torch.views import Order
from meshweave.execute.torch.wire import WireKey, wire_orders
from meshweave.ir.analysis.edges import (
    Conflicts,
    access_conflicts,
    exposed_buffers,
    local_edges,
    write_edges,
)
from meshweave.ir.analysis.matching import Node
from meshweave.ir.program import BoundOp, Buffer, Program


@dataclass(frozen=True)
class RankAnalysis:
    """What `bind` derives from a program for one rank; each fact is derived once.

    Ops go by their index in `ops`. A lane is a queue of ops that run in program order.

    Attributes:
        rank: the global rank.
        has_memory: whether `bind` was given a remote memory.
        shares_groups: whether lanes may share process groups.
        in_arrival_order: whether updates of the same elements may be made in the order in which they arrive.
        tracks: whether matmuls that are released tile by tile run as kernels that count their tiles.
    """

    program: Program
    rank: int
    has_memory: bool
    shares_groups: bool
    in_arrival_order: bool = False
    tracks: bool = False

    @cached_property
    def ops(self) -> tuple[BoundOp, ...]:
        """Return this rank's ops in program order, with loops unrolled and expressions evaluated to integers."""
        return tuple(self.program.ops_on_rank(self.rank))

    @cached_property
    def buffers(self) -> dict[str, Buffer]:
        """Return the buffers that this rank has, by name."""
        program = self.program
        return {b.name: b for b in program.buffers if self.rank in program.mesh_of[b.mesh]}

    @cached_property
    def exposed(self) -> frozenset[str]:
        """Return the names of the buffers that some rank reads or writes in another rank's memory."""
        return exposed_buffers(self.program)

    @property
    def is_one_sided(self) -> bool:
        """Return whether there is a remote memory and ops that use it; fences then go through it, too."""
        return self.has_memory and bool(self.exposed)

    # -- order among this rank's ops -------------------------------------------------------------------------

    @cached_property
    def _conflicts(self) -> Conflicts:
        return access_conflicts(self.ops)

    @cached_property
    def edges(self) -> tuple[tuple[int, ...], ...]:
        """Return for each op of this rank the indices of the earlier ops that it must wait for.

        Where `regions` is not None, matmuls in other lanes that count their tiles are left out: the op waits for
        their counters instead (`awaited_regions`).
        """
        if self.regions is None:
            return self._all_edges
        return tuple(
            tuple(other for other in earlier if other not in counted)
            for earlier, counted in zip(self._all_edges, self._local_regions, strict=True)
        )

    @cached_property
    def _all_edges(self) -> tuple[tuple[int, ...], ...]:
        return local_edges(self.ops, self.exposed, self._conflicts)

    @cached_property
    def write_edges(self) -> tuple[tuple[int, ...], ...]:
        """Return for each op the indices of the earlier ops that must end before its results may be written."""
        return write_edges(self._conflicts)

    # -- products that count their tiles ---------------------------------------------------------------------

    @cached_property
    def regions(self) -> TrackedRegions | None:
        """Return the output regions of matmuls that count their tiles; None without `tracks` or `is_one_sided`."""
        return tracked_regions(self.program) if self.tracks and self.is_one_sided else None

    @cached_property
    def _local_regions(self) -> list[tuple[int, ...]]:
        assert self.regions is not None
        return self.regions.local(self.rank, self._all_edges, [bound.op.lane for bound in self.ops])

    @cached_property
    def awaited_regions(self) -> list[tuple[Node, ...]]:
        """Return for each op the matmuls, as (rank, op index), for whose tile counters it waits.

        They are in other lanes of this rank and on other ranks. `regions` must not be None.
        """
        assert self.regions is not None
        return [
            (*((self.rank, other) for other in local), *self.regions.remote.get((self.rank, index), ()))
            for index, local in enumerate(self._local_regions)
        ]

    # -- process groups --------------------------------------------------------------------------------------

    @cached_property
    def matched_program(self) -> Program:
        """Return the program for which process groups are formed: without fences where `is_one_sided`."""
        return without_fences(self.program) if self.is_one_sided else self.program

    @cached_property
    def channels(self) -> dict[str, int]:
        """Return the channel number of each communicating lane, by lane name; lanes of one channel share their
        process groups (`assign_channels`).
        """
        return assign_channels(self.matched_program, shared=self.shares_groups)

    @cached_property
    def wire_orders(self) -> dict[WireKey, Order]:
        """Return the order of dims, outermost first, in which tensors are sent; see the function `wire_orders`."""
        return wire_orders(self.matched_program)

    # -- one-sided access ------------------------------------------------------------------------------------

    @cached_property
    def fence_groups(self) -> list[tuple[int, ...]]:
        """Return all ranks of the program, then each other set of ranks of a fence, each ascending."""
        return fence_groups(self.program)

    @cached_property
    def completion_counters(self) -> CompletionCounters:
        """Return the counters by which ops of different ranks wait for released writes and for updates.

        The matmuls of `regions`, which count their tiles themselves, are left out.
        """
        counted = () if self.regions is None else self.regions.counter_of
        return completion_counters(self.program, in_arrival_order=self.in_arrival_order, but=counted)
