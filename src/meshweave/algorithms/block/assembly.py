"""Puts the program of a block together: what a writer has written, and the equations that it is proved by."""

from __future__ import annotations

from dataclasses import replace

from meshweave.algorithms.block.end_equations import end_meanings, end_tensors
from meshweave.algorithms.block.ends import EndsWriter
from meshweave.algorithms.block.halves import Half, halves_of_layers, token_sizes
from meshweave.algorithms.block.layer import LayerWriter
from meshweave.algorithms.block.pieces import WRITERS, Piece
from meshweave.algorithms.block.problem import BlockConfig, BlockProblem, Overlap
from meshweave.algorithms.block.program_writer import ProgramWriter
from meshweave.algorithms.block.ring_equations import (
    POSITIONS,
    ring_gradient_meanings,
    ring_gradient_tensors,
    ring_meanings,
    ring_tensors,
)
from meshweave.algorithms.block.roles import AxisDims, Roles
from meshweave.algorithms.block.sized import SizedSkeleton, SizedWriter
from meshweave.algorithms.block.skeleton_writer import SkeletonWriter
from meshweave.algorithms.block.writer import BlockWriter
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.program import On, Program, Tensor
from meshweave.ir.program.meanings import Meaning
from meshweave.ir.skeleton import Skeleton


def write_program(problem: BlockProblem, config: BlockConfig, roles: Roles, mesh: Mesh, name: str) -> Program:
    """Return the program of a block on a mesh whose axes have these roles."""
    writer = ProgramWriter(problem, config, mesh, batch_dims(roles))
    _layers(problem, roles, writer).write()
    return _assembled(writer, roles, name)


def write_skeleton(
    problem: BlockProblem,
    config: BlockConfig,
    roles: Roles,
    mesh: Mesh,
    piece: Piece | None = None,
    overlap: Overlap = "layers",
) -> Skeleton:
    """Return the tasks of rank 0 of that program, or of one piece of the model; by sites, of their programs."""
    writer = SkeletonWriter(problem, config, mesh, batch_dims(roles), overlap)
    if piece is None:
        _layers(problem, roles, writer).write()
    else:
        WRITERS[piece](problem, roles, writer).write()
    return writer.skeleton()


def write_sized_skeleton(
    problem: BlockProblem, roles: Roles, mesh: Mesh, overlap: Overlap = "layers"
) -> SizedSkeleton:
    """Return the tasks of `write_skeleton` in one chunk, for any number of sequences."""
    writer = SizedWriter(problem, mesh, batch_dims(roles), overlap)
    _layers(writer.problem, roles, writer).write()
    return writer.sized()


def _layers(problem: BlockProblem, roles: Roles, writer: BlockWriter) -> LayerWriter:
    return (EndsWriter if problem.vocabulary else LayerWriter)(problem, roles, writer)


def _assembled(writer: ProgramWriter, roles: Roles, name: str) -> Program:
    """Return the program of what has been written, with the equations of its layers."""
    meanings = equations(writer.problem, roles)
    needed = {meaning.out for meaning in meanings}
    needed |= {buffer.tensor for buffer in writer.buffers.values() if buffer.tensor is not None}
    return Program(
        name,
        (writer.mesh,),
        tuple(tensor for tensor in tensors_of(writer.problem, roles) if tensor.name in needed),
        tuple(writer.buffers.values()),
        writer.lanes,
        (On(writer.mesh.name, tuple(writer.statements)),),
        tuple(meanings),
    )


def equations(problem: BlockProblem, roles: Roles) -> list[Meaning]:
    """Return the equations of all layers, and of both ends where there is a vocabulary."""
    halves = halves_of_layers(problem, roles.is_flat)
    rings = _rings(halves, roles)
    meanings: list[Meaning] = []
    for half in halves:
        meanings += half.meanings(roles.two_step_norms, ring_meanings(half) if half in rings else None)
    for half in reversed(halves) if problem.training else ():
        core = ring_gradient_meanings(half) if half in rings else None
        meanings += half.gradient_meanings(roles.two_step_norms, core)
    if problem.vocabulary:
        meanings += end_meanings(problem, roles.is_flat, roles.two_step_norms)
    return meanings


def tensors_of(problem: BlockProblem, roles: Roles) -> list[Tensor]:
    """Return all tensors of the layers, and of both ends where there is a vocabulary."""
    halves = halves_of_layers(problem, roles.is_flat)
    rings = _rings(halves, roles)
    tensors = [Tensor("X", (*token_sizes(problem, roles.is_flat), problem.hidden), problem.dtype)]
    tensors += [tensor for half in halves for tensor in half.tensors()]
    tensors += [tensor for half in rings for tensor in ring_tensors(half)]
    if problem.training:
        tensors.append(replace(tensors[0], name="DZ"))
        tensors += [tensor for half in reversed(halves) for tensor in half.gradient_tensors()]
        tensors += [tensor for half in rings for tensor in ring_gradient_tensors(half)]
    if problem.vocabulary:
        tensors += end_tensors(problem, roles.is_flat)
    if rings:
        tensors.append(Tensor(POSITIONS, (problem.sequence,), problem.statistics_dtype))
    return tensors


def _rings(halves: list[Half], roles: Roles) -> list[Half]:
    return [half for half in halves if half.is_attention and roles.ring_axis is not None]


def batch_dims(roles: Roles) -> AxisDims:
    """Return how the batch lies on the mesh, in the operands of every op."""
    return tuple("batch" if dim == "batch" else "" for dim in roles.residual)
