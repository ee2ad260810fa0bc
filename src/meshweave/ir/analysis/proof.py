"""Proves what a program computes: a run on index labels whose outputs must be the tensors that they declare."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshweave.base.errors import ProgramError
from meshweave.base.limits import PROOF_ELEMENTS, PROOF_WORK
from meshweave.describe.layout import Layout, Partial
from meshweave.ir.analysis.dataflow import Dataflow, Event
from meshweave.ir.analysis.interpret import Interpreter
from meshweave.ir.analysis.labels import (
    LABEL,
    UNWRITTEN,
    LabelAlgebra,
    Labels,
    PartialSum,
    element_labels,
    partial_term_ranks,
)
from meshweave.ir.program import Buffer, Product, Program


def num_buffer_elements(program: Program) -> int:
    """Return the elements of all buffers of all ranks, which the proof must hold in memory."""
    return sum(
        buffer.slots * math.prod(program.local_shape(buffer.name, rank))
        for buffer in program.buffers
        for rank in program.mesh_of[buffer.mesh].ranks
    )


def unproved(flow: Dataflow) -> str:
    """Return in words why a program is too large for the proof, which callers then give of a smaller one, or "".

    Elements in buffers take memory; the elements that ops read and write, and the summands that products and sums
    count, take time.
    """
    program = flow.program
    if (count := num_buffer_elements(program)) > PROOF_ELEMENTS.most:
        return PROOF_ELEMENTS.refusal(count)
    summands = work = _most_summands(program)
    for ops in flow.matched.ops.values():
        for bound in ops:
            work += summands + sum(view.num_elements for _, view in bound.op.accesses())
            if work > PROOF_WORK.most:
                return PROOF_WORK.refusal()
    return ""


def _most_summands(program: Program) -> int:
    """Return a number that no product has more summands than: its inner size, times the terms of its operands."""
    terms = dict.fromkeys(program.tensor_of, 1)
    for buffer in program.buffers:
        layout = buffer.layout
        if buffer.kind == "input" and layout is not None and buffer.tensor is not None:
            terms[buffer.tensor] *= math.prod(layout.mesh.size(axis) for axis in layout.partial_axes)
    return max(
        (
            program.tensor_of[meaning.a].shape[0 if meaning.transpose_a else 1]
            * terms[meaning.a]
            * terms[meaning.b]
            for meaning in program.computes
            if isinstance(meaning, Product)
        ),
        default=0,
    )


def prove_outputs(flow: Dataflow, order: Sequence[Event]) -> None:
    """Prove that the program computes what it declares, by executing `order` on labels.

    Raises:
        ProgramError: it does not; the error names op, rank and buffer.
    """
    program = flow.program
    algebra = LabelAlgebra(program, flow)
    interpreter = Interpreter(flow, algebra, lambda shape, dtype: np.zeros(shape, LABEL))
    algebra.interpreter = interpreter
    interpreter.fill_inputs(lambda buffer, rank: _input_labels(algebra, buffer, rank))
    interpreter.run(order)
    for buffer in program.buffers:
        if buffer.kind == "output":
            assert buffer.layout is not None
            for rank in program.mesh_of[buffer.mesh].ranks:
                _check_output(algebra, interpreter, buffer, buffer.layout, rank)


def _input_labels(algebra: LabelAlgebra, buffer: Buffer, rank: int) -> Labels:
    block = element_labels(algebra, buffer, rank)
    assert buffer.layout is not None and buffer.tensor is not None
    axes = [i for i, p in enumerate(buffer.layout.placements) if isinstance(p, Partial)]
    if axes:
        mesh = buffer.layout.mesh
        coords = mesh.coords(rank)
        number = np.ravel_multi_index([coords[i] for i in axes], [mesh.shape[i] for i in axes])
        counts = tuple(int(i == number) for i in range(algebra.summands[buffer.tensor]))
        block["term"] = algebra.term_number(PartialSum(buffer.tensor, counts))
    return block


def _check_output(
    algebra: LabelAlgebra, interpreter: Interpreter, buffer: Buffer, layout: Layout, rank: int
) -> None:
    assert buffer.tensor is not None
    holders = partial_term_ranks(layout, rank)
    if rank != holders[0]:
        return
    result = interpreter.memory[rank, buffer.name, 0]
    for holder in holders[1:]:
        try:
            term = interpreter.memory[holder, buffer.name, 0]
            result = algebra.add(algebra.read(result), algebra.read(term))
        except ProgramError as error:
            raise ProgramError(error.message, rank=holder, buffer=buffer.name) from None
    expected = algebra.finished_labels(buffer, rank)
    tensor = buffer.tensor
    unwritten = result["term"] == UNWRITTEN
    declared = tensor in algebra.products or tensor in algebra.same
    wrong = (
        (result["term"] != expected["term"]) | (result["index"] != expected["index"])
        if declared
        else unwritten
    )
    if not wrong.any():
        return
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    position = np.unravel_index(int(expected[at]["index"]), algebra.program.tensor_of[tensor].shape)
    raise ProgramError(
        f"{tensor}{list(map(int, position))} {_fault_of(algebra, result[at], expected[at])} "
        f"({int(wrong.sum())} such elements)",
        op=algebra.writers[int(result[at]["writer"])],
        rank=rank,
        buffer=buffer.name,
    )


def _fault_of(algebra: LabelAlgebra, element: Any, expected: Any) -> str:
    """Return what is wrong with an output element, to follow its name."""
    term = algebra.terms[int(element["term"])]
    if element["term"] == UNWRITTEN:
        return "is never written"
    if term is None:
        return "is zero"
    if element["index"] != expected["index"]:
        return f"holds another element of {term.basis}"
    return f"holds {term.basis}" if term.is_complete else algebra.describe_faults(term)
