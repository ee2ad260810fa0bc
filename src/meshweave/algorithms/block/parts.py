"""A piece of a model as two programs, forward and backward, for pipelines that run other work between them.

What the backward program reads of the forward one is an output there and an input here, in buffers of equal names
and layouts. Gradients of weights are left as terms along the axes that `BlockParts.sums` lists.

With recomputation the backward program begins with statements of the forward one: all of them, or its attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from meshweave.algorithms.block.assembly import batch_dims, equations, tensors_of
from meshweave.algorithms.block.end_equations import end_meanings
from meshweave.algorithms.block.nodes import is_timed
from meshweave.algorithms.block.pieces import WRITERS, LayersPiece, Piece
from meshweave.algorithms.block.place import layers_of
from meshweave.algorithms.block.problem import BlockConfig, BlockProblem
from meshweave.algorithms.block.program_writer import ProgramWriter
from meshweave.algorithms.block.roles import Roles
from meshweave.algorithms.block.sides import layout_of
from meshweave.algorithms.block.writer import Stored
from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.model.memory import Recompute
from meshweave.ir.program import Buffer, Include, Lane, On, Program, Statement, Tensor
from meshweave.ir.program.meanings import Meaning, Same, sources_of
from meshweave.ir.program.ops import READ, Call, Matmul, Op
from meshweave.ir.program.statements import ops_of

_ATTENTION = ("attention", "split_heads", "finish_attention")
"""What the names of calls begin with (`NodePlace.fn`) with which attention begins and ends: one, or a ring's."""
BACKWARD = "D"
"""What the names of gradients begin with."""


@dataclass(frozen=True)
class BlockParts:
    """A piece of a model ("layers", "embedding" or "head") as a forward and a backward program.

    Attributes:
        kept: names of the buffers that are outputs of the forward program and inputs of the backward one.
        sums: for each buffer of a weight's gradient, and of the loss, the mesh axes along which ranks have
            partial sums that the caller has to reduce.
        of_experts: names of the buffers of parameters of experts that ranks divide among them.
        is_timed: whether the programs state costs only and have no equations.
    """

    forward: Program
    backward: Program
    kept: tuple[str, ...]
    sums: dict[str, tuple[str, ...]]
    of_experts: tuple[str, ...] = ()
    is_timed: bool = False


def write_parts(
    problem: BlockProblem,
    config: BlockConfig,
    roles: Roles,
    mesh: Mesh,
    name: str,
    *,
    piece: Piece = "layers",
    recompute: Recompute = "none",
) -> BlockParts:
    """Return the forward and backward programs of a piece on a mesh whose axes have these roles.

    Args:
        problem: one with training; for the pieces "embedding" and "head" also with a vocabulary. It has a single
            layer if that has experts or latent attention.
        name: what the names of both programs begin with.
        piece: "layers", "embedding", or "head" (last norm, logits and loss).
        recompute: what the backward program recomputes: "none", "full" for all, "selective" for attention.

    Raises:
        LayoutError: the problem is one without training.
        UnsupportedError: gradients are reduced last (ZeRO-1), after a backward part; attention alone is to be
            recomputed, and there are several, or several chunks, or none in the piece; there are several layers
            with experts or latent attention; the backward program reads scratch that the forward one writes in a
            loop, as the keys of ring attention in several chunks, or writes to a buffer that the forward one has
            kept for it; or ranks have different numbers of tokens in a layer with experts or latent attention.
    """
    if not problem.training:
        raise LayoutError("a problem without training has no backward part; give one with training")
    if roles.reduces_last:
        raise UnsupportedError("gradients that are reduced after all backward parts belong to no piece")
    timed = is_timed(problem.layer)
    if timed and piece == "layers" and len(layers_of(problem)) > 1:
        raise UnsupportedError(
            "layers with experts or latent attention are written one by one; give layers=1"
        )
    writer = ProgramWriter(problem, config, mesh, batch_dims(roles))
    layers = WRITERS[piece](problem, roles, writer)
    meanings = list(end_meanings(problem, roles)) if timed else equations(problem, roles)
    if timed and piece == "layers":
        meanings = []
    tensors = tensors_of(problem, roles)
    parts = parts_of_writer(layers, writer, name, tensors, meanings, recompute=recompute)
    if not timed or piece != "layers":
        return parts
    (place,), ranks = layers_of(problem), problem.experts
    of_experts = tuple(
        layers.stored[place.own(weight.name)].buffer
        for weight in place.graph.parameters
        if ranks is not None and ranks.side(weight) is not None
    )
    return replace(parts, of_experts=of_experts, is_timed=True)


def parts_of_writer(
    layers: LayersPiece,
    writer: ProgramWriter,
    name: str,
    tensors: list[Tensor],
    meanings: list[Meaning],
    *,
    recompute: Recompute = "none",
) -> BlockParts:
    """Return the forward and the backward program of what a piece writes with its writer.

    Args:
        layers: writes the piece; it must not have declared or written anything yet.
        writer: the writer that `layers` uses.
        name: what the names of both programs begin with.
        tensors: the tensors of the piece; each program declares those that it needs.
        meanings: the equations of the piece; each program has those that lead to its outputs.
        recompute: what the backward program recomputes: "none", "full" for all, or "selective" for attention.

    Raises:
        UnsupportedError: "selective" without attention, or with products between its statements; or the
            backward program reads scratch that the forward one writes in a loop, or writes to what is kept.
    """
    mesh = writer.mesh
    layers.declare()
    writer.begin_part(_arriving(layers, writer, ("X", "Z")))
    layers.write_forward()
    writer.cut()
    first = tuple(writer.statements)
    if recompute != "full":
        writer.begin_part(_arriving(layers, writer, ("DX", "DZ")))
    layers.write_backward()
    writer.cut()
    back = _again(first, recompute) + tuple(writer.statements[len(first) :])
    scratch = {name for name in read_first(back) if writer.buffers[name].kind == "scratch"}
    back = calls_writing(scratch, first, "the backward part reads") + back
    for landed in layers.unsummed.values():
        layout = layout_of(mesh, landed.sides, landed.dims)
        writer.buffers[landed.buffer] = replace(writer.buffers[landed.buffer], layout=layout)
    kept = _kept(first, back)
    buffers, of_experts = tuple(writer.buffers.values()), getattr(writer.problem.experts, "mesh", None)
    meshes = (mesh,) if of_experts is None else (mesh, of_experts)
    whole = Program(name, meshes, tuple(tensors), buffers, tuple(writer.lanes), (), tuple(meanings))
    outputs = {buffer.name for buffer in buffers if buffer.kind == "output"}
    gradients = {buffer.name for buffer in buffers if (buffer.tensor or "").startswith(BACKWARD)}
    forward = cut_program(whole, f"{name}, forward", first, (), {*kept, *(outputs - gradients)})
    backward = cut_program(whole, f"{name}, backward", back, kept, outputs & gradients)
    sums = {
        landed.buffer: tuple(
            axis for axis, dim in zip(mesh.axes, landed.dims, strict=True) if dim == "partial"
        )
        for landed in layers.unsummed.values()
    }
    return BlockParts(forward, backward, kept, sums)


def _arriving(layers: LayersPiece, writer: ProgramWriter, names: tuple[str, ...]) -> list[Stored]:
    """Return the residuals, or gradients of them, that are inputs of a piece."""
    residuals = (layers.stored[name] for name in names if name in layers.stored)
    return [stored for stored in residuals if writer.buffers[stored.buffer].kind == "input"]


def _again(forward: tuple[Statement, ...], recompute: Recompute) -> tuple[Statement, ...]:
    """Return the statements of the forward program that the backward one begins with."""
    if recompute == "none":
        return ()
    if recompute == "full":
        return forward
    places = [
        number
        for number, statement in enumerate(forward)
        if any(isinstance(op, Call) and op.fn.startswith(_ATTENTION) for op in ops_of((statement,)))
    ]
    chosen = forward[places[0] : places[-1] + 1] if places else ()
    if not chosen or _multiplies(ops_of(chosen)):
        raise UnsupportedError("attention in chunks is not computed again alone; give recompute='full'")
    return chosen


def _multiplies(ops: Iterable[Op]) -> bool:
    """Return whether some op is a product, or includes a program with one."""
    return any(
        isinstance(op, Matmul) or (isinstance(op, Include) and _multiplies(op.program.ops())) for op in ops
    )


def calls_writing(
    scratch: set[str], statements: tuple[Statement, ...], readers: str
) -> tuple[Statement, ...]:
    """Return the `call` ops among `statements`, not those inside loops, that write one of the `scratch` buffers.

    Args:
        scratch: names of buffers.
        readers: the beginning of an error message, such as "the backward part reads".

    Raises:
        UnsupportedError: one of the `scratch` buffers is written by none of these calls.
    """
    calls = tuple(
        each
        for each in statements
        if isinstance(each, Call) and {view.buffer for view in each.writes} & scratch
    )
    if lost := scratch - {view.buffer for call in calls for view in call.writes}:
        raise UnsupportedError(f"{readers} {min(lost)}, which is no tensor that can be kept")
    return calls


def read_first(statements: Iterable[Statement]) -> dict[str, None]:
    """Return the names of the buffers that are read before they are written, in the order of the first reads.

    They are the keys of a dict whose values are all None. A write of any part of a buffer counts.
    """
    written: set[str] = set()
    first: dict[str, None] = {}
    for op in ops_of(statements):
        for mode, view in op.accesses():
            if mode == READ and view.buffer not in written:
                first[view.buffer] = None
            elif mode != READ:
                written.add(view.buffer)
    return first


def _kept(forward: Iterable[Statement], back: Iterable[Statement]) -> tuple[str, ...]:
    """Return the buffers that the forward program makes and the backward one reads before it writes them."""
    made = {view.buffer for op in ops_of(forward) for view in op.writes}
    kept = tuple(name for name in read_first(back) if name in made)
    changed = {view.buffer for op in ops_of(back) for view in op.writes} & set(kept)
    if changed:
        raise UnsupportedError(f"the backward part changes {min(changed)}, which the forward part has kept")
    return kept


def cut_program(
    whole: Program, name: str, statements: tuple[Statement, ...], given: Iterable[str], made: Iterable[str]
) -> Program:
    """Return a program of some statements, with the buffers, lanes and equations of `whole` that they need.

    Args:
        whole: the program whose declarations and equations are used; its statements are not read.
        name: the name of the result.
        given: names of the buffers that become inputs; inputs of the whole stay inputs.
        made: names of the buffers that become outputs. An output of the whole that is in neither `given` nor
            `made` becomes a temp.
    """
    used = {view.buffer for op in ops_of(statements) for _, view in op.accesses()}
    given, made = set(given), set(made)
    buffers = []
    for buffer in whole.buffers:
        if buffer.name not in used:
            continue
        kind = buffer.kind
        if buffer.name in given:
            kind = "input"
        elif buffer.name in made:
            kind = "output"
        elif kind == "output":
            kind = "temp"
        buffers.append(replace(buffer, kind=kind))
    meanings = equations_between(list(whole.computes), buffers)
    needed = {buffer.tensor for buffer in buffers}
    needed |= {tensor for meaning in meanings for tensor in (meaning.out, *sources_of(meaning))}
    lanes = {op.lane for op in ops_of(statements)}
    lanes |= {lane for op in ops_of(statements) for _, lane in getattr(op, "lanes", ())}
    return replace(
        whole,
        name=name,
        tensors=tuple(tensor for tensor in whole.tensors if tensor.name in needed),
        buffers=tuple(buffers),
        lanes=tuple(lane for lane in whole.lanes if lane.name in lanes) or (Lane("compute"),),
        body=(On(whole.meshes[0].name, statements),),
        computes=tuple(meanings),
    )


def equations_between(meanings: list[Meaning], buffers: Iterable[Buffer]) -> list[Meaning]:
    """Return the equations among `meanings` that lead from a program's inputs to its other buffers' tensors.

    An equation `Same(out, src)` whose `out` is an input and whose `src` is none is turned round: `src` then equals
    the input, and other equations for that input are left out.
    """
    by_out: dict[str, list[Meaning]] = {}
    given = {buffer.tensor for buffer in buffers if buffer.kind == "input"}
    turned = [
        Same(each.src, each.out)
        for each in meanings
        if isinstance(each, Same) and each.out in given and each.src not in given
    ]
    of_inputs = {each.out for each in turned}
    wanted = [*(each for each in meanings if each.out not in of_inputs), *turned]
    for meaning in wanted:
        by_out.setdefault(meaning.out, []).append(meaning)
    todo = [buffer.tensor for buffer in buffers if buffer.kind != "input" and buffer.tensor is not None]
    reached: set[str] = set()
    while todo:
        tensor = todo.pop()
        if tensor in reached or tensor in given:
            continue
        reached.add(tensor)
        todo += [each for meaning in by_out.get(tensor, ()) for each in sources_of(meaning)]
    return [meaning for meaning in wanted if meaning.out in reached]
