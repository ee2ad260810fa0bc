"""The constants of a chip's kernels: products, attention, element-wise calls and collectives inside a host.

`cost` turns them into seconds (`cost.products`, `cost.attention`, `cost.libraries`), which is also where each
constant's place in the formula stands. A chip without them is priced by its one rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from meshweave.base.errors import DescriptionError
from meshweave.describe.files import Count, Duration, Rate, key

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Amount = Annotated[float, Field(ge=0.0, le=1e6)]
Bytes = Annotated[float, Field(ge=0.0, le=1e15)]
Power = Annotated[float, Field(ge=1.0, le=1e6)]


@dataclass(frozen=True, slots=True)
class ProductTile:
    """One tile of C that a unit computes: m x n elements, in clusters of `cluster` tiles along m.

    A library that chooses by m alone takes the tile for products of more than `above_m` and at most `up_to_m` rows
    (0: no limit).
    """

    m: int
    n: int
    cluster: int = 1
    above_m: int = 0
    up_to_m: int = 0


@dataclass(frozen=True, slots=True)
class TileMenu:
    """The tiles of C among which a library of matrix products takes the fastest.

    Attributes:
        k_step: the elements of k that one pass multiplies; k is padded to a multiple.
        splits: into how many parts k may be split among units.
    """

    tiles: tuple[ProductTile, ...]
    k_step: int = 64
    splits: tuple[int, ...] = (1,)


TILE_MENUS = {
    "gpu": TileMenu(
        tuple(
            ProductTile(m, n)
            for m, n in (
                *((256, 128), (128, 256), (128, 128), (128, 64), (64, 128)),
                *((64, 64), (64, 32), (32, 64), (256, 64), (64, 256)),
            )
        ),
        splits=(1, 2, 3, 4, 6, 8, 16),
    ),
    "gpu-by-m": TileMenu(
        (
            ProductTile(64, 64, up_to_m=64),
            ProductTile(64, 128, cluster=2, above_m=64, up_to_m=128),
            ProductTile(128, 128, cluster=2, above_m=128),
        )
    ),
}
"""The menus by name. `gpu`: the sizes of cuBLAS kernels; `gpu-by-m`: the choice of SGLang's fp8 products on
sm90, by rows alone."""


def _check_sustained(share: float | None) -> None:
    if share is not None and not 0 < share <= 1:
        raise DescriptionError(f"sustained_share is {share}; give a share above 0, at most 1")


@dataclass(frozen=True, slots=True)
class ProductConstants:
    """What the time of a product in one dtype depends on; `cost.products` has the formula.

    Attributes:
        tiles: the name of a menu of `TILE_MENUS`.
        units: processors that compute a tile each (SMs, arrays). A count of the hardware, not fitted.
        flops_per_s: FLOP/s of all units at full tiles.
        unit_bytes_per_s: bytes per second of operands into one unit.
        tile_s: seconds a tile takes besides its passes over k: prologue, epilogue.
        launch_s: seconds of a product of nothing.
        memory_bytes_per_s: bytes per second of A, B and C.
        wave_share: from 0 (units take tiles evenly, as if these were divisible) to 1 (whole waves).
        overlap: the power p in which time of computing and of memory add up, (c^p + m^p)^(1/p): 1 is one after
            the other.
        split_passes: passes of partial sums through memory for each part of k, where k is split.
        slowdown: how much of the time a product loses for each factor e by which it is longer than 0.1 ms (the
            clock falls with heat and power).
        prepare_s: seconds for each element of A before the product: the cast to fp8.
        sustained_share: what these products sustain in steady training; None: as others of their chip.
    """

    tiles: Annotated[str, key(f"the menu of tiles, one of {', '.join(TILE_MENUS)}")]
    units: Annotated[Count, key("the number of SMs, arrays or cores, at least 1")]
    flops_per_s: Annotated[Rate, key("FLOP/s of all units at full tiles, a number of at least 1")]
    unit_bytes_per_s: Annotated[Rate, key("bytes per second of operands into one unit")]
    tile_s: Annotated[Duration, key("seconds a tile takes besides its passes over k, from 0 to 1e6")]
    launch_s: Annotated[Duration, key("seconds of a product of nothing, from 0 to 1e6")]
    memory_bytes_per_s: Annotated[Rate, key("bytes per second of A, B and C")]
    wave_share: Annotated[Share, key("from 0 (no waves) to 1 (whole waves)")] = 1.0
    overlap: Annotated[
        Power, key("the power in which time of computing and of memory add up, at least 1")
    ] = 4.0
    split_passes: Annotated[Amount, key("passes of partial sums through memory for each part of k")] = 1.0
    slowdown: Annotated[Amount, key("the share of time lost for each factor e above 0.1 ms")] = 0.0
    prepare_s: Annotated[Duration, key("seconds for each element of A before the product")] = 0.0
    sustained_share: Annotated[
        float | None, key("their own `sustained_share`, where it is not that of the file", gt=0, le=1)
    ] = None

    def __post_init__(self) -> None:
        _check_sustained(self.sustained_share)
        if self.tiles not in TILE_MENUS:
            raise DescriptionError(f"tiles '{self.tiles}' is no menu; give one of {', '.join(TILE_MENUS)}")
        if min(self.flops_per_s, self.unit_bytes_per_s, self.memory_bytes_per_s, self.units) < 1:
            raise DescriptionError("rates and the number of units of products are each at least 1")
        if not (0 <= self.wave_share <= 1 and self.overlap >= 1):
            raise DescriptionError("wave_share is from 0 to 1, overlap at least 1")
        if min(self.tile_s, self.launch_s, self.split_passes, self.slowdown, self.prepare_s) < 0:
            raise DescriptionError("durations of products are at least 0")


@dataclass(frozen=True, slots=True)
class SystolicConstants:
    """What the time of a product on systolic arrays depends on; `cost.systolic` has the formula.

    Attributes:
        flops_per_s: FLOP/s of all arrays while rows pass.
        load_rows: rows that could pass while one part of an operand is loaded into an array.
        rounded_per_s: elements of C per second that are rounded from sums in fp32.
        launch_s: seconds of a product of nothing.
        memory_bytes_per_s: bytes per second of A, B and C.
        first_bytes: the most of the operands that is read before the first multiplication.
        last_bytes: the most of C that is written after the last one.
        window: the rows and columns of C for which operands are read once; for more they are read again.
        overlap: the power in which the time of multiplying adds up with that of rounding and memory.
    """

    flops_per_s: Annotated[Rate, key("FLOP/s of all arrays while rows pass, a number of at least 1")]
    load_rows: Annotated[Amount, key("rows that could pass while a part of an operand is loaded")]
    rounded_per_s: Annotated[Rate, key("elements of C per second that are rounded from sums in fp32")]
    launch_s: Annotated[Duration, key("seconds of a product of nothing, from 0 to 1e6")]
    memory_bytes_per_s: Annotated[Rate, key("bytes per second of A, B and C")]
    first_bytes: Annotated[Bytes, key("the most that is read before the first multiplication")]
    last_bytes: Annotated[Bytes, key("the most of C that is written after the last multiplication")]
    window: float = math.inf
    overlap: Annotated[
        Power, key("the power in which multiplying adds up with rounding and memory, at least 1")
    ] = 4.0

    def __post_init__(self) -> None:
        rates = self.flops_per_s, self.rounded_per_s, self.memory_bytes_per_s
        if min(*rates, self.window, self.overlap) < 1:
            raise DescriptionError("rates, window and overlap of systolic products are each at least 1")
        if min(self.load_rows, self.launch_s, self.first_bytes, self.last_bytes) < 0:
            raise DescriptionError("durations and sizes of systolic products are at least 0")


@dataclass(frozen=True, slots=True)
class CpuProductConstants:
    """What the time of a product in one dtype on one thread of a CPU depends on; see `cost.products`.

    Attributes:
        flops_per_s: FLOP/s of products that stay in the caches.
        launch_s: seconds of a product of nothing.
        memory_bytes_per_s: bytes per second of what does not fit into the caches.
        cache_bytes: bytes that fit into the caches; of a shared cache those that one thread has.
        copy_s, store_s: seconds for each byte of B that is copied, and of C that is stored.
        unaligned_s: seconds more for each byte of a C whose rows begin within a cache line.
        unaligned_far_s: seconds more still where that C is beyond `near_cache_bytes`.
        strided_s: seconds more for each byte of a C beyond half the cache, for k from 48 to 112.
        near_cache_bytes: bytes of a core's own cache. A size of the hardware, not fitted.
    """

    flops_per_s: Annotated[Rate, key("FLOP/s of products that stay in the caches, at least 1")]
    launch_s: Annotated[Duration, key("seconds of a product of nothing, from 0 to 1e6")]
    memory_bytes_per_s: Annotated[Rate, key("bytes per second of what does not fit into the caches")]
    cache_bytes: Annotated[Rate, key("how many bytes fit into the caches, at least 1")]
    copy_s: Annotated[Duration, key("seconds for each byte of B that is copied, from 0 to 1e6")] = 0.0
    store_s: Annotated[Duration, key("seconds for each byte of C that is stored, from 0 to 1e6")] = 0.0
    unaligned_s: Annotated[
        Duration, key("seconds more for each byte of a C whose rows begin within a cache line")
    ] = 0.0
    unaligned_far_s: Annotated[Duration, key("seconds more still where C is beyond near_cache_bytes")] = 0.0
    strided_s: Annotated[
        Duration, key("seconds more for each byte of a C beyond half the cache, for k from 48 to 112")
    ] = 0.0
    near_cache_bytes: Annotated[Rate, key("the cache of a core, in bytes, at least 1")] = float(1 << 20)

    def __post_init__(self) -> None:
        if min(self.flops_per_s, self.memory_bytes_per_s, self.cache_bytes, self.near_cache_bytes) < 1:
            raise DescriptionError("rates and cache sizes of products are each at least 1")
        stores = self.store_s, self.unaligned_s, self.unaligned_far_s, self.strided_s
        if min(self.launch_s, self.copy_s, *stores) < 0:
            raise DescriptionError("durations of products are at least 0")


ProductModel = ProductConstants | SystolicConstants | CpuProductConstants
"""The constants of products, of any of the three formulas."""


@dataclass(frozen=True, slots=True)
class AttentionConstants:
    """What the time of attention in one dtype depends on; `cost.attention` has the formula.

    Attributes:
        units, flops_per_s, launch_s, memory_bytes_per_s, overlap, slowdown: as of products.
        block: queries, and keys, of a tile.
        tile_s: seconds that a tile of queries takes besides its keys.
        tail_share: how much longer than evenly shared work the last unit runs, as a share (0 to 1) of the
            longest tile of queries.
    """

    units: Annotated[Count, key("the number of SMs, at least 1")]
    block: Annotated[Count, key("queries, and keys, of a tile, at least 1")]
    flops_per_s: Annotated[Rate, key("FLOP/s of all units, a number of at least 1")]
    tile_s: Annotated[Duration, key("seconds that a tile of queries takes besides its keys, from 0 to 1e6")]
    launch_s: Annotated[Duration, key("seconds of attention of nothing, from 0 to 1e6")]
    memory_bytes_per_s: Annotated[Rate, key("bytes per second of queries, keys, values and result")]
    tail_share: Annotated[Share, key("the share of the longest tile by which units end apart")] = 1.0
    overlap: Annotated[
        Power, key("the power in which time of computing and of memory add up, at least 1")
    ] = 4.0
    slowdown: Annotated[Amount, key("the share of time lost for each factor e above 0.1 ms")] = 0.0

    def __post_init__(self) -> None:
        if min(self.units, self.block, self.flops_per_s, self.memory_bytes_per_s) < 1:
            raise DescriptionError("rates, block and the number of units of attention are each at least 1")
        if not (0 <= self.tail_share <= 1 and self.overlap >= 1):
            raise DescriptionError("tail_share is from 0 to 1, overlap at least 1")
        if min(self.tile_s, self.launch_s, self.slowdown) < 0:
            raise DescriptionError("durations of attention are at least 0")


@dataclass(frozen=True, slots=True)
class CollectiveConstants:
    """What the time of one kind of collective inside a host depends on; `cost.libraries` has the formula.

    Attributes:
        launch_s: seconds of a collective of nothing.
        hop_s, low_latency_bytes_per_s: seconds a hop, and rate, of the protocol for small sizes.
        simple_s, simple_hop_s, bytes_per_s: seconds more, seconds a hop, and rate, of that for large sizes.
        ramp_s: seconds for each square root of a byte: what filling a pipeline of the best depth costs.
        group_power: the power of (P - 1) / P with which the rate among P chips grows.
    """

    launch_s: Annotated[Duration, key("seconds of a collective of nothing, from 0 to 1e6")]
    hop_s: Annotated[Duration, key("seconds a hop of the protocol for small sizes, from 0 to 1e6")]
    low_latency_bytes_per_s: Annotated[Rate, key("the rate of that protocol")]
    simple_s: Annotated[Duration, key("seconds more of the protocol for large sizes, from 0 to 1e6")]
    simple_hop_s: Annotated[Duration, key("seconds a hop of that protocol, from 0 to 1e6")]
    bytes_per_s: Annotated[Rate, key("the rate of that protocol")]
    ramp_s: Annotated[Duration, key("seconds for each square root of a byte, from 0 to 1e6")]
    group_power: Annotated[Amount, key("the power of (P - 1) / P with which the rate grows")]

    def __post_init__(self) -> None:
        if min(self.low_latency_bytes_per_s, self.bytes_per_s) < 1:
            raise DescriptionError("rates of collectives are each at least 1")
        times = self.launch_s, self.hop_s, self.simple_s, self.simple_hop_s, self.ramp_s, self.group_power
        if min(times) < 0:
            raise DescriptionError("durations of collectives are at least 0")


@dataclass(frozen=True, slots=True)
class ProductTable:
    """Measured products: the seconds of each (m, n, k), in one dtype.

    Raises:
        DescriptionError: there are no points, a point stands twice, or a value is out of range.
    """

    points: tuple[tuple[int, int, int, float], ...]
    source: str = ""

    @classmethod
    def of(cls, seconds: Mapping[tuple[int, ...], float], source: str = "") -> ProductTable:
        """Return the table of measured products: their `seconds` by (m, n, k), and where these are from.

        Raises DescriptionError if there are none, or a size or time is not positive.
        """
        return cls(tuple((m, n, k, time) for (m, n, k), time in seconds.items()), source)

    def __post_init__(self) -> None:
        if not self.points:
            raise DescriptionError("a table of products has no rows; give one at least")
        shapes = {point[:3] for point in self.points}
        if len(shapes) < len(self.points):
            raise DescriptionError("a table of products has a shape twice; give each (m, n, k) once")
        if any(min(point) <= 0 for point in self.points):
            raise DescriptionError("a table of products has a size or time that is not positive")

    def __hash__(self) -> int:
        """Return a hash of a few points: prices are kept by their table, which may have thousands."""
        return hash((len(self.points), self.points[0], self.points[-1], self.source))

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Return the (least, greatest) measured value of m, of n and of k."""
        columns = list(zip(*(point[:3] for point in self.points), strict=True))
        return tuple((min(column), max(column)) for column in columns)


@dataclass(frozen=True)
class ChipKernels:
    """The constants of a chip's kernels, by dtype, and of collectives inside a host of such chips, by kind.

    Attributes:
        source: what they were fitted on.
        elementwise: (launch_s, memory_bytes_per_s) of calls that stream through memory; None: the chip's own rate.
        switch_reduces: whether the switch inside a host reduces (NVLink SHARP); trees between hosts then use it.
        reference: the catalog's name of it, or its file; "" where it was made otherwise.
        sustained_share: the rate of products in steady training over the one of `products`, which short runs have:
            power limits the clock of a chip that multiplies for minutes. Steps of a software stack use it.
        grouped_share: the factor of the rates of grouped products (`cost.grouped`); where a step is priced it is
            set from `sustained_share`, and no file has it.
        tables: measured products by dtype, which take the place of `products` within their ranges.
        outside: how a product outside the ranges of a table is priced: "model" (by `products`) or "error" (not).
    """

    name: str
    source: str
    products: tuple[tuple[str, ProductModel], ...] = ()
    attention: tuple[tuple[str, AttentionConstants], ...] = ()
    collectives: tuple[tuple[str, CollectiveConstants], ...] = ()
    elementwise: tuple[float, float] | None = None
    tables: tuple[tuple[str, ProductTable], ...] = ()
    outside: str = "model"
    switch_reduces: bool = False
    sustained_share: float = 1.0
    grouped_share: float = field(default=1.0, kw_only=True)
    reference: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.outside not in ("model", "error"):
            raise DescriptionError(f"outside is '{self.outside}'; give model or error")
        _check_sustained(self.sustained_share)
        for kind in ("products", "attention", "collectives", "tables"):
            names = [name for name, _ in getattr(self, kind)]
            if len(set(names)) < len(names):
                raise DescriptionError(f"{kind} of {' and '.join(names)}: one stands twice; give each once")

    def product(self, dtype: str) -> ProductModel | None:
        """Return the constants of products in a dtype; None where there are none."""
        return dict(self.products).get(dtype)

    def sustained_of(self, dtype: str) -> float:
        """Return the share (0 to 1) of their rate that products in a dtype sustain in steady training."""
        own = getattr(self.product(dtype), "sustained_share", None)
        return self.sustained_share if own is None else own

    def attention_of(self, dtype: str) -> AttentionConstants | None:
        """Return the constants of attention in a dtype; None where there are none."""
        return dict(self.attention).get(dtype)

    def collective(self, kind: str) -> CollectiveConstants | None:
        """Return the constants of a kind of collective; None where there are none."""
        return dict(self.collectives).get(kind)

    def table(self, dtype: str) -> ProductTable | None:
        """Return the measured products in a dtype; None where there are none."""
        return dict(self.tables).get(dtype)
