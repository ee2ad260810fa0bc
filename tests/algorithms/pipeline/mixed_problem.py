"""A pipeline of unlike stages, and functions for a program of its signals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from meshweave.algorithms.pipeline import Edge, PipelineProblem
from meshweave.algorithms.pipeline.examples import small_stage
from meshweave.describe.layout import Replicate, Shard
from meshweave.describe.layout.mesh import Mesh


def mixed_meshes(micro_batches: int = 3) -> PipelineProblem:
    """Return three stages with different data and tensor degrees, so that both boundaries are reshards."""
    first = Mesh.of("p0", (2, 2), ("dp", "tp"))
    second = Mesh.of("p1", (1, 2), ("dp", "tp"), 4)
    third = Mesh.of("p2", (4,), ("dp",), 6)
    stages = (
        small_stage(first, 4, data_axes=("dp",), is_sharded=True),
        small_stage(second, 4, data_axes=("dp",), work=2),
        small_stage(third, 4, data_axes=("dp",)),
    )
    split, whole = (Shard(0), Shard(1)), (Shard(0), Replicate())
    edges = (Edge(0, 1, (4,), whole, split), Edge(1, 2, (2,), split))
    return PipelineProblem(stages, edges, micro_batches, 4, (3,), (1,))


def signal_functions(
    problem: PipelineProblem, functions: Mapping[str, Callable[..., Any]]
) -> dict[str, Callable[..., Any]]:
    """Return functions for a program of one-byte signals: they work as `functions` do, on zeros that stay here.

    Args:
        problem: the pipeline.
        functions: those of the stages, by the names of the program's calls.
    """
    wrapped = dict(functions)
    for number, stage in enumerate(problem.stages):
        rows = problem.rows // stage.data_parallelism
        shapes = [
            [(rows, *edge.shape) for edge in edges]
            for edges in (problem.edges_into(number), problem.edges_out_of(number))
        ]
        for suffix, (given, made) in (
            ("", shapes),
            ("_input_grad", shapes[::-1]),
            ("_backward", shapes[::-1]),
        ):
            name = f"stage{number}{suffix}"
            wrapped[name] = _on_zeros(functions[name], given, len(made))
    return wrapped


def _on_zeros(
    function: Callable[..., Any], given: Sequence[tuple[int, ...]], num_made: int
) -> Callable[..., Any]:
    """Return a function that takes signals for its first inputs, and gives signals for its first outputs."""

    def run(stash: dict[str, Any], *operands: Any) -> list[Any]:
        like = next(operand for operand in operands[len(given) :] if hasattr(operand, "reshape"))
        zeros = [_zeros(like, shape, like.dtype) for shape in given]
        outs = function(stash, *zeros, *operands[len(given) :])
        signal = _zeros(like, (1,), "uint8")
        return [signal] * num_made + list(outs[num_made:])

    return run


def _zeros(like: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return zeros as an array, or as a tensor if `like` is one."""
    if not hasattr(like, "new_zeros"):
        return np.zeros(shape, dtype)
    made = like.new_zeros(shape)
    return made.byte() if dtype == "uint8" else made
