"""The seconds in which a layer's host issues its parts, and how long the chip waits for a host that itself waits.

The kernels are those of the layer's graph, task by task, those of plain attention, and those that the stack does
not fuse (`algorithms.step.stacks`).
"""

from __future__ import annotations

from meshweave.algorithms.step.block_time import LayerBlock
from meshweave.algorithms.step.host import IssueCounts, paced_ps
from meshweave.algorithms.step.problem import Parallelism, StepProblem
from meshweave.algorithms.step.quantizing import added_passes
from meshweave.algorithms.step.software_stack import UnfusedKernels
from meshweave.base.units import to_ps, to_s


def unfused_of(problem: StepProblem, parallelism: Parallelism, part: str) -> UnfusedKernels:
    """Return the kernels of a layer's `part`, "forward" or "backward", that the stack does not fuse.

    `SoftwareStack.copies` are added where the part communicates: always with tensor ranks; backward with several
    data or context ranks; forward where ZeRO shards over these.
    """
    stack, p, is_forward = problem.stack, parallelism, part == "forward"
    unfused = stack.forward if is_forward else stack.backward
    copies = p.tensor_size > 1 or (p.replicas > 1 and (p.zero or not is_forward))
    return unfused + stack.copies[0 if is_forward else 1] if copies else unfused


_PLAIN_KERNELS = {"forward": 3, "backward": 5}
"""Kernels of plain attention beyond one: two products, softmax and dropout; four products, and the gradients of
softmax and dropout."""


def issue_counts(block: LayerBlock, parallelism: Parallelism) -> tuple[IssueCounts, IssueCounts]:
    """Return what the host issues per micro-batch for (a layer's forward part, its backward part).

    Recomputation is left out. `block` is the layer, priced under `parallelism`.
    """
    problem, first, whole = block.problem, block.forward, block.whole
    plain = _PLAIN_KERNELS if problem.attention_kind == "plain" else dict.fromkeys(_PLAIN_KERNELS, 0)
    stack = problem.stack
    passes = len(problem.model.layer.linears) if any(stack.gradient_passes) else 0
    more = {
        part: plain[part]
        + unfused_of(problem, parallelism, part).kernels
        + added_passes(problem, parallelism, part).kernels
        for part in plain
    }
    back = whole.kernels - first.kernels + more["backward"] + passes
    return (
        IssueCounts(first.kernels + more["forward"], first.collectives, first.messages, 1),
        IssueCounts(back, whole.collectives - first.collectives, whole.messages - first.messages),
    )


def issued_s(block: LayerBlock, parallelism: Parallelism) -> tuple[float, float, float]:
    """Return the seconds in which the host issues a layer's (forward part, backward part, recomputation).

    They are for one micro-batch. All are 0 where the problem has no rates of a host.
    """
    problem = block.problem
    host, graphs = problem.host, problem.stack.graphs
    captured = problem.stack.captured if problem.model.is_routed else 0.0
    if host is None:
        return 0.0, 0.0, 0.0
    forward_s, backward_s = (
        counts.seconds(host, graphs, captured) for counts in issue_counts(block, parallelism)
    )
    again_s = {"none": 0.0, "full": forward_s}.get(parallelism.recompute)
    if again_s is None:
        plain = _PLAIN_KERNELS["forward"] if problem.attention_kind == "plain" else 0
        again_s = IssueCounts(1 + plain).seconds(host, graphs, captured)
    return forward_s, backward_s, again_s


def stalls_s(
    block: LayerBlock, parallelism: Parallelism, added_s: tuple[float, float]
) -> tuple[float, float]:
    """Return the seconds that a host which waits for collectives adds to a layer's (forward, backward) part.

    They are per micro-batch. `added_s` are seconds on the chip that the software adds to (the forward part, the
    backward part), which the results leave out. Both results are 0 where the host does not wait or has graphs,
    without collectives, and where tasks are not priced one by one (`LayerBlock.issued`).
    """
    host, first, whole = block.problem.host, block.forward, block.whole
    if host is None or not host.waits or block.problem.stack.graphs or not whole.collectives:
        return 0.0, 0.0
    parts = block.issued
    if parts is None:
        return 0.0, 0.0
    counts = issue_counts(block, parallelism)
    free_s = first.part.total_s, (whole.part - first.part).total_s
    forward_s, backward_s = (
        max(to_s(paced_ps(tasks, count, host, to_ps(more_s))) - own_s - more_s, 0.0)
        for tasks, count, more_s, own_s in zip(parts, counts, added_s, free_s, strict=True)
    )
    return forward_s, backward_s
