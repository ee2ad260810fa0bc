"""The reading `framework` of ATP: its layers as a framework of 2021 runs them on A100s.

No constant here is fitted on a row of ATP; where chunks are and what overlaps was read after rows had been seen:

- products and element-wise kernels take the catalog's times by shape of an A100, sustained as in training;
- the software is the catalog's `megatron-2021`: kernels that are not fused, seconds between two kernels, and
  attention of two products, softmax and dropout that keep the scores (section 5.1: no optimized kernels);
- a layer is one op after another, its four all-reduces too. Chunks are of the forward pass alone (section 4.2),
  where communication is then one stream beside the products, one collective after another. Whether all-reduces of
  the backward pass run beside gradients of weights without chunks (section 4.2) is open: both are scored.

What the software adds is not hidden behind communication. Links, and bytes of sums, are those of the machines.

With a host (reading `framework-host`) no kernel has a gap behind it. A host issues kernels and Python code one
after another, and waits for collectives where there are no chunks (`algorithms.step.host`). Its figures are those
of another machine of A100s, whose published runs of the same software they were fitted on (decision 0070).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from meshweave.algorithms.block import BlockConfig, BlockProblem
from meshweave.algorithms.step.block_time import layer_block
from meshweave.algorithms.step.host import IssueCounts, IssuedKind, IssuedTask, paced_ps
from meshweave.algorithms.step.host_time import issue_counts
from meshweave.algorithms.step.layers import least_added_s
from meshweave.algorithms.step.problem import Parallelism, StepProblem
from meshweave.algorithms.step.stacks import load_stack
from meshweave.algorithms.table import algorithm
from meshweave.base.units import to_ps, to_s
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.kernels_file import load_kernels
from meshweave.describe.model.transformer import Transformer
from meshweave.describe.model.workload import Workload
from meshweave.ir.program import Lane, Op, Program, Statement, rewrite
from meshweave.simulate import Simulation, simulate
from meshweave_studies.blocks.ranking import MeshShape, block_machine

ATP, SUMMA, COLLECTIVE, DEPTH = "atp", "summa_block", "collective_block", "25d_block"
"""Strategies: ATP's own, and its rivals."""
STACK = "megatron-2021"
HOST_OF = "megatron-deepspeed"
"""The stack whose host issues kernels where there is one."""
KERNELS = {"A100-SXM4-80GB": "a100-sxm4-80gb", "A100-PCIe-80GB": "a100-pcie-80gb"}
"""Constants of the catalog by the name of a chip."""
_COMPUTING = ("matmul", "call")


def step_problem(cluster: Cluster, model: Transformer, load: Workload, has_host: bool = False) -> StepProblem:
    """Return a step of a model on a machine of ATP under the stack `STACK`, with the host of `HOST_OF` if
    `has_host`.
    """
    kernels = load_kernels(KERNELS[cluster.chip.name])
    priced = replace(cluster, chip=replace(cluster.chip, kernels=kernels))
    stack = load_stack(STACK)
    if has_host:
        stack = replace(stack, launch_s=0.0, host=load_stack(HOST_OF).host)
    return StepProblem(model, priced, load.batch, load.sequence, load.dtype, attention="plain", stack=stack)


def framework_s(problem: StepProblem, strategy: str, mesh: MeshShape, chunks: int, overlaps: bool) -> float:
    """Return the seconds of a layer on a mesh: its program, and what the software adds.

    Args:
        overlaps: whether communication of the backward pass runs beside its products; not with a host.
    """
    machine = block_machine(problem.priced_cluster, mesh)

    def simulated_s(program: Program, overlaps: bool) -> float:
        return simulate(
            on_one_stream(program) if overlaps else one_after_another(program), machine
        ).duration_s

    def program(training: bool, chunks: int) -> Program:
        load = Workload(problem.batch, problem.sequence, problem.dtype)
        block = BlockProblem.of(problem.model, load, mesh, training=training)
        return algorithm(strategy).program(block, config_of(strategy, mesh, chunks))

    whole, parallelism = program(True, 1), _parallelism(problem, mesh, strategy)
    added_s = least_added_s(problem, parallelism)
    if problem.host is not None:
        counts = _issued(problem, parallelism, _num_kernels(whole))
        run = simulate(one_after_another(whole), machine)
        seconds, kernels = to_s(paced_ps(issued_tasks(run), counts, problem.host, to_ps(added_s))), 0
    else:
        seconds, kernels = simulated_s(whole, overlaps) + added_s, _num_kernels(whole)
    if chunks > 1:
        plain, chunked = program(False, 1), program(False, chunks)
        seconds += simulated_s(chunked, True) - simulated_s(plain, False)
        kernels += _num_kernels(chunked) - _num_kernels(plain)
    if problem.host is not None:
        return max(seconds, replace(counts, kernels=counts.kernels + kernels).seconds(problem.host))
    return seconds + kernels * problem.stack.gap_s


def _parallelism(problem: StepProblem, mesh: MeshShape, strategy: str) -> Parallelism:
    """Return how a layer is shared; 2.5D products share it as 2D ones do on a mesh of as many ranks."""
    sides = math.prod(mesh[:-1]), mesh[-1]
    return Parallelism(
        tensor=sides, strategy=SUMMA if strategy == DEPTH else strategy, micro_batch=problem.batch
    )


def _issued(problem: StepProblem, parallelism: Parallelism, kernels: int) -> IssueCounts:
    """Return what the host issues in a layer whose program has so many kernels, forward and backward."""
    block = layer_block(problem, parallelism)
    parts = issue_counts(block, parallelism)
    more = sum(part.kernels for part in parts) - block.whole.kernels
    return IssueCounts(kernels + more, layers=sum(part.layers for part in parts))


def issued_tasks(run: Simulation) -> tuple[IssuedTask, ...]:
    """Return the ops of rank 0 of a program that runs them one after another, each waiting for the one before.

    Together they take as long as the program.
    """
    tasks: list[IssuedTask] = []
    before_ps = 0
    for span, bound in zip(run.spans(0), run.program.ops_on_rank(0), strict=True):
        kind: IssuedKind = "kernel" if span.kind in _COMPUTING else "transfer"
        if is_collective(bound.op):
            kind = "collective"
        end_ps = max(span.end_ps, before_ps)  # a broadcast passed on may end after what follows it
        tasks.append(IssuedTask(kind, end_ps - before_ps, (len(tasks) - 1,) if tasks else ()))
        before_ps = end_ps
    tasks.append(IssuedTask("transfer", run.duration_ps - before_ps, (len(tasks) - 1,)))  # of other ranks
    return tuple(tasks)


def is_collective(op: Op) -> bool:
    """Return whether an op runs over a mesh or one of its axes, such as a collective."""
    return getattr(op, "over", None) is not None


def _num_kernels(program: Program) -> int:
    """Return how many kernels rank 0 computes."""
    first = program.ranks[0]
    return sum(bound.op.kind in _COMPUTING for bound in program.expanded.ops_on_rank(first))


def config_of(strategy: str, mesh: MeshShape, chunks: int) -> BlockConfig:
    """Return the config of a strategy as the paper has it; SUMMA has a panel per rank of the longer side."""
    if strategy in (SUMMA, DEPTH):
        return BlockConfig(slices=max(mesh[-2:]))
    return BlockConfig(chunks, "all_reduce" if strategy == ATP and mesh[1] > 1 else "reduce_scatter")


def one_after_another(program: Program) -> Program:
    """Return a program all of whose ops are in one lane, in the order in which they are written."""
    return _moved(program, Lane("all"), lambda op: True)


def on_one_stream(program: Program) -> Program:
    """Return a program whose communication is all in one lane, in the order in which it is written."""
    return _moved(program, Lane("stream"), is_collective)


def _moved(program: Program, lane: Lane, moves: Callable[[Op], bool]) -> Program:
    def moved(op: Op) -> tuple[Statement, ...]:
        return (replace(op, lane=lane.name) if moves(op) else op,)

    return replace(program, lanes=(*program.lanes, lane), body=rewrite(program.body, moved))
