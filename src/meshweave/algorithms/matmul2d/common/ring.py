"""Products overlapped with the ring steps of one moving matrix (Wang et al., ASPLOS '23, section 3).

An all-gather around a ring delivers one part after another, so the product can start with the local part and
take each further part as it arrives. A reduce-scatter passes partial sums on, so the product of a part is needed
just before that part moves, and the product of the local part comes last. In S iterations, several parts share a
product: fewer and larger products, at the price of a coarser overlap ("unrolling"; MeshSlice, section 4.2).

Parts travel in both directions around the ring at once, as in Wang et al., so that both links of an axis are busy:
of the P - 1 parts that must come to a chip, P // 2 come forwards and (P - 1) // 2 backwards, each whole. The ring
takes P // 2 steps then. On two chips both directions are the same link, and one is used. The ring steps that one
iteration takes in a direction are issued as one operation, so that S iterations pay for S launches.

The iteration of the local part, the first of a gather and the last of a scatter, moves nothing. The P // 2 steps
are divided among the other S - 1 iterations as evenly as possible, so that S is at most P // 2 + 1. Parts that
travel in the same direction in one iteration share a product. They are neighbours, except that they may wrap
around the end of the matrix; then they are two products. This module writes the program for any operand and axis,
`ring_costs` says what it costs; `wang` uses it on a 2D mesh, `one_dim` for 1D tensor parallelism and FSDP.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from meshweave.algorithms.matmul2d.common.extents import chunk_extent, largest_extent
from meshweave.algorithms.matmul2d.common.ops import collective_of, local_product, moving_scratch, with_ops
from meshweave.algorithms.matmul2d.common.problem import MESH, Matmul2dProblem, MovingMatrix, Placements
from meshweave.algorithms.matrix_views import full_matrix, matrix_slice
from meshweave.ir.program import Buffer, Program
from meshweave.ir.program.expressions import Index, Var, binary, minimum
from meshweave.ir.program.ops import Add, Op, Permute
from meshweave.ir.program.release import CollectiveStep
from meshweave.ir.program.views import FULL, Range, Selector, View
from meshweave.lower.rings import BACK

DimLetters = tuple[str, str]
"""Which of m, n, k the two dims of a stored matrix are."""

Steps = tuple[int, int]
"""The ring steps [start, stop) of an iteration."""


@dataclass(frozen=True)
class RingDirection:
    """One direction in which parts of a matrix travel around a ring of chips, one chip per ring step.

    Attributes:
        sign: 1 (forwards) if a chip receives the parts of the chips after it, -1 (backwards) of those before it.
        steps: the number of ring steps in this direction.
        suffix: what the names of the direction's lane, ops and buffers end in.
    """

    sign: int
    steps: int
    suffix: str

    def steps_in(self, iteration: Steps) -> range:
        """Return which ring steps of an iteration (start, stop) this direction takes: those below its `steps`."""
        return range(iteration[0], min(iteration[1], self.steps))


@dataclass(frozen=True)
class RingProduct:
    """A product that overlaps with the ring steps of one matrix, which travels in parts, one per chip of the ring.

    The product is computed in iterations. One multiplies the chip's own part; each other one takes some ring steps
    in both directions, and has a product per direction for the parts that travel.

    Attributes:
        placements: for each of "a", "b" and "c" one placement per mesh axis.
        moving: the matrix that goes around its mesh axis in parts.
        exposed: a second matrix that moves, by one collective before (or after) all products, or None.
        num_iterations: the iterations asked for, that of the own part included. With P > 1 chips there are at
            least 2 and at most P // 2 + 1, whatever is asked for.
    """

    problem: Matmul2dProblem
    placements: Placements
    moving: MovingMatrix
    exposed: MovingMatrix | None
    num_iterations: int

    @property
    def num_parts(self) -> int:
        """Return the number of parts of the moving matrix, one per chip of the ring."""
        return self.problem.axis_size(self.moving.axis)

    @property
    def dim_letters(self) -> dict[str, DimLetters]:
        """Return for each of "a", "b" and "c" which of "m", "n", "k" its two dims, as stored, are."""
        dataflow = self.problem.dataflow
        return {
            "a": ("k", "m") if dataflow == "rs" else ("m", "k"),
            "b": ("n", "k") if dataflow == "ls" else ("k", "n"),
            "c": ("m", "n"),
        }

    @property
    def cut_letter(self) -> str:
        """Return which of "m", "n", "k" is the dim that is cut into parts."""
        return self.dim_letters[self.moving.operand][self.moving.dim]

    @property
    def cut_size(self) -> int:
        """Return the global size, in elements, of the dim that is cut into parts."""
        return self.problem.stored_shape(self.moving.operand)[self.moving.dim]

    @property
    def part_size(self) -> int:
        """Return the size of the largest part along the dim that is cut, in elements."""
        return -(-self.cut_size // self.num_parts)

    @property
    def directions(self) -> tuple[RingDirection, ...]:
        """Return the directions in which parts travel, forwards first; one for 2 chips, none for 1."""
        both = RingDirection(1, self.num_parts // 2, ""), RingDirection(-1, (self.num_parts - 1) // 2, BACK)
        return tuple(direction for direction in both if direction.steps)

    @cached_property
    def iterations(self) -> tuple[tuple[int, int], ...]:
        """Return the ring steps (start, stop) of each iteration that moves parts, in order."""
        sizes = (size for count, size, _ in self.iteration_sizes for _ in range(count))
        return tuple(pairwise(accumulate(sizes, initial=0)))

    @property
    def iteration_sizes(self) -> list[tuple[int, int, int]]:
        """Return the iterations that move parts, equal neighbours together, the largest first; [] for one chip.

        Each entry is (number of iterations, ring steps forwards in each, ring steps backwards in each). The
        iteration of the chip's own part is not counted.
        """
        steps = self.num_parts // 2
        count = min(max(self.num_iterations - 1, 1), steps)
        if not count:
            return []
        each, rest = divmod(steps, count)
        last = each - (self.num_parts + 1) % 2  # with an even number of parts one step more goes forwards
        sizes = [(rest, each + 1, each + 1), (count - rest - 1, each, each), (1, each, last)]
        return [size for size in sizes if size[0]]

    def bounds(self, part: Index) -> tuple[Index, Index]:
        """Return (start, stop) of part number `part` (from 0), in elements of the dim that is cut into parts.

        `part` may be an expression; the results are expressions then.
        """
        begin, end = part * self.part_size, (part + 1) * self.part_size
        if self.cut_size % self.num_parts:
            return minimum(begin, self.cut_size), minimum(end, self.cut_size)
        return begin, end

    def extent(self, part: Index) -> Index:
        """Return the size of part number `part` (from 0) along the dim that is cut into parts, in elements.

        `part` may be an expression; the result may be one then.
        """
        if self.cut_size % self.num_parts == 0:
            return self.part_size
        begin, end = self.bounds(part)
        return end - begin

    def local_extents(self) -> dict[str, int]:
        """Return {"m": ..., "n": ..., "k": ...}: the sizes, in elements, of all products of one chip together.

        They are those of the chip with the largest shards. The dim that is cut into parts has its global size.
        """
        sizes = {"m": self.problem.m, "n": self.problem.n, "k": self.problem.k}
        for operand, letters in self.dim_letters.items():
            whole = {
                matrix.dim
                for matrix in (self.moving, self.exposed)
                if matrix is not None and matrix.operand == operand
            }
            for dim, letter in enumerate(letters):
                if dim not in whole:
                    local = largest_extent(self.problem, self.placements, operand, dim)
                    sizes[letter] = min(sizes[letter], local)
        sizes[self.cut_letter] = self.cut_size
        return sizes


# --- program --------------------------------------------------------------------------------------------


def build(ring: RingProduct, name: str) -> Program:
    """Return the program of a ring product, called `name`."""
    builder = _RingProgramBuilder(ring)
    body = tuple(builder.body())
    declared = ring.problem.declarations(name, ring.placements)
    return with_ops(declared, builder.buffers.values(), dict.fromkeys(op.lane for op in body), body)


class _RingProgramBuilder:
    def __init__(self, ring: RingProduct) -> None:
        self.ring = ring
        self.buffers: dict[str, Buffer] = {}
        self.coordinate = Var(f"{MESH}.{ring.moving.axis}")
        self.buffer_of = {operand: operand for operand in "abc"}
        """The buffer from which products read an operand, or into which they write the result."""

    def body(self) -> Iterator[Op]:
        """Yield the collective of the operand that is not hidden, if any, and the ring with its products."""
        ring, exposed = self.ring, self.ring.exposed
        if exposed is not None and ring.problem.axis_size(exposed.axis) > 1:
            whole = self._whole_buffer(exposed)
            if exposed.scattered:
                self.buffer_of["c"] = whole
            else:
                self.buffer_of[exposed.operand] = whole
                yield self._collective(exposed, whole)
        yield from self._scatter() if ring.moving.scattered else self._gather()
        if exposed is not None and exposed.scattered and self.buffer_of["c"] != "c":
            yield self._collective(exposed, self.buffer_of["c"])

    def _collective(self, exposed: MovingMatrix, whole: str) -> Op:
        """Return the gather of a matrix into buffer `whole`, or the reduce-scatter from there."""
        size = self.ring.problem.stored_shape(exposed.operand)[exposed.dim]
        sizes = chunk_extent(size, self.ring.problem.axis_size(exposed.axis), Var("peer"))
        return collective_of(exposed, full_matrix(whole), full_matrix(exposed.operand), sizes)

    def _gather(self) -> Iterator[Op]:
        ring, moving = self.ring, self.ring.moving
        yield self._product(*ring.bounds(self.coordinate), own=True, first=True)
        if ring.num_parts == 1:
            return
        whole = self.buffer_of[moving.operand] = self._whole_buffer(moving)
        for iteration in ring.iterations:
            for step in range(*iteration):
                for direction in ring.directions:
                    if step in direction.steps_in(iteration):
                        at = self._part_from(direction.sign * step)
                        sent = self._part(whole, at) if step else full_matrix(moving.operand)
                        got = self._part(whole, self._part_from(direction.sign * (step + 1)))
                        yield self._permute(got, sent, -direction.sign, step, direction, iteration)
            for direction in ring.directions:
                yield from self._products(
                    *(direction.sign * (step + 1) for step in direction.steps_in(iteration))
                )

    def _scatter(self) -> Iterator[Op]:
        ring = self.ring
        if ring.num_parts == 1:
            yield self._product(*ring.bounds(self.coordinate), own=True, first=True)
            return
        own, whole = self.buffer_of["c"], self._whole_buffer(ring.moving)
        inboxes = {direction: self._inbox(direction) for direction in ring.directions}
        for iteration in ring.iterations:
            self.buffer_of["c"] = whole
            for direction in ring.directions:
                yield from self._products(
                    *(direction.sign * (direction.steps - step) for step in direction.steps_in(iteration))
                )
            for step in range(*iteration):
                for direction in ring.directions:
                    if step in direction.steps_in(iteration):
                        yield from self._pass_on(whole, inboxes[direction], step, direction, iteration)
        self.buffer_of["c"] = own
        yield self._product(*ring.bounds(self.coordinate), own=True, first=True)
        for direction in ring.directions:
            yield self._add(
                full_matrix("c"),
                self._box(inboxes[direction], self.coordinate, direction.steps - 1),
                direction,
            )

    def _pass_on(
        self, whole: str, inbox: str, step: int, direction: RingDirection, iteration: Steps
    ) -> Iterator[Op]:
        """Write one step of a scatter: add the local term to the sum that has arrived, and send it on."""
        part = self._part_from(direction.sign * (direction.steps - step))
        sent = self._part(whole, part)
        if step:
            arrived = self._box(inbox, part, step - 1)
            yield self._add(arrived, sent, direction)
            sent = arrived
        got = self._box(inbox, self._part_from(direction.sign * (direction.steps - step - 1)), step)
        yield self._permute(got, sent, direction.sign, step, direction, iteration)

    def _part_from(self, places: int) -> Index:
        """Return the part of the chip so many places after this one."""
        if not places:
            return self.coordinate
        return (self.coordinate + places if places > 0 else self.coordinate - -places) % self.ring.num_parts

    def _products(self, *places: int) -> Iterator[Op]:
        """Write the products of the parts of the chips so many places after this one, which are neighbours.

        They are one product, or two where the parts wrap around the end of the matrix.
        """
        if not places:
            return
        ring = self.ring
        first, last = self._part_from(min(places)), self._part_from(max(places))
        begin, end = ring.bounds(first)[0], ring.bounds(last)[1]
        if first == last:
            yield self._product(begin, end)
            return
        wraps = binary("<", last, first)
        yield self._product(begin, wraps * ring.cut_size + (1 - wraps) * end)
        yield self._product(0, wraps * end)

    def _product(self, begin: Index, end: Index, own: bool = False, first: bool = False) -> Op:
        """Return the product over [begin, end) of the cut dim. An `own` part is read from the shard itself."""
        ring, views = self.ring, {}
        for operand, letters in ring.dim_letters.items():
            if own and operand == ring.moving.operand:
                views[operand] = full_matrix(operand)
                continue
            selectors: list[Selector] = [
                Range(begin, end) if letter == ring.cut_letter else FULL for letter in letters
            ]
            views[operand] = View(self.buffer_of[operand], tuple(selectors))
        return local_product(ring.problem.dataflow, views, int(ring.cut_letter == "k" and not first))

    # --- moving ---------------------------------------------------------------------------------------

    def _permute(
        self, got: View, sent: View, shift: int, step: int, direction: RingDirection, iteration: Steps
    ) -> Op:
        """Return ring step `step` of a direction, one of those of an iteration."""
        axis, steps = self.ring.moving.axis, direction.steps_in(iteration)
        return Permute(
            over=f"{MESH}.{axis}",
            out=got,
            src=sent,
            shift=shift,
            step=step_mark(self.ring, step - steps.start, len(steps)),
            lane=axis + direction.suffix,
            name=f"step{step}_{self.ring.moving.operand}{direction.suffix}",
        )

    def _add(self, out: View, src: View, direction: RingDirection) -> Op:
        lane = self.ring.moving.axis + direction.suffix
        return Add(out=out, src=src, lane=lane, name=f"add_{self.ring.moving.operand}{direction.suffix}")

    def _part(self, buffer: str, part: Index) -> View:
        return matrix_slice(buffer, self.ring.moving.dim, Range(*self.ring.bounds(part)))

    def _box(self, buffer: str, part: Index, step: int) -> View:
        return matrix_slice(buffer, self.ring.moving.dim, Range(0, self.ring.extent(part)), step % 2)

    def _whole_buffer(self, moving: MovingMatrix) -> str:
        """Declare scratch `x_g` for a moving operand along its whole dim, which is outermost in memory."""
        size = self.ring.problem.stored_shape(moving.operand)[moving.dim]
        return self._scratch(f"{moving.operand}_g", moving, size, 1)

    def _inbox(self, direction: RingDirection) -> str:
        return self._scratch(f"c_in{direction.suffix}", self.ring.moving, self.ring.part_size, 2)

    def _scratch(self, name: str, moving: MovingMatrix, along: int, slots: int) -> str:
        ring = self.ring
        self.buffers[name] = moving_scratch(ring.problem, ring.placements, moving, name, along, slots)
        return name


def step_mark(ring: RingProduct, index: int, count: int) -> CollectiveStep | None:
    """Return the `step` argument of the permute op for ring step `index` of `count` that are launched together.

    Step 0 pays for the launch. The result is None in a ring of one direction (2 chips), where each ring step is
    launched on its own.
    """
    return CollectiveStep("send_recv", index, count, num_directions=2) if len(ring.directions) == 2 else None
