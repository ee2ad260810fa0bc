"""A product as DTensor computes it: reshard the operands by collectives, multiply once, reduce the result.

On a mesh of one axis there are three pairs of placements whose product needs no communication. Operands are first
resharded to one of them (PyTorch, `torch.distributed.tensor`):

    rows      A by rows,     B replicated    C by rows
    columns   A replicated,  B by columns    C by columns
    outer     A by columns,  B by rows       C partial, then reduce-scattered

Nothing overlaps: each stage is a collective or a product that needs all of the one before. Which of the three is
taken follows from what resharding the operands costs by DTensor's own count (`redistribute_cost`), which leaves
the reduction out; that is why it likes outer products (Slicing Is All You Need, section 5.2.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from meshweave.algorithms.matrix_views import full_matrix
from meshweave.algorithms.universal.algorithm import AnyLayoutProduct
from meshweave.algorithms.universal.problem import UniversalProblem
from meshweave.base.errors import LayoutError
from meshweave.base.units import dtype_bytes
from meshweave.describe.layout import Layout, Partial, Placement, Replicate, Shard, chunk_bounds
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.cluster import Cluster
from meshweave.ir.program import Buffer, Lane, On, Product, Program, Statement, Tensor
from meshweave.ir.program.ops import Add, AllGather, AllToAll, Copy, Fence, Get, Matmul, Op, ReduceScatter
from meshweave.ir.program.views import FULL, Range, View

Strategy = Literal["rows", "columns", "outer"]
Collectives = Literal["ring", "direct"]

STRATEGIES: dict[Strategy, tuple[Placement, Placement, Placement]] = {
    "rows": (Shard(0), Replicate(), Shard(0)),
    "columns": (Replicate(), Shard(1), Shard(1)),
    "outer": (Shard(1), Shard(0), Partial()),
}
COMPUTE, MOVE = "compute", "move"


def choose_strategy(problem: UniversalProblem) -> Strategy:
    """Return the strategy that DTensor takes: the one that reshards the fewest bytes of operands.

    An all-gather counts as the whole operand, an all-to-all as the shard of one rank.

    Raises:
        LayoutError: as `resharded_program`.
    """
    placed, mesh = _shard_placements(problem), problem.a.mesh

    def cost(strategy: Strategy) -> float:
        total = 0.0
        for operand, now, wanted in zip("ab", placed, STRATEGIES[strategy], strict=False):
            rows, columns = problem.shape(operand)  # type: ignore[arg-type]
            size = rows * columns * dtype_bytes(problem.dtype)
            if isinstance(wanted, Replicate):
                total += size
            elif now != wanted:
                total += size / mesh.num_ranks
        return total

    return min(STRATEGIES, key=cost)


def resharded_program(
    problem: UniversalProblem, strategy: Strategy | None = None, collectives: Collectives = "ring"
) -> Program:
    """Return the program of C = A B that reshards its operands; all matrices are sharded over one mesh axis.

    Args:
        strategy: the placements that operands are resharded to; by default the one of `choose_strategy`.
        collectives: "direct": every rank reads from all others at once, as libraries do where each pair of ranks
            has a link. "ring": ring collectives.

    Raises:
        LayoutError: a layout is of another kind, or the strategy does not end in the placement of C.
    """
    placed = _shard_placements(problem)
    writer = _ReshardedProgramBuilder(problem, placed, strategy or choose_strategy(problem), collectives)
    return writer.write()


def _shard_placements(problem: UniversalProblem) -> tuple[Shard, Shard, Shard]:
    placements = []
    for layout in (problem.a, problem.b, problem.c):
        if layout.mesh != problem.a.mesh or len(layout.placements) != 1:
            raise LayoutError(f"{layout}: a resharded product needs all matrices on one mesh of one axis")
        (placement,) = layout.placements
        if not isinstance(placement, Shard):
            raise LayoutError(f"{layout}: a resharded product needs every matrix sharded")
        placements.append(placement)
    return placements[0], placements[1], placements[2]


class _ReshardedProgramBuilder:
    def __init__(
        self,
        problem: UniversalProblem,
        placed: tuple[Shard, Shard, Shard],
        strategy: Strategy,
        collectives: Collectives,
    ) -> None:
        self.problem, self.placed, self.strategy = problem, placed, strategy
        self.wanted = STRATEGIES[strategy]
        self.direct = collectives == "direct"
        if strategy != "outer" and placed[2] != self.wanted[2]:
            raise LayoutError(f"C of a product by {strategy} is {self.wanted[2]}, not {placed[2]}")
        self.mesh: Mesh = problem.a.mesh
        self.over = f"{self.mesh.name}.{self.mesh.axes[0]}"
        self.shapes = {"a": problem.shape("a"), "b": problem.shape("b"), "c": problem.shape("c")}

    def write(self) -> Program:
        """Return the program: operands resharded, one product, its result resharded."""
        problem, mesh = self.problem, self.mesh
        buffers = [
            self._buffer("a", "input", self.placed[0]),
            self._buffer("b", "input", self.placed[1]),
            self._buffer("c", "output", self.placed[2]),
        ]
        body: list[Statement] = []
        operands = {"a": "a", "b": "b"}
        for operand, now, wanted in zip("ab", self.placed, self.wanted, strict=False):
            if now == wanted:
                continue
            operands[operand] = f"{operand}_moved"
            buffers.append(self._buffer(operand, "temp", wanted, f"{operand}_moved"))
            body += self._reshard(operand, now, wanted)
        sums = self.strategy == "outer"
        out = "c_terms" if sums else "c"
        body.append(
            On(
                mesh.name,
                (
                    Matmul(
                        out=full_matrix(out),
                        a=full_matrix(operands["a"]),
                        b=full_matrix(operands["b"]),
                        lane=COMPUTE,
                    ),
                ),
            )
        )
        if sums:
            buffers.append(Buffer(out, "scratch", mesh.name, problem.dtype, shape=self.shapes["c"]))
            body += self._reduce(buffers)
        width = max(mesh.num_ranks - 1, 1) if self.direct else 1
        lanes = (Lane(COMPUTE), Lane(MOVE, "ready" if self.direct else "fifo", width))
        tensors = tuple(Tensor(name.upper(), self.shapes[name], problem.dtype) for name in "abc")
        name = f"resharded, {self.strategy}, {'direct' if self.direct else 'ring'} collectives"
        return Program(name, (mesh,), tensors, tuple(buffers), lanes, tuple(body), (Product("C", "A", "B"),))

    def _buffer(
        self, operand: str, kind: Literal["input", "output", "temp"], placement: Placement, name: str = ""
    ) -> Buffer:
        layout = Layout(self.mesh, (placement,))
        return Buffer(name or operand, kind, self.mesh.name, self.problem.dtype, operand.upper(), layout)

    # --- operands ---------------------------------------------------------------------------------------------

    def _reshard(self, operand: str, now: Shard, wanted: Placement) -> Iterator[Statement]:
        out, src = full_matrix(f"{operand}_moved"), full_matrix(operand)
        if self.direct:
            for place, rank in enumerate(self.mesh.ranks):
                yield On((rank,), tuple(self._fetches(operand, now, wanted, place)))
            return
        sizes = self._sizes(operand, now.dim)
        if isinstance(wanted, Shard):
            yield On(
                self.mesh.name,
                (
                    AllToAll(
                        over=self.over, out=out, src=src, lane=MOVE, name=f"exchange_{operand}",
                        split_dim=wanted.dim, concat_dim=now.dim,
                        send_sizes=self._sizes(operand, wanted.dim), recv_sizes=sizes,
                    ),
                ),
            )  # fmt: skip
            return
        gather = AllGather(
            over=self.over, out=out, src=src, lane=MOVE, name=f"gather_{operand}", dim=now.dim, sizes=sizes
        )
        yield On(self.mesh.name, (gather,))

    def _fetches(self, operand: str, now: Shard, wanted: Placement, place: int) -> Iterator[Op]:
        """Yield the copies and gets by which the rank at `place` reads from all ranks, itself first."""
        count = self.mesh.num_ranks
        for other in ((place + ahead) % count for ahead in range(count)):
            lo, hi = chunk_bounds(self.shapes[operand][now.dim], count, other)
            out: list[Range] = [FULL, FULL]
            src: list[Range] = [FULL, FULL]
            out[now.dim] = Range(lo, hi)
            if isinstance(wanted, Shard):
                first, last = chunk_bounds(self.shapes[operand][wanted.dim], count, place)
                src[wanted.dim] = Range(first, last)
                if first == last:
                    continue
            if lo == hi:
                continue
            into = View(f"{operand}_moved", tuple(out))
            if other == place:
                yield Copy(out=into, src=View(operand, tuple(src)), lane=MOVE)
            else:
                yield Get(out=into, src=View(operand, tuple(src), rank=self.mesh.ranks[other]), lane=MOVE)

    def _sizes(self, operand: str, dim: int) -> tuple[int, ...]:
        return self._parts(self.shapes[operand][dim])

    def _parts(self, size: int) -> tuple[int, ...]:
        count = self.mesh.num_ranks
        return tuple(hi - lo for lo, hi in (chunk_bounds(size, count, place) for place in range(count)))

    # --- result -----------------------------------------------------------------------------------------------

    def _reduce(self, buffers: list[Buffer]) -> Iterator[Statement]:
        mesh, dim = self.mesh, self.placed[2].dim
        sizes = self._sizes("c", dim)
        if not self.direct:
            scatter = ReduceScatter(
                over=self.over,
                out=full_matrix("c"),
                src=full_matrix("c_terms"),
                lane=MOVE,
                name="scatter_c",
                dim=dim,
                sizes=sizes,
            )
            yield On(mesh.name, (scatter,))
            return
        yield On(mesh.name, (Fence(over=mesh.name, lane=MOVE),))
        most = list(self.shapes["c"])
        most[dim] = max(sizes)
        slots = max(mesh.num_ranks - 1, 1)
        buffers.append(
            Buffer("c_term", "scratch", mesh.name, self.problem.dtype, shape=tuple(most), slots=slots)
        )
        for place, rank in enumerate(mesh.ranks):
            yield On((rank,), tuple(self._gather_and_add(place, dim)))

    def _gather_and_add(self, place: int, dim: int) -> Iterator[Op]:
        count = self.mesh.num_ranks
        lo, hi = chunk_bounds(self.shapes["c"][dim], count, place)
        if lo == hi:
            return
        part, inside = [FULL, FULL], [FULL, FULL]
        part[dim], inside[dim] = Range(lo, hi), Range(0, hi - lo)
        terms = [View("c_term", tuple(inside), slot=ahead - 1) for ahead in range(1, count)]
        for ahead, term in enumerate(terms, start=1):
            owner = self.mesh.ranks[(place + ahead) % count]
            yield Get(out=term, src=View("c_terms", tuple(part), rank=owner), lane=MOVE)
        yield Copy(out=full_matrix("c"), src=View("c_terms", tuple(part)), lane=COMPUTE)
        for term in terms:
            yield Add(out=full_matrix("c"), src=term, lane=COMPUTE)


# --- the entry of the table ------------------------------------------------------------------------------


@dataclass(frozen=True)
class RedistributionConfig:
    """The placements that operands are redistributed to, and whether collectives are rings or direct reads."""

    strategy: Strategy
    collectives: Collectives = "ring"

    def __str__(self) -> str:
        return f"{self.strategy}, {self.collectives} collectives"


class DTensorProduct(AnyLayoutProduct[RedistributionConfig]):
    """Redistribute the operands by collectives, multiply once, reduce the result, as DTensor does."""

    name = "dtensor"
    title = "DTensor"
    source = "PyTorch, torch.distributed.tensor; Slicing Is All You Need, section 5.2.1"

    def examples(self) -> Iterator[UniversalProblem]:
        """Yield products of sharded matrices on one axis."""
        mesh = Mesh.of("tp", (4,), ("x",))
        rows, columns = Layout(mesh, (Shard(0),)), Layout(mesh, (Shard(1),))
        yield UniversalProblem(8, 8, 8, rows, rows, rows)
        yield UniversalProblem(9, 7, 10, columns, rows, columns, "int64")

    def candidates(
        self, problem: UniversalProblem, cluster: Cluster | None = None
    ) -> Iterator[RedistributionConfig]:
        """Yield what DTensor would choose first, then the other strategies that end in the layout of C."""
        chosen = choose_strategy(problem)
        for strategy in sorted(STRATEGIES, key=lambda strategy: strategy != chosen):
            if strategy != "outer" and STRATEGIES[strategy][2] not in problem.c.placements:
                continue
            yield RedistributionConfig(strategy)
            yield RedistributionConfig(strategy, "direct")

    def refusal(self, problem: UniversalProblem) -> str | None:
        """Return why DTensor has no strategy for these layouts, None where it has one."""
        try:
            choose_strategy(problem)
        except LayoutError as error:
            return str(error)
        return None

    def program(self, problem: UniversalProblem, config: RedistributionConfig) -> Program:
        return resharded_program(problem, config.strategy, config.collectives)


DTENSOR = DTensorProduct()
