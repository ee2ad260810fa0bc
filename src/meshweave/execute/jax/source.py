"""A program as the source of a jax function: `jax_source`.

The source stands alone: it needs jax, and nothing of this package. `execute.jax.run` executes the same text.
"""

from __future__ import annotations

import ast
import builtins
import keyword
import math
import re
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files

import numpy as np

from meshweave.base.errors import UnsupportedError, printable
from meshweave.describe.layout import Layout, Partial, Shard, StridedShard, Tile
from meshweave.execute.jax.devices import DeviceMesh, quoted
from meshweave.execute.jax.rank_steps import RankStepWriter, as_messages, is_by_rank
from meshweave.execute.jax.rolled_loops import Loops, RolledLoopWriter
from meshweave.execute.jax.statements import StatementWriter
from meshweave.execute.jax.turns import NumberTexts, Turn
from meshweave.execute.jax.variables import rewritten_whole, written_in_parts
from meshweave.execute.jax.views import HeldBuffer, Views
from meshweave.ir.program import Buffer, Program
from meshweave.ir.program.ops import Add, Matmul, Op, Recv
from meshweave.ir.program.renaming import fresh_name

ENTRY = "on_mesh"
"""The function of the source that returns the jitted function of whole tensors."""

BODY = "on_device"
"""The function of the source that one device runs."""

_IMPORTS = """\
from __future__ import annotations

{of_calls}from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec as P
"""
_IMPORTS_OF_CALLS = """\
from collections.abc import Callable, Mapping
from functools import partial
"""


def jax_source(
    program: Program,
    axes: Sequence[str] | None = None,
    *,
    in_order: bool = False,
    loops: Loops = "unrolled",
) -> str:
    """Return the source of a module whose `on_mesh(mesh)` returns the program as a jitted function.

    That function takes the global input tensors, in the order in which the program declares their buffers, and
    returns the global output tensor, or a tuple of several. For a program with calls it is `on_mesh(mesh,
    functions)`, with a dict of the functions by name.

    Args:
        axes: names of the axes of the jax mesh; by default those of the first mesh with all ranks.
        in_order: have communication wait for the last matmul that stands before it in the program, and a matmul
            for the matmul before it; `OpWriter` says it in full. XLA's scheduler may otherwise start all
            transfers at once, and end each right before its use.
        loops: "rolled" writes outermost loops whose iterations differ in numbers alone as `lax.fori_loop`, which
            compiles in less time; XLA then overlaps nothing across iterations. Ignored with `in_order`, and where
            ranks have ops of their own, messages, fences or releases.

    Raises:
        UnsupportedError: jax has no form for something in the program, no mesh of it has all ranks, or it has no
            inputs or no outputs.
        LayoutError: `axes` has more or fewer names than the mesh has axes.
        ProgramError: an expression has no value, messages or collectives do not match, or the program deadlocks.
    """
    return _SourceWriter(as_messages(program), axes, in_order, loops).source()


class _SourceWriter:
    def __init__(self, program: Program, axes: Sequence[str] | None, in_order: bool, loops: Loops) -> None:
        self.in_order, self.loops = in_order, loops
        self.program = program
        self.devices = DeviceMesh(program, axes)
        self.calls: list[str] = []
        self.numbers = NumberTexts(self.devices, self._index_name)
        self.views = Views(program, self.numbers)
        sums = {view.buffer for op in program.ops() if _sums(op) for view in op.writes}
        self.by_rank = is_by_rank(program)
        values = set() if self.by_rank else rewritten_whole(program)
        parts = {} if self.by_rank else written_in_parts(program)
        for buffer in program.buffers:
            name = self._buffer_name(buffer.name)
            self.views.declare(buffer, name, sums=buffer.name in sums, is_value=buffer.name in values)
            self.views.held[buffer.name].parts = None if buffer.name in values else parts.get(buffer.name)

    def _buffer_name(self, name: str) -> str:
        """Return the variable of a buffer or a whole input tensor, which is that of no other one."""
        return name if name not in _taken_names() else fresh_name(f"{name}_", self.program.names)

    def _index_name(self, name: str) -> str:
        """Return the name of a loop index or coordinate, which no buffer has."""
        buffers = {self._buffer_name(buffer.name) for buffer in self.program.buffers}
        while name in buffers or name in _taken_names():
            name += "_at"
        return name

    def source(self) -> str:
        """Return the source of the whole module: imports, operations, `on_device` and `on_mesh`."""
        body = self._body()
        whole = self._whole()
        helpers = [text for name, text in _helpers().items() if name in self._helpers_used(body, whole)]
        name = _plain(self.program.name)
        title = f"The program {name} as a jax function: on_mesh(mesh), on a mesh {self._mesh_text}."
        head = f'"""{title}\n\n'
        head += "Written by meshweave. Each line of on_device is an op of the program.\n"
        aliases = {"Axes": "str | tuple[str, ...]", "Shapes": "tuple[tuple[int, ...], ...]"}
        used = {name for text in helpers for name in _names_in(text)}
        alias = "".join(f"{name} = {meaning}\n\n" for name, meaning in aliases.items() if name in used)
        imports = _IMPORTS.format(of_calls=_IMPORTS_OF_CALLS if self.calls else "")
        parts = [f'{head}"""\n\n{imports}\n{alias}', *helpers, body, whole]
        return "\n\n".join(part.rstrip("\n") + "\n" for part in parts)

    @property
    def _mesh_text(self) -> str:
        listed = (f"{axis}={size}" for axis, size in self.devices.sizes.items())
        return _plain(", ".join(listed))

    def _helpers_used(self, *texts: str) -> set[str]:
        known = _helpers()
        used: set[str] = set()
        left = [name for text in texts for name in _names_in(text) if name in known]
        while left:
            name = left.pop()
            if name not in used:
                used.add(name)
                left += [other for other in _names_in(known[name]) if other in known]
        return used

    # --- what one device runs -------------------------------------------------------------------------

    def _of_kind(self, kind: str) -> list[Buffer]:
        return [buffer for buffer in self.program.buffers if buffer.kind == kind]

    def _body(self) -> str:
        inputs, outputs = self._of_kind("input"), self._of_kind("output")
        if not inputs or not outputs:
            raise UnsupportedError(
                f"program {printable(self.program.name)} has no {'outputs' if inputs else 'inputs'}: a "
                "jax function is of inputs and returns outputs"
            )
        for buffer in inputs:
            self.views.held[buffer.name].is_written = True
        writer = self._writer()
        held = [self.views.held[buffer.name] for buffer in self.program.buffers]
        used = set(_names_in("\n".join(writer.lines)))
        lines = [
            f"{name} = lax.axis_index({quoted(axes[0] if len(axes) == 1 else axes)})"
            for name, axes in self.numbers.coordinates.items()
            if name in used
        ]
        lines += [line for each in held for line in _start(each, used)]
        lines += ["last, arrived, moved = None, [], {}"] if self.in_order else []
        lines += writer.lines
        results = ", ".join(self._result(buffer) for buffer in outputs)
        lines.append(f"return ({results},)")
        parameters = ", ".join(f"{self.views.held[b.name].name}: Array" for b in inputs)
        shapes = "; ".join(f"{self.views.held[b.name].name} {self.views.held[b.name].shape}" for b in inputs)
        made = ", ".join(b.tensor or "" for b in outputs)
        parameters = (
            f"functions: Mapping[str, Callable[..., Any]], {parameters}" if writer.calls else parameters
        )
        self.calls = list(writer.calls)
        head = f"def {BODY}({parameters}) -> tuple[Array, ...]:\n"
        head += f'    """Return the shards of {made} on one device, given {shapes}."""\n'
        return head + "".join(f"    {line}\n" for line in lines)

    def _writer(self) -> StatementWriter:
        """Return the writer of the body, with all lines written."""
        if self.by_rank:
            by_rank = RankStepWriter(
                self.program, self.devices, self.numbers, self.views, in_order=self.in_order
            )
            by_rank.steps()
            return by_rank
        kind = RolledLoopWriter if self.loops == "rolled" else StatementWriter
        writer = kind(self.program, self.devices, self.numbers, self.views, in_order=self.in_order)
        ranks = {rank: self.program.environment(rank) for rank in self.program.ranks}
        writer.body(self.program.body, [Turn({}, ranks)])
        return writer

    def _result(self, buffer: Buffer) -> str:
        held = self.views.held[buffer.name]
        text = held.name if buffer.slots == 1 else f"{held.name}[0]"
        cast = "" if held.dtype == buffer.dtype else f".astype({quoted(buffer.dtype)})"
        if held.parts is None:
            text += cast
        else:  # a part is cast before they are joined: the product that makes it does so
            parts = f"[part{cast} for part in {text}]" if cast else text
            text = f"jnp.concatenate({parts}, axis={held.parts[0]})"
        assert buffer.layout is not None
        return f"{text}[None]" if buffer.layout.partial_axes else text

    # --- whole tensors --------------------------------------------------------------------------------

    def _whole(self) -> str:
        inputs, outputs = self._of_kind("input"), self._of_kind("output")
        tensors = list(dict.fromkeys(b.tensor for b in inputs if b.tensor is not None))
        in_specs = ", ".join(self._spec(buffer) for buffer in inputs)
        out_specs = ", ".join(self._spec(buffer) for buffer in outputs)
        args = ", ".join(self._spread(buffer) for buffer in inputs)
        names = [f"{self.views.held[b.name].name}" for b in outputs]
        of_tensor = {b.tensor: self._collect(b) for b in reversed(outputs)}
        results = [of_tensor[t] for t in dict.fromkeys(b.tensor for b in outputs)]
        parameters = ", ".join(f"{self._buffer_name(name)}: Array" for name in tensors)
        shapes = {t.name: f"{t.name} {t.shape}" for t in self.program.tensors}
        given = ", ".join(shapes[name] for name in tensors)
        made = ", ".join(shapes[name or ""] for name in of_tensor)
        dtypes = {buffer.dtype for buffer in self.program.buffers}
        wide = "".join(f"        require_x64({quoted(d)})\n" for d in ("int64", "float64") if d in dtypes)
        signature, called, calls = "mesh: Mesh", BODY, ""
        if self.calls:
            signature += ", functions: Mapping[str, Callable[..., Any]]"
            called = f"partial({BODY}, functions)"
            calls = f"    Functions of arrays by name, for calls: {_plain(', '.join(self.calls))}.\n"
        return (
            f"def {ENTRY}({signature}) -> Any:\n"
            f'    """Return the jitted function from {given} to {made}.\n\n'
            f'    The mesh has the axes {self._mesh_text}.\n{calls}    """\n'
            f"    local = jax.shard_map(\n"
            f"        {called},\n        mesh=mesh,\n        in_specs=({in_specs},),\n"
            f"        out_specs=({out_specs},),\n        check_vma=False,\n    )\n\n"
            f"    @jax.jit\n    def whole({parameters}) -> Any:\n{wide}"
            f"        ({', '.join(names)},) = local({args})\n"
            f"        return {', '.join(results)}\n\n"
            f"    return whole\n"
        )

    def _axes_of_dim(self, layout: Layout, dim: int) -> list[tuple[str, ...]]:
        """Return the jax mesh axes of each mesh axis that cuts a dim of the tensor as it is seen."""
        dims = {dim}
        if layout.folds is not None:
            first = sum(len(fold) for fold in layout.folds[:dim])
            dims = set(range(first, first + len(layout.folds[dim])))
        return [
            self._jax_axes(layout, axis)
            for axis, placement in zip(layout.mesh.axes, layout.placements, strict=True)
            if isinstance(placement, (Shard, Tile, StridedShard)) and placement.dim in dims
        ]

    def _jax_axes(self, layout: Layout, axis: str) -> tuple[str, ...]:
        axes = self.devices.axes_of(f"{layout.mesh.name}.{axis}")
        if axes is None or layout.mesh.num_ranks != len(self.program.ranks):
            raise UnsupportedError(f"layout {layout} is not along axes of a mesh of all ranks")
        return axes

    def _spec(self, buffer: Buffer) -> str:
        """Return the PartitionSpec of a buffer; terms of partial sums lie along a dim in front."""
        layout = buffer.layout
        assert layout is not None and buffer.tensor is not None
        dims = range(len(self.program.tensor_of[buffer.tensor].shape))
        parts = [[a for axes in self._axes_of_dim(layout, dim) for a in axes] for dim in dims]
        if layout.partial_axes:
            parts.insert(0, [a for axis in layout.partial_axes for a in self._jax_axes(layout, axis)])
        texts = ["None" if not p else quoted(p[0]) if len(p) == 1 else quoted(tuple(p)) for p in parts]
        while texts and texts[-1] == "None":
            texts.pop()
        return f"P({', '.join(texts)})"

    def _positions(self, buffer: Buffer, dim: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the global index at each position of a dim of equal shards, -1 where a shard is filled up."""
        layout = buffer.layout
        assert layout is not None and buffer.tensor is not None
        shape = self.program.tensor_of[buffer.tensor].shape
        axes = [a for listed in self._axes_of_dim(layout, dim) for a in listed]
        count = int(np.prod([self.devices.sizes[a] for a in axes], dtype=int))
        most = self.views.held[buffer.name].shape[dim]
        positions = np.full((count, most), -1)
        for rank in layout.mesh.ranks:
            mine = layout.indices(shape, rank)[dim]
            positions[self.devices.index_along(rank, axes), : len(mine)] = mine
        return positions.reshape(-1)

    def _spread(self, buffer: Buffer) -> str:
        """Return the text of a whole input tensor cut into equal shards."""
        assert buffer.tensor is not None and buffer.layout is not None
        text = self._buffer_name(buffer.tensor)
        axes = buffer.layout.partial_axes
        offset = 1 if axes else 0
        if axes:
            if any(isinstance(p, Partial) and p.op != "sum" for p in buffer.layout.placements):
                raise UnsupportedError(f"{buffer.name}: inputs of which ranks hold terms must be sums")
            text = f"terms({text}, {math.prod(buffer.layout.mesh.size(axis) for axis in axes)})"
        for dim, size in enumerate(self.program.tensor_of[buffer.tensor].shape):
            positions = self._positions(buffer, dim)
            if np.array_equal(positions, np.arange(size)):
                continue
            if _is_filled(positions, size):
                text = f"fill({text}, {dim + offset}, {len(positions)})"
            else:
                text = f"spread({text}, {dim + offset}, {tuple(positions.tolist())})"
        return text

    def _collect(self, buffer: Buffer) -> str:
        """Return the text of a whole output tensor."""
        assert buffer.tensor is not None and buffer.layout is not None
        text = self.views.held[buffer.name].name
        cuts: list[str] = []
        for dim, size in enumerate(self.program.tensor_of[buffer.tensor].shape):
            positions = self._positions(buffer, dim)
            if np.array_equal(positions, np.arange(size)) or _is_filled(positions, size):
                cuts.append(":" if len(positions) == size else f":{size}")
                continue
            places = np.full(size, -1)
            places[positions[positions >= 0]] = np.flatnonzero(positions >= 0)
            offset = 1 if buffer.layout.partial_axes else 0
            text = f"collect({text}, {dim + offset}, {tuple(places.tolist())})"
            cuts.append(":")
        if buffer.layout.partial_axes:
            ops = sorted({p.op for p in buffer.layout.placements if isinstance(p, Partial)})
            if len(ops) > 1:
                raise UnsupportedError(
                    f"{buffer.name}: ranks hold terms for {' and '.join(ops)}; jax reduces by one"
                )
            is_narrow = ops[0] in ("sum", "prod") and buffer.dtype in ("int8", "uint8", "int16")
            text = f"{text}.{ops[0]}(0{f', dtype={quoted(buffer.dtype)}' if is_narrow else ''})"
        if any(cut != ":" for cut in cuts):
            text += f"[{', '.join(cuts)}]"
        return text


def _sums(op: Op) -> bool:
    """Return whether an op adds to what it writes."""
    release = getattr(op, "release", None)
    adds = (release is not None and release.update) or (isinstance(op, Recv) and op.update)
    return adds or isinstance(op, Add) or (isinstance(op, Matmul) and op.accumulate != 0)


def _start(held: HeldBuffer, used: set[str]) -> Iterator[str]:
    """Yield the line that gives a buffer its value before the first op."""
    buffer = held.buffer
    if buffer.kind == "input":
        if held.name in used and buffer.layout is not None and buffer.layout.partial_axes:
            yield f"{held.name} = {held.name}[0]"
        if held.name in used and held.dtype != buffer.dtype:
            yield f"{held.name} = {held.name}.astype({quoted(held.dtype)})"
        if buffer.slots > 1:
            yield f"{held.name} = [{held.name}] * {buffer.slots}"
        return
    slots = f" * {buffer.slots}" if buffer.slots > 1 else ""
    if held.parts is not None:
        listed = f"[None] * {len(held.parts[1])}"
        yield f"{held.name} = {f'[{listed} for _ in range({buffer.slots})]' if slots else listed}"
    elif held.needs_start or (slots and held.name in used):
        kind = "jnp.zeros" if held.is_uneven else "lax.empty"
        start = f"{kind}({held.shape}, {quoted(held.dtype)})" if held.needs_start else "None"
        if slots and held.needs_start:  # one array for all of them would be copied for each
            start = f"[{start} for _ in range({buffer.slots})]"
        elif slots:
            start = f"[None]{slots}"
        yield f"{held.name} = {start}"


def _is_filled(positions: np.ndarray[tuple[int], np.dtype[np.int64]], size: int) -> bool:
    """Return whether positions are 0 .. size - 1, then filling."""
    return bool((positions[:size] == np.arange(size)).all() and (positions[size:] == -1).all())


def _names_in(text: str) -> list[str]:
    return [node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)]


def _plain(text: str) -> str:
    """Return a text for a docstring: words and punctuation that ends none."""
    return re.sub(r"[^\w .,:;=+*()\[\]-]", " ", text)


@cache
def _helpers() -> dict[str, str]:
    """Return the source of each function of `operations`, by name, in order."""
    text = files("meshweave.execute.jax").joinpath("operations.py").read_text(encoding="utf-8")
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return {node.name: f"{ast.get_source_segment(text, node)}\n" for node in nodes}


@cache
def _taken_names() -> frozenset[str]:
    """Return the names that buffers and indices may not have."""
    modules = {"jax", "jnp", "lax", "Array", "Mesh", "P", "Any", "Callable", "Mapping", "partial"}
    own = {ENTRY, BODY, "Axes", "Shapes", "functions", "mesh", "local", "whole", *modules}
    own |= {"last", "arrived", "moved"}
    return frozenset({*own, *_helpers(), *dir(builtins), *keyword.kwlist})
