"""The host with which the program of a step is simulated: one rate for all ops of all ranks.

What a host issues beyond the ops of a program, such as kernels that a stack does not fuse, is spread evenly over
these ops, in layers of all kinds. Graphs may capture a share of the kernels of layers with experts
(`SoftwareStack.captured`), which the host then does not issue. Embedding and head are not captured, so that their
ops are then counted too.
"""

from __future__ import annotations

from dataclasses import replace

from meshweave.algorithms.step.block_time import layer_block
from meshweave.algorithms.step.host_time import issue_counts
from meshweave.algorithms.step.layers import ends_time
from meshweave.algorithms.step.problem import Parallelism, StepProblem
from meshweave.describe.machine.host import HostRates


def program_host(problem: StepProblem, parallelism: Parallelism) -> HostRates | None:
    """Return the seconds per op in which a host issues a step's program; None where no host is known.

    `kernel_s` includes an equal share of Python code and of kernels that are no ops; `layer_s` is 0.
    """
    host, stack = problem.host, problem.stack
    if host is None:
        return None
    again = parallelism.recompute == "full"
    of_kinds = [(share, *_issued_and_ops(kind, parallelism, again)) for share, kind in problem.kinds]
    issued_s, ops = (sum(share * each[at] for share, *each in of_kinds) for at in (0, 1))
    if stack.graphs:
        return HostRates(issued_s / ops)
    if stack.captured and problem.model.is_routed and host.kernel_s:
        ends_s = sum(sum(end.issued_s) for end in ends_time(problem, parallelism)) / problem.model.num_layers
        issued_s, ops = issued_s + ends_s, ops + ends_s / host.kernel_s
    return replace(host, kernel_s=issued_s / ops, layer_s=0.0)


def _issued_and_ops(problem: StepProblem, parallelism: Parallelism, again: bool) -> tuple[float, int]:
    """Return the seconds in which the host issues the kernels of a layer, and the ops of its program."""
    host, block = problem.host, layer_block(problem, parallelism)
    ops = block.whole.kernels + again * block.forward.kernels
    if host is None:
        return 0.0, ops
    if problem.stack.graphs:
        return (2 + again) * host.kernel_s, ops
    counts = issue_counts(block, parallelism)
    kernels = sum(count.kernels for count in counts) + again * counts[0].kernels
    captured = problem.stack.captured if problem.model.is_routed else 0.0
    return (1 - captured) * (kernels * host.kernel_s + (1 + again) * host.layer_s), ops
