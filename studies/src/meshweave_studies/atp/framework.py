"""The reading `framework` of ATP: its layers as a framework of 2021 runs them on A100s.

No constant here is fitted on a row of ATP; where chunks are and what overlaps was read after rows had been seen:

- products and element-wise kernels take the catalog's times by shape of an A100, sustained as in training;
- the software is the catalog's `megatron-2021`: kernels that are not fused, seconds between two kernels, and
  attention of two products, softmax and dropout that keep the scores (section 5.1: no optimized kernels);
- a layer is one op after another, its four all-reduces too. Chunks are of the forward pass alone (section 4.2),
  where communication is then one stream beside the products, one collective after another. Whether all-reduces of
  the backward pass run beside gradients of weights without chunks (section 4.2) is open: both are scored.

What the software adds is not hidden behind communication. Links, and bytes of sums, are those of the machines.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from meshweave.algorithms.block import BlockConfig, BlockProblem
from meshweave.algorithms.step.layers import least_added_s
from meshweave.algorithms.step.problem import Parallelism, StepProblem
from meshweave.algorithms.step.stacks import load_stack
from meshweave.algorithms.table import algorithm
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.kernels_file import load_kernels
from meshweave.describe.model.transformer import Transformer
from meshweave.describe.model.workload import Workload
from meshweave.ir.program import Lane, Op, Program, Statement, rewrite
from meshweave.simulate import simulate
from meshweave_studies.blocks.ranking import MeshShape, block_machine

ATP, SUMMA, COLLECTIVE, DEPTH = "atp", "summa_block", "collective_block", "25d_block"
"""Strategies: ATP's own, and its rivals."""
STACK = "megatron-2021"
KERNELS = {"A100-SXM4-80GB": "a100-sxm4-80gb", "A100-PCIe-80GB": "a100-pcie-80gb"}
"""Constants of the catalog by the name of a chip."""
_COMPUTING = ("matmul", "call")


def step_problem(cluster: Cluster, model: Transformer, load: Workload) -> StepProblem:
    """Return a step of a model on a machine of ATP under the stack."""
    kernels = load_kernels(KERNELS[cluster.chip.name])
    priced = replace(cluster, chip=replace(cluster.chip, kernels=kernels))
    stack = load_stack(STACK)
    return StepProblem(model, priced, load.batch, load.sequence, load.dtype, attention="plain", stack=stack)


def framework_s(problem: StepProblem, strategy: str, mesh: MeshShape, chunks: int, overlaps: bool) -> float:
    """Return the seconds of a layer on a mesh: its program, and what the software adds.

    Args:
        overlaps: whether communication of the backward pass runs beside its products.
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

    whole = program(True, 1)
    seconds, kernels = simulated_s(whole, overlaps), _num_kernels(whole)
    if chunks > 1:
        plain, chunked = program(False, 1), program(False, chunks)
        seconds += simulated_s(chunked, True) - simulated_s(plain, False)
        kernels += _num_kernels(chunked) - _num_kernels(plain)
    return seconds + _software_s(problem, mesh, strategy, kernels)


def _software_s(problem: StepProblem, mesh: MeshShape, strategy: str, kernels: int) -> float:
    """Return the seconds that the stack and plain attention add to a layer of so many kernels on a mesh.

    2.5D products share a layer as 2D ones do on a mesh of as many ranks.
    """
    sides = math.prod(mesh[:-1]), mesh[-1]
    shares = SUMMA if strategy == DEPTH else strategy
    parallelism = Parallelism(tensor=sides, strategy=shares, micro_batch=problem.batch)
    return least_added_s(problem, parallelism) + kernels * problem.stack.gap_s


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
    return _moved(program, Lane("stream"), lambda op: getattr(op, "over", None) is not None)


def _moved(program: Program, lane: Lane, moves: Callable[[Op], bool]) -> Program:
    def moved(op: Op) -> tuple[Statement, ...]:
        return (replace(op, lane=lane.name) if moves(op) else op,)

    return replace(program, lanes=(*program.lanes, lane), body=rewrite(program.body, moved))
