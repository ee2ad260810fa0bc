"""The text form of includes: `def block():` gives a sub-program a name, `include(block, x=h(m % 2), ...)` runs it.

Each sub-program is printed once, under the name that includes use, after those that it includes itself.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Protocol

from meshweave.base.errors import did_you_mean
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.program.expressions import Index, from_ast
from meshweave.ir.program.include import Include, Submesh
from meshweave.ir.program.literals import fault_at, read_int, read_string, read_subscript
from meshweave.ir.program.program import Program
from meshweave.ir.program.views import FULL, Range, View
from meshweave.ir.program.written import Lane

RESERVED = ("stashes", "copies", "copy", "name")
"""Arguments of an include that are no formal names."""


def include_to_text(op: Include, quoted: str) -> str:
    """Return an include as it stands in the text form; `quoted` is its name in quotes, "" for none."""
    parts = [op.part]
    for pairs in (op.meshes, op.buffers, op.indices, op.lanes):
        parts += [f"{formal}={actual}" for formal, actual in pairs]
    if op.stashes:
        shown = ", ".join(f'("{formal}", "{actual}")' for formal, actual in op.stashes)
        parts.append(f"stashes=({shown},)")
    if op.copies != 1:
        parts.append(f"copies={op.copies}")
    if op.copy != 0:
        parts.append(f"copy={op.copy}")
    if quoted:
        parts.append(f"name={quoted}")
    return f"include({', '.join(parts)})"


class ProgramReader(Protocol):
    """What reading an include needs of the reader of the program that it stands in.

    Attributes:
        meshes, lanes: the declared meshes and lanes, by name.
        parts: the sub-programs defined so far, by name.
        defining: the name of the sub-program whose definition is being read; () outside of definitions.
    """

    meshes: dict[str, Mesh]
    lanes: dict[str, Lane]
    parts: dict[str, Program]
    defining: tuple[str, ...]

    def read_view(self, node: ast.expr) -> View:
        """Return the view that a syntax node of a program's text says: `x`, `x(slot)[0:4, :]` or `at(rank, x)`.

        Raises ProgramError, with line and column, where it is no view, names no declared buffer, or selects
        another number of dims than the buffer has.
        """


def read_include(call: ast.Call, reader: ProgramReader) -> Include:
    """Return the include that a call of the text form describes.

    Raises:
        ProgramError: it names no program that is defined above it, a name that it gives is no formal of that
            program, or what it gives for one is malformed.
    """
    part = call.args[0].id if len(call.args) == 1 and isinstance(call.args[0], ast.Name) else ""
    if part in reader.defining:
        path = " > ".join((*reader.defining[reader.defining.index(part) :], part))
        raise fault_at(call, f"'{part}' includes itself: {path}")
    if part not in reader.parts:
        raise fault_at(
            call, f"'{part}' is no program that is defined above{did_you_mean(part, reader.parts)}"
        )
    program = reader.parts[part]
    given = {item.arg or "**": item.value for item in call.keywords}
    formals: dict[str, Mapping[str, object]] = {
        "mesh": program.mesh_of,
        "buffer": {b.name: b for b in program.buffers if b.kind in ("input", "output")},
        "index": dict.fromkeys(program.indices),
        "lane": program.lane_of,
    }
    known = {name for table in formals.values() for name in table}
    for item in call.keywords:
        name = item.arg or "**"
        if name not in known and name not in RESERVED:
            raise fault_at(item.value, f"'{part}' has no '{name}' to be given{did_you_mean(name, known)}")
        if given[name] is not item.value:
            raise fault_at(item.value, f"'{part}' is given '{name}' twice")
    nodes = {
        kind: {name: given[name] for name in table if name in given and name not in RESERVED}
        for kind, table in formals.items()
    }
    return Include(
        part=part,
        program=program,
        meshes=tuple((name, _submesh(node, reader.meshes)) for name, node in nodes["mesh"].items()),
        buffers=tuple((name, reader.read_view(node)) for name, node in nodes["buffer"].items()),
        indices=tuple((name, from_ast(node)) for name, node in nodes["index"].items()),
        lanes=tuple((name, _lane(node, reader)) for name, node in nodes["lane"].items()),
        stashes=_stashes(given.get("stashes"), reader),
        copies=read_int(given["copies"]) if "copies" in given else 1,
        copy=from_ast(given["copy"]) if "copy" in given else 0,
        name=read_string(given["name"]) if "name" in given else "",
    )


def _submesh(node: ast.expr, meshes: dict[str, Mesh]) -> Submesh:
    order: tuple[int, ...] | None = None
    match node:
        case ast.Call(func=ast.Name(id="transpose"), args=[inner, *axes], keywords=[]) if axes:
            node, order = inner, tuple(map(read_int, axes))
    node, chosen = read_subscript(node)
    name = node.id if isinstance(node, ast.Name) else ast.unparse(node)
    if name not in meshes:
        raise fault_at(node, f"'{name}' is no mesh{did_you_mean(name, meshes)}")
    if chosen is None:
        return Submesh(name, (FULL,) * len(meshes[name].shape), order)
    return Submesh(name, tuple(map(_coordinate, chosen)), order)


def _coordinate(node: ast.expr) -> Index | Range:
    match node:
        case ast.Slice(lower=lower, upper=upper, step=None):
            return Range(0 if lower is None else from_ast(lower), None if upper is None else from_ast(upper))
    return from_ast(node)


def _lane(node: ast.expr, reader: ProgramReader) -> str:
    name = node.id if isinstance(node, ast.Name) else ast.unparse(node)
    if name not in reader.lanes:
        raise fault_at(node, f"'{name}' is no lane{did_you_mean(name, reader.lanes)}")
    return name


def _stashes(node: ast.expr | None, reader: ProgramReader) -> tuple[tuple[str, str], ...]:
    pairs: list[tuple[str, str]] = []
    for item in node.elts if isinstance(node, ast.Tuple) else [] if node is None else [node]:
        match item:
            case ast.Tuple(elts=[formal, actual]):
                pairs.append((read_string(formal), read_string(actual)))
            case _:
                raise fault_at(item, 'stashes are pairs: (("name in the program", "name here"),)')
    return tuple(pairs)
