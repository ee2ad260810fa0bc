"""Functions of stages on small whole numbers, which show that every stage gets the right operands.

They are no derivatives. Each result depends on every element of every operand, on its place and on the number
of the operand, and is a whole number from 0 to 30 (a sum of these for the gradient of parameters), so that
results are exact in float32 whatever the order. The functions work on numpy arrays and on torch tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from meshweave.algorithms.contract import Array, Arrays
from meshweave.algorithms.pipeline.problem import PipelineProblem, Stash

MODULUS = 31
"""A prime: what is not 0 has an inverse, so that no operand is lost in a product."""
STASH_BYTES_PER_ROW = Stash(4, 4, 4)
"""What these functions keep of one row: three float32 numbers."""


def stage_functions(problem: PipelineProblem) -> dict[str, Callable[..., Any]]:
    """Return stand-ins for the functions that the program's `call` ops run, by name: sums modulo `MODULUS`.

    They show which operands arrived; they are no stage of a model, and no derivatives.

    Those of stage i are stage{i} for the forward, and stage{i}_recompute, stage{i}_input_grad,
    stage{i}_weight_grad and, for both gradients in one, stage{i}_backward. "marker" does nothing.

    Each takes the stash (a dict in which it keeps values of one micro-batch between its calls), the inputs of its
    call, and the number of the micro-batch. It returns the outputs of its call, in order.
    """
    functions: dict[str, Callable[..., Any]] = {"marker": lambda *_: None}
    for number in range(problem.num_stages):
        into, out_of = problem.edges_into(number), problem.edges_out_of(number)
        outs = tuple(edge.shape for edge in out_of) or (problem.output_shape,)
        num_ins, in_shapes = max(len(into), 1), tuple(edge.shape for edge in into)
        functions[f"stage{number}"] = _forward(number, num_ins, outs)
        functions[f"stage{number}_recompute"] = _recompute(number)
        functions[f"stage{number}_input_grad"] = _input_grad(len(outs), in_shapes)
        functions[f"stage{number}_weight_grad"] = _weight_grad
        functions[f"stage{number}_backward"] = _backward(functions[f"stage{number}_input_grad"])
        if problem.stages[number].recompute is not None:
            functions[f"stage{number}"] = _forgetting(functions[f"stage{number}"])
    return functions


def _weighted(x: Any) -> Any:
    """Return for each row the sum of its elements, each times its distance from the end."""
    return x.reshape(x.shape[0], -1).cumsum(1).sum(1) % MODULUS


def _numbers(like: Any, count: int) -> Any:
    """Return 1, 2, ... `count`, modulo 31, as an array or tensor like another."""
    values = [number % MODULUS for number in range(1, count + 1)]
    return like.new_tensor(values) if hasattr(like, "new_tensor") else np.array(values, like.dtype)


def _spread(rows: Any, offset: Any, shape: tuple[int, ...]) -> Any:
    """Return (rows, *shape) of one number per row, each element by its place."""
    count = int(np.prod(shape))
    made = (rows.reshape(-1, 1) * _numbers(rows, count) + offset) % MODULUS
    return made.reshape(rows.shape[0], *shape)


def _forward(number: int, num_ins: int, outs: Sequence[tuple[int, ...]]) -> Callable[..., Any]:
    def forward(stash: dict[str, Any], *operands: Any) -> list[Any]:
        ins, parameters = operands[:num_ins], operands[num_ins]
        row = _weighted(parameters.reshape(1, -1))
        for at, x in enumerate(ins):
            row = row + (at + 1) * _weighted(x)
        stash["row"] = row % MODULUS
        stash["gate"] = _gate(stash["row"], number)
        return [_spread(stash["gate"], at, shape) for at, shape in enumerate(outs)]

    return forward


def _gate(row: Any, number: int) -> Any:
    return (row * row + number + 1) % MODULUS


def _forgetting(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that keeps its rows alone, from which a recomputation makes the rest."""

    def run(stash: dict[str, Any], *operands: Any) -> Any:
        outs = forward(stash, *operands)
        del stash["gate"]
        return outs

    return run


def _recompute(number: int) -> Callable[..., Any]:
    def recompute(stash: dict[str, Any], *_: Any) -> tuple[()]:
        stash["gate"] = _gate(stash["row"], number)
        return ()

    return recompute


def _input_grad(num_grads: int, ins: Sequence[tuple[int, ...]]) -> Callable[..., Any]:
    def input_grad(stash: dict[str, Any], *operands: Any) -> list[Any]:
        grads, parameters = operands[:num_grads], operands[num_grads]
        arrived = 0
        for at, grad in enumerate(grads):
            arrived = arrived + (at + 2) * _weighted(grad)
        stash["grad"] = (arrived * stash.pop("gate") + _weighted(parameters.reshape(1, -1))) % MODULUS
        row = stash["row"].reshape(-1, 1)
        return [_spread(stash["grad"], row * (at + 1), shape) for at, shape in enumerate(ins)]

    return input_grad


def _weight_grad(stash: dict[str, Any], total: Any, *_: Any) -> list[Any]:
    made = (stash["row"] * stash["grad"] % MODULUS).sum()
    return [total + made * _numbers(total, total.shape[0])]


def _backward(input_grad: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of both gradients: called as that of inputs, with the total so far after that."""

    def backward(stash: dict[str, Any], *operands: Any) -> list[Any]:
        *given, total, micro_batch = operands
        return [*input_grad(stash, *given, micro_batch), *_weight_grad(stash, total)]

    return backward


def reference(problem: PipelineProblem, inputs: Arrays) -> dict[str, Array]:
    """Return outputs Y{i} and gradients DW{i} of the unpipelined model: each stage once, on the whole batch.

    `inputs` are the whole W{i} of each stage, X{i} of those without a predecessor and T{i} of those without a
    successor, by these names.
    """
    functions = stage_functions(problem)
    stashes: list[dict[str, Any]] = [{} for _ in problem.stages]
    values: dict[str, Array] = dict(inputs)
    for number in range(problem.num_stages):
        names = [f"H{edge.name}" for edge in problem.edges_into(number)] or [f"X{number}"]
        made = [f"H{edge.name}" for edge in problem.edges_out_of(number)] or [f"Y{number}"]
        ins = (values[name] for name in (*names, f"W{number}"))
        values |= zip(made, functions[f"stage{number}"](stashes[number], *ins), strict=True)
    for number in reversed(range(problem.num_stages)):
        names = [f"G{edge.name}" for edge in problem.edges_out_of(number)] or [f"T{number}"]
        made = [f"G{edge.name}" for edge in problem.edges_into(number)]
        functions[f"stage{number}_recompute"](stashes[number])
        ins = (values[name] for name in (*names, f"W{number}"))
        values |= zip(made, functions[f"stage{number}_input_grad"](stashes[number], *ins), strict=True)
        values[f"DW{number}"] = _weight_grad(stashes[number], np.zeros_like(inputs[f"W{number}"]))[0]
    return {name: value for name, value in values.items() if name.startswith(("Y", "DW"))}
