"""One product whose regions go to different memories: `product` with `remote_map`, `dma_map` and `local`.

This is how T3 configures the output of a product (Pati et al., ASPLOS '24, section 4.4, figure 12): its kernel
stays as it is, and each region of the output says where the stores of its tiles go. Regions are computed in the
order in which they are listed, and ranks list them in orders of their own, staggered.

- `remote_map(target)`: tiles are stored in another rank's memory as they are computed.
- `dma_map(target, via, lane=)`: tiles are stored in `via`, and sent to `target` once all updates of `via` are
  there, whoever makes them: those of this product and those that other ranks send.
- `local(target)`: tiles are stored in this rank's memory and stay there.

A product is written out as ops: one `matmul` a region, with the product's release, of which all but the first join
the one before (`Release.joins`), and a tracked `put` for each `dma_map`. A machine runs them as one kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from meshweave.base.errors import ProgramError
from meshweave.ir.program.expressions import Index
from meshweave.ir.program.ops import Matmul, Put
from meshweave.ir.program.release import Release
from meshweave.ir.program.statements import Repeat, Statement
from meshweave.ir.program.views import View


@dataclass(frozen=True, kw_only=True)
class OutputMap:
    """Where a region of a product goes.

    Attributes:
        target: the region of the memory that keeps it.
        a, b: the parts of the operands that it is the product of; None for the whole operand of the product.
    """

    word: ClassVar[str] = ""
    target: View
    a: View | None = None
    b: View | None = None

    @property
    def stored_to(self) -> View:
        """Return the view that the tiles of the product are stored to."""
        return self.target


@dataclass(frozen=True, kw_only=True)
class RemoteMap(OutputMap):
    """A region whose tiles are stored in another rank's memory as they are computed."""

    word: ClassVar[str] = "remote_map"


@dataclass(frozen=True, kw_only=True)
class LocalMap(OutputMap):
    """A region whose tiles are stored in this rank's memory and stay there."""

    word: ClassVar[str] = "local"


@dataclass(frozen=True, kw_only=True)
class DmaMap(OutputMap):
    """A region that is sent to another rank when all updates of it are there.

    Attributes:
        via: the region of this rank's memory that tiles are stored to, and that is sent.
        lane: the lane of the copy.
    """

    word: ClassVar[str] = "dma_map"
    via: View
    lane: str

    @property
    def stored_to(self) -> View:
        """Return `via`, the view in this rank's memory that the tiles of the product are stored to."""
        return self.via


@dataclass(frozen=True)
class EachRegion:
    """The region `region` for each `var` = 0 .. count - 1; its views may use `var`."""

    region: OutputMap
    var: str
    count: Index


def product_statements(
    a: View,
    b: View,
    regions: Sequence[OutputMap | EachRegion],
    lane: str,
    release: Release | None = None,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
) -> tuple[Statement, ...]:
    """Return the ops of one product of a (M, K) and b (K, N) whose regions go where their maps say.

    They are a `matmul` per region and a `put` per `DmaMap`, in a loop for an `EachRegion`.

    Args:
        regions: in the order in which they are computed.
        lane: the lane of the products.
        release: tiles, their order and the first one in each region, and whether stores update; `joins` is set
            here. None leaves all that to the machine.
        transpose_a, transpose_b: whether a is stored (K, M), and b (N, K).

    Raises:
        ProgramError: there are no regions, or the first one is one of a loop.
    """
    if not regions or isinstance(regions[0], EachRegion):
        raise ProgramError("a product has regions, and the first one stands alone, outside of a loop")
    release = Release() if release is None else release

    def written_out(region: OutputMap, joins: bool) -> Iterator[Statement]:
        yield Matmul(
            out=region.stored_to,
            a=region.a or a,
            b=region.b or b,
            transpose_a=transpose_a,
            transpose_b=transpose_b,
            release=replace(release, joins=joins),
            lane=lane,
            name=region.word if isinstance(region, RemoteMap) else "",
        )
        if isinstance(region, DmaMap):
            sent = Release(update=release.update)
            yield Put(out=region.target, src=region.via, release=sent, lane=region.lane, name=region.word)

    statements: list[Statement] = []
    for number, region in enumerate(regions):
        if isinstance(region, EachRegion):
            body = tuple(written_out(region.region, joins=True))
            statements.append(Repeat(region.var, region.count, body))
        else:
            statements += written_out(region, joins=number > 0)
    return tuple(statements)
