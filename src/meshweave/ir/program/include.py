"""A program in a program: the `include` op, which runs another program on some of the ranks.

An include names a sub-program and says what stands for its declarations (formals) here (actuals):

- for each mesh a sub-mesh of this program, `tp=grid[stage, :]`: the ranks at these coordinates, in order;
- for each input and output buffer a view of a buffer of this program, `x=act[8 * m:8 * m + 8, :]`;
- for an index, which the sub-program hands to its calls, an expression, `batch=m`;
- for a lane, if wanted, a lane of this program. Without one the sub-program has lanes of its own, which all
  includes under one name share. Its scratch is shared likewise; of `copies` sets of it `copy` picks one.

Expressions are those of the including program, so that loop indices may stand in all of them. Messages of the
sub-program are kept apart by its lanes, and stashes by names of their own, unless `stashes` renames them.

`ir.program.expand` defines what an include means: the statements of the sub-program with actuals in place of
formals. Readings that need every op read the expanded program. `ir.analysis.include` reads an include as one op: a
collective of its ranks that reads the views of its inputs and writes those of its outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from meshweave.base.errors import ProgramError
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.program.expressions import Index, evaluate, names_in
from meshweave.ir.program.ops import READ, WRITE, Collective, Mode, Over
from meshweave.ir.program.views import Range, View
from meshweave.ir.program.written import WrittenProgram


class IncludeError(ProgramError):
    """An error in an include, whose message begins with the path of includes that leads to it."""

    def __init__(self, path: str, error: ProgramError) -> None:
        self.path, self.cause = path, error
        super().__init__(f"{path}: {error.message}", op=error.op, rank=error.rank, buffer=error.buffer)


def include_error(path: str, error: ProgramError) -> IncludeError:
    """Return `error` as an IncludeError whose path begins with `path`, the title of an include around it."""
    if isinstance(error, IncludeError):
        return IncludeError(f"{path} > {error.path}", error.cause)
    return IncludeError(path, error)


@dataclass(frozen=True, slots=True)
class Submesh:
    """The ranks of `mesh` at given coordinates: per axis one coordinate, or a range of them, which stays an axis.

    Attributes:
        order: the positions of the remaining axes in the order wanted; None for the order of the mesh.
    """

    mesh: str
    coordinates: tuple[Index | Range, ...]
    order: tuple[int, ...] | None = None

    def __str__(self) -> str:
        text = self.mesh
        if any(at != Range() for at in self.coordinates):
            text += f"[{', '.join(map(str, self.coordinates))}]"
        return text if self.order is None else f"transpose({', '.join(map(str, (text, *self.order)))})"

    @property
    def indices(self) -> Iterator[Index]:
        """Yield every expression in the coordinates; of a range its start and its stop (0 if that is None)."""
        for at in self.coordinates:
            yield from (at.start, 0 if at.stop is None else at.stop) if isinstance(at, Range) else (at,)

    def resolve(self, mesh: Mesh, env: Mapping[str, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (shape of the sub-mesh, its global ranks in row-major order), without axes of one coordinate.

        `mesh` is the mesh called `self.mesh`; `env` has the value of each variable in the coordinates.

        Raises:
            ProgramError: a coordinate is outside the mesh, a range is empty, an expression has no value, there
                are more or fewer coordinates than axes, or `order` is no permutation of the axes that remain.
        """
        if len(self.coordinates) != len(mesh.shape):
            raise ProgramError(
                f"{self} has {len(self.coordinates)} coordinates, mesh {mesh.name} has {len(mesh.shape)} axes"
            )
        chosen: list[int | slice] = []
        for at, size, axis in zip(self.coordinates, mesh.shape, mesh.axes, strict=True):
            if isinstance(at, Range):
                start = evaluate(at.start, env)
                stop = size if at.stop is None else evaluate(at.stop, env)
                if not 0 <= start < stop <= size:
                    raise ProgramError(
                        f"{self} takes [{start}, {stop}) of the {size} ranks of {mesh.name}.{axis}"
                    )
                chosen.append(slice(start, stop))
                continue
            place = evaluate(at, env)
            if not 0 <= place < size:
                raise ProgramError(
                    f"{self} has coordinate {place} on {mesh.name}.{axis}, which has 0 to {size - 1}"
                )
            chosen.append(place)
        ranks = np.array(mesh.ranks, dtype=np.int64).reshape(mesh.shape)[tuple(chosen)]
        if self.order is not None:
            if sorted(self.order) != list(range(ranks.ndim)):
                raise ProgramError(
                    f"{self} transposes axes {self.order}; give a permutation of 0 to {ranks.ndim - 1}"
                )
            ranks = ranks.transpose(self.order)
        return ranks.shape, tuple(ranks.reshape(-1).tolist())


@dataclass(frozen=True, kw_only=True)
class Include(Collective):
    """The statements of another program, here; the module docstring says how its names are replaced.

    Attributes:
        lane: "" always: its ops run in lanes of their own or in those of `lanes`.
        over: the global ranks that take part, once the op is resolved for a rank.
        part: the name under which the text form defines the sub-program.
        meshes, buffers, lanes, indices: (formal name, what stands for it) in the order of the sub-program's
            declarations.
        stashes: (stash name in the sub-program, stash name here) of those that other includes or calls share.
        copies: how many sets of the sub-program's scratch there are; `copy` is the number of the one to use.
    """

    kind: ClassVar[str] = "include"
    lane: str = ""
    over: Over = ()
    part: str
    program: WrittenProgram = field(repr=False)
    meshes: tuple[tuple[str, Submesh], ...]
    buffers: tuple[tuple[str, View], ...] = ()
    lanes: tuple[tuple[str, str], ...] = ()
    indices: tuple[tuple[str, Index], ...] = ()
    stashes: tuple[tuple[str, str], ...] = ()
    copies: int = 1
    copy: Index = 0

    @property
    def title(self) -> str:
        """Return the op's name and that of its sub-program, `stage 2 > block`, or the latter alone."""
        return f"{self.name} > {self.part}" if self.name and self.name != self.part else self.part

    def accesses(self) -> tuple[tuple[Mode, View], ...]:
        """Return reads of the views that stand for inputs, then writes of those that stand for outputs."""
        kinds = {buffer.name: buffer.kind for buffer in self.program.buffers}
        reads = tuple((READ, view) for formal, view in self.buffers if kinds.get(formal) == "input")
        return (*reads, *((WRITE, view) for formal, view in self.buffers if kinds.get(formal) == "output"))

    @cached_property
    def rank_variables(self) -> frozenset[str]:
        """Return the names of the variables (loop indices, coordinates) that decide which ranks take part."""
        return frozenset(
            name for _, submesh in self.meshes for index in submesh.indices for name in names_in(index)
        )

    def on_rank(self, rank: int, ranks: tuple[int, ...]) -> Include:
        """Return the op as the global rank `rank` runs it: `buffers` has only those that this rank holds.

        `ranks` are the global ranks of all that take part, in the order of the sub-program's ranks; they become
        `over`.
        """
        inner = self.program.ranks[ranks.index(rank)]
        mesh_of = {buffer.name: self.program.mesh_of[buffer.mesh] for buffer in self.program.buffers}
        own = tuple((formal, view) for formal, view in self.buffers if inner in mesh_of[formal])
        return replace(self, over=ranks, buffers=own)

    def rank_map(self, mesh_of: Mapping[str, Mesh], env: Mapping[str, int]) -> dict[int, int]:
        """Return {rank of the sub-program: global rank here}, in ascending order of the former.

        `mesh_of` has the meshes of this program by name, `env` the value of each variable in the sub-meshes.

        Raises:
            ProgramError: a sub-mesh is of an unknown mesh or outside of it, or its shape is not that of the
                sub-program's mesh (for a mesh of one axis, its number of ranks); or a rank of the sub-program is
                given two ranks, or two of them one.
        """
        ranks: dict[int, int] = {}
        for formal, submesh in self.meshes:
            mesh = self.program.mesh_of[formal]
            if submesh.mesh not in mesh_of:
                raise ProgramError(f"{submesh} names no mesh; declared are {', '.join(mesh_of)}")
            shape, actual = submesh.resolve(mesh_of[submesh.mesh], env)
            if shape != mesh.shape and (len(mesh.shape) > 1 or math.prod(shape) != mesh.num_ranks):
                raise ProgramError(f"mesh {formal} has shape {mesh.shape}, {submesh} has {shape}")
            for inner, outer in zip(mesh.ranks, actual, strict=True):
                if ranks.setdefault(inner, outer) != outer:
                    raise ProgramError(
                        f"the sub-meshes given for {self.part} put its rank {inner} on ranks {ranks[inner]} and "
                        f"{outer}; give sub-meshes that agree"
                    )
        if len(set(ranks.values())) < len(ranks):
            raise ProgramError(
                f"the sub-meshes given for {self.part} overlap; give each of its ranks a rank of its own"
            )
        return dict(sorted(ranks.items()))
