"""The distributed product that every algorithm of this folder solves.

A mesh of Pr rows and Pc columns; unless an algorithm says otherwise, rows of each stored matrix are sharded
over mesh axis `row`, its columns over `col`, by DTensor's chunk rule. A third axis, `depth`, holds copies.
Which matrix stays put names the dataflow (MeshSlice, section 2.3.1):

    os   C = A B      A stored (M, K)   B stored (K, N)   C stationary
    ls   C = A B^T    A stored (M, K)   B stored (N, K)   A stationary
    rs   C = A^T B    A stored (K, M)   B stored (K, N)   B stationary

The dim that the two moving matrices share is the *sliced* dim: K for os, N for ls, M for rs. One of them
moves between columns (its columns are sliced), the other between rows (its rows are sliced).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from meshweave.base.errors import LayoutError, printable, require_known, require_whole, require_wholes
from meshweave.base.units import DTYPES, dtype_bytes
from meshweave.describe.layout import Layout, Placement, Replicate, Shard, chunk_bounds
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.layout.shapes import factorisations
from meshweave.ir.program import Buffer, Product, Program, Tensor

Dataflow = Literal["os", "ls", "rs"]
Placements = dict[str, tuple[Placement, ...]]
"""Placements of operands "a", "b", "c", one per mesh axis."""

DATAFLOWS: tuple[Dataflow, ...] = ("os", "ls", "rs")
AXES = ("row", "col", "depth")
"""Names of the mesh axes; a 2D mesh has the first two."""
MESH = "tp"
"""Name of the mesh in every program of this folder."""


@dataclass(frozen=True)
class MovingMatrix:
    """A matrix that moves along a mesh axis.

    Attributes:
        operand: "a", "b" or "c".
        axis: the mesh axis.
        dim: the dim of the stored matrix that is sliced, and sharded over that axis.
        scattered: whether the matrix is an output, reduced and scattered after the product. An input is gathered
            before the product.
    """

    operand: str
    axis: Literal["row", "col"]
    dim: int
    scattered: bool


_HORIZONTAL = {"os": "a", "ls": "c", "rs": "a"}
_VERTICAL = {"os": "b", "ls": "b", "rs": "c"}


@dataclass(frozen=True)
class Matmul2dProblem:
    """A product with result C (M, N) that sums over K, on a mesh (rows, columns) or (rows, columns, depth).

    One matrix is stationary: it does not move between chips. The other two are moving and share a dim, the sliced
    one. Operands "a", "b" and "c" are A, B and C; mesh axes are "row", "col" and "depth". `Placements` have one
    placement per mesh axis for each operand.

    Attributes:
        m, n, k: global sizes of the product in elements.
        mesh_shape: chips along each mesh axis.
        dataflow: "os" is C = A B with C stationary, "ls" C = A B^T with A stationary (B is stored (N, K)), "rs"
            C = A^T B with B stationary (A is stored (K, M)).
        dtype: name of the dtype of all three matrices.
        ranks: global ranks of the mesh in row-major order; None means 0, 1, 2, ...

    Raises:
        LayoutError: a size is not positive, the mesh has not two or three axes, or a name is unknown.
    """

    m: int
    n: int
    k: int
    mesh_shape: tuple[int, ...]
    dataflow: Dataflow = "os"
    dtype: str = "float32"
    ranks: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.dataflow not in DATAFLOWS:
            raise LayoutError(f"dataflow '{self.dataflow}' is none of {', '.join(DATAFLOWS)}")
        for name in ("m", "n", "k"):
            object.__setattr__(self, name, require_whole(getattr(self, name), name.upper(), LayoutError))
        shape = tuple(require_whole(size, "a size of the mesh", LayoutError) for size in self.mesh_shape)
        object.__setattr__(self, "mesh_shape", shape)
        if min(self.m, self.n, self.k) < 1:
            raise LayoutError(f"M, N, K = {self.m}, {self.n}, {self.k} must be positive")
        if len(self.mesh_shape) not in (2, 3) or min(self.mesh_shape) < 1:
            raise LayoutError(f"a product needs a mesh of two or three positive sizes, not {self.mesh_shape}")
        require_known(self.dtype, DTYPES, "unknown dtype", LayoutError)

    @cached_property
    def mesh(self) -> Mesh:
        """Return the mesh, with axes "row", "col" and, if `mesh_shape` has three sizes, "depth"."""
        axes = AXES[: len(self.mesh_shape)]
        if self.ranks is None:
            return Mesh.of(MESH, self.mesh_shape, axes)
        return Mesh(MESH, self.mesh_shape, axes, self.ranks)

    @property
    def num_chips(self) -> int:
        """Return the number of chips of the mesh."""
        return math.prod(self.mesh_shape)

    @property
    def flops(self) -> int:
        """Return the FLOPs of the whole product on all chips together, 2 M N K."""
        return 2 * self.m * self.n * self.k

    def stored_shape(self, operand: str) -> tuple[int, int]:
        """Return the global shape (rows, columns) of operand "a", "b" or "c" as it is stored."""
        if operand == "a":
            return (self.k, self.m) if self.dataflow == "rs" else (self.m, self.k)
        if operand == "b":
            return (self.n, self.k) if self.dataflow == "ls" else (self.k, self.n)
        return self.m, self.n

    @cached_property
    def stationary(self) -> str:
        """Return the operand that does not move: "a", "b" or "c"."""
        return {"os": "c", "ls": "a", "rs": "b"}[self.dataflow]

    @cached_property
    def sliced_size(self) -> int:
        """Return the global size, in elements, of the sliced dim: K for "os", N for "ls", M for "rs"."""
        return {"os": self.k, "ls": self.n, "rs": self.m}[self.dataflow]

    @cached_property
    def horizontal(self) -> MovingMatrix:
        """Return the matrix that moves along mesh axis "col": between the chips of a mesh row."""
        operand = _HORIZONTAL[self.dataflow]
        return MovingMatrix(operand, "col", 1, operand == "c")

    @cached_property
    def vertical(self) -> MovingMatrix:
        """Return the matrix that moves along mesh axis "row": between the chips of a mesh column."""
        operand = _VERTICAL[self.dataflow]
        return MovingMatrix(operand, "row", 0, operand == "c")

    def axis_size(self, axis: str) -> int:
        """Return the number of chips along a mesh axis: "row", "col" or "depth"."""
        return self.mesh_shape[AXES.index(axis)]

    def largest_part(self, size: int, axis: str) -> int:
        """Return ceil(`size` / chips of mesh axis `axis`): the most elements that one chip gets of `size`."""
        return chunk_bounds(size, self.axis_size(axis), 0)[1]

    def declarations(self, name: str, placements: Placements | None = None) -> Program:
        """Return a program without ops: mesh, tensors A, B, C, their buffers a, b, c, and the equation of C.

        A matrix that moves along its dim 1 is stored column-major: a slice of its columns is then contiguous,
        and can be sent without a transpose.

        Args:
            name: the program's name.
            placements: for each of "a", "b" and "c" one placement per mesh axis; None for `two_d_placements`.
        """
        mesh = self.mesh
        column_major = {moving.operand for moving in (self.horizontal, self.vertical) if moving.dim == 1}
        placed = placements or two_d_placements(self)
        tensors = tuple(Tensor(op.upper(), self.stored_shape(op), self.dtype) for op in "abc")
        buffers = tuple(
            Buffer(
                op,
                "output" if op == "c" else "input",
                MESH,
                self.dtype,
                op.upper(),
                Layout(mesh, placed[op]),
                order=(1, 0) if op in column_major else None,
            )
            for op in "abc"
        )
        product = Product("C", "A", "B", transpose_a=self.dataflow == "rs", transpose_b=self.dataflow == "ls")
        return Program(name, (mesh,), tensors, buffers, (), (), (product,))

    def traffic_bytes(self, rank: int, placements: Placements | None = None) -> dict[str, int]:
        """Return a rank's bytes of communication if each moving matrix is gathered or scattered once.

        Keys are "mesh.axis", such as "tp.row"; an axis without bytes is left out. On an axis of P chips the bytes
        are (P - 1) / P of the gathered or reduced block (MeshSlice, section 2.3.1), exact also for unequal shards.

        Args:
            rank: a global rank.
            placements: for each of "a", "b" and "c" one placement per mesh axis; None for `two_d_placements`.
        """
        placed = placements or two_d_placements(self)
        traffic = {}
        for moving in (self.horizontal, self.vertical):
            shape = self.stored_shape(moving.operand)
            local = Layout(self.mesh, placed[moving.operand]).local_shape(shape, rank)
            missing = shape[moving.dim] - local[moving.dim]
            moved_bytes = missing * local[1 - moving.dim] * dtype_bytes(self.dtype)
            if moved_bytes:
                traffic[f"{MESH}.{moving.axis}"] = moved_bytes
        return traffic


def two_d_placements(problem: Matmul2dProblem) -> Placements:
    """Return, for each of "a", "b" and "c", its placement along each mesh axis of the problem.

    Stored rows are sharded over "row", stored columns over "col", and matrices are replicated over "depth".
    """
    placed: tuple[Placement, ...] = (Shard(0), Shard(1))
    if len(problem.mesh_shape) == 3:
        placed = (*placed, Replicate())
    return dict.fromkeys("abc", placed)


def two_d_meshes(num_chips: int) -> tuple[tuple[int, ...], ...]:
    """Return every mesh shape (rows, columns) with rows x columns = `num_chips`."""
    return factorisations(num_chips, 2)


@dataclass(frozen=True)
class Matmul2dConfig:
    """What an algorithm leaves open. Each algorithm reads the fields that it names in its docstring.

    Attributes:
        slices: relative widths of the slices: (1, 1, 1, 1) are four equal ones. For SUMMA the length of `slices`
            is the number of steps, for ring algorithms the number of iterations, and widths are not read.
        block: neighbouring elements of the sliced dim that stay together in a slice.
        packets: the number of packets into which a broadcast or reduce is cut.
        overlap: the only mesh axis, "row" or "col", along which Wang's algorithm hides communication.

    Raises:
        LayoutError: a number is not whole, there are less than 1 packets, or `overlap` is neither "row" nor "col".
    """

    slices: tuple[int, ...] = (1,)
    block: int = 8
    packets: int = 1
    overlap: Literal["row", "col"] = "col"

    def __post_init__(self) -> None:
        require_wholes(self, ("block", "packets"), LayoutError)
        widths: object = self.slices
        if not isinstance(widths, tuple | list):
            raise LayoutError(f"slices is {printable(repr(widths))}; give the width of each, such as (1, 1)")
        if type(widths) is not tuple or any(type(width) is not int for width in widths):
            whole = tuple(require_whole(width, "a width of slices", LayoutError) for width in widths)
            object.__setattr__(self, "slices", whole)
        if self.packets < 1:
            raise LayoutError(f"packets is {self.packets}; give at least 1")
        require_known(self.overlap, AXES[:2], "a product has no overlap along mesh axis", LayoutError)

    @property
    def slice_count(self) -> int:
        """Return the number of slices, the length of `slices`."""
        return len(self.slices)

    def __str__(self) -> str:
        text = f"S={len(self.slices)}"
        if len(set(self.slices)) > 1:
            text += f" tapered {':'.join(map(str, self.slices))}"
        return text + (f" D={self.packets}" if self.packets > 1 else "")
