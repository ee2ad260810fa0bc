"""The text form of a program: printed here, read back by `ir.program.parse`; the two are inverse.

The text is Python syntax (a subset that is parsed, never executed): declarations are assignments, `with`
says where ops run, `for` and `if` repeat and guard. An op is a call with its fields by name, views first. A
program that others include is the body of a `def`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any

from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.program.expressions import Expr
from meshweave.ir.program.include import Include
from meshweave.ir.program.include_text import include_to_text
from meshweave.ir.program.meanings import Function, Meaning, Product, Sum, TensorPart
from meshweave.ir.program.ops import Op
from meshweave.ir.program.program import Program
from meshweave.ir.program.release import CollectiveStep, Release
from meshweave.ir.program.statements import Block, Key, On, Repeat, Statement, When, walk
from meshweave.ir.program.views import View
from meshweave.ir.program.written import Buffer, Lane

WORDS = {"Release": "release", "CollectiveStep": "step", "num_directions": "ways"}
"""What records and their fields are called in the text form, where that is not their name in Python."""


def to_text(program: Program) -> str:
    """Return the program as text, ending in a newline."""
    return (
        "\n".join((f"program({value_to_text(program.name)})", *_definitions(program), *_lines(program)))
        + "\n"
    )


def _definitions(program: Program) -> Iterator[str]:
    for name, part in program.parts.items():
        yield f"def {name}():"
        for line in (f"program({value_to_text(part.name)})", *_lines(part)):
            yield f"    {line}"


def op_to_text(op: Op) -> str:
    """Return one op as it stands in the text form."""
    if isinstance(op, Include):
        return include_to_text(op, value_to_text(op.name) if op.name else "")
    views: list[str] = []
    named: list[str] = []
    for item in fields(op):
        value = getattr(op, item.name)
        if isinstance(value, View):
            views.append(str(value))
        elif item.name in ("lane", "name") or value == _default(item):
            continue
        else:
            named.append(f"{item.name}={value_to_text(value)}")
    named.append(f"lane={op.lane}")
    if op.name:
        named.append(f"name={value_to_text(op.name)}")
    return f"{op.kind}({', '.join(views + named)})"


def _lines(program: Program) -> Iterator[str]:
    for mesh in program.meshes:
        yield f"{mesh.name} = {mesh_to_text(mesh)}"
    for table in program.counts:
        totals = f", {table.totals}" if table.totals else ""
        yield f"{table.name} = counts({table.shape}, {table.capacity}{totals})"
    for tensor in program.tensors:
        counted = f", counts={tensor.counts}" if tensor.counts else ""
        yield f'{tensor.name} = tensor({tensor.shape}, "{tensor.dtype}"{counted})'
    for meaning in program.computes:
        yield _meaning(meaning)
    for buffer in program.buffers:
        yield f"{buffer.name} = {_buffer(buffer)}"
    for lane in program.lanes:
        yield f"{lane.name} = {_lane(lane)}"
    for index in program.indices:
        yield f"{index} = index()"
    yield from _statements(program.body)


def mesh_to_text(mesh: Mesh) -> str:
    """Return the call `mesh(...)` that declares a mesh, without the name that it is assigned to."""
    first = mesh.ranks[0]
    if mesh.ranks == tuple(range(first, first + mesh.num_ranks)):
        tail = f", first={first}" if first else ""
    else:
        tail = f", ranks={mesh.ranks}"
    return f"mesh({mesh.shape}, {value_to_text(mesh.axes)}{tail})"


def _meaning(meaning: Meaning) -> str:
    match meaning:
        case Product():
            flags = (name for name in ("transpose_a", "transpose_b") if getattr(meaning, name))
            tail = "".join(f", {name}=True" for name in flags)
            return f"computes({meaning.out}, product({meaning.a}, {meaning.b}{tail}))"
        case Sum():
            return f"computes({meaning.out}, add({', '.join(meaning.terms)}))"
        case Function():
            return f"computes({meaning.part}, call({', '.join(_function(meaning))}))"
    return f"computes({meaning.out}, same({meaning.src}))"


def _function(meaning: Function) -> Iterator[str]:
    yield value_to_text(meaning.fn)
    yield from map(str, meaning.ins)
    if meaning.stash:
        yield f"stash={value_to_text(meaning.stash)}"
    if meaning.reduce:
        yield f"reduce={value_to_text(meaning.reduce)}"
    if meaning.output:
        yield f"output={meaning.output}"


def _buffer(buffer: Buffer) -> str:
    if buffer.tensor is None:
        parts = [value_to_text(buffer.shape), f'"{buffer.dtype}"', f"on={buffer.mesh}"]
    else:
        parts = [buffer.tensor, str(buffer.layout)]
    if buffer.slots != 1:
        parts.append(f"slots={buffer.slots}")
    if buffer.order is not None:
        parts.append(f"order={buffer.order}")
    return f"{buffer.kind}({', '.join(parts)})"


def _lane(lane: Lane) -> str:
    parts = [f'order="{lane.order}"'] if lane.order != "fifo" else []
    if lane.width != 1:
        parts.append(f"width={lane.width}")
    return f"lane({', '.join(parts)})"


def _statements(body: tuple[Statement, ...]) -> Iterator[str]:
    def enter(block: Block, key: Key, indent: str) -> Iterator[tuple[Key, str]]:
        yield key, indent + "    "

    for _, statement, indent in walk(body, "", enter):
        match statement:
            case On(where=where):
                place = where if isinstance(where, str) else f"ranks({', '.join(map(str, where))})"
                yield f"{indent}with {place}:"
            case Repeat(var=var, count=count):
                yield f"{indent}for {var} in range({count}):"
            case When(condition=condition):
                yield f"{indent}if {condition}:"
            case _:
                yield indent + op_to_text(statement)
                continue
        if not statement.body:
            yield indent + "    pass"


def _default(item: Any) -> Any:
    return item.default if item.default is not MISSING else _NEVER


_NEVER = object()


def value_to_text(value: Any) -> str:
    """Return the text of an op's field: a number, string, view, expression, record or tuple of these."""
    if isinstance(value, str):
        # JSON would write an emoji as two surrogates, which Python reads as two characters.
        return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, (Release, CollectiveStep)):
        shown = [
            f"{WORDS.get(item.name, item.name)}={value_to_text(getattr(value, item.name))}"
            for item in fields(value)
            if getattr(value, item.name) != _default(item)
        ]
        return f"{WORDS[type(value).__name__]}({', '.join(shown)})"
    if isinstance(value, tuple):
        inner = ", ".join(value_to_text(item) for item in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    assert isinstance(value, (bool, int, float, View, Expr, TensorPart)), value
    return str(value)
