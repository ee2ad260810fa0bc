"""COSMA: the grid that communicates least, then gather, multiply, reduce.

Kwasniewski et al., Red-Blue Pebbling Revisited (SC '19): (m, n, k) is cut into one box per rank so that the
faces of a box, which is what its rank takes in or gives away, are as small as they can be. With memory without
limit, which is all that is here, each rank has its whole box at once: the parts of A and B that its neighbours
hold are gathered, there is one product, and C is summed over the boxes that differ in k. Nothing overlaps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshweave.algorithms.contract import Gradient
from meshweave.algorithms.matrix_views import full_matrix
from meshweave.algorithms.universal.algorithm import AnyLayoutProduct
from meshweave.algorithms.universal.config import permute_axes
from meshweave.algorithms.universal.problem import UniversalProblem
from meshweave.base.errors import LayoutError
from meshweave.describe.layout import Layout, Placement, Replicate, Shard
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.layout.shapes import factorisations
from meshweave.describe.machine.cluster import Cluster
from meshweave.ir.program import Buffer, Lane, On, Product, Program, Tensor
from meshweave.ir.program.ops import AllGather, AllReduce, Matmul, Op, ReduceScatter

Grid = tuple[int, int, int]
"""Into how many parts m, n and k are cut."""

_SHARED: dict[str, tuple[tuple[int, int, int], tuple[Placement, Placement, Placement]]] = {
    "a": ((0, 2, 1), (Shard(0), Shard(1), Shard(0))),
    "b": ((1, 2, 0), (Shard(1), Shard(0), Shard(1))),
    "c": ((0, 1, 2), (Shard(0), Shard(1), Shard(0))),
}
"""For each matrix the mesh axes (m, n, k) in the order in which they shard it, and the placements. The last axis
shards a block among the ranks that need all of it."""
_AXES = ("m", "n", "k")


def face_elements(m: int, n: int, k: int, grid: Grid) -> float:
    """Return the elements of A and B that a rank receives, and of C that it sends."""
    pm, pn, pk = grid
    a, b, c = m * k / (pm * pk), k * n / (pk * pn), m * n / (pm * pn)
    return a * (1 - 1 / pn) + b * (1 - 1 / pm) + c * (1 - 1 / pk)


def choose_grid(m: int, n: int, k: int, num_ranks: int) -> Grid:
    """Return the grid with the smallest faces; of equal ones that which cuts k most, so that it gathers least."""
    grids = [(pm, pn, pk) for pm, pn, pk in factorisations(num_ranks, 3)]
    return min(grids, key=lambda grid: (face_elements(m, n, k, grid), -grid[2], grid))


def cosma_problem(
    m: int, n: int, k: int, grid: Grid, dtype: str = "float32", *, all_reduce: bool = False
) -> UniversalProblem:
    """Return C = A B with every matrix in equal parts on a mesh of that grid.

    With `all_reduce`, C is replicated over the ranks that share its sum.

    Raises:
        LayoutError: the grid does not cut the matrices into equal parts.
    """
    pm, pn, pk = grid
    if m % (pm * pn) or m % (pm * pk) or n % (pn * pm) or k % pk:
        raise LayoutError(f"grid {pm} x {pn} x {pk} does not cut M, N, K = {m}, {n}, {k} into equal parts")
    base = Mesh.of("tp", grid, _AXES)
    layouts = {}
    for name, (order, placements) in _SHARED.items():
        reordered = permute_axes(Layout(base, (Replicate(),) * 3), order)
        last = Replicate() if name == "c" and all_reduce else placements[2]
        layouts[name] = Layout(reordered.mesh, (*placements[:2], last))
    return UniversalProblem(m, n, k, layouts["a"], layouts["b"], layouts["c"], dtype)


def cosma_program(
    m: int, n: int, k: int, grid: Grid, dtype: str = "float32", *, all_reduce: bool = False
) -> Program:
    """Return the program that solves `cosma_problem`, which gathers A and B, multiplies and reduces C.

    Raises what `cosma_problem` raises.
    """
    problem = cosma_problem(m, n, k, grid, dtype, all_reduce=all_reduce)
    pm, pn, pk = grid
    base = Mesh.of("tp", grid, _AXES)
    layouts = {"a": problem.a, "b": problem.b, "c": problem.c}
    shapes = {"a": (m, k), "b": (k, n), "c": (m, n)}
    buffers = [
        Buffer(name, "output" if name == "c" else "input", layout.mesh.name, dtype, name.upper(), layout)
        for name, layout in layouts.items()
    ]
    ops: list[Op] = []
    used = {}
    for name, axis, dim in (("a", 1, 0), ("b", 0, 1)):
        used[name] = name
        if grid[axis] == 1:
            continue
        used[name] = f"{name}_block"
        mesh = layouts[name].mesh
        block = tuple(
            size // _cuts(layouts[name], number, but=_AXES[axis]) for number, size in enumerate(shapes[name])
        )
        buffers.append(Buffer(used[name], "scratch", base.name, dtype, shape=block))
        over, lane = f"{mesh.name}.{_AXES[axis]}", "move"
        ops.append(
            AllGather(
                over=over,
                out=full_matrix(used[name]),
                src=full_matrix(name),
                lane=lane,
                dim=dim,
                name=f"gather_{name}",
            )
        )
    out = "c" if pk == 1 else "c_terms"
    ops.append(
        Matmul(out=full_matrix(out), a=full_matrix(used["a"]), b=full_matrix(used["b"]), lane="compute")
    )
    if pk > 1:
        buffers.append(Buffer(out, "scratch", base.name, dtype, shape=(m // pm, n // pn)))
        over = f"{layouts['c'].mesh.name}.k"
        if all_reduce:
            ops.append(
                AllReduce(over=over, out=full_matrix("c"), src=full_matrix(out), lane="move", name="reduce_c")
            )
        else:
            scatter = ReduceScatter(
                over=over, out=full_matrix("c"), src=full_matrix(out), lane="move", dim=0, name="scatter_c"
            )
            ops.append(scatter)
    meshes = tuple(dict.fromkeys((base, *(layout.mesh for layout in layouts.values()))))
    tensors = tuple(Tensor(name.upper(), shape, dtype) for name, shape in shapes.items())
    name = f"cosma, {pm} x {pn} x {pk}"
    lanes = (Lane("compute"), Lane("move"))
    body = (On(base.name, tuple(ops)),)
    return Program(name, meshes, tensors, tuple(buffers), lanes, body, (Product("C", "A", "B"),))


def _cuts(layout: Layout, dim: int, but: str) -> int:
    count = 1
    for placement, axis, size in zip(layout.placements, layout.mesh.axes, layout.mesh.shape, strict=True):
        if isinstance(placement, Shard) and placement.dim == dim and axis != but:
            count *= size
    return count


# --- the entry of the table ------------------------------------------------------------------------------


@dataclass(frozen=True)
class CosmaConfig:
    """The grid (parts of M, N, K), and whether C is all-reduced instead of reduce-scattered."""

    grid: Grid
    all_reduce: bool = False

    def __str__(self) -> str:
        return f"grid {'x'.join(map(str, self.grid))}{', all-reduce' if self.all_reduce else ''}"


class Cosma(AnyLayoutProduct[CosmaConfig]):
    """Gather, multiply once, reduce; operands lie in the layouts of the grid that communicates least."""

    name = "cosma"
    title = "COSMA"
    source = "Kwasniewski et al., SC '19"

    def examples(self) -> Iterator[UniversalProblem]:
        """Yield a product that is cut in all three dims, and one whose C every rank gets whole."""
        yield cosma_problem(16, 16, 16, (2, 2, 2), "float32")
        yield cosma_problem(12, 8, 12, (2, 1, 3), "int64", all_reduce=True)

    def candidates(self, problem: UniversalProblem, cluster: Cluster | None = None) -> Iterator[CosmaConfig]:
        """Yield the grids whose layouts are those of the problem."""
        for pm, pn, pk in factorisations(len(problem.ranks), 3):
            grid = pm, pn, pk
            for all_reduce in (False, True):
                if _fits(problem, grid, all_reduce):
                    yield CosmaConfig(grid, all_reduce)

    def refusal(self, problem: UniversalProblem) -> str | None:
        """Return why no grid of COSMA has these layouts, None where one has."""
        if next(self.candidates(problem), None) is None:
            return "its operands lie in equal parts on a grid of its own"
        return None

    def program(self, problem: UniversalProblem, config: CosmaConfig) -> Program:
        """Return COSMA's program on the config's grid. Raises LayoutError where the layouts are others."""
        if not _fits(problem, config.grid, config.all_reduce):
            raise LayoutError(f"these layouts are not those of COSMA's {config}")
        return cosma_program(*problem.sizes, config.grid, problem.dtype, all_reduce=config.all_reduce)

    def gradients(self, problem: UniversalProblem) -> tuple[Gradient[UniversalProblem], ...]:
        """Return (): the operands of the gradients are not laid out as on a grid of COSMA."""
        return ()


def _fits(problem: UniversalProblem, grid: Grid, all_reduce: bool) -> bool:
    try:
        own = cosma_problem(*problem.sizes, grid, problem.dtype, all_reduce=all_reduce)
    except LayoutError:
        return False
    return own == problem


COSMA = Cosma()
