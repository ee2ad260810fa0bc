"""Exchanges of tokens with experts that run beside what another micro-batch computes.

The forward part of one micro-batch runs beside the backward part of another, so that both compute while tokens of
both travel (Megatron-Core's 1F1B with overlapped exchanges).
"""

from __future__ import annotations

from meshweave.algorithms.step.block_tasks import PartTime
from meshweave.algorithms.step.block_time import LayerBlock
from meshweave.algorithms.step.problem import Parallelism, StepProblem
from meshweave.cost.exchange import library_of
from meshweave.describe.machine.kernels import ProductConstants


def overlapped_share(problem: StepProblem, p: Parallelism) -> float:
    """Return the share (0 to 1) of a pipeline's time in which a forward part runs beside a backward part.

    The first forward and the last backward part, and those that fill and drain the pipeline, run alone.
    """
    micro_batches = problem.batch // (p.data * p.micro_batch)
    return (micro_batches - 1) / (micro_batches + (p.pipeline - 1) / p.virtual_stages)


def hidden_exchanges(block: LayerBlock) -> tuple[PartTime, PartTime]:
    """Return the times to add to a layer's (forward part, backward part) where token exchanges are hidden.

    Hidden exchanges run beside the computing of another micro-batch: `tensor_s` is negative, the communication
    that is no longer exposed, and `compute_s` positive, since products have only the multiprocessors that the
    exchange leaves. Both are 0 where the stack does not overlap exchanges, or there are none.
    """
    problem = block.problem
    if not problem.stack.overlaps_exchanges or not block.whole.exchange_s:
        return PartTime(), PartTime()
    first, whole = block.forward, block.whole
    exposed = first.part.tensor_s, whole.part.tensor_s - first.part.tensor_s
    own = (
        min(first.exchange_s, exposed[0]),
        min(whole.exchange_s - first.exchange_s, exposed[1]),
    )
    computing_s, total_s = whole.part.compute_s, sum(own)
    hidden_s = min(total_s, computing_s)
    kernels = problem.cluster.chip.kernels
    products = kernels.product(problem.dtype) if kernels else None
    units = products.units if isinstance(products, ProductConstants) else 0
    taken = library_of(problem.dispatcher).multiprocessors / units if units else 0.0
    out = []
    for each in own:
        share = each / total_s if total_s else 0.0
        out.append(PartTime(share * hidden_s * taken / (1 - taken), -share * hidden_s))
    return out[0], out[1]
