"""AlpaComm's rivals as their public code runs them: Alpa's send/recv with and without a gather afterwards.

Source: alpa-projects/alpa, alpa/pipeline_parallel/cross_mesh_resharding.py at commit eae20b6, with the settings of
benchmark/alpa/resharding/suite.py at commit 8f4f1ef: mode "send_recv", load balance "normal".

- Parts (`_rewrite_allgather_spec`). Ranks that want the same shard are to be sent a part each. Tensor dims are cut
  in turn, each into as many parts as the number of these ranks and the dim's length in the shard have as common
  divisor. What stays undivided is sent more than once: three ranks that want 1024 rows are sent three copies, six
  ranks two halves three times each. There are no uneven parts.
- Senders (`_generate_send_recv_resharding_strategy_by_loads`). Of the ranks that have a slice that one sends which
  has sent the fewest bytes so far, the first of equals.
- Order (`generate_naive_order`). Destination part by part, copy by copy, source slice by source slice. A GPU sends
  one message at a time, and receives one at a time.
- The gather is one all-gather over each cut, begun by a GPU when it has its part.

Where a destination spans hosts that all want the same shard, the code as merged cuts nothing and sends copies. The
paper says that its rival gathers across hosts there (section 5.1.1), as the code does without that clause, and
so does this.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from meshweave.algorithms.reshard import ReshardProblem, TensorMove
from meshweave.base.errors import UnsupportedError
from meshweave.describe.layout import Intervals, Layout, Placement, Replicate, Shard
from meshweave.describe.layout.intervals import common_runs
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.program import Buffer, Lane, On, Program, Same, Statement, Tensor
from meshweave.ir.program.ops import AllGather, Recv, Send
from meshweave.ir.program.views import Range, View

SEND_LANE, GATHER_LANE = "tiles", "gather"


@dataclass(frozen=True)
class Cut:
    """A cut of a replicated shard: along tensor dim `dim` into the parts of mesh axis `axis`."""

    axis: str
    dim: int


@dataclass(frozen=True)
class PartLayout:
    """What the receiving ranks are sent: a layout in which they have parts, and the cuts to be gathered again."""

    layout: Layout
    cuts: tuple[Cut, ...]

    def gathered(self, count: int) -> Layout:
        """Return the layout after the last `count` cuts are gathered."""
        axes = {cut.axis for cut in self.cuts[len(self.cuts) - count :]}
        placements = tuple(
            Replicate() if axis in axes else placement
            for axis, placement in zip(self.layout.mesh.axes, self.layout.placements, strict=True)
        )
        return replace(self.layout, placements=placements)


def part_layout(layout: Layout, shape: tuple[int, ...]) -> PartLayout:
    """Return the parts that Alpa sends of a tensor of `shape` to a layout of shards and replicas.

    Neighbouring mesh axes that replicate count as one.

    Raises:
        UnsupportedError: axes that replicate are not next to each other.
    """
    mesh = layout.mesh
    copies = [axis for axis, placement in enumerate(layout.placements) if isinstance(placement, Replicate)]
    if not copies or math.prod(mesh.shape[axis] for axis in copies) == 1:
        return PartLayout(layout, ())
    if copies != list(range(copies[0], copies[-1] + 1)):
        raise UnsupportedError(f"{layout}: Alpa gathers along one mesh axis, or along neighbouring ones")
    left = math.prod(mesh.shape[axis] for axis in copies)
    local = layout.local_shape(shape, mesh.ranks[0])
    sizes, placements, cuts = list[int](), list[Placement](), list[Cut]()
    for dim, extent in enumerate(local):
        parts = math.gcd(left, extent)
        if parts > 1:
            cuts.append(Cut(f"part{dim}", dim))
            sizes.append(parts)
            placements.append(Shard(dim))
            left //= parts
    names = [cut.axis for cut in cuts]
    if left > 1:
        names, sizes, placements = [*names, "copy"], [*sizes, left], [*placements, Replicate()]
    before, after = slice(0, copies[0]), slice(copies[-1] + 1, None)
    finer = Mesh(
        f"{mesh.name}_parts",
        (*mesh.shape[before], *sizes, *mesh.shape[after]),
        (*mesh.axes[before], *names, *mesh.axes[after]),
        mesh.ranks,
    )
    kept = layout.placements[before], layout.placements[after]
    return PartLayout(Layout(finer, (*kept[0], *placements, *kept[1])), tuple(cuts))


@dataclass(frozen=True)
class _TileMessage:
    """A box that one rank sends another: where it lies in the source shard and in the destination part."""

    sender: int
    receiver: int
    src: tuple[Range, ...]
    dst: tuple[Range, ...]


def alpa_program(problem: ReshardProblem, *, gathers: bool = True) -> Program:
    """Return a reshard of one tensor as Alpa's public code does it; without `gathers`, all ranks are sent copies.

    Raises:
        UnsupportedError: there are several tensors, shards of one layout differ in shape, or the destination
            replicates as `part_layout` cannot cut.
    """
    if len(problem.moves) != 1:
        raise UnsupportedError(f"Alpa's reshard is of one tensor here, not of {len(problem.moves)}")
    (move,) = problem.moves
    for layout in (move.src, move.dst):
        if len({layout.local_shape(move.shape, rank) for rank in layout.mesh.ranks}) > 1:
            raise UnsupportedError(f"{layout} of {move.shape}: Alpa's shards are all of one shape")
    parts = part_layout(move.dst, move.shape) if gathers else PartLayout(move.dst, ())
    tensors = tuple(Tensor(name, move.shape, move.dtype) for name in ("X0", "Y0"))
    layouts = [parts.gathered(count) for count in range(len(parts.cuts))] + [move.dst]
    meshes = dict.fromkeys((move.src.mesh, *(layout.mesh for layout in layouts)))
    names = [*(f"parts{count}" for count in range(len(parts.cuts))), "y0"]
    buffers = [Buffer("x0", "input", move.src.mesh.name, move.dtype, "X0", move.src)]
    for name, layout in zip(names, layouts, strict=True):
        kind = "output" if name == "y0" else "temp"
        buffers.append(Buffer(name, kind, layout.mesh.name, move.dtype, "Y0", layout))  # type: ignore[arg-type]
    body: list[Statement] = []
    for message in _messages(move, layouts[0]):
        send = Send(src=View("x0", message.src), peer=message.receiver, lane=SEND_LANE)
        recv = Recv(out=View(names[0], message.dst), peer=message.sender, lane=SEND_LANE)
        body += [On((message.sender,), (send,)), On((message.receiver,), (recv,))]
    whole = (Range(),) * len(move.shape)
    for cut, before, after in zip(reversed(parts.cuts), names, names[1:], strict=False):
        over = f"{parts.layout.mesh.name}.{cut.axis}"
        gather = AllGather(
            out=View(after, whole), src=View(before, whole), over=over, dim=cut.dim, lane=GATHER_LANE
        )
        body.append(On(parts.layout.mesh.name, (gather,)))
    lanes = (Lane(SEND_LANE), *([Lane(GATHER_LANE)] if parts.cuts else []))
    name = "reshard as Alpa does" if gathers else "reshard by Alpa's send/recv"
    return Program(name, tuple(meshes), tensors, tuple(buffers), lanes, tuple(body), (Same("Y0", "X0"),))


def _messages(move: TensorMove, layout: Layout) -> Iterator[_TileMessage]:
    """Yield the messages in Alpa's order, each from the sender that its balance chooses."""
    sent: dict[int, int] = defaultdict(int)
    sources = _ranks_of_tiles(move.src, move.shape)
    for tile, receivers in _ranks_of_tiles(layout, move.shape).items():
        slices = []
        for source, senders in sources.items():
            runs = [list(common_runs(a, b)) for a, b in zip(source, tile, strict=True)]
            for box in product(*runs):
                src, dst = (tuple(Range(run[side], run[side] + run[2]) for run in box) for side in (0, 1))
                slices.append((senders, src, dst, math.prod(run[2] for run in box)))
        for receiver in receivers:
            for senders, src, dst, size in slices:
                sender = min(senders, key=lambda rank: sent[rank])
                sent[sender] += size
                yield _TileMessage(sender, receiver, src, dst)


def _ranks_of_tiles(layout: Layout, shape: tuple[int, ...]) -> dict[tuple[Intervals, ...], list[int]]:
    """Return the ranks of each distinct shard, in the order of tiles: the first tensor dim outermost."""
    ranks_of: dict[tuple[Intervals, ...], list[int]] = {}
    for rank in layout.mesh.ranks:
        ranks_of.setdefault(layout.intervals(shape, rank), []).append(rank)
    return dict(sorted(ranks_of.items(), key=lambda item: [of[0][0] for of in item[0]]))
