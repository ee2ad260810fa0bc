"""The distributed product that every algorithm of this folder solves.

A mesh of Pr rows and Pc columns; rows of each stored matrix are sharded over mesh axis `row`, its columns
over `col`, by DTensor's chunk rule. Which matrix stays put names the dataflow (MeshSlice, section 2.3.1):

    os   C = A B      A stored (M, K)   B stored (K, N)   C stationary
    ls   C = A B^T    A stored (M, K)   B stored (N, K)   A stationary
    rs   C = A^T B    A stored (K, M)   B stored (K, N)   B stationary

The dim that the two moving matrices share is the *sliced* dim: K for os, N for ls, M for rs. One of them
moves between columns (its columns are sliced), the other between rows (its rows are sliced).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from meshweave.describe.layout import Layout, Shard, chunk
from meshweave.describe.mesh import Mesh
from meshweave.errors import LayoutError, MeshweaveError, nearest
from meshweave.ir.program import Buffer, Product, Program, Tensor
from meshweave.ir.skeleton import Skeleton
from meshweave.units import DTYPES, dtype_bytes

Dataflow = Literal["os", "ls", "rs"]
DATAFLOWS: tuple[Dataflow, ...] = ("os", "ls", "rs")
AXES = ("row", "col")
MESH = "tp"


@dataclass(frozen=True)
class Moving:
    """A matrix that moves: `operand` ("a", "b" or "c") travels along mesh axis `axis`; dim `dim` of it is
    sliced and sharded over that axis. It is gathered before the product, or, `scattered`, reduced after it."""

    operand: str
    axis: Literal["row", "col"]
    dim: int
    scattered: bool


_HORIZONTAL = {"os": "a", "ls": "c", "rs": "a"}
_VERTICAL = {"os": "b", "ls": "b", "rs": "c"}


@dataclass(frozen=True)
class MatmulProblem:
    """C (M, N) from M, N, K on a (rows, cols) mesh. Raises LayoutError for sizes that make no sense."""

    m: int
    n: int
    k: int
    mesh_shape: tuple[int, int]
    dataflow: Dataflow = "os"
    dtype: str = "float32"
    ranks: tuple[int, ...] | None = None
    """Global ranks of the mesh in row-major order; None means 0, 1, 2, ..."""

    def __post_init__(self) -> None:
        if self.dataflow not in DATAFLOWS:
            raise LayoutError(f"dataflow '{self.dataflow}' is none of {', '.join(DATAFLOWS)}")
        if min(self.m, self.n, self.k) < 1:
            raise LayoutError(f"M, N, K = {self.m}, {self.n}, {self.k} must be positive")
        if len(self.mesh_shape) != 2 or min(self.mesh_shape) < 1:
            raise LayoutError(f"a 2D product needs a mesh of two positive sizes, not {self.mesh_shape}")
        if self.dtype not in DTYPES:
            raise LayoutError(f"unknown dtype '{self.dtype}'{nearest(self.dtype, DTYPES)}")

    @property
    def mesh(self) -> Mesh:
        if self.ranks is None:
            return Mesh.of(MESH, self.mesh_shape, AXES)
        return Mesh(MESH, self.mesh_shape, AXES, self.ranks)

    @property
    def num_chips(self) -> int:
        return math.prod(self.mesh_shape)

    @property
    def flops(self) -> int:
        """FLOPs of the whole product, two per multiply-add."""
        return 2 * self.m * self.n * self.k

    def stored_shape(self, operand: str) -> tuple[int, int]:
        """Global shape of operand "a", "b" or "c" as it is stored."""
        if operand == "a":
            return (self.k, self.m) if self.dataflow == "rs" else (self.m, self.k)
        if operand == "b":
            return (self.n, self.k) if self.dataflow == "ls" else (self.k, self.n)
        return self.m, self.n

    @property
    def stationary(self) -> str:
        return {"os": "c", "ls": "a", "rs": "b"}[self.dataflow]

    @property
    def sliced_size(self) -> int:
        return {"os": self.k, "ls": self.n, "rs": self.m}[self.dataflow]

    @property
    def horizontal(self) -> Moving:
        """The matrix that moves between columns."""
        operand = _HORIZONTAL[self.dataflow]
        return Moving(operand, "col", 1, operand == "c")

    @property
    def vertical(self) -> Moving:
        """The matrix that moves between rows."""
        operand = _VERTICAL[self.dataflow]
        return Moving(operand, "row", 0, operand == "c")

    def axis_size(self, axis: str) -> int:
        return self.mesh_shape[AXES.index(axis)]

    def largest_part(self, size: int, axis: str) -> int:
        """Largest part of `size` elements chunked over a mesh axis."""
        return chunk(size, self.axis_size(axis), 0)[1]

    def declarations(self, name: str) -> Program:
        """A program with mesh, tensors, meaning and operand buffers a, b, c declared, and nothing done yet."""
        mesh = self.mesh
        tensors = tuple(Tensor(op.upper(), self.stored_shape(op), self.dtype) for op in "abc")
        layout = Layout(mesh, (Shard(0), Shard(1)))
        buffers = tuple(
            Buffer(op, "output" if op == "c" else "input", MESH, self.dtype, op.upper(), layout)
            for op in "abc"
        )
        meaning = Product("C", "A", "B", transpose_a=self.dataflow == "rs", transpose_b=self.dataflow == "ls")
        return Program(name, (mesh,), tensors, buffers, (), (), (meaning,))

    def traffic_bytes(self, rank: int) -> dict[str, int]:
        """Logical bytes that a rank must move per mesh axis when each moving matrix crosses its axis once:
        (P - 1) / P of the gathered or reduced block (MeshSlice, section 2.3.1), exact for uneven shards."""
        layout = Layout(self.mesh, (Shard(0), Shard(1)))
        out = {}
        for moving in (self.horizontal, self.vertical):
            shape = self.stored_shape(moving.operand)
            local = layout.local_shape(shape, rank)
            others = shape[moving.dim] - local[moving.dim]
            moved = others * local[1 - moving.dim] * dtype_bytes(self.dtype)
            if moved:
                out[f"{MESH}.{moving.axis}"] = moved
        return out


@dataclass(frozen=True)
class Config:
    """What an algorithm may choose: `slices` lists the relative widths of the slices (all equal: the plain
    slice count), `block` is the number of neighbouring elements that stay together in a slice."""

    slices: tuple[int, ...] = (1,)
    block: int = 8

    @property
    def slice_count(self) -> int:
        return len(self.slices)

    def __str__(self) -> str:
        if len(set(self.slices)) == 1:
            return f"S={len(self.slices)}"
        return f"S={len(self.slices)} tapered {':'.join(map(str, self.slices))}"


@dataclass(frozen=True)
class Algorithm:
    """One entry of the table of algorithms. All functions take (problem, config).

    `program` raises MeshweaveError where the problem cannot be solved by this algorithm; `configs` lists
    what a tuner may try; `traffic` is the closed form of bytes moved per axis by one rank.
    """

    name: str
    title: str
    source: str
    dataflows: tuple[Dataflow, ...]
    program: Callable[[MatmulProblem, Config], Program]
    skeleton: Callable[[MatmulProblem, Config], Skeleton]
    configs: Callable[[MatmulProblem], Iterator[Config]]
    traffic: Callable[[MatmulProblem, Config, int], dict[str, int]]
    supports: Callable[[MatmulProblem], MeshweaveError | None] = lambda problem: None
