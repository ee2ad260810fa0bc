"""Random reshards for tests: any meshes, any layouts without sums, any hosts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import strategies as st

from meshweave.algorithms.reshard import ReshardPlan, ReshardProblem, TensorMove, plan_reshard
from meshweave.algorithms.reshard.plan import MESSAGE_BYTES
from meshweave.algorithms.reshard.tasks import TensorPiece
from meshweave.cost.fabric import HostTopology
from meshweave.describe.layout import Layout, Placement, Replicate, Shard, StridedShard, Tile
from meshweave.describe.layout.mesh import Mesh
from meshweave.execute.numpy import numpy_dtype

MOST_RANKS = 8
"""Of one mesh."""
DTYPES = ("float64", "float32", "bfloat16", "float16", "int64", "int16", "uint8")


@st.composite
def meshes(draw: st.DrawFn, name: str, pool: tuple[int, ...]) -> Mesh:
    """One axis or two, with 1 to 8 ranks of `pool` in any order."""
    count = draw(st.integers(1, min(len(pool), MOST_RANKS)))
    ranks = draw(st.permutations(pool))[:count]
    if draw(st.booleans()):
        return Mesh(name, (count,), ("x",), tuple(ranks))
    rows = draw(st.sampled_from([rows for rows in range(1, count + 1) if count % rows == 0]))
    return Mesh(name, (rows, count // rows), ("x", "y"), tuple(ranks))


@st.composite
def pairs_of_meshes(draw: st.DrawFn) -> tuple[Mesh, Mesh]:
    """On the same ranks, on others, or on some of both."""
    pool = tuple(range(draw(st.integers(2, 12))))
    match draw(st.sampled_from(["equal", "disjoint", "any"])):
        case "equal":
            src = draw(meshes("p", pool))
            dst = draw(st.permutations(src.ranks))
            rows = draw(st.sampled_from([n for n in range(1, len(dst) + 1) if len(dst) % n == 0]))
            return src, Mesh("q", (rows, len(dst) // rows), ("x", "y"), tuple(dst))
        case "disjoint":
            at = draw(st.integers(1, len(pool) - 1))
            return draw(meshes("p", pool[:at])), draw(meshes("q", pool[at:]))
    return draw(meshes("p", pool)), draw(meshes("q", pool))


def placements(num_dims: int) -> st.SearchStrategy[Placement]:
    if num_dims == 0:
        return st.just(Replicate())
    dims = st.integers(0, num_dims - 1)
    tiles = st.integers(1, 4).flatmap(lambda n: st.builds(Tile, dims, st.just(n), st.integers(0, n - 1)))
    return st.one_of(
        st.builds(Shard, dims), st.just(Replicate()), tiles, st.builds(StridedShard, dims, st.integers(1, 3))
    )


@st.composite
def layouts(draw: st.DrawFn, mesh: Mesh, num_dims: int) -> Layout:
    return Layout(mesh, tuple(draw(placements(num_dims)) for _ in mesh.shape))


@st.composite
def items(draw: st.DrawFn, name: str, src: Mesh, dst: Mesh) -> TensorMove:
    """Up to three dims, of sizes that need not divide: shards may be empty, and tensors too."""
    sizes = st.one_of(st.integers(1, 9), st.sampled_from([0, 1, 4, 8, 12]))
    shape = tuple(draw(st.lists(sizes, max_size=3)))
    dtype = draw(st.sampled_from(DTYPES))
    return TensorMove(name, shape, dtype, draw(layouts(src, len(shape))), draw(layouts(dst, len(shape))))


@st.composite
def problems(draw: st.DrawFn) -> ReshardProblem:
    found, pair = [], draw(pairs_of_meshes())
    for number in range(draw(st.integers(1, 3))):
        if number and draw(st.booleans()):
            pair = draw(pairs_of_meshes())
        found.append(draw(items(f"item{number}", *pair)))
    return ReshardProblem(tuple(found))


@st.composite
def host_networks(draw: st.DrawFn, num_ranks: int) -> HostTopology:
    """Ranks on hosts at random or host by host, behind one NIC or several."""
    nics = draw(st.integers(1, 3))
    if draw(st.booleans()):
        per_host = draw(st.integers(1, 4))
        hosts = [rank // per_host for rank in range(num_ranks)]
        numbers = [rank % per_host % nics for rank in range(num_ranks)]
    else:
        hosts = draw(st.lists(st.integers(0, 3), min_size=num_ranks, max_size=num_ranks))
        numbers = draw(st.lists(st.integers(0, nics - 1), min_size=num_ranks, max_size=num_ranks))
    rates, latencies = st.sampled_from([1, 10**3, 10**9, 10**11]), st.sampled_from([0.0, 1e-6, 1e-3])
    return HostTopology(
        tuple(hosts), tuple(numbers), draw(rates), draw(rates), draw(latencies), draw(latencies)
    )


@dataclass(frozen=True)
class Case:
    """`is_fine`: tensors of a few bytes are cut into chunks and divided among senders as larger ones are."""

    problem: ReshardProblem
    network: HostTopology
    message_bytes: int
    is_fine: bool

    def plan(self, strategy: str, order: str = "best") -> ReshardPlan:
        with fine(self.is_fine):
            return plan_reshard(
                self.problem, self.network, strategy=strategy, order=order, message_bytes=self.message_bytes
            )


@contextmanager
def fine(is_fine: bool = True) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if is_fine:
            patch.setattr("meshweave.algorithms.reshard.broadcast.MIN_CHUNK_BYTES", 8)
            patch.setattr("meshweave.algorithms.reshard.broadcast.MAX_CHUNKS", 8)
            patch.setattr("meshweave.algorithms.reshard.plan.MIN_PART_BYTES", 8)
        yield


@st.composite
def cases(draw: st.DrawFn) -> Case:
    problem = draw(problems())
    network = draw(host_networks(problem.ranks[-1] + 1 + draw(st.integers(0, 2))))
    most = draw(st.sampled_from([5, 24, 100, MESSAGE_BYTES]))
    return Case(problem, network, most, draw(st.booleans()))


# --- by global index -------------------------------------------------------------------------------------


def values(item: TensorMove) -> np.ndarray:
    """A tensor in which no two elements are alike, as far as the dtype can tell."""
    return np.arange(1, math.prod(item.shape) + 1).reshape(item.shape).astype(numpy_dtype(item.dtype))


def numbered(layout: Layout, shape: tuple[int, ...], rank: int) -> np.ndarray:
    """The shard of a rank, with each element's number in the tensor."""
    numbers = np.arange(math.prod(shape)).reshape(shape)
    return numbers[np.ix_(*layout.indices(shape, rank))] if shape else numbers


def box(start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(lo, lo + size) for lo, size in zip(start, shape, strict=True))


def elements(piece: TensorPiece) -> int:
    return math.prod(piece.shape)
