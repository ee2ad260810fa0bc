"""What experts cost: their router, copies of tokens to and fro, and grouped products.

With T tokens on a rank, k experts a token of h features, and E experts of f inner features on ranks (expert,
tensor), a rank has E / expert of them, and of each f / tensor features:

    router      a product (T, E, h), and passes over T E scores in float32
    dispatch    copies side by side by expert: T h read, T k h written, where a library sends each of them; the
                exchange; what arrives sorted by expert, where a rank has several, or copied for each of its
                experts, where a library sends it once to a rank; gathered over the ranks that share an expert
    experts     grouped products over T x k x tensor x load rows (`ExpertRanks.load`); or a product for each
                expert, and passes between
    combine     the same way back, with sums for dispatch's copies

Backward, combine is a dispatch of gradients and dispatch a combine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from meshweave.algorithms.block.nodes.kernel import PassPart
from meshweave.algorithms.block.nodes.timed import TimedRecord, streamed
from meshweave.algorithms.block.problem import BlockProblem, ExpertRanks
from meshweave.algorithms.block.writer import COMPUTE
from meshweave.base.units import dtype_bytes
from meshweave.cost.exchange import elements_after_dispatch, library_of
from meshweave.describe.model.experts import CombineCopies, DispatchCopies, Experts, Router, SharedGate
from meshweave.ir.work import Compute, CopyExchange, Transfer, Work, matmul_work

MESH_OF_EXPERTS = "experts"
"""The name of the mesh whose axes "rank" and "tensor" share experts."""
_SCORE_PASSES = 6
"""Reads and writes of scores in float32: softmax, choice, and their gradients take about as many."""


class RouterRecord(TimedRecord[Router]):
    """The scores of all experts, and the choice of the highest for each token."""

    node_type = Router

    def works(
        self, node: Router, problem: BlockProblem, tokens: int, part: PassPart
    ) -> Iterator[tuple[str, Work]]:
        """Yield ("compute", work) for each op of the router, for `tokens` of one rank.

        `part` "forward" is the product with the router's weight, "backward" the products for its two gradients;
        then come reads and writes of the scores (tokens, experts) in float32.
        """
        if part == "forward":
            yield COMPUTE, matmul_work(tokens, node.experts, node.hidden, problem.dtype)
        else:
            yield COMPUTE, matmul_work(tokens, node.hidden, node.experts, problem.dtype)
            yield COMPUTE, matmul_work(node.hidden, node.experts, tokens, problem.dtype)
        yield streamed(problem, _SCORE_PASSES * tokens * node.experts * 4 // dtype_bytes(problem.dtype))


def _exchanged(
    node: DispatchCopies | CombineCopies,
    problem: BlockProblem,
    tokens: int,
    kind: Literal["dispatch", "combine"],
) -> Iterator[tuple[str, Work]]:
    """Yield the passes and transfers of a dispatch, or in reverse of a combine."""
    router, ranks = node.router, problem.experts or ExpertRanks()
    copies = tokens * router.chosen * node.hidden
    item = dtype_bytes(problem.dtype)
    sends_copies = ranks.expert == 1 or library_of(ranks.dispatcher).sends == "copies"
    works = [streamed(problem, copies + tokens * node.hidden)] if sends_copies else []
    if ranks.expert > 1:
        limits = router.groups, router.top_groups, ranks.load, ranks.dispatcher
        exchange = CopyExchange(
            kind,
            f"{MESH_OF_EXPERTS}.rank",
            ranks.expert,
            node.hidden * item,
            1,
            None,
            1,
            tokens,
            router.experts,
            router.chosen,
            *limits,
        )
        works.append((MESH_OF_EXPERTS, exchange))
        if router.experts > ranks.expert:
            rows = round(copies * ranks.load)
            arrived = rows if sends_copies else elements_after_dispatch(exchange, item)
            works.append(streamed(problem, rows + arrived))
    if ranks.tensor > 1:
        name = "all_gather" if kind == "dispatch" else "reduce_scatter"
        part = round(copies * ranks.load) * item
        works.append((MESH_OF_EXPERTS, Transfer(name, f"{MESH_OF_EXPERTS}.tensor", ranks.tensor, part)))
    return iter(works if kind == "dispatch" else reversed(works))


class DispatchRecord(TimedRecord[DispatchCopies]):
    """The exchange that sends copies of tokens to the ranks of their experts."""

    node_type = DispatchCopies

    def works(
        self, node: DispatchCopies, problem: BlockProblem, tokens: int, part: PassPart
    ) -> Iterator[tuple[str, Work]]:
        """Yield (lane, work) for each op that sends copies of a rank's `tokens`; backward, returns gradients.

        In lane "compute" copies are written and sorted; in lane "experts" are the exchange, and the all-gather
        over ranks that share an expert. Backward the ops come in reverse, with a reduce-scatter for the
        all-gather.
        """
        return _exchanged(node, problem, tokens, "dispatch" if part == "forward" else "combine")


class CombineRecord(TimedRecord[CombineCopies]):
    """The exchange that returns the experts' results, and their weighted sum for each token."""

    node_type = CombineCopies

    def works(
        self, node: CombineCopies, problem: BlockProblem, tokens: int, part: PassPart
    ) -> Iterator[tuple[str, Work]]:
        """Yield (lane, work) for each op that returns results of a rank's `tokens`; backward, sends gradients.

        In lane "experts" are the reduce-scatter over ranks that share an expert, and the exchange; in lane
        "compute" copies are sorted and summed. Backward the ops come in reverse, with an all-gather for the
        reduce-scatter.
        """
        return _exchanged(node, problem, tokens, "combine" if part == "forward" else "dispatch")


class ExpertsRecord(TimedRecord[Experts]):
    """The products of all experts of a rank, grouped or one by one."""

    node_type = Experts

    def works(
        self, node: Experts, problem: BlockProblem, tokens: int, part: PassPart
    ) -> Iterator[tuple[str, Work]]:
        """Yield ("compute", work) for each op of one rank's experts; `tokens` are those of a rank before dispatch.

        Grouped products are one op for the forward part and two for the backward part. Otherwise each product of
        all experts, and each pass over inner features, is an op.
        """
        ranks = problem.experts or ExpertRanks()
        rows = math.ceil(tokens * node.chosen * ranks.tensor * ranks.load)
        shape = (
            rows,
            node.hidden,
            -(-node.inner // ranks.tensor),
            -(-node.experts // ranks.expert),
            node.columns,
        )
        if not ranks.grouped:
            yield from _works_apart(shape, problem, part)
            return
        parts = ("",) if part == "forward" else ("input_grad", "weight_grad")
        for name in parts:
            yield COMPUTE, experts_work(shape, problem.dtype, name)


def _works_apart(
    shape: tuple[int, int, int, int, int], problem: BlockProblem, part: PassPart
) -> Iterator[tuple[str, Work]]:
    """Yield the products of each expert, which run side by side, and the pass over inner features between."""
    rows, hidden, inner, experts, columns = shape
    each, first = max(rows // experts, 1), columns * inner
    if part == "forward":
        yield COMPUTE, matmul_work(each, first, hidden, problem.dtype, experts)
        yield streamed(problem, rows * (first + inner))
        yield COMPUTE, matmul_work(each, hidden, inner, problem.dtype, experts)
        return
    yield COMPUTE, matmul_work(each, inner, hidden, problem.dtype, experts)
    yield streamed(problem, rows * (2 * first + inner))
    yield COMPUTE, matmul_work(each, hidden, first, problem.dtype, experts)
    yield COMPUTE, matmul_work(inner, hidden, each, problem.dtype, experts)
    yield COMPUTE, matmul_work(hidden, first, each, problem.dtype, experts)


def experts_work(shape: tuple[int, int, int, int, int], dtype: str, part: str = "") -> Compute:
    """Return the work (FLOPs and bytes) of one rank's experts as one call: two products, activation between them.

    Args:
        shape: (rows of all experts of the rank, hidden features, inner features, experts of the rank, columns of
            the first product per inner feature: 2 with a gate, else 1).
        part: "" for the forward part, "input_grad" or "weight_grad" for one half of the backward part.
    """
    rows, hidden, inner, experts, columns = shape
    flops = 2 * rows * hidden * inner * (columns + 1)
    weights = experts * hidden * inner * (columns + 1)
    moved = (weights + rows * (2 * hidden + 2 * (columns + 1) * inner)) * dtype_bytes(dtype)
    return Compute("call", flops, moved, dtype=dtype, call="experts", shape=shape, part=part)


class SharedGateRecord(TimedRecord[SharedGate]):
    """A gate for each token, by which the result of the shared expert is multiplied."""

    node_type = SharedGate

    def works(
        self, node: SharedGate, problem: BlockProblem, tokens: int, part: PassPart
    ) -> Iterator[tuple[str, Work]]:
        """Yield ("compute", work) once: reads and writes of 3 arrays (tokens, hidden), or of 6 backward."""
        yield streamed(problem, (3 if part == "forward" else 6) * tokens * node.hidden)
