"""Programs with includes for tests: golden ones, and any program inside of another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.program import FULL, Buffer, Include, Program, Submesh, Tensor, View
from meshweave.ir.program.meanings import Meaning, TensorPart
from meshweave.ir.program.parse import parse

FOLDER = Path(__file__).parent.parent / "golden" / "include"
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.txt")))


def text_of(name: str) -> str:
    return (FOLDER / f"{name}.txt").read_text()


def golden_include(name: str) -> Program:
    return parse(text_of(name))


def wrapped(program: Program, ranks: Mapping[int, int] | None = None) -> Program:
    """A program that does nothing but include another as a whole; `ranks` says which rank each of its ranks is."""
    ranks = ranks or {rank: rank for rank in program.ranks}
    meshes = {
        mesh.name: replace(mesh, ranks=tuple(ranks[rank] for rank in mesh.ranks)) for mesh in program.meshes
    }
    interface = tuple(buffer for buffer in program.buffers if buffer.kind in ("input", "output"))
    include = Include(
        part="inner",
        program=program,
        meshes=tuple((mesh.name, Submesh(mesh.name, (FULL,) * len(mesh.shape))) for mesh in program.meshes),
        buffers=tuple((b.name, View(b.name, (FULL,) * b.num_dims(program.tensor_of))) for b in interface),
    )
    placed = tuple(_on_mesh(buffer, meshes[buffer.mesh]) for buffer in interface)
    return Program(
        program.name, tuple(meshes.values()), program.tensors, placed, (), (include,), program.computes
    )


def _on_mesh(buffer: Buffer, mesh: Mesh) -> Buffer:
    assert buffer.layout is not None
    return replace(buffer, mesh=mesh.name, layout=replace(buffer.layout, mesh=mesh))


def side_by_side(left: Program, right: Program) -> Program:
    """A program that includes two others on ranks that they do not share, each with its names after a letter."""
    meshes: list[Mesh] = []
    tensors: list[Tensor] = []
    buffers: list[Buffer] = []
    meanings: list[Meaning] = []
    body: list[Include] = []
    first = 0
    for letter, program in (("p", left), ("q", right)):
        moved = {
            mesh.name: replace(
                mesh, name=f"{letter}_{mesh.name}", ranks=tuple(rank + first for rank in mesh.ranks)
            )
            for mesh in program.meshes
        }
        meshes += moved.values()
        tensors += (replace(tensor, name=f"{letter}_{tensor.name}") for tensor in program.tensors)
        interface = [buffer for buffer in program.buffers if buffer.kind in ("input", "output")]
        for buffer in interface:
            names = {"name": f"{letter}_{buffer.name}", "tensor": f"{letter}_{buffer.tensor}"}
            buffers.append(replace(_on_mesh(buffer, moved[buffer.mesh]), **names))
        meanings += (_prefixed(meaning, letter) for meaning in program.computes)
        include = wrapped(program).includes[0]
        body.append(
            replace(
                include,
                part=f"{letter}_inner",
                meshes=tuple(
                    (formal, replace(at, mesh=f"{letter}_{at.mesh}")) for formal, at in include.meshes
                ),
                buffers=tuple(
                    (f, replace(view, buffer=f"{letter}_{view.buffer}")) for f, view in include.buffers
                ),
            )
        )
        first += max(program.ranks) + 1
    return Program("both", tuple(meshes), tuple(tensors), tuple(buffers), (), tuple(body), tuple(meanings))


def _prefixed(meaning: Meaning, letter: str) -> Meaning:
    """A meaning with a letter before each tensor."""

    def renamed(value: Any) -> Any:
        if isinstance(value, TensorPart):
            return replace(value, tensor=f"{letter}_{value.tensor}")
        return tuple(map(renamed, value)) if isinstance(value, tuple) else f"{letter}_{value}"

    names = {"out", "a", "b", "src", "terms", "part", "ins", "stash"} & {
        item.name for item in fields(meaning)
    }
    return replace(meaning, **{name: renamed(getattr(meaning, name)) for name in names})
