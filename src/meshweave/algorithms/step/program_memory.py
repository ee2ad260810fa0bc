"""Count the bytes that the program of a step holds at once, and what a chip holds besides.

The program of one layer says what its parts hold inside, what the forward part leaves, and which part reads that
last. A walk through the actions of a pipeline rank adds these up, layer by layer, without the program of the step:

    throughout      shards of weights and gradients; whole ones, and buckets of two layers, as ZeRO has them
    a part          the most inside it above what is there before, and what is there more or less after it
    after a part    gradients of matrices until they are added to a bucket, or packed into one of their own

Matrices are views of their buckets, and updated weights lie where the weights were. What a software stack keeps
otherwise (activated gates, masks, copies, scores, logits in float32, shards in place of the whole) is a term of
its own beside those of optimizer, allocator, context and communicators.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from operator import mul

from meshweave.algorithms.pipeline.actions import ActionKind
from meshweave.algorithms.step.block_program import StepPieces, step_pieces
from meshweave.algorithms.step.block_stage import PART_OF_ACTION
from meshweave.algorithms.step.memory import GATHERED_LAYERS
from meshweave.algorithms.step.placement import sharding_groups
from meshweave.algorithms.step.stage_settings import runs_of
from meshweave.algorithms.step.stages import Stages
from meshweave.algorithms.step.units import CONSTANTS, PER_MICRO_BATCH, PartKind, Unit
from meshweave.base.units import dtype_bytes
from meshweave.ir.analysis.lifetimes import LOCAL, lifetimes


@dataclass(frozen=True)
class HeldBytes:
    """The bytes that a chip of a pipeline rank holds at its peak.

    Attributes:
        total: all but optimizer states: weights, gradients and temporary buffers.
        between: the share of `total` that is in temporary buffers when the part of a stage (forward, backward)
            with the peak begins: what earlier parts left, such as activations.
    """

    total: int
    between: int


def held_bytes(step: Stages) -> tuple[HeldBytes, ...]:
    """Return for each pipeline rank the bytes that a chip holds at its peak, when it runs the program of a step.

    Raises:
        UnsupportedError: no program is written for such a step (`lay_step`), or layers have experts or latent
            attention.
    """
    walk = _Walk(step, step_pieces(step))
    return tuple(map(walk.held, range(step.parallelism.pipeline)))


def program_memory(step: Stages) -> tuple[int, ...]:
    """Return for each pipeline rank the bytes of weights, gradients and buffers on a chip at its peak.

    Raises:
        UnsupportedError: no program is written for such a step (`lay_step`), or layers have experts or latent
            attention.
    """
    return tuple(each.total for each in held_bytes(step))


@dataclass(frozen=True)
class _Held:
    """Bytes of a part of a unit: the most inside it, and after it, above those before it."""

    most: int
    after: int


class _Pieces:
    """What the parts of a unit hold.

    Args:
        is_split: whether gradients of weights have a part of their own.
        runs_once: whether there is one micro-batch.
    """

    def __init__(self, unit: Unit, *, is_split: bool, runs_once: bool) -> None:
        self.unit, self._runs_once = unit, runs_once
        self.parts: tuple[PartKind, ...] = ("forward", "input_grad", "weight_grad")
        if not is_split:
            self.parts = "forward", "backward"
        self.gradients = sum(prod(weight.shape) * dtype_bytes(weight.dtype) for weight in unit.weights)
        self._always = {weight.name for weight in unit.weights} | {*PER_MICRO_BATCH, *CONSTANTS, "loss"}

    @cached_property
    def unsplit(self) -> _Pieces:
        """Return the same pieces with gradients of weights as a part of the backward part."""
        return _Pieces(self.unit, is_split=False, runs_once=self._runs_once)

    @cached_property
    def _last_part(self) -> dict[str, PartKind]:
        """Return the last part that reads each buffer between parts."""
        return {
            buffer.name: part
            for part in self.parts
            if (program := self.unit.program(part)) is not None
            for buffer in program.buffers
            if buffer.kind == "input"
        }

    @cached_property
    def held(self) -> dict[PartKind, tuple[_Held, _Held]]:
        """Return what each part holds when it runs first, and later: what it writes by parts stays."""
        return {part: self._held(part) for part in self.parts}

    def _held(self, part: PartKind) -> tuple[_Held, _Held]:
        program = self.unit.program(part)
        if program is None:
            return _Held(0, 0), _Held(0, 0)
        program = program.expanded
        rank, of_both, of_first = program.ranks[0], _Changes(), _Changes()
        again = lifetimes(program, rank, times=2)
        for (name, slot), lives in lifetimes(program, rank, {*LOCAL, "input", "output"}).items():
            kind, size = program.buffer_of[name].kind, program.buffer_bytes(name, rank)
            first, last = lives[0][0], lives[-1][1]
            if name in self._always:
                continue
            if kind == "output":
                of_both.append((first, size))
            elif kind == "input":
                of_both += [(last + 1, -size)] if self._last_part[name] == part else []
            elif len(again[name, slot]) < 2 * len(lives) and not self._runs_once:  # nothing writes all of it
                of_first.append((first, size))
            else:
                of_both += [change for begin, end in lives for change in ((begin, size), (end + 1, -size))]
        return _sum_of([*of_both, *of_first]), _sum_of(of_both)


_Changes = list[tuple[int, int]]
"""(op index, bytes) of what comes and goes in a part."""


def _sum_of(changes: _Changes) -> _Held:
    total = defaultdict[int, int](int)
    for index, change in changes:
        total[index] += change
    level = most = 0
    for index in sorted(total):
        level += total[index]
        most = max(most, level)
    return _Held(most, level)


class _Walk:
    """A walk through the actions of a pipeline rank."""

    def __init__(self, step: Stages, of: StepPieces) -> None:
        self.step, self.of, self.settings = step, of, of.settings
        split = {leaf.stage for leaf in of.schedule.leaves() if leaf.kind is ActionKind.WEIGHT_GRAD}
        p, known = step.parallelism, step.problem.cache("held")
        sizes = p.strategy, p.tensor_mesh, p.context, p.experts, p.micro_batch, p.recompute
        self.pieces: list[dict[str, _Pieces]] = []
        for stage, units in enumerate(of.units):
            self.pieces.append({})
            for unit, _ in units:
                key = unit.name, stage in split, step.micro_batches == 1, sizes
                if key not in known:
                    known[key] = _Pieces(unit, is_split=key[1], runs_once=key[2])
                self.pieces[stage][unit.name] = known[key]
        self._begun: set[tuple[str, str]] = set()
        self.weight, self.gradient = (
            dtype_bytes(self.settings.dtype),
            dtype_bytes(self.settings.gradient_dtype),
        )

    def held(self, rank: int) -> HeldBytes:
        """Return the bytes that a chip of a pipeline rank holds at its peak."""
        most, between = self.peak(rank)
        return HeldBytes(self.throughout(rank) + most, between)

    # --- what is there throughout -----------------------------------------------------------------------

    def throughout(self, rank: int) -> int:
        """Return the bytes that a chip holds all the time: buckets, and a residual that arrives ahead."""
        stages = [stage for stage, own in enumerate(self.step.stage_ranks) if own == rank]
        ahead = [self._residual(stage) for stage in stages if stage and self.step.micro_batches > 1]
        return max(ahead, default=0) + sum(
            self._buckets(unit, count) for stage in stages for unit, count in self.of.units[stage]
        )

    def _buckets(self, unit: Unit, count: int) -> int:
        settings, e, g = self.settings, self.weight, self.gradient
        shards = unit.shards if settings.is_sharded else 1
        total = -(-count * unit.elements * (e + g) // shards)
        if settings.is_sharded:
            if settings.shards_weights:
                total += e * self._ring(unit, count)
            elif unit.is_layer or not (unit.name == "embedding" or settings.gathers_each):
                total += e * count * unit.elements
            if not settings.reduces_each:
                total += g * count * unit.elements
            groups = sharding_groups(self.step.parallelism)[0]
            if self._is_in_runs(unit, count):
                ranks = accumulate((size for size, _ in groups), mul)
                total += sum(g * unit.elements // each for each in ranks)
            if len(groups) > 1:
                total += -(-(e + g) * self._ring(unit, count) // groups[0][0])
        return total

    def _is_in_runs(self, unit: Unit, count: int) -> bool:
        """Return whether reduced gradients of a unit are written in two runs: their buffer never begins anew."""
        settings = self.settings
        return settings.reduces_each and not self._ring(unit, count) and None not in runs_of(unit, settings)

    @staticmethod
    def _ring(unit: Unit, count: int) -> int:
        """Return the elements of buckets of several layers that take turns in one vector; 0 where there is one."""
        return GATHERED_LAYERS * unit.elements if count >= GATHERED_LAYERS else 0

    # --- what comes and goes ----------------------------------------------------------------------------

    def peak(self, rank: int) -> tuple[int, int]:
        """Return the most bytes of temporary buffers on a chip, and of these those kept between parts."""
        actions = [leaf for action in self.of.schedule.actions[rank] for leaf in action.leaves]
        parts = [(leaf.stage, PART_OF_ACTION[leaf.kind]) for leaf in actions if leaf.kind in PART_OF_ACTION]
        level = most = between = self._gathered_table(rank)
        forwards = sum(part == (0, "forward") for part in parts)
        begun = dict.fromkeys((stage for stage, _ in parts), frozenset[tuple[str, str]]())
        known: dict[object, tuple[int, int, frozenset[tuple[str, str]]]] = {}
        for stage, part in parts:
            key = stage, part, begun[stage]
            if key not in known:
                known[key] = self._of_part(*key)
            above, after, begun[stage] = known[key]
            if level + above > most:
                most, between = level + above, level
            level += after
            forwards -= (stage, part) == (0, "forward")
            if (stage, part) == (0, "forward") and not forwards:
                level -= self._gathered_table(rank)
        return most, between

    def _of_part(
        self, stage: int, part: PartKind, begun: frozenset[tuple[str, str]]
    ) -> tuple[int, int, frozenset[tuple[str, str]]]:
        """Return the most bytes in a part and those after it, above those before, and what has begun after it."""
        self._begun = {*begun}
        level = most = 0
        for above, after in self._part(stage, part):
            most, level = max(most, level + above), level + after
        return most, level, frozenset(self._begun)

    def _gathered_table(self, rank: int) -> int:
        """Return the bytes of an embedding table that is gathered once, which no backward part reads."""
        settings = self.settings
        if rank or not settings.is_sharded or settings.gathers_each or "embedding" not in self.pieces[0]:
            return 0
        return self.weight * next(unit.elements for unit, _ in self.of.units[0] if unit.name == "embedding")

    def _part(self, stage: int, part: PartKind) -> Iterator[tuple[int, int]]:
        """Yield for each unit of a stage the most bytes in a part, and those after it, above those before."""
        pieces, units = self.pieces[stage], {unit.name: (unit, count) for unit, count in self.of.units[stage]}
        order = [name for name in ("embedding",) if name in pieces]
        order += [*self.of.layers[stage], *(name for name in ("head",) if name in pieces)]
        is_forward, is_backward = part == "forward", part in ("backward", "input_grad")
        residual = self._residual(stage)
        if (is_forward and stage) or (is_backward and stage < len(self.pieces) - 1):
            yield residual, residual  # it arrives
        early = 0
        if is_backward and self.of.layers[stage]:  # the first gather begins with the action
            top = self.of.layers[stage][-1]
            early = self._gathered(units[top][0], part, units[top][1])
        yield early, early
        for name in order if is_forward else reversed(order):
            if name == "embedding" and part in ("backward", "weight_grad") and self.step.micro_batches == 1:
                yield 0, -self._rings(stage)
            is_early = early > 0 and name == top
            yield from self._unit(pieces[name], part, *units[name], is_gathered=is_early)
            if is_early:
                yield 0, -early
                early = 0
        if (is_backward and stage) or (is_forward and stage < len(self.pieces) - 1):
            yield 0, -residual  # it is sent

    def _rings(self, stage: int) -> int:
        """Return the bytes of buckets in which layers take turns, which nothing needs after the first layer."""
        settings, total = self.settings, 0
        for unit, count in self.of.units[stage]:
            ring = self._ring(unit, count) if unit.is_layer else 0
            shard = ring // unit.shards if settings.is_sharded else 0
            total += self.weight * ring * settings.shards_weights
            total += self.gradient * (ring + shard) * settings.reduces_each
        return total

    def _residual(self, stage: int) -> int:
        for pieces in self.pieces[stage].values():
            program = pieces.unit.parts.forward
            for name in ("x", "z"):
                if name in program.buffer_of and program.buffer_of[name].tensor is not None:
                    return program.buffer_bytes(name, program.ranks[0])
        return 0

    def _unit(
        self, pieces: _Pieces, part: PartKind, unit: Unit, count: int, *, is_gathered: bool
    ) -> Iterator[tuple[int, int]]:
        of = pieces if part in pieces.parts else pieces.unsplit  # a schedule may split some backward parts
        held = of.held[part][not self._begins(unit, part)]
        whole = 0 if is_gathered else self._gathered(unit, part, count)
        if whole and unit.name == "head":  # until its backward part
            is_new, is_over = self._begins(unit, "whole"), part != "forward"
            yield whole * is_new, whole * is_new
            yield held.most, held.after - whole * is_over
            if is_over:
                self._begun.discard((unit.name, "whole"))
        else:
            yield held.most + whole, held.after
        if part in ("backward", "weight_grad"):
            yield self._packed(unit, count, pieces.gradients)

    def _gathered(self, unit: Unit, part: PartKind, count: int) -> int:
        """Return the bytes of weights that a part of one layer or table gathers for itself."""
        settings = self.settings
        if part == "weight_grad" or not settings.gathers_each or self._ring(unit, count):
            return 0
        if unit.is_layer and not settings.shards_weights:
            return 0
        return self.weight * unit.elements if part == "forward" or unit.name != "embedding" else 0

    def _packed(self, unit: Unit, count: int, gradients: int) -> tuple[int, int]:
        """Return what the bucket of a micro-batch's gradients adds, the most and after it."""
        settings, g = self.settings, self.gradient
        if not settings.reduces_each:
            return 0, -gradients
        ring = self._ring(unit, count)
        shards = unit.shards if settings.is_sharded else 0
        bucket = g * (ring or unit.elements)
        shard = bucket // shards if shards and not self._is_in_runs(unit, count) else 0
        most = max(bucket, bucket + shard - gradients)
        if not ring:
            return most, -gradients
        is_new = self._begins(unit, "ring")
        return most * is_new, (bucket + shard) * is_new - gradients

    def _begins(self, unit: Unit, what: str) -> bool:
        """Return whether something of a unit of the stage begins now, and note that it has."""
        key = unit.name, what
        is_new = key not in self._begun
        self._begun.add(key)
        return is_new
