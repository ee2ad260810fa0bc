"""Turn the program of a group of GPUs into the kernels of one of them.

One GPU stands for all, since all do the same with other parts (T3, section 5.1.1). What it sends to the GPU s
places on arrives as what the GPU s places back sends at the same time: the region is the one that the same op of
that GPU names.

A product begins a kernel, and those that join it (`ir.program.regions`) go on in it; their tiles are stored as the
ops say: to a region of its own memory or of another GPU, as writes or as updates near memory. Tiles, their order
and the first one are those of the release, or else the machine's. A tile that is computed from what others send
waits until the rows of its operand are there. A tracked copy is no kernel: the tracker has each tile of its source
sent as soon as the tile is complete, and a source that no one else releases is sent at once.

A product without releases stores through the cache, in tiles that a library chooses (`tiles`), and in parts of k
that a second kernel adds where that is faster.

Ring collectives are kernels of blocks. Fences and zeroes cost nothing: memory to be updated is zero when a step
begins.
"""

from __future__ import annotations

from itertools import pairwise

from meshweave.base.errors import UnsupportedError
from meshweave.describe.machine.gpu import GpuFile
from meshweave.ir.program import BoundOp, Program
from meshweave.ir.program.expressions import number_of
from meshweave.ir.program.ops import AllGather, Copy, Fence, Matmul, Op, Put, ReduceScatter, Zero
from meshweave.ir.program.release import Release
from meshweave.ir.program.views import View
from meshweave_studies.gpu.kernels import Kernels, ProductOperands, Rectangle, Region, Source, StoreTarget
from meshweave_studies.gpu.memory_map import MatrixTiles, MemoryMap, by
from meshweave_studies.gpu.tiles import PARTIAL_BYTES, TileChoice, choose_tile

BLOCK_BYTES = 16384
"""Bytes that a compute unit moves at once in a kernel of a collective."""


def lower(program: Program, gpu: GpuFile, *, near_memory: bool = False) -> Kernels:
    """Return the kernels of one GPU of a program that all ranks run alike.

    Args:
        near_memory: whether reduce-scatters add near memory to what is there instead of reading it.

    Raises:
        UnsupportedError: the program has ops that kernels are not written for, or parts that differ in size.
    """
    return _KernelWriter(program, gpu, near_memory).run()


class _KernelWriter:
    def __init__(self, program: Program, gpu: GpuFile, near_memory: bool) -> None:
        self.program, self.gpu, self.near_memory = program, gpu, near_memory
        self.ranks = program.ranks
        self.rank = self.ranks[0]
        self.out = Kernels()
        self.memory = MemoryMap(program, gpu, self.rank, self.out)
        self.fused = ""
        """The lane of the kernel that further products join."""
        self.ops: dict[int, tuple[BoundOp, ...]] = {}

    def run(self) -> Kernels:
        """Return the kernels of this rank's ops."""
        for index, bound in enumerate(self._ops_of(self.rank)):
            self._lower(index, bound.op)
        return self.out

    def _ops_of(self, rank: int) -> tuple[BoundOp, ...]:
        if rank not in self.ops:
            self.ops[rank] = tuple(self.program.expanded.ops_on_rank(rank))
        return self.ops[rank]

    def _peer(self, view: View) -> int:
        """Return how many places on the owner of a view is; 0 for this rank."""
        if view.rank is None:
            return 0
        return (self.ranks.index(number_of(view.rank)) - self.ranks.index(self.rank)) % len(self.ranks)

    def _arriving(self, index: int, out: View) -> View:
        """Return the own view that op number `index` of another rank writes, while this rank's writes `out`.

        Raises UnsupportedError where the parts differ in size.
        """
        sender = self.ranks[(self.ranks.index(self.rank) - self._peer(out)) % len(self.ranks)]
        other = getattr(self._ops_of(sender)[index].op, "out", None)
        assert isinstance(other, View)
        if out.shape != other.shape:
            raise UnsupportedError(
                f"one GPU stands for all only where parts are alike; it sends {by(out.shape)} elements and gets "
                f"{by(other.shape)}"
            )
        return other

    def _lower(self, index: int, op: Op) -> None:
        match op:
            case Zero() | Fence():
                return
            case Matmul():
                self._product(index, op)
            case Put() if op.release is not None:
                self._tracked_copy(index, op)
            case _:
                self.fused = ""
                self._collective(op)

    def _collective(self, op: Op) -> None:
        """Add the kernel of a collective or a copy."""
        match op:
            case ReduceScatter():
                self._reduce_scatter(op)
            case AllGather():
                self._all_gather(op)
            case Copy():
                self._copy(op)
            case _:
                raise UnsupportedError(
                    f"a GPU in detail runs products, tracked puts, reduce-scatters, all-gathers and copies; this "
                    f"program has '{op.kind}'"
                )

    # --- products and tracked copies --------------------------------------------------------------------

    def _product(self, index: int, op: Matmul) -> None:
        kernel = self._kernel_of_product(op)
        (a, a_stride, item, a_turned), (b, b_stride, _, b_turned) = map(self.memory.operand, (op.a, op.b))
        k = op.a.shape[0] if op.transpose_a else op.a.shape[1]
        a_by_k, b_by_k = op.transpose_a == a_turned, op.transpose_b != b_turned
        operands = self.out.add_operands(
            ProductOperands(a, a_stride, a_by_k, b, b_stride, b_by_k, item, self.gpu.tile[2])
        )
        release = op.release
        if release is None:
            choice = choose_tile(self.gpu, op.out.shape[0], op.out.shape[1], k, item)
            self.out.kernels[kernel].slots = choice.slots
            if choice.splits > 1:
                self._split_product(op, kernel, operands, choice, k)
                return
            release = Release((choice.rows, choice.columns))
        size = self.memory.tile_of(release, op.out.shape[1])
        is_sum = op.release is not None and op.release.update
        of = Source.REDUCE_SCATTER_READ if is_sum else Source.OTHER_READ
        tiles = self.memory.tiles(self._arriving(index, op.out), size, kernel, of)
        peer, store = self._peer(op.out), _store_of(op, self._peer(op.out) > 0)
        arriving = self._awaited(op)
        for tile in self.memory.order(op.out.shape[0], op.out.shape[1], release):
            region = tiles.regions[tile[0], tile[2]]
            waits = arriving.row_range(tile[0], tile[1]) if arriving is not None else (-1, 0)
            self.out.add_tile(kernel, region, store, operands, tile, (0, k), peer=peer, waits=waits)
            self.out.regions[region].updates += op.release is not None

    def _split_product(self, op: Matmul, kernel: int, operands: int, choice: TileChoice, k: int) -> None:
        """Add tiles of parts of k, each stored apart, and a kernel that adds them up."""
        _store_of(op, self._peer(op.out) > 0)
        matrix, steps = self.memory.matrix(op.out), -(-k // choice.depth)
        cuts = [min(steps * part // choice.splits * choice.depth, k) for part in range(choice.splits)] + [k]
        whole = matrix.rows * matrix.columns * PARTIAL_BYTES
        at = self.memory.take(choice.splits * whole)
        total = self.out.add_kernel("product", Source.PRODUCT_READ, Source.PRODUCT_WRITE)
        for tile in self.memory.order(matrix.rows, matrix.columns, Release((choice.rows, choice.columns))):
            i0, i1, j0, j1 = tile
            row_bytes = (j1 - j0) * PARTIAL_BYTES
            for part, bounds in enumerate(pairwise(cuts)):
                stored = Region(Rectangle(at + part * whole, 1, (i1 - i0) * row_bytes, 0))
                region = self.out.add_region(stored)
                self.out.add_tile(kernel, region, StoreTarget.CACHED, operands, tile, bounds)
            step = max(BLOCK_BYTES // row_bytes, 1)
            for i in range(i0, i1, step):
                rows = min(step, i1 - i)
                parts = Rectangle(at + (i - i0) * row_bytes, choice.splits, rows * row_bytes, whole)
                base = matrix.base + i * matrix.stride + j0 * matrix.item
                out = Rectangle(base, rows, (j1 - j0) * matrix.item, matrix.stride)
                reads, stores = self.out.add_region(Region(parts)), self.out.add_region(Region(out))
                self.out.add_move(total, stores, StoreTarget.CACHED, (reads,))
            at += (i1 - i0) * row_bytes

    def _kernel_of_product(self, op: Matmul) -> int:
        """Return the kernel that a product joins, or else a new one."""
        if op.release is None or not op.release.joins:
            self.out.add_kernel("product", Source.PRODUCT_READ, Source.PRODUCT_WRITE)
        elif self.fused != op.lane:
            raise UnsupportedError(
                f"{op.title} joins a product, and lane {op.lane} has none before it to join"
            )
        self.fused = op.lane if op.release is not None else ""
        return len(self.out.kernels) - 1

    def _awaited(self, op: Matmul) -> MatrixTiles | None:
        """Return the tiles of the first operand that others send while the product runs, by its rows."""
        tiles = self.memory.known_tiles(op.a) if not op.transpose_a else None
        if tiles is None or not any(self.out.regions[number].updates for number in tiles.regions.values()):
            return None
        return tiles

    def _tracked_copy(self, index: int, op: Put) -> None:
        matrix, release = self.memory.matrix(op.src), op.release
        source = self.memory.known_tiles(op.src)
        # What is sent without a trigger, or before a product, belongs to the kernel that comes next.
        kernel = len(self.out.kernels) - (1 if self.fused else 0)
        of = Source.REDUCE_SCATTER_READ if release is not None and release.update else Source.ALL_GATHER_READ
        size = source.size if source is not None else self.memory.tile_of(release, matrix.columns)
        if source is None:
            source = self.memory.tiles(op.src, size, kernel, of)
        elif release is not None and release.tile and self.memory.tile_of(release, matrix.columns) != size:
            sizes = f"{by(self.memory.tile_of(release, matrix.columns))}, which is released by {by(size)}"
            raise UnsupportedError(
                f"a GPU in detail sends on tiles as they are released, not {op.src} by {sizes}"
            )
        target = self.memory.tiles(self._arriving(index, op.out), size, kernel, of)
        for place, number in source.regions.items():
            region = self.out.regions[number]
            if region.dma_to >= 0:
                raise UnsupportedError(f"a GPU in detail sends on a region once, and {op.src} goes to two")
            region.dma_to, region.dma_updates = target.regions[place], release is not None and release.update
            region.dma_peer = self._peer(op.out)
            self.out.regions[target.regions[place]].updates += 1

    # --- collectives as kernels run them ----------------------------------------------------------------

    def _blocks(self, base: int, num_bytes: int, **about: object) -> list[int]:
        return [
            self.out.add_region(Region(Rectangle(base + at, 1, min(BLOCK_BYTES, num_bytes - at), 0), **about))  # type: ignore[arg-type]
            for at in range(0, num_bytes, BLOCK_BYTES)
        ]

    def _ring(self, count: int, num_bytes: int, op: Op) -> int:
        if num_bytes % count:
            raise UnsupportedError(f"{op.kind}: {num_bytes} bytes do not divide over {count} ranks")
        return num_bytes // count

    def _reduce_scatter(self, op: ReduceScatter) -> None:
        """Add kernels' blocks: read a part and what arrived, send the sum; at the end store it (figure 10)."""
        kernel = self.out.add_kernel(
            "reduce_scatter", Source.REDUCE_SCATTER_READ, Source.REDUCE_SCATTER_WRITE
        )
        count = len(self.program.group(op.over, self.rank))
        base, total = self.memory.part(op.src)
        size = self._ring(count, total, op)
        into = {"kernel": kernel, "updates": 1}
        previous: list[int]
        if self.near_memory:
            # Parts are added to where they are: the first is sent as it is, each other one after it was added to.
            previous = self._blocks(base, size)
            for step in range(1, count):
                arrived = self._blocks(base + step * size, size, **into)
                for here, there in zip(previous, arrived, strict=True):
                    wait = here if step > 1 else -1
                    self.out.add_move(kernel, there, StoreTarget.REMOTE_UPDATE, (here,), wait)
                previous = arrived
            return
        buffer = self.memory.take(total - size)
        previous = []
        for step in range(count - 1):
            own, arrived = (
                self._blocks(base + step * size, size),
                self._blocks(buffer + step * size, size, **into),
            )
            for number, (here, there) in enumerate(zip(own, arrived, strict=True)):
                reads = (previous[number], here) if step else (here,)
                self.out.add_move(kernel, there, StoreTarget.REMOTE, reads, previous[number] if step else -1)
            previous = arrived
        target, _ = self.memory.part(op.out)
        last = self._blocks(base + (count - 1) * size, size)
        for here, arrived_block, there in zip(last, previous, self._blocks(target, size), strict=True):
            self.out.add_move(kernel, there, StoreTarget.LOCAL, (arrived_block, here), arrived_block)

    def _all_gather(self, op: AllGather) -> None:
        """Add kernels' blocks: send the own part, then pass on what arrives."""
        kernel = self.out.add_kernel("all_gather", Source.ALL_GATHER_READ, Source.ALL_GATHER_WRITE)
        count = len(self.program.group(op.over, self.rank))
        base, total = self.memory.part(op.out)
        size = self._ring(count, total, op)
        about = {"read": Source.ALL_GATHER_READ, "write": Source.ALL_GATHER_WRITE}
        previous = self._blocks(self.memory.part(op.src)[0], size, **about)
        for step in range(count - 1):
            arrived = self._blocks(base + step * size, size, kernel=kernel, updates=1, **about)
            for here, there in zip(previous, arrived, strict=True):
                self.out.add_move(kernel, there, StoreTarget.REMOTE, (here,), here if step else -1)
            previous = arrived

    def _copy(self, op: Copy) -> None:
        kernel = self.out.add_kernel("copy", Source.OTHER_READ, Source.OTHER_WRITE)
        source, num_bytes = self.memory.part(op.src)
        target, _ = self.memory.part(op.out)
        for here, there in zip(self._blocks(source, num_bytes), self._blocks(target, num_bytes), strict=True):
            self.out.add_move(kernel, there, StoreTarget.LOCAL, (here,))


def _store_of(op: Matmul, is_remote: bool) -> StoreTarget:
    """Return how the tiles of a product are stored."""
    if op.release is None:
        if is_remote:
            raise UnsupportedError(f"{op.title} stores to another GPU: a GPU in detail needs its release")
        return StoreTarget.CACHED
    if is_remote:
        return StoreTarget.REMOTE_UPDATE if op.release.update else StoreTarget.REMOTE
    return StoreTarget.LOCAL_UPDATE if op.release.update else StoreTarget.LOCAL
