"""What bounds a simulated run: its critical path, and how much faster no schedule could be.

The path is walked back from the op that ends last. All of an op's time is on it, unless a partner came later:
then only the time from that partner's issue on, and the walk goes on with what let the partner be issued. So the
segments of a path follow each other without gaps, and their times add up to the run's duration, to the
picosecond.

Within a transfer, launch and synchronisation are what the machine's constants say. The rest is transfer, which
includes what late neighbours and shared links added in the middle of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshweave.base.units import work_ps
from meshweave.cost.price import price
from meshweave.ir.program.ops import Collective, Op, Recv, Send
from meshweave.ir.work import Compute, work_of
from meshweave.simulate.partners import Partners
from meshweave.simulate.result import LinkUse, Simulation

CATEGORIES = ("compute", "copy", "launch", "sync", "transfer", "wait")
_LISTED, _MESSAGES = "listed groups", "point-to-point messages"
_WORDS = {
    "compute": ("compute", "products"),
    "copy": ("memory", "copies and additions"),
    "launch": ("launches", "launches of products and communication"),
    "sync": ("latency", "synchronisation of communication steps"),
    "transfer": ("links", "transfers"),
    "wait": ("the order of lanes", "waits for a turn in a lane"),
}


@dataclass(frozen=True, slots=True)
class PathSegment:
    """A segment of the critical path: an op, from when its last partner was there to its end.

    Attributes:
        launch_ps, sync_ps: the parts of it that are launch and synchronisation.
        slowed_ps: how much longer it took than alone on an idle machine.
    """

    rank: int
    index: int
    label: str
    kind: str
    axis: str
    start_ps: int
    end_ps: int
    launch_ps: int
    sync_ps: int
    slowed_ps: int

    @property
    def category(self) -> str:
        """Return where the time goes that is neither launch nor synchronisation."""
        if self.kind in ("matmul", "call"):
            return "compute"
        if self.kind == "wait":
            return "wait"
        return "transfer" if self.axis else "copy"


@dataclass(frozen=True)
class TimeBound:
    """A time that no order of the same products and messages can go below, and what sets it."""

    name: str
    ps: int
    what: str


@dataclass(frozen=True)
class CriticalPath:
    """The critical path of a run: `segments` from its start to its end; `bounds`, the largest first."""

    segments: tuple[PathSegment, ...]
    duration_ps: int
    bounds: tuple[TimeBound, ...]

    @cached_property
    def parts_ps(self) -> dict[str, int]:
        """Return the picoseconds of each category, which sum exactly to the duration."""
        parts = dict.fromkeys(CATEGORIES, 0)
        for step in self.segments:
            parts["launch"] += step.launch_ps
            parts["sync"] += step.sync_ps
            parts[step.category] += step.end_ps - step.start_ps - step.launch_ps - step.sync_ps
        return parts

    @cached_property
    def axes_ps(self) -> dict[str, int]:
        """Return the picoseconds of transfer by mesh axis, the largest first."""
        axes: dict[str, int] = defaultdict(int)
        for step in self.segments:
            if step.category == "transfer":
                axes[step.axis] += step.end_ps - step.start_ps - step.launch_ps - step.sync_ps
        return dict(sorted(axes.items(), key=lambda item: -item[1]))

    @cached_property
    def slowed_ps(self) -> int:
        """Return how much longer the segments took than alone, for shared links and memory and late neighbours."""
        return sum(step.slowed_ps for step in self.segments)

    @property
    def over_bound(self) -> float | None:
        """Return the duration over the largest bound; None where nothing is bounded."""
        most = self.bounds[0].ps if self.bounds else 0
        return self.duration_ps / most if most else None

    @cached_property
    def verdict(self) -> str:
        """Return one line: what most of the path is, and how far the run is from the nearest bound."""
        if not self.duration_ps:
            return "bound by nothing: no time passes"
        parts = self.parts_ps
        most = max(parts, key=lambda name: parts[name])
        name, what = _WORDS[most]
        text = f"{_percent(parts[most], self.duration_ps)} of the critical path are {what}"
        if most == "transfer":
            axis, ps = next(iter(self.axes_ps.items()))
            if len(self.axes_ps) == 1 or 2 * ps > parts[most]:
                name = f"links {_over(axis)}"
            text += f", {_percent(ps, self.duration_ps)} {_over(axis)}" if len(self.axes_ps) > 1 else ""
        if self.over_bound is not None:
            text += f"; {self.over_bound:.2f} x the {self.bounds[0].name} bound"
        return f"bound by {name}: {text}"


def _over(axis: str) -> str:
    if axis in (_LISTED, _MESSAGES):
        return f"of {axis}"
    return f"of axis {axis}" if "." in axis else f"of mesh {axis}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %"


def critical_path(run: Simulation) -> CriticalPath:
    """Return the critical path of a simulation, and the bounds beside it."""
    steps = tuple(_BackwardWalk(run).segments())[::-1]
    return CriticalPath(steps, run.duration_ps, tuple(sorted(_bounds(run), key=lambda bound: -bound.ps)))


# --- bounds ---------------------------------------------------------------------------------------------


def _bounds(run: Simulation) -> Iterator[TimeBound]:
    count, chip = len(run.ranks), run.machine.cluster.chip
    amounts = run.outputs["carried"]
    for name, values, rate, what in (
        ("compute", amounts[count : 2 * count], int(chip.effective_flops_per_s), "FLOPs of rank {}"),
        ("memory", amounts[:count], int(chip.memory_bytes_per_s), "bytes through the memory of rank {}"),
    ):
        if len(values):
            at = int(np.argmax(values))
            yield TimeBound(name, work_ps(int(values[at]), rate), what.format(int(run.ranks[at])))
    busiest = max(run.links, key=_link_ps, default=None)
    if busiest is not None:
        yield TimeBound("link", _link_ps(busiest), f"bytes over {busiest.name}")


def _link_ps(use: LinkUse) -> int:
    return work_ps(use.carried_bytes, use.rate_bytes_per_s)


# --- the walk -------------------------------------------------------------------------------------------


class _BackwardWalk:
    def __init__(self, run: Simulation) -> None:
        self.run = run
        self.issued, self.ended = run.outputs["issued_ps"], run.outputs["ended_ps"]
        self.partners = Partners(run)
        self.seen: set[int] = set()

    def segments(self) -> Iterator[PathSegment]:
        """Yield the segments from the end of the run back to its start."""
        if not self.run.num_ops or not self.run.duration_ps:
            return
        at: int | None = int(np.argmax(self.ended))
        end = self.run.duration_ps
        while at is not None:
            self.seen.add(at)
            partner = self.partners.last_partner(at)
            freed = at if partner is None or partner in self.seen else partner
            start = int(self.issued[freed])
            if end > start:
                yield self._segment(at, start, end)
            at, end = self._before(freed), start
            if end and (at is None or self.ended[at] < end):
                # No op ended just then; none of the simulator's rules leads here, and the sum stays right.
                begin = 0 if at is None else int(self.ended[at])
                place = self.partners.rank_and_index(freed)
                yield PathSegment(*place, self.partners.op(freed).label, "wait", "", begin, end, 0, 0, 0)
                end = begin

    def _before(self, op: int) -> int | None:
        """The op whose end let this one be issued, or one before it in its lane that went at the same time."""
        while True:
            cause = int(self.run.outputs["cause"][op])
            if cause >= 0 and self.ended[cause] == self.issued[op]:
                return cause
            previous = self._previous(op)
            if previous is None:
                return cause if cause >= 0 else None
            op = previous

    def _previous(self, op: int) -> int | None:
        """The op before this one in its lane, if both were issued at one time: this one had to wait its turn."""
        rank, index = self.partners.rank_and_index(op)
        ops = self.partners.ops(rank)
        for back in range(1, index + 1):
            if ops[index - back].op.lane == ops[index].op.lane:
                return op - back if self.issued[op - back] == self.issued[op] else None
        return None

    def _segment(self, number: int, start: int, end: int) -> PathSegment:
        bound = self.partners.op(number)
        work = work_of(self.run.program, bound.op)
        cost = price(work, self.run.machine, ends=_ends(bound.op, self.partners.rank_and_index(number)[0]))
        took = end - start
        launch = min(cost.launch_ps, took)
        sync = min(cost.sync_ps, took - launch)
        slowed = max(took - cost.total_ps, 0)
        axis = "" if isinstance(work, Compute) else work.axis or _group_name(bound.op)
        return PathSegment(
            *self.partners.rank_and_index(number),
            bound.label,
            bound.op.kind,
            axis,
            start,
            end,
            launch,
            sync,
            slowed,
        )


def _ends(op: Op, rank: int) -> tuple[int, int] | None:
    """Of a message: from whom to whom."""
    match op:
        case Send(peer=int(peer)):
            return rank, peer
        case Recv(peer=int(peer)):
            return peer, rank
    return None


def _group_name(op: Op) -> str:
    """For communication beside all mesh axes."""
    return _LISTED if isinstance(op, Collective) else _MESSAGES
