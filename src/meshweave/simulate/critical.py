"""The critical path of a simulated run, and lower bounds on the duration of any schedule.

The path is followed backwards from the op that ends last. If no partner of an op was issued after the op itself,
the whole op is on the path, and the walk goes on with the op whose end let it be issued. Otherwise the path has
the op only from the issue of its last partner on, and the walk goes on with the op whose end let the partner be
issued. So segments follow each other without gaps, and their times sum exactly to the run's duration. Where the
machine has hosts and no op ended when an op was issued, its host had just come to it: the path then has what the
host issued since it began, or since the end of the collective that it waited for last.

Launch and synchronisation of a transfer are the machine's constants; what both ends of a message pack counts as
launch. The remaining time counts as transfer, including delays by late neighbours and shared links.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from meshweave.base.units import work_ps
from meshweave.cost.packing import message_price, op_price
from meshweave.cost.price import Price
from meshweave.ir.program.ops import AllReduce, Collective, Exchange, Op, Permute, Recv, Send
from meshweave.ir.work import Compute, Transfer, Work, work_of
from meshweave.simulate.partners import Partners
from meshweave.simulate.result import LinkUse, Simulation

CATEGORIES = ("compute", "copy", "launch", "sync", "transfer", "host", "wait")
_LISTED, _MESSAGES = "listed groups", "point-to-point messages"
_WORDS = {
    "compute": ("compute", "products"),
    "copy": ("memory", "copies and additions"),
    "launch": ("launches", "launches of products and communication"),
    "sync": ("latency", "synchronisation of communication steps"),
    "transfer": ("links", "transfers"),
    "host": ("the host", "ops that the host of a rank issues"),
    "wait": ("the order of lanes", "waits for a turn in a lane"),
}


@dataclass(frozen=True, slots=True)
class PathSegment:
    """A segment of the critical path: an op, from the issue of its last partner (or its own) to its end.

    Attributes:
        rank, index: the global rank, and the number of the op among those of the rank.
        kind: the kind of the op; "host" for time in which the host of the rank comes to the op, "wait" for other
            time in which nothing on the path runs.
        axis: of communication its mesh axis ("tp.row") or whole mesh ("tp"), else "listed groups" or
            "point-to-point messages"; "" of all else.
        start_ps, end_ps: picoseconds from the start of the run.
        launch_ps, sync_ps: the picoseconds of it that are launch and synchronisation.
        slowed_ps: its picoseconds beyond those of the same op alone on an idle machine, at least 0.
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
        """Return what its time goes to, launch and sync aside: compute, copy, transfer, host or wait."""
        if self.kind in ("matmul", "call"):
            return "compute"
        if self.kind in ("host", "wait"):
            return self.kind
        return "transfer" if self.axis else "copy"


@dataclass(frozen=True)
class TimeBound:
    """A lower bound on the duration of the same products and messages in any order.

    It is what the busiest resource of a kind takes at its full rate.
    `name` is its kind: "compute", "memory" or "link". `detail` says which one: "FLOPs of rank 3".
    """

    name: str
    time_ps: int
    detail: str


@dataclass(frozen=True)
class CriticalPath:
    """The critical path of a run: `segments` in order of time, and lower `bounds`, the largest first."""

    segments: tuple[PathSegment, ...]
    duration_ps: int
    bounds: tuple[TimeBound, ...]

    @cached_property
    def ps_by_category(self) -> dict[str, int]:
        """Return the picoseconds of the path for each of `CATEGORIES`; they sum exactly to the duration."""
        parts = dict.fromkeys(CATEGORIES, 0)
        for step in self.segments:
            parts["launch"] += step.launch_ps
            parts["sync"] += step.sync_ps
            parts[step.category] += step.end_ps - step.start_ps - step.launch_ps - step.sync_ps
        return parts

    @cached_property
    def transfer_ps_by_axis(self) -> dict[str, int]:
        """Return {`PathSegment.axis`: picoseconds of transfer on the path}, the largest first.

        Launch and synchronisation are left out, as in the category "transfer".
        """
        axes: dict[str, int] = defaultdict(int)
        for step in self.segments:
            if step.category == "transfer":
                axes[step.axis] += step.end_ps - step.start_ps - step.launch_ps - step.sync_ps
        return dict(sorted(axes.items(), key=lambda item: -item[1]))

    @cached_property
    def slowed_ps(self) -> int:
        """Return the picoseconds that shared links, shared memory and late neighbours add to ops of the path."""
        return sum(step.slowed_ps for step in self.segments)

    @property
    def duration_over_bound(self) -> float | None:
        """Return the duration divided by the largest lower bound, 1 or more; None if no bound is above 0."""
        most = self.bounds[0].time_ps if self.bounds else 0
        return self.duration_ps / most if most else None

    @cached_property
    def verdict(self) -> str:
        """Return one line of text: the largest category of the path, and the duration over the largest bound."""
        if not self.duration_ps:
            return "bound by nothing: no time passes"
        parts = self.ps_by_category
        most = max(parts, key=lambda name: parts[name])
        name, description = _WORDS[most]
        text = f"{_percent(parts[most], self.duration_ps)} of the critical path are {description}"
        if most == "transfer":
            by_axis = self.transfer_ps_by_axis
            axis, ps = next(iter(by_axis.items()))
            if len(by_axis) == 1 or 2 * ps > parts[most]:
                name = f"links {_over(axis)}"
            text += f", {_percent(ps, self.duration_ps)} {_over(axis)}" if len(by_axis) > 1 else ""
        if self.duration_over_bound is not None:
            text += f"; {self.duration_over_bound:.2f} x the {self.bounds[0].name} bound"
        return f"bound by {name}: {text}"


def _over(axis: str) -> str:
    if axis in (_LISTED, _MESSAGES):
        return f"of {axis}"
    return f"of axis {axis}" if "." in axis else f"of mesh {axis}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %"


def critical_path(run: Simulation) -> CriticalPath:
    """Return the critical path of a simulation with its lower bounds."""
    steps = tuple(_BackwardWalk(run).segments())[::-1]
    return CriticalPath(steps, run.duration_ps, tuple(sorted(_bounds(run), key=lambda bound: -bound.time_ps)))


# --- bounds ---------------------------------------------------------------------------------------------


def _bounds(run: Simulation) -> Iterator[TimeBound]:
    count, chip = len(run.ranks), run.machine.cluster.chip
    amounts = run.outputs["carried"]
    for name, values, rate, detail in (
        ("compute", amounts[count : 2 * count], int(chip.effective_flops_per_s), "FLOPs of rank {}"),
        ("memory", amounts[:count], int(chip.memory_bytes_per_s), "bytes through the memory of rank {}"),
    ):
        if len(values):
            at = int(np.argmax(values))
            yield TimeBound(name, work_ps(int(values[at]), rate), detail.format(int(run.ranks[at])))
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
        self.written = tuple(run.program.ops()) if run.machine.copies else ()
        self.seen: set[int] = set()

    def segments(self) -> Iterator[PathSegment]:
        """Yield the segments of the critical path, from the end of the run back to its start."""
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
                kind = "wait"  # no rule of the simulator leads here; the segment keeps the sum exact
                if self.run.machine.cluster.host is not None:
                    at, kind = self._host_began(freed), "host"
                begin = 0 if at is None else int(self.ended[at])
                place = self.partners.rank_and_index(freed)
                if end > begin:
                    yield PathSegment(*place, self.partners.op(freed).label, kind, "", begin, end, 0, 0, 0)
                end = begin

    def _before(self, op: int) -> int | None:
        """Return the op whose end let `op` be issued, or the one before it in its lane if issued at that time."""
        while True:
            cause = int(self.run.outputs["cause"][op])
            if cause >= 0 and self.ended[cause] == self.issued[op]:
                return cause
            previous = self._previous(op)
            if previous is None:
                return cause if cause >= 0 else None
            op = previous

    def _host_began(self, op: int) -> int | None:
        """Return the collective before `op` whose end its rank's host waited for last, or None."""
        host = self.run.machine.cluster.host
        rank, index = self.partners.rank_and_index(op)
        for back in range(1, index + 1) if host is not None and host.waits else ():
            earlier = self.partners.ops(rank)[index - back].op
            if isinstance(earlier, Collective) and not isinstance(earlier, Permute):
                return op - back
        return None

    def _previous(self, op: int) -> int | None:
        """Return the op before `op` in its lane if both were issued at one time: `op` waited for it."""
        rank, index = self.partners.rank_and_index(op)
        ops = self.partners.ops(rank)
        for back in range(1, index + 1):
            if ops[index - back].op.lane == ops[index].op.lane:
                return op - back if self.issued[op - back] == self.issued[op] else None
        return None

    def _price(self, number: int, op: Op, work: Work) -> Price:
        if not isinstance(op, (Send, Recv)):
            rank, _ = self.partners.rank_and_index(number)
            return op_price(self._unfolded(number, work), op, rank, self.run.machine)
        pair = number, self.partners.other_end(number)
        sent, received = pair if isinstance(op, Send) else pair[::-1]
        send, recv = self.partners.op(sent).op, self.partners.op(received).op
        assert isinstance(send, Send) and isinstance(recv, Recv)
        ends = self.partners.rank_and_index(sent)[0], self.partners.rank_and_index(received)[0]
        return message_price(self.run.program, send, recv, ends, self.run.machine)

    def _unfolded(self, number: int, work: Work) -> Work:
        """Return the work of an op with all members of its group, also those that the machine folds."""
        copies = self.run.machine.copies
        op = self.written[int(self.run.template_ops[number])] if copies else None
        if not isinstance(op, Collective) or op.over not in copies or not isinstance(work, Transfer):
            return work
        assert isinstance(op.over, str)
        if isinstance(op, Exchange):  # whose text has all members
            return replace(work, axis=op.over)
        times = copies[op.over]
        part = work.part_bytes if isinstance(op, AllReduce) else work.part_bytes // times
        return replace(work, axis=op.over, num_ranks=work.num_ranks * times, part_bytes=part)

    def _segment(self, number: int, start: int, end: int) -> PathSegment:
        bound = self.partners.op(number)
        work = work_of(self.run.program, bound.op)
        cost = self._price(number, bound.op, work)
        took = end - start
        launch = min(cost.launch_ps + cost.pack_ps, took)
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


def _group_name(op: Op) -> str:
    """Return the heading of communication that runs along no mesh axis."""
    return _LISTED if isinstance(op, Collective) else _MESSAGES
