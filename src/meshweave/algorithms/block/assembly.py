"""Puts the program of a block together: what a writer has written, and the equations that it is proved by."""

from __future__ import annotations

from dataclasses import replace

from meshweave.algorithms.block.end_equations import end_meanings, end_tensors
from meshweave.algorithms.block.ends import EndsWriter
from meshweave.algorithms.block.folds import layer_gradient_meanings, layer_meanings, layer_tensors
from meshweave.algorithms.block.layer import LayerWriter
from meshweave.algorithms.block.pieces import WRITERS, Piece
from meshweave.algorithms.block.place import layers_of, token_sizes
from meshweave.algorithms.block.problem import BlockConfig, BlockProblem, Overlap
from meshweave.algorithms.block.program_writer import ProgramWriter
from meshweave.algorithms.block.roles import AxisDims, Roles
from meshweave.algorithms.block.sized import SizedSkeleton, SizedWriter
from meshweave.algorithms.block.skeleton_writer import SkeletonWriter
from meshweave.algorithms.block.writer import BlockWriter
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.program import On, Program, Tensor
from meshweave.ir.program.meanings import Meaning
from meshweave.ir.skeleton import Skeleton


def write_program(problem: BlockProblem, config: BlockConfig, roles: Roles, mesh: Mesh, name: str) -> Program:
    """Return the program of a block on a mesh whose axes have these roles.

    `name` is the program's name.

    Raises:
        UnsupportedError: a layer has experts or latent attention, which have no equations, or a node of a type
            without a record.
    """
    writer = ProgramWriter(problem, config, mesh, batch_dims(roles))
    _layers(problem, roles, writer).write()
    return _assembled(writer, roles, name)


def write_skeleton(
    problem: BlockProblem,
    config: BlockConfig,
    roles: Roles,
    mesh: Mesh,
    piece: Piece | None = None,
) -> Skeleton:
    """Return the skeleton (tasks, lanes, what waits for what) of rank 0 in the program of `write_program`.

    Args:
        piece: "layers", "embedding" or "head" for this piece of the model alone, without the all-reduces of
            gradients of weights and of the loss. None for the whole program: the layers, with embedding and head
            if the problem has a vocabulary.
    """
    writer = SkeletonWriter(problem, config, mesh, batch_dims(roles))
    if piece is None:
        _layers(problem, roles, writer).write()
    else:
        WRITERS[piece](problem, roles, writer).write()
    return writer.skeleton()


def write_sized_skeleton(
    problem: BlockProblem, roles: Roles, mesh: Mesh, overlap: Overlap = "layers"
) -> SizedSkeleton:
    """Return what rank 0 of a block computes and sends, as tasks to be priced, for any number of sequences a rank.

    The batch is not cut into chunks; that of `problem` is ignored. `roles` say what each axis of `mesh` shards.
    `overlap` is as in `BlockConfig`.
    """
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
    """Return the equations of all layers, and with a vocabulary those of embedding, last norm, logits and loss.

    If the problem has `training`, the equations of the gradients are included.

    Raises:
        UnsupportedError: a layer has experts or latent attention, which have no equations.
    """
    layers = layers_of(problem, roles.is_flat)
    meanings = [meaning for layer in layers for meaning in layer_meanings(layer, roles)]
    for layer in reversed(layers) if problem.training else ():
        meanings += layer_gradient_meanings(layer, roles)
    if problem.vocabulary:
        meanings += end_meanings(problem, roles)
    return meanings


def tensors_of(problem: BlockProblem, roles: Roles) -> list[Tensor]:
    """Return all tensors of the layers, and with a vocabulary those of embedding, last norm, logits and loss.

    They have global shapes; gradients are among them, also without training.
    """
    residual = Tensor("X", (*token_sizes(problem, roles.is_flat), problem.hidden), problem.dtype)
    tensors = [residual, replace(residual, name="DZ")]
    for layer in layers_of(problem, roles.is_flat):
        tensors += layer_tensors(layer, roles)
    if problem.vocabulary:
        tensors += end_tensors(problem, roles)
    return list({tensor.name: tensor for tensor in tensors}.values())


def batch_dims(roles: Roles) -> AxisDims:
    """Return for each mesh axis "batch" if it shards the residual stream by batch, else ""."""
    return tuple("batch" if dim == "batch" else "" for dim in roles.residual)
