"""The text form of a product whose regions go to different memories (`ir.program.regions`).

    product(a, b, (
        remote_map(at(1, x[0:4, :]), a=a[0:4, :]),
        *(dma_map(at(1, x[4 + s:5 + s, :]), x[4 + s:5 + s, :], a=a[4 + s:5 + s, :], lane=dma) for s in range(2)),
        local(x[6:8, :], a=a[6:8, :])), release=release(update=True), lane=compute)

It is read as the ops that it stands for, and these are what is printed.
"""

from __future__ import annotations

import ast
from typing import Any, Protocol

from meshweave.base.errors import ProgramError, did_you_mean
from meshweave.ir.program.expressions import from_ast
from meshweave.ir.program.literals import fault_at, read_arguments, read_flag, read_items, read_name
from meshweave.ir.program.regions import (
    DmaMap,
    EachRegion,
    LocalMap,
    OutputMap,
    RemoteMap,
    product_statements,
)
from meshweave.ir.program.statements import Statement
from meshweave.ir.program.views import View
from meshweave.ir.program.written import Lane

_MAPS: dict[str, type[OutputMap]] = {kind.word: kind for kind in (RemoteMap, DmaMap, LocalMap)}


class RegionReader(Protocol):
    """What reading a product needs of the reader of the program that it stands in."""

    lanes: dict[str, Lane]

    def read_view(self, node: ast.expr) -> View:
        """Return the view that a syntax node describes: `x`, `x(slot)[0:4, :]` or `at(rank, x)`."""

    def read_field(self, name: str, kind: str, node: ast.expr) -> Any:
        """Return the value of an op's field `name`, annotated as of type `kind`, from its syntax node."""


def read_product(node: ast.stmt, reader: RegionReader) -> tuple[Statement, ...]:
    """Return the statements of a product with regions; () for a node that is no call of `product`.

    Raises:
        ProgramError: it does not read `product(a, b, (region, ...), release=, transpose_a=, transpose_b=,
            lane=)`, a name in it is unknown, or the first region is one of a loop.
    """
    match node:
        case ast.Expr(value=ast.Call(func=ast.Name(id="product")) as call):
            pass
        case _:
            return ()
    names = ("a", "b", "regions", "lane", "release", "transpose_a", "transpose_b")
    a, b, regions, lane, release, transpose_a, transpose_b = read_arguments(call, names, optional=3)
    left, right = reader.read_view(a), reader.read_view(b)
    maps = [_region(node, reader) for node in read_items(regions)]
    name = read_name(lane, reader.lanes, "lane")
    tiles = None if release is None else reader.read_field("release", "Release | None", release)
    turned_a, turned_b = (node is not None and read_flag(node) for node in (transpose_a, transpose_b))
    try:
        return product_statements(left, right, maps, name, tiles, transpose_a=turned_a, transpose_b=turned_b)
    except ProgramError as error:
        raise fault_at(call, error.message) from None


def _region(node: ast.expr, reader: RegionReader) -> OutputMap | EachRegion:
    match node:
        case ast.Starred(
            value=ast.GeneratorExp(
                elt=inner,
                generators=[
                    ast.comprehension(
                        target=ast.Name(id=var),
                        iter=ast.Call(func=ast.Name(id="range"), args=[count], keywords=[]),
                        ifs=[],
                        is_async=0,
                    )
                ],
            )
        ):
            return EachRegion(_map(inner, reader), var, from_ast(count))
    return _map(node, reader)


def _map(node: ast.expr, reader: RegionReader) -> OutputMap:
    match node:
        case ast.Call(func=ast.Name(id=word)) if word in _MAPS:
            pass
        case ast.Call(func=ast.Name(id=word)):
            raise fault_at(node, f"a region is no '{word}'{did_you_mean(word, _MAPS)}")
        case _:
            raise fault_at(node, f"a region is {', '.join(_MAPS)}, or *(region for s in range(n))")
    kind = _MAPS[word]
    views = ("target", "via") if kind is DmaMap else ("target",)
    names = (*views, "lane", "a", "b") if kind is DmaMap else (*views, "a", "b")
    given = dict(zip(names, read_arguments(node, names, optional=2), strict=True))
    values: dict[str, Any] = {
        name: reader.read_view(value) for name, value in given.items() if name != "lane" and value is not None
    }
    if kind is DmaMap:
        values["lane"] = read_name(given["lane"], reader.lanes, "lane")
    return kind(**values)
