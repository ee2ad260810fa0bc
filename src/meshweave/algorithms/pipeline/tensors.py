"""The tensors of a pipeline, their layouts, and what each is computed from.

The batch lies block-cyclically over the data axes: each micro-batch is cut into as many parts as there are
data-parallel ranks, so that a rank's rows of a micro-batch are consecutive in its shard.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from meshweave.algorithms.pipeline.problem import PipelineProblem, Stage
from meshweave.describe.layout import Layout, Replicate, Tile
from meshweave.describe.layout.layouts import Placement
from meshweave.ir.program import Tensor
from meshweave.ir.program.meanings import Function, Meaning, TensorPart

BATCH_DTYPE = "float32"
"""The dtype of X, Y and T."""


def batch_layout(problem: PipelineProblem, stage: Stage) -> Layout:
    """Return the layout of X, Y or T at a stage: the rows of all micro-batches block-cyclic over its data axes.

    So each data-parallel rank has an equal share of every micro-batch. Other mesh axes replicate.
    """
    size, placements = problem.rows, list[Placement]()
    for axis, extent in zip(stage.mesh.axes, stage.mesh.shape, strict=True):
        if axis in stage.data_axes:
            size //= extent
            placements.append(Tile(0, size))
        else:
            placements.append(Replicate())
    return Layout(stage.mesh, tuple(placements))


def tensor_layouts(problem: PipelineProblem) -> dict[str, Layout]:
    """Return the layouts of the inputs W, X and T and of the outputs DW and Y, by tensor name such as "W0"."""
    layouts: dict[str, Layout] = {}
    for number, stage in enumerate(problem.stages):
        parameters, batch = stage.parameter_layout(), batch_layout(problem, stage)
        layouts |= {f"W{number}": parameters, f"DW{number}": parameters}
        if not problem.edges_into(number):
            layouts[f"X{number}"] = batch
        if not problem.edges_out_of(number):
            layouts |= {f"T{number}": batch, f"Y{number}": batch}
    return layouts


def tensors(problem: PipelineProblem) -> Iterator[Tensor]:
    """Yield all tensors of a pipeline with their global shapes: inputs and outputs, then those of edges."""
    batch = problem.micro_batches * problem.rows
    for number, stage in enumerate(problem.stages):
        yield Tensor(f"W{number}", (stage.parameters,), stage.parameter_dtype)
        yield Tensor(f"DW{number}", (stage.parameters,), stage.own_gradient_dtype)
        if not problem.edges_into(number):
            yield Tensor(f"X{number}", (batch, *problem.input_shape), BATCH_DTYPE)
        if not problem.edges_out_of(number):
            yield Tensor(f"T{number}", (batch, *problem.output_shape), BATCH_DTYPE)
            yield Tensor(f"Y{number}", (batch, *problem.output_shape), BATCH_DTYPE)
    for edge in problem.edges:
        yield Tensor(f"H{edge.name}", (batch, *edge.shape), edge.dtype)
        yield Tensor(f"G{edge.name}", (batch, *edge.shape), edge.dtype)


def meanings(problem: PipelineProblem, joint: Collection[int] = ()) -> Iterator[Meaning]:
    """Yield equations that say from which tensors each activation, output and gradient is computed.

    Row r of an activation, output or gradient follows from row r of its operands, and from all parameters.
    Gradients of parameters are sums over rows.

    Args:
        problem: the pipeline.
        joint: the numbers of the stages whose input and weight gradients are one call.
    """
    for number in range(problem.num_stages):
        into, out_of = problem.edges_into(number), problem.edges_out_of(number)
        parameters = TensorPart(f"W{number}", (None,))
        ins = tuple(_row(f"H{edge.name}", edge.shape) for edge in into)
        ins = ins or (_row(f"X{number}", problem.input_shape),)
        outs = tuple(_row(f"H{edge.name}", edge.shape) for edge in out_of)
        outs = outs or (_row(f"Y{number}", problem.output_shape),)
        grads = tuple(_row(f"G{edge.name}", edge.shape) for edge in out_of)
        grads = grads or (_row(f"T{number}", problem.output_shape),)
        for output, part in enumerate(outs):
            yield Function(part, f"stage{number}", (*ins, parameters), output=output)
        stash, total = (*ins, parameters), TensorPart(f"DW{number}", (None,))
        if number in joint:
            given, fn = (*grads, parameters, total), f"stage{number}_backward"
            for output, edge in enumerate(into):
                yield Function(_row(f"G{edge.name}", edge.shape), fn, given, stash, output=output)
            yield Function(total, fn, given, stash, reduce="sum", output=len(into))
            continue
        for output, edge in enumerate(into):
            part = _row(f"G{edge.name}", edge.shape)
            yield Function(part, f"stage{number}_input_grad", (*grads, parameters), stash, output=output)
        yield Function(
            total, f"stage{number}_weight_grad", (total,), (*stash, *grads, parameters), reduce="sum"
        )


def _row(tensor: str, shape: tuple[int, ...]) -> TensorPart:
    return TensorPart(tensor, ("r", *(None,) * len(shape)))
