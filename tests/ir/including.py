"""Programs with includes for tests: golden ones, and any program inside of another."""

from __future__ import annotations

from pathlib import Path

from meshweave.ir.program import FULL, Include, Program, Submesh, View
from meshweave.ir.program.parse import parse

FOLDER = Path(__file__).parent.parent / "golden" / "include"
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.txt")))


def text_of(name: str) -> str:
    return (FOLDER / f"{name}.txt").read_text()


def golden_include(name: str) -> Program:
    return parse(text_of(name))


def wrapped(program: Program) -> Program:
    """A program that does nothing but include another as a whole."""
    interface = tuple(buffer for buffer in program.buffers if buffer.kind in ("input", "output"))
    include = Include(
        part="inner",
        program=program,
        meshes=tuple((mesh.name, Submesh(mesh.name, (FULL,) * len(mesh.shape))) for mesh in program.meshes),
        buffers=tuple(
            (buffer.name, View(buffer.name, (FULL,) * buffer.num_dims(program.tensor_of)))
            for buffer in interface
        ),
    )
    return Program(program.name, program.meshes, program.tensors, interface, (), (include,), program.computes)
