"""Reads the text form of a program back. Nothing in the text is executed.

Every mistake is a ProgramError of one line that says what is wrong, and mostly where (line, column).
"""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, replace
from typing import Any

from meshweave.base.errors import LayoutError, ProgramError, did_you_mean, printable, require_kind
from meshweave.base.limits import DIMS, MESH_RANKS, PROGRAM_BYTES
from meshweave.describe.layout import Layout
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.program.expressions import Index, from_ast
from meshweave.ir.program.include_text import read_include
from meshweave.ir.program.literals import (
    fault_at,
    read_arguments,
    read_dims,
    read_dtype,
    read_flag,
    read_int,
    read_ints,
    read_items,
    read_name,
    read_number,
    read_over,
    read_placement,
    read_selector,
    read_sizes,
    read_slots,
    read_string,
    read_subscript,
)
from meshweave.ir.program.meaning_text import read_meaning
from meshweave.ir.program.meanings import Meaning
from meshweave.ir.program.ops import OP_TYPES, Op
from meshweave.ir.program.program import Program
from meshweave.ir.program.region_text import read_product
from meshweave.ir.program.release import CollectiveStep, Release
from meshweave.ir.program.statements import On, Repeat, Statement, When
from meshweave.ir.program.text import WORDS
from meshweave.ir.program.views import FULL, View
from meshweave.ir.program.written import Buffer, Counts, Lane, Tensor

_BUFFER_KINDS = ("input", "output", "temp", "scratch")


def parse(text: str) -> Program:
    """Return the program that `text` describes.

    Raises:
        BindError: `text` is no text.
        ProgramError: the text is too long, is not in the form that `ir.program.text` prints, or defines a
            sub-program that nothing includes.
    """
    require_kind(text, str, "the text of a program", "a str")
    if len(text) > PROGRAM_BYTES.most:
        raise ProgramError(f"the text {PROGRAM_BYTES.refusal(len(text))}")
    try:
        with warnings.catch_warnings():  # Python warns of what it would do with text that we refuse anyway
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        deep = isinstance(error, RecursionError | MemoryError)
        reason = "nested too deeply" if deep else printable(error.args[0])
        line = getattr(error, "lineno", None) or 1
        raise ProgramError(f"line {line}: not in the text form of a program: {reason}") from None
    reader = _Reader()
    try:
        for node in tree.body:
            reader.top_level(node)
    except LayoutError as error:
        raise ProgramError(f"line {node.lineno}: {error}") from None
    except RecursionError:
        raise ProgramError(f"line {node.lineno}: nested too deeply") from None
    program = reader.program(1)
    for name in reader.parts:
        if name not in program.parts:
            raise ProgramError(f"'{name}' is defined and never included")
    return program


class _Reader:
    def __init__(self, parts: dict[str, Program] | None = None, defining: tuple[str, ...] = ()) -> None:
        self.parts: dict[str, Program] = {} if parts is None else parts
        self.defining = defining
        self.indices: dict[str, None] = {}
        self.counts: dict[str, Counts] = {}
        self.name: str | None = None
        self.num_mesh_ranks = 0
        self.meshes: dict[str, Mesh] = {}
        self.tensors: dict[str, Tensor] = {}
        self.buffers: dict[str, Buffer] = {}
        self.lanes: dict[str, Lane] = {}
        self.computes: list[Meaning] = []
        self.body: list[Statement] = []

    def program(self, line: int) -> Program:
        """Return what was read, from line number `line` on. Raises ProgramError where it has no name."""
        if self.name is None:
            raise ProgramError(f'line {line}: a program starts with program("name")')
        return Program(
            self.name,
            tuple(self.meshes.values()),
            tuple(self.tensors.values()),
            tuple(self.buffers.values()),
            tuple(self.lanes.values()),
            tuple(self.body),
            tuple(self.computes),
            tuple(self.indices),
            tuple(self.counts.values()),
        )

    # --- declarations ---------------------------------------------------------------------------------

    def top_level(self, node: ast.stmt) -> None:
        """Add a declaration, sub-program or statement at the top level of the text to what has been read."""
        match node:
            case ast.Expr(
                value=ast.Call(
                    func=ast.Name(id="program"), args=[ast.Constant(value=str() as name)], keywords=[]
                )
            ) if self.name is None:
                self.name = name
            case ast.Expr(
                value=ast.Call(func=ast.Name(id="computes"), args=[out, ast.Call() as call], keywords=[])
            ):
                self.computes.append(read_meaning(out, call, self.tensors))
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Name(id=kind)) as call):
                self._declare(name, kind, call)
            case ast.FunctionDef(name=name, body=body):
                self._define(name, node, body)
            case _:
                self.body += self._block([node])

    def _define(self, name: str, node: ast.FunctionDef, body: Sequence[ast.stmt]) -> None:
        if self.defining:
            raise fault_at(node, f"'{name}' is defined inside of {self.defining[-1]}; define it before that")
        if name in self.parts:
            raise fault_at(node, f"'{name}' is defined twice")
        if ast.unparse(node.args) or node.decorator_list or node.returns:
            raise fault_at(node, f"a program is defined by 'def {name}():', without arguments")
        reader = _Reader(self.parts, (name,))
        for statement in body:
            reader.top_level(statement)
        self.parts[name] = reader.program(node.lineno)

    def _declare(self, name: str, kind: str, call: ast.Call) -> None:
        tables = (self.meshes, self.counts, self.tensors, self.buffers, self.lanes, self.indices)
        if any(name in table for table in tables):
            raise fault_at(call, f"'{name}' is declared twice")
        if kind == "mesh":
            self.meshes[name] = self._mesh(name, call)
        elif kind == "tensor":
            shape, dtype, table = read_arguments(call, ("shape", "dtype", "counts"), optional=1)
            counted = "" if table is None else read_name(table, self.counts, "table of counts")
            self.tensors[name] = Tensor(name, read_dims(f"tensor {name}", shape), read_dtype(dtype), counted)
        elif kind == "counts":
            shape, capacity, totals = read_arguments(call, ("shape", "capacity", "totals"), optional=1)
            most = () if totals is None else read_ints(totals)
            self.counts[name] = Counts(name, read_dims(f"counts {name}", shape), read_int(capacity), most)
        elif kind in _BUFFER_KINDS:
            self.buffers[name] = self._buffer(name, kind, call)
        elif kind == "lane":
            order, width = read_arguments(call, ("order", "width"), optional=2)
            order_text = "fifo" if order is None else read_string(order)
            if order_text not in ("fifo", "ready"):
                raise fault_at(call, f"a lane's order is 'fifo' or 'ready', not '{order_text}'")
            width_value = 1 if width is None else read_int(width)
            if width_value < 1:
                raise fault_at(call, f"a lane's width is at least 1, not {width_value}")
            self.lanes[name] = Lane(name, order_text, width_value)  # type: ignore[arg-type]
        elif kind == "index":
            read_arguments(call, ())
            self.indices[name] = None
        else:
            known = ("mesh", "counts", "tensor", "lane", "index", *_BUFFER_KINDS)
            raise fault_at(call, f"'{kind}' declares nothing{did_you_mean(kind, known)}")

    def _mesh(self, name: str, call: ast.Call) -> Mesh:
        shape, axes, first, ranks = read_arguments(call, ("shape", "axes", "first", "ranks"), optional=2)
        sizes = read_dims(f"mesh {name}", shape)
        names = tuple(read_string(item) for item in read_items(axes))
        if any(size < 1 for size in sizes):
            raise fault_at(call, f"mesh {name}: every axis needs a size of at least 1, not {sizes}")
        self.num_mesh_ranks += math.prod(sizes)
        if self.num_mesh_ranks > MESH_RANKS.most:
            raise fault_at(call, f"the program {MESH_RANKS.refusal(self.num_mesh_ranks)}")
        if ranks is not None:
            return Mesh(name, sizes, names, read_ints(ranks))
        return Mesh.of(name, sizes, names, 0 if first is None else read_int(first))

    def _buffer(self, name: str, kind: str, call: ast.Call) -> Buffer:
        if kind == "scratch":
            shape, dtype, mesh_node, slots, order = read_arguments(
                call, ("shape", "dtype", "on", "slots", "order"), optional=2
            )
            mesh = read_name(mesh_node, self.meshes, "mesh")
            sizes = read_items(shape)
            if len(sizes) > DIMS.most:
                raise fault_at(call, f"scratch {name} {DIMS.refusal(len(sizes))}")
            return Buffer(
                name, "scratch", mesh, read_dtype(dtype), shape=tuple(map(from_ast, sizes)),
                slots=read_slots(name, slots),
                order=None if order is None else read_ints(order),
            )  # fmt: skip
        tensor, layout, slots, order = read_arguments(
            call, ("tensor", "layout", "slots", "order"), optional=2
        )
        declared = self.tensors[read_name(tensor, self.tensors, "tensor")]
        placed = self._layout(layout)
        return Buffer(
            name, kind, placed.mesh.name, declared.dtype, declared.name, placed,  # type: ignore[arg-type]
            slots=read_slots(name, slots),
            order=None if order is None else read_ints(order),
        )  # fmt: skip

    def _layout(self, node: ast.expr | None) -> Layout:
        match node:
            case ast.Call(func=ast.Name(id="fold"), args=[ast.Subscript() as placed, *folds], keywords=[]):
                return replace(self._layout(placed), folds=tuple(map(read_ints, folds)))
            case ast.Subscript(value=mesh, slice=inner):
                placements = inner.elts if isinstance(inner, ast.Tuple) else [inner]
                return Layout(
                    self.meshes[read_name(mesh, self.meshes, "mesh")],
                    tuple(read_placement(item) for item in placements),
                )
        raise fault_at(
            node or ast.Pass(),
            "a layout is written mesh[placement, ...], such as tp[S(0), R], or fold(tp[S(0), R], (sizes), ...)",
        )

    # --- statements -----------------------------------------------------------------------------------

    def _statement(self, node: ast.stmt) -> Statement:
        match node:
            case ast.With(
                items=[ast.withitem(context_expr=ast.Name(id=mesh), optional_vars=None)], body=body
            ):
                if mesh not in self.meshes:
                    raise fault_at(node, f"'{mesh}' is no mesh{did_you_mean(mesh, self.meshes)}")
                return On(mesh, self._block(body))
            case ast.With(
                items=[
                    ast.withitem(context_expr=ast.Call(func=ast.Name(id="ranks"), args=args, keywords=[]))
                ],
                body=body,
            ):
                return On(tuple(map(read_int, args)), self._block(body))
            case ast.For(
                target=ast.Name(id=var),
                iter=ast.Call(func=ast.Name(id="range"), args=[count], keywords=[]),
                body=body,
                orelse=[],
            ):
                return Repeat(var, from_ast(count), self._block(body))
            case ast.If(test=test, body=body, orelse=[]):
                return When(from_ast(test), self._block(body))
            case ast.Expr(value=ast.Call(func=ast.Name(id="include")) as call):
                return read_include(call, self)
            case ast.Expr(value=ast.Call(func=ast.Name(id=kind)) as call):
                if kind not in OP_TYPES:
                    raise fault_at(
                        node, f"there is no op '{kind}'{did_you_mean(kind, (*OP_TYPES, 'include'))}"
                    )
                return self._op(OP_TYPES[kind], call)
        raise fault_at(
            node, "expected an op, 'with mesh:', 'with ranks(...):', 'for i in range(n):' or 'if condition:'"
        )

    def _block(self, body: Sequence[ast.stmt]) -> tuple[Statement, ...]:
        nodes = (node for node in body if not isinstance(node, ast.Pass))
        return tuple(one for node in nodes for one in read_product(node, self) or (self._statement(node),))

    def _op(self, kind: type[Op], call: ast.Call) -> Op:
        items = {item.name: item for item in fields(kind)}
        view_names = [name for name, item in items.items() if item.type == "View"]
        if len(call.args) > len(view_names):
            raise fault_at(call, f"{kind.kind} takes {len(view_names)} views, not {len(call.args)}")
        values: dict[str, Any] = {
            name: self.read_view(node) for name, node in zip(view_names, call.args, strict=False)
        }
        for keyword in call.keywords:
            name = keyword.arg or "**"
            if name not in items or name in values:
                raise fault_at(keyword.value, f"{kind.kind} has no field '{name}'{did_you_mean(name, items)}")
            values[name] = self.read_field(name, str(items[name].type), keyword.value)
        missing = [name for name, item in items.items() if name not in values and item.default is MISSING]
        if missing:
            raise fault_at(call, f"{kind.kind} lacks {', '.join(missing)}")
        return kind(**values)

    def read_field(self, name: str, kind: str, node: ast.expr) -> Any:
        """Return the value of an op's field `name`, annotated as of type `kind`, from its syntax node."""
        readers: dict[str, Callable[[ast.expr], Any]] = {
            "View": self.read_view,
            "tuple[View, ...]": lambda n: tuple(map(self.read_view, read_items(n))),
            "tuple[Index, ...]": lambda n: tuple(map(from_ast, read_items(n))),
            "Index": from_ast,
            "int": read_int,
            "float": read_number,
            "bool": read_flag,
            "Over": read_over,
            "Sizes": read_sizes,
            "Release | None": lambda n: self._record(Release, n),
            "CollectiveStep | None": lambda n: self._record(CollectiveStep, n),
        }
        if name == "lane":
            return read_name(node, self.lanes, "lane")
        return readers.get(kind, read_string)(node)

    def read_view(self, node: ast.expr) -> View:
        """Return the view that a syntax node describes: `x`, `x(slot)[0:4, :]` or `at(rank, x)`."""
        rank: Index | None = None
        match node:
            case ast.Call(func=ast.Name(id="at"), args=[owner, inner], keywords=[]):
                rank, node = from_ast(owner), inner
        node, chosen = read_subscript(node)
        slot: Index = 0
        match node:
            case ast.Call(func=ast.Name() as head, args=[number], keywords=[]):
                node, slot = head, from_ast(number)
        name = read_name(node, self.buffers, "buffer")
        dims = self.buffers[name].num_dims(self.tensors)
        selectors = tuple(map(read_selector, chosen or ())) or (FULL,) * dims
        if len(selectors) != dims:
            raise fault_at(node, f"buffer {name} has {dims} dims, view has {len(selectors)}")
        return View(name, selectors, slot, rank)

    def _record(self, kind: type, node: ast.expr) -> Any:
        word, items = WORDS[kind.__name__], fields(kind)
        names = tuple(WORDS.get(item.name, item.name) for item in items)
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == word):
            raise fault_at(node, f"expected {word}({', '.join(names)})")
        num_optional = sum(item.default is not MISSING for item in items)
        values = zip(items, read_arguments(node, names, optional=num_optional), strict=True)
        return kind(
            **{
                item.name: self.read_field(item.name, str(item.type), value)
                for item, value in values
                if value is not None
            }
        )
