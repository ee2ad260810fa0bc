"""Choosing how a fused product overlaps: its algorithm and tiles, by simulating what runs over messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from meshweave.algorithms.fused import Tiles, ring_problems
from meshweave.algorithms.table import FUSED_PRODUCTS
from meshweave.algorithms.universal.problem import UniversalProblem
from meshweave.base.errors import LayoutError
from meshweave.cost.machine import Machine
from meshweave.describe.machine.cluster import Cluster
from meshweave.ir.program import Product, Program
from meshweave.ir.program.renaming import Renaming
from meshweave.ir.program.views import View
from meshweave.lower import lower_one_sided, lower_rings, write_out_tiles
from meshweave.lower.one_sided import write_out_per_rank
from meshweave.simulate import simulate

TILE_COUNTS = (1, 2, 4, 8, 16)
"""Tiles of a part that are tried, each of whole rows."""

MAX_TILES = 1024
"""Most tiles of all ranks together that are tried, so that all choices are simulated in seconds."""

MAX_RING = 8
"""Most ranks of a ring for which `faster_than` simulates fused products."""


@dataclass(frozen=True)
class FusedChoice:
    """An algorithm of a fused product, with its tiles.

    A fused product overlaps its matrix product with its all-gather or reduce-scatter, which runs around rings of
    ranks (`ring_problems`): one ring for each group of the mesh axis that it communicates along.

    Attributes:
        algorithm: its name in `ALGORITHMS`.
        tiles: the size and order of the tiles that are sent; None for algorithms that do not send tiles.
        program: the program of all rings together, its communication written as messages and ring steps.
        simulated_s: simulated seconds of `program` on the cluster.
    """

    algorithm: str
    tiles: Tiles | None
    program: Program
    simulated_s: float


def fused_choices(problem: UniversalProblem, cluster: Cluster) -> Iterator[FusedChoice]:
    """Yield each fused algorithm that can compute a product, once for each tile size, simulated on `cluster`.

    The rings of the product are simulated at the same time. Nothing is yielded for layouts that have no rings
    or that no fused algorithm supports.

    Raises:
        LayoutError: the cluster has too few chips.
    """
    rings = ring_problems(problem)
    if not rings:
        return
    part = -(-rings[0].m // len(rings[0].ranks))
    for entry in FUSED_PRODUCTS.values():
        if any(entry.refusal(ring) is not None for ring in rings):
            continue
        if not isinstance(next(entry.candidates(rings[0])), Tiles):
            config = next(entry.candidates(rings[0]))
            program = side_by_side([lower_rings(entry.program(ring, config)) for ring in rings])
            yield FusedChoice(entry.name, None, program, simulated_s(program, cluster))
            continue
        num_parts = sum(len(ring.ranks) ** 2 for ring in rings)
        counts = [count for count in TILE_COUNTS if num_parts * count <= MAX_TILES or count == 1]
        for rows in dict.fromkeys(-(-part // count) for count in counts):
            tiles = Tiles(rows, problem.n, "rows")
            written = (write_out_tiles(entry.program(ring, tiles)) for ring in rings)
            program = side_by_side([lower_rings(lower_one_sided(one)) for one in written])
            yield FusedChoice(entry.name, tiles, program, simulated_s(program, cluster))


def tune_fused(problem: UniversalProblem, cluster: Cluster, *, by_tiles: bool = False) -> FusedChoice:
    """Return the algorithm and tiles with the least simulated time; of equals the first.

    Args:
        by_tiles: whether to choose only among products that communicate tile by tile.

    Raises:
        LayoutError: no fused product takes the layouts, or the cluster has too few chips.
    """
    choices = [one for one in fused_choices(problem, cluster) if one.tiles is not None or not by_tiles]
    if not choices:
        raise LayoutError(f"no fused product takes {problem}")
    return min(choices, key=lambda choice: choice.simulated_s)


def faster_than(problem: UniversalProblem, program: Program, cluster: Cluster) -> FusedChoice | None:
    """Return the fused product with the least simulated time, if it is faster than `program`; else None.

    None as well where the cluster has too few chips, a ring has more than `MAX_RING` ranks, or no fused
    algorithm supports the layouts.

    Args:
        program: a program of the same product with one-sided ops, which are written as messages to simulate it.
    """
    if problem.ranks[-1] >= cluster.num_chips:
        return None
    if any(len(ring.ranks) > MAX_RING for ring in ring_problems(problem)):
        return None
    best = min(fused_choices(problem, cluster), key=lambda choice: choice.simulated_s, default=None)
    if best is None:
        return None
    limit_s = simulated_s(lower_rings(lower_one_sided(program)), cluster)
    return best if best.simulated_s < limit_s else None


def side_by_side(programs: Sequence[Program]) -> Program:
    """Return one program that runs all of `programs` at once, each on ranks of its own; a single one unchanged.

    Names of meshes, tensors and buffers get the number of their program, from 0, as a suffix: `A_0`. Declared
    meanings (`Program.computes`) are kept if they are products, and dropped otherwise.
    """
    first = programs[0]
    if len(programs) == 1:
        return first
    parts = [_numbered(write_out_per_rank(program), number) for number, program in enumerate(programs)]
    lanes = {lane.name: lane for part in parts for lane in part.lanes}
    return replace(
        first,
        meshes=tuple(mesh for part in parts for mesh in part.meshes),
        tensors=tuple(tensor for part in parts for tensor in part.tensors),
        buffers=tuple(buffer for part in parts for buffer in part.buffers),
        lanes=tuple(lanes.values()),
        body=tuple(statement for part in parts for statement in part.body),
        computes=tuple(meaning for part in parts for meaning in part.computes),
    )


def _numbered(program: Program, number: int) -> Program:
    """Return the program of a product with `number` behind the names of its meshes, tensors and buffers."""

    def renamed(name: str) -> str:
        return f"{name}_{number}"

    def renamed_view(name: str) -> Callable[[View], View]:
        return lambda view: replace(view, buffer=renamed(name))

    meshes = {mesh.name: replace(mesh, name=renamed(mesh.name)) for mesh in program.meshes}
    renaming = Renaming(
        values={},
        views={buffer.name: renamed_view(buffer.name) for buffer in program.buffers},
        meshes={name: (mesh.name, {axis: axis for axis in mesh.axes}) for name, mesh in meshes.items()},
    )
    buffers = (
        replace(
            buffer,
            name=renamed(buffer.name),
            mesh=renamed(buffer.mesh),
            tensor=renamed(buffer.tensor) if buffer.tensor else buffer.tensor,
            layout=buffer.layout and replace(buffer.layout, mesh=meshes[buffer.mesh]),
        )
        for buffer in program.buffers
    )
    return replace(
        program,
        meshes=tuple(meshes.values()),
        tensors=tuple(replace(tensor, name=renamed(tensor.name)) for tensor in program.tensors),
        buffers=tuple(buffers),
        body=renaming.body(program.body),
        computes=tuple(
            replace(meaning, out=renamed(meaning.out), a=renamed(meaning.a), b=renamed(meaning.b))
            for meaning in program.computes
            if isinstance(meaning, Product)
        ),
    )


def simulated_s(program: Program, cluster: Cluster) -> float:
    """Return the simulated seconds, with contention, of a program without one-sided ops on `cluster`."""
    return float(simulate(program, Machine.of(cluster, program)).duration_s)
