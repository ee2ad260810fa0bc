"""Puts the program of a block together: what a writer has written, and the equations that it is proved by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshweave.algorithms.block.end_equations import end_gradient_meanings, end_meanings, end_tensors
from meshweave.algorithms.block.ends import EndsWriter
from meshweave.algorithms.block.halves import halves_of_layers, token_sizes
from meshweave.algorithms.block.layer import LayerWriter
from meshweave.algorithms.block.problem import BlockConfig, BlockProblem
from meshweave.algorithms.block.program_writer import ProgramWriter
from meshweave.algorithms.block.ring_equations import (
    POSITIONS,
    ring_gradient_meanings,
    ring_gradient_tensors,
    ring_meanings,
    ring_tensors,
)
from meshweave.algorithms.block.roles import AxisDims, Roles
from meshweave.algorithms.block.skeleton_writer import SkeletonWriter
from meshweave.algorithms.block.writer import BlockWriter
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.program import Include, On, Program, Statement, Tensor
from meshweave.ir.program.meanings import Meaning, Same, sources_of
from meshweave.ir.program.ops import READ, UPDATE, WRITE, Mode
from meshweave.ir.program.statements import ops_of
from meshweave.ir.skeleton import Skeleton


@dataclass(frozen=True)
class BlockParts:
    """A block as two programs, for pipelines, which run other things between them.

    Attributes:
        forward: X, or TOKENS, and weights to Z, or LOSS, and to all that is kept.
        backward: DZ, weights and what is kept to DX and the gradients of weights.
        kept: the buffers that are outputs of `forward` and inputs of `backward`, which have the same names.
    """

    forward: Program
    backward: Program
    kept: tuple[str, ...]


def write_program(problem: BlockProblem, config: BlockConfig, roles: Roles, mesh: Mesh, name: str) -> Program:
    """Return the program of a block on a mesh whose axes have these roles."""
    writer = ProgramWriter(problem, config, mesh, _batch_dims(roles))
    _layers(problem, roles, writer).write()
    return _assembled(writer, roles, name)


def write_parts(
    problem: BlockProblem, config: BlockConfig, roles: Roles, mesh: Mesh, name: str
) -> BlockParts:
    """Return the forward and the backward part of that program, of a block for training."""
    writer = ProgramWriter(problem, config, mesh, _batch_dims(roles), is_divided=True)
    _layers(problem, roles, writer).write()
    return _divided(writer, _assembled(writer, roles, name), roles)


def write_skeleton(problem: BlockProblem, config: BlockConfig, roles: Roles, mesh: Mesh) -> Skeleton:
    """Return the tasks of rank 0 of that program."""
    writer = SkeletonWriter(problem, config, mesh, _batch_dims(roles))
    _layers(problem, roles, writer).write()
    return writer.skeleton()


def _layers(problem: BlockProblem, roles: Roles, writer: BlockWriter) -> LayerWriter:
    return (EndsWriter if problem.vocabulary else LayerWriter)(problem, roles, writer)


def _assembled(writer: ProgramWriter, roles: Roles, name: str) -> Program:
    """Return the program of what has been written, with the equations of its layers."""
    problem, is_flat = writer.problem, roles.is_flat
    halves = halves_of_layers(problem, is_flat)
    rings = [half for half in halves if half.is_attention and roles.ring_axis is not None]
    meanings = list(_meanings(problem, roles))
    if problem.training:
        meanings += _gradient_meanings(problem, roles)
    needed = {meaning.out for meaning in meanings}
    needed |= {buffer.tensor for buffer in writer.buffers.values() if buffer.tensor is not None}
    tensors = [Tensor("X", (*token_sizes(problem, is_flat), problem.hidden), problem.dtype)]
    tensors += [tensor for half in halves for tensor in half.tensors()]
    tensors += [tensor for half in rings for tensor in ring_tensors(half)]
    if problem.training:
        tensors.append(replace(tensors[0], name="DZ"))
        tensors += [tensor for half in reversed(halves) for tensor in half.gradient_tensors()]
        tensors += [tensor for half in rings for tensor in ring_gradient_tensors(half)]
    if problem.vocabulary:
        tensors += end_tensors(problem, is_flat)
    if rings:
        tensors.append(Tensor(POSITIONS, (problem.sequence,), problem.statistics_dtype))
    return Program(
        name,
        (writer.mesh,),
        tuple(tensor for tensor in tensors if tensor.name in needed),
        tuple(writer.buffers.values()),
        writer.lanes,
        (On(writer.mesh.name, tuple(writer.statements)),),
        tuple(meanings),
    )


def _meanings(problem: BlockProblem, roles: Roles) -> Iterator[Meaning]:
    """Yield the equations of the forward part."""
    for half in halves_of_layers(problem, roles.is_flat):
        is_ring = half.is_attention and roles.ring_axis is not None
        yield from half.meanings(roles.two_step_norms, ring_meanings(half) if is_ring else None)
    if problem.vocabulary:
        yield from end_meanings(problem, roles.is_flat, roles.two_step_norms)


def _gradient_meanings(problem: BlockProblem, roles: Roles) -> Iterator[Meaning]:
    """Yield the equations of the backward part."""
    for half in reversed(halves_of_layers(problem, roles.is_flat)):
        is_ring = half.is_attention and roles.ring_axis is not None
        core = ring_gradient_meanings(half) if is_ring else None
        yield from half.gradient_meanings(roles.two_step_norms, core)
    if problem.vocabulary:
        yield from end_gradient_meanings(problem, roles.is_flat, roles.two_step_norms)


def _divided(writer: ProgramWriter, whole: Program, roles: Roles) -> BlockParts:
    """Return the two parts of a program: what the first one writes and the second one reads is kept between."""
    (body,) = whole.body
    assert isinstance(body, On) and writer.num_forward is not None
    statements = body.body[: writer.num_forward], body.body[writer.num_forward :]
    written = [_accessed(part, WRITE) for part in statements]
    read = [_accessed(part, READ) for part in statements]
    kept = [
        buffer.name
        for buffer in whole.buffers
        if buffer.kind == "temp" and buffer.name in written[0] & read[1]
    ]
    meanings = list(_meanings(writer.problem, roles)), list(_gradient_meanings(writer.problem, roles))
    of_kept = {whole.buffer_of[name].tensor for name in kept}
    same = [each for each in meanings[0] if isinstance(each, Same)]
    meanings[1][:0] = [each for each in same if each.src in of_kept]
    meanings[1][:0] = [Same(each.src, each.out) for each in same if each.out in of_kept]
    programs = []
    for number, title in enumerate(("forward", "backward")):
        buffers = []
        for buffer in whole.buffers:
            if buffer.name in kept:
                buffers.append(replace(buffer, kind="input" if number else "output"))
            elif buffer.name in written[number] | read[number]:
                buffers.append(buffer)
        lanes = {op.lane for op in ops_of(statements[number])}
        lanes |= {own for op in ops_of(statements[number]) if isinstance(op, Include) for _, own in op.lanes}
        tensors = {buffer.tensor for buffer in buffers} | {each.out for each in meanings[number]}
        tensors |= {name for each in meanings[number] for name in sources_of(each)}
        programs.append(
            replace(
                whole,
                name=f"{whole.name}, {title}",
                tensors=tuple(tensor for tensor in whole.tensors if tensor.name in tensors),
                buffers=tuple(buffers),
                lanes=tuple(lane for lane in whole.lanes if lane.name in lanes),
                body=(On(body.where, statements[number]),),
                computes=tuple(meanings[number]),
            )
        )
    forward, backward = programs
    return BlockParts(forward, backward, tuple(kept))


def _accessed(statements: tuple[Statement, ...], mode: Mode) -> set[str]:
    """Return the buffers that statements read, or write."""
    return {
        view.buffer for op in ops_of(statements) for each, view in op.accesses() if each in (mode, UPDATE)
    }


def _batch_dims(roles: Roles) -> AxisDims:
    return tuple("batch" if dim == "batch" else "" for dim in roles.residual)
