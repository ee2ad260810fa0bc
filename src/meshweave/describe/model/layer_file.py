"""Layers as tables of a file: runs of equal layers, and of each its nodes with the names of their types."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, fields
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from pydantic import Field, TypeAdapter, ValidationError

from meshweave.base.errors import DescriptionError, did_you_mean, listed, printable
from meshweave.base.installed import all_offered
from meshweave.describe.files import FileModel
from meshweave.describe.model.layer import LayerGraph
from meshweave.describe.model.nodes import LayerNode

Runs = tuple[tuple[int, LayerGraph], ...]
NodeTypes = Mapping[str, type[LayerNode]]


class LayersFile(FileModel):
    """A run of equal layers, node by node.

    Of a node `type` is the name of its class, and the other keys are its fields, as in
    `{type = "Activation", out = "H", ins = ["Y"], group = "feed_forward", inner = 64, gated = false}`.
    """

    count: int = Field(description="how many layers follow each other, a whole number of at least 1", ge=1)
    nodes: list[dict[str, Any]] = Field(
        description="the nodes in the order of the forward part, tables with `type` and the fields of the type",
        min_length=1,
    )


def layers_table(runs: Runs) -> list[dict[str, Any]]:
    """Return the tables for the key `runs` of a model file, from which `layers_from` reads equal layers.

    A run is (how many equal layers follow each other, the layer).
    """
    return [{"count": count, "nodes": [_node_table(node) for node in graph.nodes]} for count, graph in runs]


def _node_table(node: LayerNode) -> dict[str, Any]:
    values = {name: value for name, value in asdict(node).items() if value is not None}
    return {"type": type(node).__name__, **values}


def layers_from(runs: list[LayersFile]) -> Runs:
    """Return the runs of equal layers that tables describe.

    Raises:
        DescriptionError: a table is wrong (the error names run and node), or the nodes of a run make no layer.
    """
    known = node_types() if runs else {}
    return tuple((run.count, _layer(number, run, known)) for number, run in enumerate(runs))


def _layer(number: int, run: LayersFile, known: NodeTypes) -> LayerGraph:
    nodes = tuple(_nodes(number, run, known))
    try:
        return LayerGraph(nodes)
    except DescriptionError as error:
        raise DescriptionError(f"runs.{number}: {error}") from None


def _nodes(number: int, run: LayersFile, known: NodeTypes) -> Iterator[LayerNode]:
    for at, table in enumerate(run.nodes):
        try:
            yield _node(dict(table), known)
        except DescriptionError as error:
            raise DescriptionError(f"runs.{number}.nodes.{at}: {error}") from None


def _node(table: dict[str, Any], known: NodeTypes) -> LayerNode:
    name = table.pop("type", "")
    if not isinstance(name, str) or name not in known:
        hint = did_you_mean(str(name), tuple(known))
        raise DescriptionError(
            f"there is no type '{printable(name)}'{hint}; there are {listed(tuple(known))}"
        )
    own = known[name]
    keys = [field.name for field in fields(own)]
    if unknown := [key for key in table if key not in keys]:
        hint = did_you_mean(unknown[0], keys)
        raise DescriptionError(f"unknown key '{printable(unknown[0])}'{hint}; {name} has {', '.join(keys)}")
    for field in fields(own):  # a file has no word for None
        if field.name not in table and field.default is MISSING:
            raise DescriptionError(f"{name} needs {field.name}; give all of {', '.join(keys)}")
    try:
        return _adapter(own).validate_json(json.dumps(table), strict=True)
    except (ValidationError, TypeError) as error:
        detail = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": str(error)}
        raise DescriptionError(f"{'.'.join(map(str, detail['loc']))}: {printable(detail['msg'])}") from None


@cache
def _adapter(own: type[LayerNode]) -> TypeAdapter[LayerNode]:
    return TypeAdapter(own)


@cache
def _import_all() -> None:
    room = __name__.rpartition(".")[0]
    for module in iter_modules([str(Path(__file__).parent)]):
        import_module(f"{room}.{module.name}")
    for _ in all_offered("meshweave.nodes"):
        pass


def node_types() -> NodeTypes:
    """Return the types of nodes by name: those of `describe.model`, and those of installed packages."""
    _import_all()
    by_name: dict[str, type[LayerNode]] = {}
    todo = LayerNode.__subclasses__()
    while todo:
        own = todo.pop()
        todo += own.__subclasses__()
        if not own.__abstractmethods__:
            by_name.setdefault(own.__name__, own)
    return dict(sorted(by_name.items()))
