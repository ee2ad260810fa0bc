"""A program as written: what it declares, its statements, and what follows from the declarations alone."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from meshweave.base.errors import LayoutError, ProgramError, listed
from meshweave.base.units import dtype_bytes
from meshweave.describe.layout import Layout
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.program.expressions import Index, evaluate
from meshweave.ir.program.meanings import Meaning
from meshweave.ir.program.ops import Op, Over
from meshweave.ir.program.statements import Statement, ops_of
from meshweave.ir.program.views import View


@dataclass(frozen=True)
class Counts:
    """A table of numbers of rows that are known at run time only. An entry of it is a cell, of so many rows.

    Attributes:
        capacity: the most rows of one cell.
        totals: for each dim of the table, the most rows that the cells at one index of that dim have together; 0
            leaves that open. () leaves all open.
    """

    name: str
    shape: tuple[int, ...]
    capacity: int
    totals: tuple[int, ...] = ()


@dataclass(frozen=True)
class Tensor:
    """A logical, global tensor, of which buffers hold shards.

    Attributes:
        counts: the table of counts whose dims are the first ones of the tensor: each of these elements stands
            for as many rows as the table says (`ir.program.counts`). "" where every element is one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    counts: str = ""


@dataclass(frozen=True)
class Buffer:
    """Memory of one rank; every rank of `mesh` has one of this name.

    An input, output or temp buffer holds the shard of `tensor` that `layout` gives its rank, so that each byte
    has a global index. Scratch has only a `shape` (expressions over mesh coordinates allowed).

    Attributes:
        slots: number of independent copies, for double buffering.
        order: the dims from outermost to innermost in memory; None for row-major.
    """

    name: str
    kind: Literal["input", "output", "temp", "scratch"]
    mesh: str
    dtype: str
    tensor: str | None = None
    layout: Layout | None = None
    shape: tuple[Index, ...] = ()
    slots: int = 1
    order: tuple[int, ...] | None = None

    def num_dims(self, tensors: Mapping[str, Tensor]) -> int:
        """Return the number of dims, given the tensors of the program."""
        return len(self.shape) if self.tensor is None else len(tensors[self.tensor].shape)


@dataclass(frozen=True)
class Lane:
    """An issue queue of each rank: `fifo` starts ops in program order, `ready` any that can start.

    `width` is how many of its ops may run at once.
    """

    name: str
    order: Literal["fifo", "ready"] = "fifo"
    width: int = 1


@dataclass(frozen=True)
class WrittenProgram:
    """The declarations and statements of a `Program`.

    Attributes:
        body: the statements.
        computes: the meanings of outputs and of other tensors, which `ir.analysis.validate` proves.
        indices: names that an including program gives a value (a micro-batch, say) and that only the `args` of
            calls may use. They are 0 where the program is not included.
        counts: tables of numbers of rows; `Program.with_counts` must give them values before the program can
            run.
    """

    name: str
    meshes: tuple[Mesh, ...]
    tensors: tuple[Tensor, ...]
    buffers: tuple[Buffer, ...]
    lanes: tuple[Lane, ...]
    body: tuple[Statement, ...]
    computes: tuple[Meaning, ...] = ()
    indices: tuple[str, ...] = ()
    counts: tuple[Counts, ...] = ()

    @cached_property
    def mesh_of(self) -> dict[str, Mesh]:
        """Return the meshes by name."""
        return {mesh.name: mesh for mesh in self.meshes}

    @cached_property
    def tensor_of(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        return {tensor.name: tensor for tensor in self.tensors}

    @cached_property
    def counts_of(self) -> dict[str, Counts]:
        """Return the tables of counts by name."""
        return {table.name: table for table in self.counts}

    def require_counts(self) -> None:
        """Raise ProgramError if the program has tables of counts: `with_counts` must give them values first."""
        if self.counts:
            raise ProgramError(
                f"program {self.name} has counts {listed(self.counts_of)}, known at run time: "
                "with_counts gives them values"
            )

    @cached_property
    def buffer_of(self) -> dict[str, Buffer]:
        """Return the buffers by name."""
        return {buffer.name: buffer for buffer in self.buffers}

    @cached_property
    def lane_of(self) -> dict[str, Lane]:
        """Return the lanes by name."""
        return {lane.name: lane for lane in self.lanes}

    @cached_property
    def names(self) -> frozenset[str]:
        """Return all names that are declared, of which none may be declared again."""
        tables = (self.meshes, self.counts, self.tensors, self.buffers, self.lanes)
        return frozenset(item.name for table in tables for item in table) | {*self.indices}

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Return the global ranks of all meshes, ascending."""
        return tuple(sorted({rank for mesh in self.meshes for rank in mesh.ranks}))

    @property
    @abstractmethod
    def expanded(self) -> WrittenProgram:
        """Return the program with the statements of sub-programs in place of includes, if there are any."""

    def ops(self) -> Iterator[Op]:
        """Yield every op once, as written, also one in a loop."""
        return ops_of(self.body)

    def environment(self, rank: int) -> dict[str, int]:
        """Return the values of names on `rank`: its coordinates in every mesh that has it ("tp.row"), and `rank`.

        The program's indices are 0.
        """
        env = {"rank": rank, **dict.fromkeys(self.indices, 0)}
        for mesh in self.meshes:
            if rank in mesh:
                env.update(
                    (f"{mesh.name}.{axis}", at) for axis, at in zip(mesh.axes, mesh.coords(rank), strict=True)
                )
        return env

    @cached_property
    def _shapes(self) -> dict[tuple[str, int], tuple[int, ...]]:
        return {}

    def local_shape(self, name: str, rank: int) -> tuple[int, ...]:
        """Return the shape of one slot (copy) of the buffer `name` on the global rank `rank`.

        Raises:
            ProgramError: there is no such buffer, its mesh has no such rank, its layout does not fit its tensor,
                or an extent has no value or is negative.
        """
        shape = self._shapes.get((name, rank))
        if shape is not None:
            return shape
        buffer = self._declared(name)
        if rank not in self.mesh_of[buffer.mesh]:
            raise ProgramError(f"mesh {buffer.mesh} has no rank {rank}", rank=rank, buffer=name)
        if buffer.tensor is not None:
            assert buffer.layout is not None
            try:
                shape = buffer.layout.local_shape(self.tensor_of[buffer.tensor].shape, rank)
            except LayoutError as error:
                raise ProgramError(str(error), rank=rank, buffer=name) from None
        else:
            env = self.environment(rank)
            try:
                shape = tuple(evaluate(size, env) for size in buffer.shape)
            except ProgramError as error:
                raise ProgramError(error.message, rank=rank, buffer=name) from None
        if any(size < 0 for size in shape):
            raise ProgramError(f"has shape {shape}", rank=rank, buffer=name)
        self._shapes[name, rank] = shape
        return shape

    @cached_property
    def _shapes_of_all(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        return {}

    def _declared(self, name: str) -> Buffer:
        buffer = self.buffer_of.get(name)
        if buffer is None:
            raise ProgramError(f"there is no buffer '{name}'; declared are {listed(self.buffer_of)}")
        return buffer

    def local_shapes(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Return the shape of a slot of the buffer `name` on each rank of its mesh, in the order of `Mesh.ranks`.

        Raises:
            ProgramError: there is no such buffer, its layout does not fit its tensor, or an extent has no value
                or is negative.
        """
        shapes = self._shapes_of_all.get(name)
        if shapes is None:
            buffer = self._declared(name)
            mesh = self.mesh_of[buffer.mesh]
            keys: Sequence[object] = mesh.ranks
            if buffer.layout is not None:
                assert buffer.tensor is not None
                self.local_shape(name, mesh.ranks[0])  # raises what is wrong with the layout
                is_even = buffer.layout.has_equal_shards(self.tensor_of[buffer.tensor].shape)
                keys = [None] * mesh.num_ranks if is_even else buffer.layout.shard_keys
            elif all(isinstance(extent, int) for extent in buffer.shape):
                keys = [None] * mesh.num_ranks
            known: dict[object, tuple[int, ...]] = {}
            for key, rank in zip(keys, mesh.ranks, strict=True):
                if key not in known:
                    known[key] = self.local_shape(name, rank)
            shapes = self._shapes_of_all[name] = tuple(known[key] for key in keys)
        return shapes

    def buffer_bytes(self, name: str, rank: int) -> int:
        """Return the bytes of one slot of the buffer `name` on the global rank `rank`."""
        return math.prod(self.local_shape(name, rank)) * dtype_bytes(self.buffer_of[name].dtype)

    def view_bytes(self, view: View) -> int:
        """Return the bytes of a resolved view."""
        return view.num_elements * dtype_bytes(self.buffer_of[view.buffer].dtype)

    def group_size(self, over: Over) -> int:
        """Return the number of members of a group that `over` means: a mesh axis, a mesh or listed ranks.

        It is 0 for a mesh or axis that is not declared.
        """
        if not isinstance(over, str):
            return len(over)
        mesh = self.mesh_of.get(over.partition(".")[0])
        axis = over.partition(".")[2]
        if mesh is None or (axis and axis not in mesh.axes):
            return 0
        return mesh.size(axis) if axis else mesh.num_ranks

    def group(self, over: Over, rank: int) -> tuple[int, ...]:
        """Return the group of global ranks over which an op with this `over` runs on `rank`.

        Members are in the order of the coordinate, of the mesh, or as listed.

        Raises ProgramError for an unknown mesh or axis, and for an axis of a mesh that lacks `rank`.
        """
        if not isinstance(over, str):
            return over
        mesh_name, _, axis = over.partition(".")
        mesh = self.mesh_of.get(mesh_name)
        if mesh is None:
            raise ProgramError(f"'{over}' names no mesh; declared are {listed(self.mesh_of)}")
        if axis and axis not in mesh.axes:
            raise ProgramError(f"'{over}' names no axis; mesh {mesh_name} has {listed(mesh.axes)}")
        if axis and rank not in mesh:
            raise ProgramError(f"runs over '{over}', and mesh {mesh_name} has no rank {rank}")
        return mesh.group(rank, axis) if axis else mesh.ranks
