"""What a calibration runs: collectives, ring steps, copies and products as programs, each in a loop.

Every operation is measured alone, and with all lanes busy: all axes of the mesh in both ring directions and
products beside them, which is how they meet in the programs that are planned. Ring collectives are also run
with their first step only: of P members there are P - 1 steps, and one number of steps cannot tell what a
collective costs once (launch) from what each of its steps costs (sync).

Broadcasts and reduces run as SUMMA makes them, roots taking turns around the axis, in several numbers of packets.
Successive chains pipeline into each other as `estimate.chains` says, and that recurrence is fitted: one packet
over one hop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from meshweave.base.errors import DescriptionError, LayoutError
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.links import NetworkAxis
from meshweave.ir.program import Program, Statement
from meshweave.ir.program.ops import Add, Op, Permute
from meshweave.ir.program.parse import parse
from meshweave.ir.program.statements import rewrite
from meshweave.ir.program.text import to_text
from meshweave.lower import lower_chains, lower_rings

AXES = ("row", "col")
MESH = "tp"
KINDS = ("all_gather", "reduce_scatter", "send_recv")
CHAINS = ("broadcast", "reduce")
PACKETS = (1, 4, 16)
"""Into how many packets chains cut a part, as long as these are no smaller than `LEAST_PACKET_BYTES`."""
LEAST_PACKET_BYTES = 16_000

_SMALLEST_STEP_S, _NUM_SIZES, _SIZE_RANGE = 5.2e-3, 5, 8
_LEAST_BYTES, _MOST_SMALLEST_BYTES = 1024, 262144
_SUBSET_OF_SIZES = (0, 2, 3)
"""The indices of the sizes that are measured alone too, and in chains: enough of them, without the longest."""
_RUN_S, _MIN_ITERATIONS, _MAX_ITERATIONS = 0.03, 4, 32
_BUCKETS = 4
_PRODUCTS = (1.0, 0.5, 2.0)
"""Lengths of products over that of a collective, one case after another, so that products differ in size."""
_EXPECTED_SYNC_S = 0.5e-3
"""Only decides how many iterations make a run, and how long the products beside it last."""


@dataclass(frozen=True)
class MeshAxis:
    """The mesh axis `name` of `count` members, and `link`, the links of the network that it runs over."""

    name: str
    count: int
    link: NetworkAxis

    @property
    def ring_directions(self) -> Literal[1, 2]:
        """Return in how many directions a ring along this axis sends at once.

        It is 2 where the links have two directions and there are more than two members, else 1.
        """
        return 2 if self.link.num_directions == 2 and self.count > 2 else 1


@dataclass(frozen=True)
class Loop:
    """One loop of a `SweepCase`: a collective, or a product and a copy, repeated and timed.

    Attributes:
        kind: the kind of collective, or "compute" for products and copies.
        axis: the mesh axis; "" for "compute".
        amount: bytes of one member's part, or of a packet of a broadcast or reduce; for "compute" the FLOPs of a
            product.
        steps: in one iteration, the steps of a ring, or the hops of packets from member to member.
        iterations: how often the loop repeats.
        warmup_iterations: how many of these are not measured: buckets are full at first, and TCP is slow.
        copy_bytes: for "compute", the bytes that the copy after the product reads plus those that it writes.
        packets: into how many packets a broadcast or reduce cuts its part.
    """

    kind: str
    axis: str
    amount: int
    steps: int
    iterations: int
    warmup_iterations: int
    copy_bytes: int = 0
    packets: int = 1


@dataclass(frozen=True)
class SweepCase:
    """A program of one or more loops that run at the same time.

    `is_busy` is True where they load all mesh axes while products run; False where one loop runs alone.
    """

    name: str
    is_busy: bool
    loops: tuple[Loop, ...]
    program: Program

    def payload(self) -> dict[str, Any]:
        """Return the case as JSON values, for `calibrate.rank.measure`."""
        return {
            "name": self.name,
            "program": to_text(self.program),
            "loops": [[loop.kind, loop.iterations, loop.warmup_iterations] for loop in self.loops],
        }


@dataclass(frozen=True)
class Sweep:
    """All cases of a calibration, on one mesh of all chips of a cluster.

    Attributes:
        axes: the two axes of the mesh, rows first.
        sizes: bytes of one member's part, ascending.
        expected_s: about how many seconds one repetition of all cases takes.
    """

    cluster: Cluster
    axes: tuple[MeshAxis, ...]
    sizes: tuple[int, ...]
    cases: tuple[SweepCase, ...]
    expected_s: float

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Return the number of members of each axis."""
        return tuple(axis.count for axis in self.axes)


def default_sizes(bytes_per_s: float) -> tuple[int, ...]:
    """Return five part sizes in bytes, spread over a factor of 8; the smallest takes 5 ms at `bytes_per_s`.

    At 2 x 50 Mbit/s that is 65 to 520 kB. The smallest is kept between 1 KiB and 256 KiB. Where many ranks share
    few cores, shorter steps would measure the cores and not the link.
    """
    least = min(max(bytes_per_s * _SMALLEST_STEP_S, _LEAST_BYTES), _MOST_SMALLEST_BYTES)
    ratio = _SIZE_RANGE ** (1 / (_NUM_SIZES - 1))
    return tuple(_whole(least * ratio**number) for number in range(_NUM_SIZES))


def _whole(num_bytes: float) -> int:
    """Return a size rounded to a multiple of 64 bytes, so that it has two halves of whole elements."""
    return max(round(num_bytes / 64), 1) * 64


def plan_sweep(
    cluster: Cluster, mesh_shape: tuple[int, ...], sizes: Sequence[int] = (), *, skip_bytes: int = 65536
) -> Sweep:
    """Return the cases for a mesh of all chips of `cluster`.

    Args:
        mesh_shape: (rows, columns).
        sizes: bytes of one member's part, rounded to multiples of 64; by default those of `default_sizes`.
        skip_bytes: the bytes that a link lets through before it keeps to its rate (a token bucket).

    Raises:
        LayoutError: the mesh is not one of two axes with all chips, or the network cannot carry it.
        DescriptionError: a size is not from 64 bytes to 1 GiB.
    """
    if len(mesh_shape) != 2 or math.prod(mesh_shape) != cluster.num_chips or cluster.num_chips < 2:
        shape = "x".join(map(str, mesh_shape))
        raise LayoutError(
            f"mesh {shape} does not have the {cluster.num_chips} ranks of {cluster.name}; give ROWSxCOLS with "
            "that product, of at least 2"
        )
    if bad := [size for size in sizes if not 64 <= size <= 1 << 30]:
        raise DescriptionError(f"a part of {bad[0]} bytes is none to measure; give 64 to 2**30")
    network = cluster.network
    axes = tuple(
        MeshAxis(name, count, network.axis(i, 2, mesh_shape))
        for i, (name, count) in enumerate(zip(AXES, mesh_shape, strict=True))
    )
    used = [axis for axis in axes if axis.count > 1]
    slowest = min(axis.ring_directions * axis.link.link_bytes_per_s for axis in used)
    chosen = tuple(sorted({_whole(size) for size in sizes})) or default_sizes(slowest)
    # A bucket drains by the difference between what is offered and the rate: slowly, where steps are short.
    builder = _SweepBuilder(
        Mesh.of(MESH, mesh_shape, AXES), cluster.chip.effective_flops_per_s, _BUCKETS * skip_bytes
    )
    cases: list[SweepCase] = []
    for number, size in enumerate(chosen):
        for kind in KINDS:
            firsts = (False,) if kind == "send_recv" or max(a.count for a in used) < 3 else (True, False)
            cases += [builder.case(kind, used, size, first, is_busy=True) for first in firsts]
            if number in _SUBSET_OF_SIZES:
                cases += [builder.case(kind, [axis], size, False, is_busy=False) for axis in used]
        if number in _SUBSET_OF_SIZES:
            fitting = [d for d in PACKETS if d == 1 or size >= d * LEAST_PACKET_BYTES]
            cases += [builder.chains(kind, used, size, packets) for kind in CHAINS for packets in fitting]
        cases.append(builder.products(size, used))
    return Sweep(cluster, axes, chosen, tuple(cases), sum(builder.expected_s))


class _SweepBuilder:
    """Builds cases for one mesh; `expected_s` lists about how long each takes."""

    def __init__(self, mesh: Mesh, flops_per_s: float, skip_bytes: int) -> None:
        self.mesh, self.flops_per_s, self.skip_bytes = mesh, flops_per_s, skip_bytes
        self.expected_s: list[float] = []

    def case(
        self, kind: str, axes: Sequence[MeshAxis], size: int, first: bool, *, is_busy: bool
    ) -> SweepCase:
        """Return `kind` along all `axes` at once, if `is_busy` with products beside it; `first`: only its
        first step.
        """
        iteration_s = {axis.name: self._iteration_s(kind, axis, size, first) for axis in axes}
        slowest_s = max(iteration_s.values())
        turns = min(max(math.ceil(_RUN_S / slowest_s), _MIN_ITERATIONS), _MAX_ITERATIONS)
        loops, text = [], []
        warm_s = max(self._warm(kind, axis, size, first) * iteration_s[axis.name] for axis in axes)
        for axis in axes:
            # All axes are to end together, or the rest of the slower one has the machine to itself.
            mine = max(math.ceil((warm_s + turns * slowest_s) / iteration_s[axis.name]), 2)
            warm = min(max(math.ceil(warm_s / iteration_s[axis.name]), 1), mine - 1)
            steps = 1 if kind == "send_recv" or first else axis.count - 1
            loops.append(Loop(kind, axis.name, size, steps, mine, warm))
            text.append(_transfer(kind, axis, size, mine, both=is_busy))
        run_s = warm_s + turns * slowest_s
        if is_busy:
            # A few more than it takes, for collectives take longer than expected.
            product_s = slowest_s * _PRODUCTS[len(self.expected_s) % len(_PRODUCTS)]
            loop = self._compute(product_s, math.ceil(1.15 * run_s / product_s), size)
            loops.append(loop)
            text.append(_compute(loop))
        self.expected_s.append(run_s)
        where = "all axes and products" if is_busy else axes[0].name
        name = f"{kind}{' (first step)' if first else ''} of {size} bytes, {where}"
        program = lower_rings(self._program(name, text), max(axis.ring_directions for axis in axes))
        if first:
            program = replace(program, body=_first_steps(program.body))
        return SweepCase(name, is_busy, tuple(loops), program)

    def chains(self, kind: str, axes: Sequence[MeshAxis], size: int, packets: int) -> SweepCase:
        """Return broadcasts or reduces along all `axes`, with products beside them; members are roots
        equally often.
        """
        iteration_s = {axis.name: _chain_s(axis, size, packets) for axis in axes}
        most = max(axis.count for axis in axes)
        slowest_s = max(iteration_s.values())
        warm_s = max(math.ceil(self.skip_bytes / size), most) * slowest_s
        run_s = warm_s + min(max(math.ceil(_RUN_S / slowest_s), most), _MAX_ITERATIONS) * slowest_s
        loops, text = [], []
        for axis in axes:
            warm = max(math.ceil(warm_s / iteration_s[axis.name]), 1)
            rounds = max(round((run_s - warm_s) / iteration_s[axis.name] / axis.count), 1)
            turns, steps = warm + rounds * axis.count, axis.count + packets - 2
            loops.append(Loop(kind, axis.name, size // packets, steps, turns, warm, packets=packets))
            text.append(_transfer(kind, axis, size, turns, both=False, packets=packets))
        product_s = slowest_s * _PRODUCTS[len(self.expected_s) % len(_PRODUCTS)]
        loops.append(self._compute(product_s, math.ceil(1.15 * run_s / product_s), size))
        self.expected_s.append(run_s)
        name = f"{kind} of {size} bytes in {packets} packets, all axes and products"
        program = lower_chains(self._program(name, [*text, _compute(loops[-1])]))
        return SweepCase(name, True, tuple(loops), program)

    def products(self, size: int, axes: Sequence[MeshAxis]) -> SweepCase:
        """Return products and copies alone, as long as the largest collective of that size."""
        loop = self._compute(
            max(self._iteration_s("all_gather", axis, size, False) for axis in axes), _MIN_ITERATIONS, size
        )
        self.expected_s.append(loop.iterations * loop.amount / self.flops_per_s)
        return SweepCase(
            f"products for {size} bytes", False, (loop,), self._program("products", [_compute(loop)])
        )

    def _compute(self, seconds: float, turns: int, size: int) -> Loop:
        edge = max(round((seconds * self.flops_per_s / 2) ** (1 / 3) / 4), 4) * 4
        return Loop("compute", "", 2 * edge**3, 1, max(turns, 2), 1, copy_bytes=2 * 4 * size)

    def _program(self, name: str, text: Sequence[tuple[str, str]]) -> Program:
        shape, names = self.mesh.shape, self.mesh.axes
        lines = [
            f'program("{name}")',
            f'{MESH} = mesh(({shape[0]}, {shape[1]}), ("{names[0]}", "{names[1]}"))',
        ]
        lines += [declared for declared, _ in text]
        return parse("\n".join([*lines, f"with {MESH}:", *(body for _, body in text)]) + "\n")

    def _message(self, kind: str, axis: MeshAxis, size: int) -> float:
        return size if kind == "send_recv" else size / axis.ring_directions

    def _iteration_s(self, kind: str, axis: MeshAxis, size: int, first: bool) -> float:
        steps = 1 if kind == "send_recv" or first else axis.count - 1
        step_s = self._message(kind, axis, size) / axis.link.link_bytes_per_s
        return steps * (step_s + _EXPECTED_SYNC_S)

    def _warm(self, kind: str, axis: MeshAxis, size: int, first: bool) -> int:
        steps = 1 if kind == "send_recv" or first else axis.count - 1
        return max(math.ceil(self.skip_bytes / (steps * self._message(kind, axis, size))), 1)


def _chain_s(axis: MeshAxis, size: int, packets: int) -> float:
    """Return about how many seconds one chain takes, most of which overlaps with the next chain."""
    steps = axis.count + packets - 2
    overlapping = max(steps / 2, packets) / packets
    return overlapping * size / axis.link.link_bytes_per_s + _EXPECTED_SYNC_S


def _transfer(
    kind: str, axis: MeshAxis, size: int, turns: int, *, both: bool, packets: int = 1
) -> tuple[str, str]:
    """Return declarations and body of a loop of collectives.

    They write to two slots alternately, so that a faster member never overwrites what is still to be passed on.
    """
    name, part, over = axis.name, size // 4, f"{MESH}.{axis.name}"
    declared = [f"{name} = lane()"]
    match kind:
        case "all_gather":
            declared.append(_scratch(f"{name}_part", part))
            declared.append(_scratch(f"{name}_whole", axis.count * part, slots=2))
            zeros = [f"{name}_part"]
            ops = [f'all_gather({name}_whole(i % 2), {name}_part, over="{over}", dim=0, lane={name})']
        case "reduce_scatter":
            declared.append(_scratch(f"{name}_whole", axis.count * part))
            declared.append(_scratch(f"{name}_part", part, slots=2))
            zeros = [f"{name}_whole"]
            ops = [f'reduce_scatter({name}_part(i % 2), {name}_whole, over="{over}", dim=0, lane={name})']
        case "broadcast" | "reduce":
            declared.append(_scratch(f"{name}_own", part))
            declared.append(_scratch(f"{name}_panel", part, slots=2))
            zeros = [f"{name}_own"]
            rest = f'over="{over}", root=i % {axis.count}, packets={packets}, lane={name}'
            ops = [f"{kind}({name}_panel(i % 2), {name}_own, {rest})"]
        case _:
            lanes = [(name, 1)]
            if both and axis.count > 2:
                declared.append(f"{name}_back = lane()")
                lanes.append((f"{name}_back", -1))
            declared += [_scratch(f"{lane}_part", part, slots=2) for lane, _ in lanes]
            zeros = []
            ops = [
                f'permute({lane}_part((i + 1) % 2), {lane}_part(i % 2), over="{over}", shift={shift}, lane={lane})'
                for lane, shift in lanes
            ]
            zeros = [f"{lane}_part" for lane, _ in lanes]
    body = [f"    zero({buffer}, lane={buffer.rpartition('_')[0]})" for buffer in zeros]
    body += [f"    for i in range({turns}):", *(f"        {op}" for op in ops)]
    return "\n".join(declared), "\n".join(body)


def _compute(loop: Loop) -> tuple[str, str]:
    edge, elements = round((loop.amount / 2) ** (1 / 3)), loop.copy_bytes // 8
    declared = ["compute = lane()", _scratch("x", edge, edge), _scratch("y", edge, edge)]
    declared += [_scratch("from_", elements), _scratch("to_", elements)]
    body = [
        "    zero(x, lane=compute)",
        "    zero(from_, lane=compute)",
        f"    for i in range({loop.iterations}):",
        "        matmul(y, x, x, lane=compute)",
        "        copy(to_, from_, lane=compute)",
    ]
    return "\n".join(declared), "\n".join(body)


def _scratch(name: str, *shape: int, slots: int = 1) -> str:
    sizes = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
    return f'{name} = scratch(({sizes}), "float32", on={MESH}{f", slots={slots}" if slots > 1 else ""})'


def _first_steps(body: Sequence[Statement]) -> tuple[Statement, ...]:
    """Return rings without what follows their first step, nor the sums that a left-out step would feed."""
    is_left_out = False

    def first_step(op: Op) -> tuple[Op, ...]:
        nonlocal is_left_out
        if isinstance(op, Permute) and op.step is not None:
            is_left_out = op.step.index != 0
        return () if is_left_out and isinstance(op, (Permute, Add)) else (op,)

    return rewrite(body, first_step)
