"""What the tests of the ir share: golden programs, a numeric algebra, per-rank form, a universal product."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from functions import DELAYED_WEIGHTS, FUNCTIONS
from numpy.typing import NDArray

from meshweave.algorithms.pipeline.functions import reference
from meshweave.describe.layout import Layout, Tile
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.analysis.dataflow import Dataflow, Event, untimed_order
from meshweave.ir.analysis.interpret import Interpreter
from meshweave.ir.analysis.matching import Node
from meshweave.ir.program import Buffer, Function, Lane, On, Product, Program, Same, Sum, Tensor
from meshweave.ir.program.check_meanings import running_tensors
from meshweave.ir.program.ops import Accumulate, Call, Fence, Get, Matmul, Op, Zero
from meshweave.ir.program.parse import parse
from meshweave.ir.program.views import Range, View

Array = NDArray[Any]
GOLDEN = Path(__file__).parent.parent / "golden"
NAMES = tuple(sorted(path.stem for path in GOLDEN.glob("*.txt")))


def golden_text(name: str) -> str:
    return (GOLDEN / f"{name}.txt").read_text()


def golden(name: str) -> Program:
    return parse(golden_text(name))


# --- running on numbers ---------------------------------------------------------------------------------


@dataclass
class Numbers:
    """Plain arithmetic. Memory starts as NaN, so that whatever reads too early poisons its result."""

    functions: Mapping[str, Callable[..., list[Array]]] = field(default_factory=dict)
    stash: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def matmul(self, a: Array, b: Array) -> Array:
        return a @ b

    def add(self, x: Array, y: Array) -> Array:
        return x + y

    def reduce(self, op: str, terms: Any) -> Array:
        return {"sum": np.sum, "max": np.max}[op](np.stack(terms), axis=0)

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Array:
        return np.zeros(shape)

    def read(self, block: Array) -> Array:
        return block

    def write(self, block: Array) -> Array:
        return block

    def call(self, op: Call, rank: int, ins: list[Array]) -> list[Array]:
        stash = self.stash.setdefault((rank, op.stash, *op.args), {})
        return self.functions[op.fn](stash, *ins)


class LateMachine(Interpreter):
    """An adversary: what an untracked one-sided op writes elsewhere lands only at its rank's next fence."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.late: dict[int, list[tuple[Node, View, Array, bool]]] = {}

    def put(self, node: Node, view: View, value: Array, *, update: bool = False) -> None:
        op = self.flow.op(node)
        if view.rank is not None and getattr(op, "release", None) is None:
            self.late.setdefault(node[0], []).append((node, view, value.copy(), update))
        else:
            super().write_view(node, view, value, update=update)

    def run(self, order: Any) -> None:
        for event in order:
            if isinstance(self.flow.op(event[0]), Fence):
                self.land([node[0] for node in event])
            super().run([event])
        self.land(list(self.late))

    def land(self, ranks: list[int]) -> None:
        for rank in ranks:
            for node, view, value, update in self.late.pop(rank, []):
                super().write_view(node, view, value, update=update)


def numbers_for(program: Program, seed: int = 0) -> dict[str, Array]:
    """Small whole numbers for every tensor: sums of their products are exact."""
    draw = np.random.default_rng(seed)
    return {tensor.name: draw.integers(-4, 5, tensor.shape).astype(float) for tensor in program.tensors}


def run_numbers(
    flow: Dataflow,
    order: list[Event],
    values: Mapping[str, Array],
    functions: Mapping[str, Callable[..., list[Array]]] | None = None,
) -> Interpreter:
    """Runs on numbers, from the whole tensors `values`."""
    program = flow.program
    algebra = Numbers(functions or {})
    machine = LateMachine(flow, algebra, lambda shape, dtype: np.full(shape, np.nan))
    for buffer in program.buffers:
        if buffer.kind == "input":
            for rank in buffer.layout.mesh.ranks:
                block = local(buffer, program, values[buffer.tensor], rank)
                for slot in range(buffer.slots):
                    machine.memory[rank, buffer.name, slot][...] = block
    machine.run(order)
    return machine


def local(buffer: Buffer, program: Program, whole: Array, rank: int) -> Array:
    return whole[np.ix_(*buffer.layout.indices(program.tensor_of[buffer.tensor].shape, rank))]


def dense(program: Program, values: Mapping[str, Array]) -> dict[str, Array]:
    """What the declared meanings make of `values`, in the order in which they are declared.

    Functions are applied to whole tensors, from which what they reduce over is complete. Those that read a stash
    are left out.
    """
    known = dict(values)
    for meaning in program.computes:
        match meaning:
            case Product():
                a, b = known[meaning.a], known[meaning.b]
                a = a.swapaxes(-1, -2) if meaning.transpose_a else a
                product = a @ (b.swapaxes(-1, -2) if meaning.transpose_b else b)
                out = program.tensor_of[meaning.out].shape
                known[meaning.out] = product.sum(axis=tuple(range(product.ndim - len(out))))
            case Sum():
                known[meaning.out] = sum(known[name] for name in meaning.terms)
            case Same():
                known[meaning.out] = known[meaning.src].reshape(program.tensor_of[meaning.out].shape)
            case Function() if not meaning.stash:
                running = running_tensors({m.out: m for m in program.computes}, meaning)
                ins = [
                    np.zeros_like(values[part.tensor]) if part.tensor in running else known[part.tensor]
                    for part in meaning.ins
                ]
                known[meaning.out] = FUNCTIONS[meaning.fn]({}, *ins)[meaning.output]
    return known


def expected(name: str, program: Program, values: dict[str, Array]) -> dict[str, Array]:
    """Dense numpy of a golden program; what stashes carry is written out by hand."""
    if name == "one_f_one_b":
        x, w0, w1, t = (values[key] for key in ("X", "W0", "W1", "T"))
        h = (x @ w0) ** 2
        y = (h @ w1) ** 2
        inner = 2 * (y - t) * (h @ w1)
        outer = 2 * (inner @ w1.T) * (x @ w0)
        return {"Y": y, "DW1": h.T @ inner, "DX": outer @ w0.T, "DW0": x.T @ outer}
    if name == "delayed_weights":
        return reference(DELAYED_WEIGHTS, values)
    return dense(program, values)


def outputs_equal(program: Program, machine: Interpreter, expected: Mapping[str, Array]) -> bool:
    return all(
        np.allclose(
            machine.memory[rank, buffer.name, 0], local(buffer, program, expected[buffer.tensor], rank)
        )
        for buffer in program.buffers
        if buffer.kind == "output"
        for rank in buffer.layout.mesh.ranks
    )


def orders(flow: Dataflow, seeds: int) -> Iterator[list[Event]]:
    """Program order and `seeds` random legal orders."""
    yield untimed_order(flow)
    for seed in range(seeds):
        yield untimed_order(flow, seed)


# --- per-rank form --------------------------------------------------------------------------------------


Listed = list[tuple[int, Op]]


def listed(program: Program) -> Listed:
    """Every op of every rank with plain integers, in the sequential reading."""
    pairs = [(bound.key, rank, bound.op) for rank, ops in program.ops_by_rank.items() for bound in ops]
    return [(rank, op) for _, rank, op in sorted(pairs, key=lambda pair: pair[:2])]


def with_ops(program: Program, ops: Listed) -> Program:
    """The program with its body replaced, one rank and one op at a time."""
    body = tuple(On((rank,), (op,)) for rank, op in ops)
    return Program(
        program.name, program.meshes, program.tensors, program.buffers, program.lanes, body, program.computes
    )


# --- a misaligned universal product ---------------------------------------------------------------------


def universal(stationary: str) -> Program:
    """C = A B on tiles that fit nowhere, each rank fetching what it lacks (Slicing Is All You Need).

    With `stationary` "c" a rank gets pieces of A and B for its tiles of C; with "b" it gets pieces of A and
    accumulates what they make with its tiles of B into C, wherever that lives.
    """
    mesh = Mesh.of("tp", (2, 2), ("row", "col"))
    shapes = {"A": (7, 8), "B": (8, 6), "C": (7, 6)}
    tiles = {
        "A": (Tile(0, 5, 2), Tile(1, 4, 1)),
        "B": (Tile(0, 5, 0), Tile(1, 4, 3)),
        "C": (Tile(0, 4, 0), Tile(1, 2, 1)),
    }
    layouts = {name: Layout(mesh, placements) for name, placements in tiles.items()}
    buffers = tuple(
        Buffer(name.lower(), "output" if name == "C" else "input", "tp", "float32", name, layouts[name])
        for name in shapes
    )
    scratch = tuple(
        Buffer(name, "scratch", "tp", "float32", shape=shape, slots=2)
        for name, shape in (("a_in", (7, 8)), ("b_in", (8, 6)), ("part", (7, 6)))
        if name != ("part" if stationary == "c" else "b_in")
    )
    pieces = {
        name: [(rank, *tile) for rank in mesh.ranks for tile in _tiles(layouts[name], shapes[name], rank)]
        for name in shapes
    }
    body = [On("tp", (Zero(out=_whole("c"), lane="compute"), Fence(over="tp", lane="net")))]
    for rank in mesh.ranks:
        write = _stationary_c if stationary == "c" else _stationary_b
        body.append(On((rank,), tuple(write(rank, pieces))))
    body.append(On("tp", (Fence(over="tp", lane="net"),)))
    return Program(
        f"universal, stationary {stationary.upper()}",
        (mesh,),
        tuple(Tensor(name, shape, "float32") for name, shape in shapes.items()),
        buffers + scratch,
        (Lane("compute"), Lane("net")),
        tuple(body),
        (Product("C", "A", "B"),),
    )


Piece = tuple[int, tuple[int, int], tuple[int, int], tuple[int, int]]
"""Owner, global rows, global columns, and where the first of them lies in the owner's buffer."""


def _tiles(layout: Layout, shape: tuple[int, int], rank: int) -> Iterator[tuple[Any, ...]]:
    rows, cols = layout.intervals(shape, rank)
    at_row = 0
    for row in rows:
        at_col = 0
        for col in cols:
            yield row, col, (at_row, at_col)
            at_col += col[1] - col[0]
        at_row += row[1] - row[0]


def _whole(name: str) -> View:
    return View(name, (Range(), Range()))


def _part(name: str, piece: Piece, rows: tuple[int, int], cols: tuple[int, int], rank: int) -> View:
    owner, (row, _), (col, _), (at_row, at_col) = piece
    selectors = (
        Range(rows[0] - row + at_row, rows[1] - row + at_row),
        Range(cols[0] - col + at_col, cols[1] - col + at_col),
    )
    return View(name, selectors, 0, None if owner == rank else owner)


def _cut(x: tuple[int, int], y: tuple[int, int]) -> tuple[int, int]:
    return max(x[0], y[0]), min(x[1], y[1])


def _fetch(name: str, src: View, number: int) -> tuple[View, list[Op]]:
    """`src` itself where it is the rank's own, else its copy in a scratch slot and the op that gets it."""
    if src.rank is None:
        return src, []
    out = View(name, tuple(Range(0, size) for size in src.shape), number % 2)
    return out, [Get(out=out, src=src, lane="net")]


def _stationary_c(rank: int, pieces: Mapping[str, list[Piece]]) -> Iterator[Op]:
    number = 0
    for c in pieces["C"]:
        for a in pieces["A"]:
            for b in pieces["B"]:
                m, k, n = _cut(c[1], a[1]), _cut(a[2], b[1]), _cut(c[2], b[2])
                if c[0] != rank or min(hi - lo for lo, hi in (m, k, n)) <= 0:
                    continue
                left, gets = _fetch("a_in", _part("a", a, m, k, rank), number)
                right, more = _fetch("b_in", _part("b", b, k, n, rank), number)
                yield from gets + more
                out = _part("c", c, m, n, rank)
                yield Matmul(out=out, a=left, b=right, accumulate=1, lane="compute")
                number += 1


def _stationary_b(rank: int, pieces: Mapping[str, list[Piece]]) -> Iterator[Op]:
    number = 0
    for b in pieces["B"]:
        for a in pieces["A"]:
            k = _cut(a[2], b[1])
            if b[0] != rank or k[0] >= k[1]:
                continue
            left, gets = _fetch("a_in", _part("a", a, a[1], k, rank), number)
            yield from gets
            rows, cols = a[1], b[2]
            part = View("part", (Range(0, rows[1] - rows[0]), Range(0, cols[1] - cols[0])), number % 2)
            yield Matmul(out=part, a=left, b=_part("b", b, k, cols, rank), lane="compute")
            for c in pieces["C"]:
                m, n = _cut(c[1], rows), _cut(c[2], cols)
                if m[0] < m[1] and n[0] < n[1]:
                    # Own tiles, too, are reached one-sided: other ranks add to them at the same time.
                    out = _part("c", c, m, n, rank=-1)
                    box = (Range(m[0] - rows[0], m[1] - rows[0]), Range(n[0] - cols[0], n[1] - cols[0]))
                    yield Accumulate(out=out, src=View("part", box, number % 2), lane="net")
            number += 1
