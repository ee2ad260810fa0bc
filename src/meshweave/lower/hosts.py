"""All-gathers and reduce-scatters in two levels: between hosts along rails, and inside each host.

With h chips in each of H hosts, member (j, c) of an all-gather first gathers the parts of the chips c of all
hosts, each through its own NIC. Then each host gathers H times among its chips, once for the parts of each host,
which lie together in the result. A reduce-scatter does the reverse. Every byte crosses between hosts once, over
all NICs at once.

The pass adds a mesh in which the axis of the collective is split into hosts and chips, and a scratch buffer for
the parts that have arrived. The collectives stay ops, so that rings (`lower_rings`) may follow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.program import Buffer, Program, Statement
from meshweave.ir.program.expressions import Index, maximum
from meshweave.ir.program.ops import AllGather, Op, ReduceScatter
from meshweave.ir.program.statements import rewrite
from meshweave.ir.program.views import Range, View

_SUFFIX = "hosts"


def lower_hosts(
    program: Program,
    chips_per_host: int,
    should_lower: Callable[[AllGather | ReduceScatter], bool] = lambda op: True,
) -> Program:
    """Return the program with its all-gathers and reduce-scatters over axes of several hosts in two levels.

    An axis is split where its groups are chips that follow each other, whole hosts of them. Collectives of uneven
    parts, of parts that follow from a loop, and over other axes stay. Sub-programs are lowered likewise.

    Args:
        chips_per_host: ranks that follow each other on one host.
        should_lower: selects the collectives to lower; the others stay.
    """
    program = program.with_parts(lambda part: lower_hosts(part, chips_per_host, should_lower))
    lowering = _HostLowering(program, chips_per_host, should_lower)
    body = rewrite(program.body, lowering.replacement)
    return replace(
        program,
        body=body,
        meshes=program.meshes + tuple(lowering.meshes.values()),
        buffers=program.buffers + tuple(lowering.buffers.values()),
    )


class _HostLowering:
    """The meshes and buffers that two levels add, and the ops that replace a program's collectives."""

    def __init__(
        self, program: Program, chips_per_host: int, should_lower: Callable[[AllGather | ReduceScatter], bool]
    ) -> None:
        self.program, self.chips_per_host, self.should_lower = program, chips_per_host, should_lower
        self.meshes: dict[str, Mesh] = {}
        self.buffers: dict[str, Buffer] = {}

    def replacement(self, op: Op) -> list[Statement]:
        """Return the ops that replace `op`."""
        if not isinstance(op, (AllGather, ReduceScatter)) or not self.should_lower(op):
            return [op]
        mesh, size = self._split_mesh(op), self._part_size(op)
        if mesh is None or size is None:
            return [op]
        gathers = isinstance(op, AllGather)
        part, whole = (op.src, op.out) if gathers else (op.out, op.src)
        num_hosts = mesh.size("host")
        arrived = self._arrived(op, part, size * num_hosts)
        if arrived is None:
            return [op]
        name = op.name or op.kind
        inside: list[Statement] = []
        for host in range(num_hosts):
            near = _sub(arrived, op.dim, host * size, size)
            far = _sub(whole, op.dim, host * self.chips_per_host * size, self.chips_per_host * size)
            inside.append(_level(op, f"{mesh.name}.chip", near, far, f"{name}_host{host}"))
        between = _level(op, f"{mesh.name}.host", part, arrived, f"{name}_rails")
        return [between, *inside] if gathers else [*inside, between]

    def _split_mesh(self, op: AllGather | ReduceScatter) -> Mesh | None:
        if not isinstance(op.over, str) or "." not in op.over:
            return None
        name, _, axis = op.over.partition(".")
        mesh, chips = self.program.mesh_of[name], self.chips_per_host
        size, at = mesh.size(axis), mesh.axes.index(axis)
        group = mesh.group(mesh.ranks[0], axis)
        follows = all(b == a + 1 for a, b in pairwise(group))
        if size % chips or size <= chips or not follows or any(rank % chips for rank in group[::chips]):
            return None
        key = f"{name}_{axis}_{_SUFFIX}"
        shape = (*mesh.shape[:at], size // chips, chips, *mesh.shape[at + 1 :])
        axes = (*mesh.axes[:at], "host", "chip", *mesh.axes[at + 1 :])
        if len(set(axes)) < len(axes):
            return None
        return self.meshes.setdefault(key, Mesh(key, shape, axes, mesh.ranks))

    def _part_size(self, op: AllGather | ReduceScatter) -> int | None:
        """Return the extent of every member's part along the dim; None where it is uneven or not known."""
        if op.sizes is not None:
            return op.sizes if isinstance(op.sizes, int) else None
        view = op.src if isinstance(op, AllGather) else op.out
        return self._extent(view, op.dim)

    def _extent(self, view: View, dim: int) -> int | None:
        selector, buffer = view.selectors[dim], self.program.buffer_of[view.buffer]
        if not isinstance(selector, Range):
            return None
        if selector.stop is not None:
            extent = selector.stop - selector.start
            return extent if isinstance(extent, int) else None
        if buffer.tensor is None:
            extent = buffer.shape[dim] - selector.start
            return extent if isinstance(extent, int) else None
        mesh = self.program.mesh_of[buffer.mesh]
        extents = {self.program.local_shape(buffer.name, rank)[dim] for rank in mesh.ranks}
        return extents.pop() if len(extents) == 1 and selector.start == 0 else None

    def _arrived(self, op: AllGather | ReduceScatter, part: View, size: int) -> View | None:
        """Return the scratch of the parts that have arrived, `size` along the dim; None where no box is known."""
        assert isinstance(op.over, str)
        of = self.program.buffer_of[part.buffer]
        extents = [size if d == op.dim else self._extent(part, d) for d in range(len(part.selectors))]
        known = [extent for extent in extents if extent is not None]
        if len(known) < len(extents):
            return None
        name = f"{part.buffer}_{op.over.replace('.', '_')}_rails"
        shape: tuple[Index, ...] = tuple(known)
        if name in self.buffers:  # several collectives of one buffer share the scratch
            pairs = zip(self.buffers[name].shape, shape, strict=True)
            shape = tuple(maximum(a, b) for a, b in pairs)
        self.buffers[name] = Buffer(name, "scratch", of.mesh, of.dtype, shape=shape)
        return View(name, tuple(Range(0, extent) for extent in known))


def _level(op: AllGather | ReduceScatter, over: str, part: View, whole: View, name: str) -> Op:
    """Return one level of a collective, with equal parts."""
    if isinstance(op, AllGather):
        return replace(op, over=over, out=whole, src=part, sizes=None, name=name)
    return replace(op, over=over, out=part, src=whole, sizes=None, name=name)


def _sub(view: View, dim: int, start: int, size: int) -> View:
    selectors = list(view.selectors)
    selector = selectors[dim]
    assert isinstance(selector, Range)
    selectors[dim] = Range(selector.start + start, selector.start + start + size)
    return replace(view, selectors=tuple(selectors))
