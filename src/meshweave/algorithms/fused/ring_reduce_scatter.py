"""A product that reduce-scatters itself around a ring (T3: Pati et al., ASPLOS '24, section 4).

A is sharded by columns, B and C by rows, so each rank has a term of all of C. It computes the part that its
neighbour passes on first straight into the neighbour's memory (`remote_map`), and the others into its own. A part
moves on (`dma_map`) as soon as all its updates have arrived: those of the rank's own product and those of the
previous rank. Their number is known, and that is the trigger; no fence is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshweave.algorithms.universal.algorithm import AnyLayoutProduct
from meshweave.algorithms.universal.problem import UniversalProblem
from meshweave.base.errors import LayoutError
from meshweave.describe.layout import Layout, Placement, Shard
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.cluster import Cluster
from meshweave.ir.program import Program
from meshweave.ir.program.parse import parse

_PLACEMENTS: dict[str, Placement] = {"a": Shard(1), "b": Shard(0), "c": Shard(0)}


@dataclass(frozen=True)
class TileGranularity:
    """How many rows a product releases at once."""

    rows: int = 2

    def __str__(self) -> str:
        return f"tiles of {self.rows} rows"


class RingReduceScatter(AnyLayoutProduct[TileGranularity]):
    """One product per part of C, in staggered order, each adding to memory as its tiles are finished."""

    name = "t3_ring"
    title = "T3 ring reduce-scatter"
    source = "Pati et al., T3, ASPLOS '24, section 4"

    def examples(self) -> Iterator[UniversalProblem]:
        """Yield products on rings of four and three ranks."""
        for m, n, k, count in ((10, 5, 10, 4), (9, 4, 7, 3)):
            mesh = Mesh.of("tp", (count,), ("x",))
            a, b, c = (Layout(mesh, (placement,)) for placement in _PLACEMENTS.values())
            yield UniversalProblem(m, n, k, a, b, c)

    def candidates(
        self, problem: UniversalProblem, cluster: Cluster | None = None
    ) -> Iterator[TileGranularity]:
        """Yield tiles of two rows, then as many as a part has."""
        rows = -(-problem.m // len(problem.ranks))
        yield from dict.fromkeys((TileGranularity(min(2, rows)), TileGranularity(rows)))

    def refusal(self, problem: UniversalProblem) -> str | None:
        layouts = (problem.a, problem.b, problem.c)
        mesh = problem.a.mesh
        wanted = all(
            layout.mesh == mesh and layout.placements == (placement,)
            for layout, placement in zip(layouts, _PLACEMENTS.values(), strict=True)
        )
        if not wanted or mesh.ranks != tuple(range(len(mesh.ranks))) or len(mesh.ranks) < 2:
            return "it takes A sharded by columns, B and C by rows, on a ring of ranks 0, 1, 2, ..."
        return None

    def program(self, problem: UniversalProblem, config: TileGranularity) -> Program:
        refusal = self.refusal(problem)
        if refusal is not None:
            raise LayoutError(f"{self.title}: {refusal}")
        return parse(_text(problem, config.rows))

    def gradients(self, problem: UniversalProblem) -> tuple[()]:
        """Return none: its gradients are gathers, which have no fused entry yet."""
        return ()


def _text(problem: UniversalProblem, tile: int) -> str:
    (m, n, k), count, dtype = problem.sizes, len(problem.ranks), problem.dtype
    size = -(-m // count)

    def part(number: str) -> str:
        return f"{size} * {number}:min({m}, {size} * {number} + {size}), :"

    first, own = part(f"((tp.x + {count - 1}) % {count})"), part(f"((tp.x + {count - 2} - s) % {count})")
    pass_on = f"""
        if s < {count - 2}:
            put(at((tp.x + 1) % {count}, acc[{own}]), acc[{own}],
                release=release(update=True), lane=dma, name="dma_map")"""
    return f"""program("T3: a product that reduce-scatters itself around a ring")
tp = mesh(({count},), ("x",))
A = tensor(({m}, {k}), "{dtype}")
B = tensor(({k}, {n}), "{dtype}")
C = tensor(({m}, {n}), "{dtype}")
computes(C, product(A, B))
a = input(A, tp[S(1)])
b = input(B, tp[S(0)])
c = output(C, tp[S(0)])
acc = scratch(({m}, {n}), "{dtype}", on=tp)
compute = lane()
dma = lane(order="ready", width=2)
with tp:
    zero(acc, lane=compute)
    fence(over="tp", lane=compute)
    matmul(at((tp.x + 1) % {count}, acc[{first}]), a[{first}], b,
           release=release(update=True), lane=compute, name="remote_map")
    for s in range({count - 1}):
        matmul(acc[{own}], a[{own}], b,
               release=release(tile={tile}, first=s % 2, update=True), lane=compute){pass_on}
    copy(c, acc[{part("tp.x")}], lane=compute)
"""
