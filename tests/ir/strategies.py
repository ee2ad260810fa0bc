"""Random programs in which every op type and every field turns up. They need not make sense, only print."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from hypothesis import strategies as st

from meshweave.base.errors import ProgramError
from meshweave.base.units import DTYPES
from meshweave.describe.layout import Layout, Partial, Replicate, Shard, Tile
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.program import (
    Buffer,
    Function,
    Lane,
    On,
    Product,
    Program,
    Repeat,
    Same,
    Sum,
    Tensor,
    TensorPart,
    When,
)
from meshweave.ir.program.expressions import Index, Var, binary, select
from meshweave.ir.program.ops import OP_TYPES, Op
from meshweave.ir.program.release import CollectiveStep, Release
from meshweave.ir.program.views import Blocked, Range, View

OPERATORS = ("+", "-", "*", "//", "%", "min", "max", "==", "!=", "<", "<=", ">", ">=", "and", "or")
MESHES = (
    Mesh.of("tp", (2, 3), ("row", "col")),
    Mesh("pp", (3,), ("stage",), (7, 6, 9)),
    Mesh.of("dp", (2, 1, 2), ("a", "b", "c"), 10),
)
TENSORS = (("A", 2), ("B", 3), ("V", 1))
DIMS = {"a": 2, "b": 3, "v": 1, "scratch2": 2, "scratch1": 1}
LANES = ("compute", "row", "col")


def _combine(op: str, left: Index, right: Index) -> Index:
    try:
        return binary(op, left, right)
    except ProgramError:
        return left


variables = st.sampled_from([Var(name) for name in ("tp.row", "tp.col", "s", "peer", "rank")])
indices = st.recursive(
    st.integers(-9, 99) | variables,
    lambda inner: (
        st.builds(_combine, st.sampled_from(OPERATORS), inner, inner)
        | st.builds(select, st.lists(inner, min_size=1, max_size=3), variables)
    ),
    max_leaves=4,
)
selectors = st.builds(Range, indices, st.none() | indices) | st.builds(
    Blocked, indices, indices, indices, indices, st.none() | indices
)
words = st.text(max_size=8)


@st.composite
def views(draw: st.DrawFn) -> View:
    name = draw(st.sampled_from(sorted(DIMS)))
    dims = DIMS[name]
    chosen = draw(st.just((Range(),) * dims) | st.tuples(*[selectors] * dims))
    return View(name, chosen, draw(st.just(0) | indices), draw(st.none() | indices))


_BY_TYPE: dict[str, st.SearchStrategy[Any]] = {
    "View": views(),
    "tuple[View, ...]": st.lists(views(), max_size=3).map(tuple),
    "tuple[Index, ...]": st.lists(indices, max_size=3).map(tuple),
    "Index": indices,
    "int": st.integers(0, 3),
    "float": st.floats(0, 1e6),
    "bool": st.booleans(),
    "str": words,
    "Over": st.sampled_from(["tp.row", "tp", "pp.stage", (0, 2), (5,)]),
    "Sizes": st.none() | indices | st.lists(st.integers(0, 9), max_size=4).map(tuple),
    "Release | None": st.none()
    | st.builds(
        Release,
        st.lists(indices, max_size=2).map(tuple),
        st.sampled_from(["", "rows", "columns"]),
        indices,
        st.booleans(),
        st.booleans(),
    ),
    "CollectiveStep | None": st.none()
    | st.builds(CollectiveStep, words, indices, indices, st.just("") | words),
}


def _field(item: Any) -> st.SearchStrategy[Any]:
    if item.name == "lane":
        return st.sampled_from(LANES)
    if item.name == "part":
        return st.sampled_from(["", "forward", "input_grad", "weight_grad"])
    return _BY_TYPE[item.type]


@st.composite
def ops(draw: st.DrawFn) -> Op:
    kind = OP_TYPES[draw(st.sampled_from(sorted(OP_TYPES)))]
    values = {
        item.name: draw(_field(item))
        for item in fields(kind)
        if item.default is MISSING or draw(st.booleans())
    }
    return kind(**values)


def _block(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    body = st.lists(inner, max_size=3).map(tuple)
    where = st.sampled_from(["tp", "pp"]) | st.lists(st.integers(0, 5), max_size=3).map(tuple)
    return (
        st.builds(On, where, body)
        | st.builds(Repeat, st.sampled_from(["s", "t"]), indices, body)
        | st.builds(When, indices, body)
    )


statements = st.recursive(ops(), _block, max_leaves=6)
placements = (
    st.builds(Shard, st.integers(0, 2))
    | st.just(Replicate())
    | st.builds(Partial, st.sampled_from(["sum", "max"]))
    | st.builds(Tile, st.integers(0, 2), st.integers(4, 9), st.integers(0, 3))
)


@st.composite
def buffers(draw: st.DrawFn, name: str) -> Buffer:
    dims = DIMS[name]
    slots = draw(st.sampled_from([1, 1, 2, 3]))
    order = draw(st.none() | st.permutations(range(dims)).map(tuple))
    mesh = draw(st.sampled_from(MESHES))
    if name.startswith("scratch"):
        shape = draw(st.tuples(*[indices] * dims))
        dtype = draw(st.sampled_from(DTYPES))
        return Buffer(name, "scratch", mesh.name, dtype, shape=shape, slots=slots, order=order)
    kind = draw(st.sampled_from(["input", "output", "temp"]))
    layout = Layout(mesh, draw(st.tuples(*[placements] * len(mesh.shape))))
    return Buffer(name, kind, mesh.name, "float32", name.upper(), layout, slots=slots, order=order)


@st.composite
def tensor_parts(draw: st.DrawFn) -> TensorPart:
    name, dims = draw(st.sampled_from(TENSORS))
    return TensorPart(name, draw(st.tuples(*[st.none() | st.sampled_from(["i", "j", "row"])] * dims)))


def functions() -> st.SearchStrategy[Function]:
    parts = st.lists(tensor_parts(), max_size=3).map(tuple)
    reduce = st.sampled_from(["", "sum", "max", "softmax so far"])
    return st.builds(Function, tensor_parts(), words, parts, parts, reduce, st.integers(0, 3))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    names = st.sampled_from([name for name, _ in TENSORS])
    meaning = (
        st.builds(Product, names, names, names, st.booleans(), st.booleans())
        | st.builds(Same, names, names)
        | st.builds(Sum, names, st.lists(names, min_size=2, max_size=3).map(tuple))
        | functions()
    )
    return Program(
        draw(words),
        MESHES,
        tuple(
            Tensor(name, draw(st.tuples(*[st.integers(0, 9)] * dims)), "float32") for name, dims in TENSORS
        ),
        tuple(draw(buffers(name)) for name in DIMS),
        tuple(
            Lane(name, draw(st.sampled_from(["fifo", "ready"])), draw(st.integers(1, 3))) for name in LANES
        ),
        tuple(draw(st.lists(statements, max_size=4))),
        tuple(draw(st.lists(meaning, max_size=2))),
    )
