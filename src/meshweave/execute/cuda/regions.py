"""Which products of a program run as kernels that count their tiles, by which counters, and who waits for them.

A region of a product is a `matmul` that releases its result (`ir.program.regions`). It has one counter, in the
memory of the rank that its tiles are stored to: only ops of that rank, those that touch the region, wait for it.
Regions of a lane that follow one another and wait for nothing new run in one kernel.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from meshweave.ir.analysis.edges import tracked_edges
from meshweave.ir.analysis.matching import Node, match
from meshweave.ir.program import BoundOp, Program
from meshweave.ir.program.ops import Matmul, Op
from meshweave.ir.program.views import Range


@dataclass(frozen=True)
class TrackedRegions:
    """The regions of a program: parts of a matmul's output, each of one op. Its key is (rank, index of that op).

    Attributes:
        counter_of: for each region (the rank in whose memory its counter is, the counter's index there).
        product_of: for each region all regions of the same matmul, itself included.
        remote: for each op (rank, index) the regions of other ranks that it waits for.
        num_counters: the most counters that any rank has.
    """

    counter_of: Mapping[Node, tuple[int, int]]
    product_of: Mapping[Node, tuple[Node, ...]]
    remote: Mapping[Node, tuple[Node, ...]]
    num_counters: int

    def local(self, rank: int, edges: Sequence[Iterable[int]], lanes: Sequence[str]) -> list[tuple[int, ...]]:
        """Return for each op of `rank` the op indices of the regions in other lanes that it waits for.

        Args:
            edges: for each op of the rank the indices of the earlier ops that it waits for.
            lanes: the lane (queue of ops that run in order, such as a stream) of each op of the rank.
        """
        return [
            tuple(
                other
                for other in earlier
                if (rank, other) in self.counter_of and lanes[other] != lanes[index]
            )
            for index, earlier in enumerate(edges)
        ]


def tracked_regions(program: Program) -> TrackedRegions:
    """Return the regions of all matmuls that a program releases tile by tile, on all ranks, and their counters."""
    counter_of: dict[Node, tuple[int, int]] = {}
    product_of: dict[Node, tuple[Node, ...]] = {}
    num_counters: dict[int, int] = {}
    for rank, ops in program.ops_by_rank.items():
        for product in _products(ops):
            nodes = tuple((rank, index) for index in product)
            product_of.update(dict.fromkeys(nodes, nodes))
            for node in nodes:
                holder = ops[node[1]].op.writes[0].rank
                holder = rank if holder is None else holder
                assert isinstance(holder, int)
                number = num_counters.get(holder, 0)
                num_counters[holder] = number + 1
                counter_of[node] = holder, number
    remote = {
        later: nodes
        for later, earlier in tracked_edges(match(program)).items()
        if (nodes := tuple(node for node in earlier if node in counter_of))
    }
    return TrackedRegions(counter_of, product_of, remote, max(num_counters.values(), default=0))


def is_region(op: Op) -> bool:
    """Return whether an op computes a region that is released tile by tile.

    That is a 2-D matmul with a `release` that does not accumulate and whose views are plain ranges.
    """
    return (
        isinstance(op, Matmul)
        and op.release is not None
        and not op.accumulate
        and all(
            len(view.selectors) == 2 and all(isinstance(selector, Range) for selector in view.selectors)
            for view in (op.out, op.a, op.b)
        )
    )


def _products(ops: Sequence[BoundOp]) -> list[list[int]]:
    """Return the regions of each product of a rank, which follow one another in a lane."""
    products: list[list[int]] = []
    last: dict[str, list[int] | None] = {}
    for index, bound in enumerate(ops):
        op = bound.op
        if not is_region(op):
            last[op.lane] = None
            continue
        assert isinstance(op, Matmul) and op.release is not None
        product = last.get(op.lane) if op.release.joins else None
        if product is None:
            product = []
            products.append(product)
        product.append(index)
        last[op.lane] = product
    return products


@dataclass
class Launches:
    """The kernels of one rank: which regions each computes, by their op indices."""

    members: dict[int, list[int]] = field(default_factory=dict)
    """For the first region of each kernel, all regions of that kernel."""
    joined: set[int] = field(default_factory=set)
    """The regions that are not the first of their kernel."""


def launches(
    rank: int,
    regions: TrackedRegions,
    waits: Sequence[Container[object]],
    lanes: Sequence[str],
    alike: Container[tuple[int, int]],
    edges: Sequence[Iterable[int]],
) -> Launches:
    """Return which regions each kernel of global rank `rank` computes.

    A region joins the kernel of the previous region of its matmul where one kernel can compute both, its lane has
    already waited for all that the region waits for, and it waits for no region of that kernel.

    Args:
        regions: the regions of the program.
        waits: for each op of the rank a set of what it waits for in other lanes and ranks; equal elements stand
            for equal waits.
        lanes: the lane of each op of the rank.
        alike: pairs of op indices of successive regions that one kernel can compute.
        edges: for each op of the rank the indices of the earlier ops that it waits for.
    """
    launches = Launches()
    seen: dict[str, set[object]] = {}
    kernel_of: dict[int, list[int]] = {}
    for index, lane in enumerate(lanes):
        known, needed = seen.setdefault(lane, set()), set(waits[index])  # type: ignore[call-overload]
        if (rank, index) in regions.product_of:
            product = [of for _, of in regions.product_of[rank, index]]
            place = product.index(index)
            before = product[place - 1] if place else None
            joins = before is not None and needed <= known and (before, index) in alike
            if before is not None and joins and not {*edges[index]}.intersection(kernel_of[before]):
                kernel_of[index] = kernel_of[before]
                kernel_of[index].append(index)
                launches.joined.add(index)
            else:
                kernel_of[index] = launches.members[index] = [index]
        known |= needed
    return launches
