"""The in-process executor: all ranks of a program on numpy arrays, one event after another.

It is the oracle that every other executor is held against, and the first thing a new algorithm runs on: no
processes, no transport, exact in integers, and any legal order of events on demand. Memory that no op has
written holds poison (NaN, or a junk integer), so that a read too early shows in the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce as fold
from typing import Any

import numpy as np

from meshweave.base.errors import BindError, ProgramError, require_known
from meshweave.describe.layout import Layout, Partial
from meshweave.execute.calls import Calls, CallTable
from meshweave.ir.analysis.dataflow import Dataflow, Event, analyse, untimed_order
from meshweave.ir.analysis.interpret import Array, Interpreter
from meshweave.ir.analysis.terms import partial_term_ranks
from meshweave.ir.program import Program
from meshweave.ir.program.ops import Call
from meshweave.trace import Span, Trace

_REDUCTIONS: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
}


@dataclass(frozen=True)
class NumpyResult:
    """The result of a run: global output tensors by name, and the final memory of each (rank, buffer, slot).

    `peak_stash_bytes` gives for each rank the most bytes that the stashes of its calls held at once
    (`execute.calls`); ranks without calls are left out.
    """

    outputs: dict[str, Array]
    memory: dict[tuple[int, str, int], Array]
    trace: Trace
    peak_stash_bytes: Mapping[int, int] = field(default_factory=dict)


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Return the numpy dtype for a program's `dtype`, by name: "float16" -> float16, "bfloat16" -> float32."""
    return np.dtype("float32" if dtype == "bfloat16" else dtype)


def poisoned(shape: tuple[int, ...], dtype: str) -> Array:
    """Return an array that stands for unwritten memory: all NaN, or all bytes 0x55 for an integer `dtype`."""
    kind = numpy_dtype(dtype)
    if kind.kind == "f":
        return np.full(shape, np.nan, kind)
    return np.full((*shape, kind.itemsize), 0x55, np.uint8).view(kind).reshape(shape)


def run_numpy(
    program: Program,
    inputs: Mapping[str, Array],
    *,
    seed: int | None = None,
    calls: Calls | None = None,
    flow: Dataflow | None = None,
) -> NumpyResult:
    """Run all ranks of `program` in this process on numpy arrays, and return outputs, memory and trace.

    Args:
        inputs: global tensors by name, one for each tensor that an input buffer holds.
        seed: seed of a random legal order of the ops; None for program order where dependences allow.
        calls: the functions that `call` ops name; see `execute.calls`.
        flow: the result of `ir.analysis.dataflow.analyse(program)`, where the caller has it already.

    Raises:
        BindError: inputs or calls are missing, or shapes or dtypes do not fit.
        ProgramError: messages or collectives do not match, the program deadlocks, or replicas of an output differ.
    """
    flow = analyse(program) if flow is None else flow
    _check_inputs(program, inputs)
    numbers = _Numbers(calls or {})
    machine = Interpreter(flow, numbers, poisoned)
    for rank in program.ranks:
        for name, value in local_inputs(program, inputs, rank).items():
            for slot in range(program.buffer_of[name].slots):
                machine.memory[rank, name, slot][...] = value
    with np.errstate(all="ignore"):
        spans = _run_timed(machine, flow, untimed_order(flow, seed))
        outputs = assemble(program, {key: value for key, value in machine.memory.items() if key[2] == 0})
    stashed = {rank: table.peak_stash_bytes for rank, table in numbers.tables.items()}
    return NumpyResult(outputs, machine.memory, Trace(program.name, "numpy", spans), stashed)


def _run_timed(machine: Interpreter, flow: Dataflow, order: Iterable[Event]) -> tuple[Span, ...]:
    spans: list[Span] = []
    began_ns = time.perf_counter_ns()
    for event in order:
        start_ns = time.perf_counter_ns()
        machine.run((event,))
        end_ns = time.perf_counter_ns()
        for rank, index in event:
            bound = flow.bound_op((rank, index))
            start_ps, end_ps = (start_ns - began_ns) * 1000, (end_ns - began_ns) * 1000
            spans.append(Span(rank, index, bound.op.lane, bound.op.kind, bound.label, start_ps, end_ps))
    return tuple(spans)


@dataclass(frozen=True)
class _Numbers:
    """Implements `ir.analysis.interpret.Algebra` on numbers."""

    calls: Calls
    tables: dict[int, CallTable] = field(default_factory=dict)

    def matmul(self, a: Array, b: Array) -> Array:
        """Return a (..., M, K) @ b (..., K, N), of float16 in float32, of integers in int64.

        The wider dtype holds sums over K that would round or overflow in the operands' one.
        """
        if a.dtype == np.float16:  # as devices do: products of halves are summed in single precision
            return np.asarray(np.matmul(a, b, dtype=np.float32))
        if a.dtype.kind in "iu" and b.dtype.kind in "iu":
            return np.asarray(np.matmul(a, b, dtype=np.int64))
        return np.asarray(np.matmul(a, b))

    def add(self, x: Array, y: Array) -> Array:
        """Return a sum in the dtype of `x`."""
        return np.asarray(np.add(x, y, dtype=x.dtype, casting="same_kind"))

    def reduce(self, op: str, terms: Sequence[Array]) -> Array:
        """Return the reduction of terms, folded from first to last. Raises ProgramError for an unknown `op`."""
        require_known(op, _REDUCTIONS, "there is no reduction", ProgramError)
        return np.asarray(fold(_REDUCTIONS[op], terms))

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Return an array of zeros; `dtype` is the program's name of it."""
        return np.zeros(shape, numpy_dtype(dtype))

    def read(self, block: Array) -> Array:
        """Return what an op reads: `block` itself, since numbers need no check."""
        return block

    def write(self, block: Array) -> Array:
        """Return what is stored where an op writes `block`: the same numbers."""
        return block

    def call(self, op: Call, rank: int, ins: list[Array]) -> list[Array]:
        """Return the outputs of a function of the program on a rank, given copies of its inputs."""
        table = self.tables.setdefault(rank, CallTable(self.calls, rank=rank))
        return [np.asarray(out) for out in table.bind(op)(*(block.copy() for block in ins))]


# --- global tensors and shards ------------------------------------------------------------------------------


def _check_inputs(program: Program, inputs: Mapping[str, Array]) -> None:
    wanted = sorted({b.tensor for b in program.buffers if b.kind == "input" and b.tensor is not None})
    for name in wanted:
        if name not in inputs:
            raise BindError(f"tensor {name} is an input of program {program.name} and was not given")
        tensor, value = program.tensor_of[name], np.asarray(inputs[name])
        if value.shape != tensor.shape:
            raise BindError(f"tensor {name} has shape {tensor.shape}, not {value.shape}")
        if not np.can_cast(value.dtype, numpy_dtype(tensor.dtype), "same_kind"):
            raise BindError(f"tensor {name} is {tensor.dtype}, which {value.dtype} does not become")
    for name in inputs:
        require_known(name, wanted, f"program {program.name} has no input tensor", BindError)


def local_inputs(program: Program, inputs: Mapping[str, Array], rank: int) -> dict[str, Array]:
    """Return the shards that global rank `rank` holds of the global tensors `inputs`, by input buffer name.

    Buffers on a mesh without this rank are left out. A tensor laid out as partial sums is split into terms, so
    that a term left out or added twice shows: along a mesh axis of n ranks, index i > 0 holds i in every element,
    and index 0 the value minus n(n-1)/2. Of a partial product, indices other than 0 hold 1 everywhere; of `max`
    and `min` all hold the whole value.
    """
    shards: dict[str, Array] = {}
    for buffer in program.buffers:
        if buffer.kind == "input" and rank in program.mesh_of[buffer.mesh]:
            assert buffer.tensor is not None and buffer.layout is not None
            value = np.asarray(inputs[buffer.tensor]).astype(numpy_dtype(buffer.dtype))
            indices = buffer.layout.indices(value.shape, rank)
            shards[buffer.name] = _term(buffer.layout, value[np.ix_(*indices)], rank)
    return shards


def _term(layout: Layout, value: Array, rank: int) -> Array:
    coords = layout.mesh.coords(rank)
    for placement, size, at in zip(layout.placements, layout.mesh.shape, coords, strict=True):
        if not isinstance(placement, Partial) or placement.op in ("max", "min"):
            continue
        if placement.op == "sum":
            later = size * (size - 1) // 2  # the members after the first hold 1, 2, ...
            value = value - value.dtype.type(later) if at == 0 else np.full_like(value, at)
        elif at:
            value = np.ones_like(value)
    return value


def assemble(program: Program, memory: Mapping[tuple[int, str, int], Array]) -> dict[str, Array]:
    """Return the global tensors that the shards of the output buffers make up, by tensor name.

    Partial results are reduced. Elements that no rank holds have the value of `poisoned`.

    Args:
        memory: the local shard for each key (rank, output buffer, 0); other slots than 0 are ignored.

    Raises:
        ProgramError: ranks that should hold the same elements hold unequal integers, or floats that differ by
            more than rounding.
    """
    outputs: dict[str, Array] = {}
    for buffer in program.buffers:
        if buffer.kind != "output":
            continue
        assert buffer.tensor is not None and buffer.layout is not None
        shape, layout = program.tensor_of[buffer.tensor].shape, buffer.layout
        whole = outputs.get(buffer.tensor)
        filled = np.full(shape, whole is not None)
        if whole is None:
            whole = outputs[buffer.tensor] = poisoned(shape, buffer.dtype)
        for rank in layout.mesh.ranks:
            terms = partial_term_ranks(layout, rank)
            if terms[0] != rank:
                continue
            shard = _reduce_partials(layout, {r: memory[r, buffer.name, 0] for r in terms})
            index = np.ix_(*layout.indices(shape, rank))
            before = filled[index]
            if not _equal(np.where(before, whole[index], shard), shard):
                raise ProgramError(
                    f"holds other elements of {buffer.tensor} than a lower rank that holds the same ones",
                    rank=rank,
                    buffer=buffer.name,
                )
            whole[index], filled[index] = shard, True
    return outputs


def _reduce_partials(layout: Layout, terms: Mapping[int, Array]) -> Array:
    level = list(terms.values())
    for placement, size in reversed(list(zip(layout.placements, layout.mesh.shape, strict=True))):
        if isinstance(placement, Partial):
            how = _REDUCTIONS[placement.op]
            level = [np.asarray(fold(how, level[at : at + size])) for at in range(0, len(level), size)]
    return level[0]


def _equal(x: Array, y: Array) -> bool:
    """Whether replicas agree: integers exactly, floats up to the order in which terms were summed."""
    if x.dtype.kind != "f":
        return bool((x == y).all())
    tolerance = 64 * float(np.finfo(x.dtype).eps)
    return bool(
        np.allclose(x, y, rtol=tolerance, atol=tolerance * float(np.abs(y).max(initial=1.0)), equal_nan=True)
    )
