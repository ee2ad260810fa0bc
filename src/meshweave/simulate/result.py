"""The result of a simulation, in columns by op; traces and summaries are computed from it on demand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshweave.base.errors import LayoutError
from meshweave.base.shown import Shown
from meshweave.base.units import format_s, to_s
from meshweave.cost.machine import Machine
from meshweave.cost.placed import Link
from meshweave.ir.program import Program
from meshweave.trace import Span, Trace

PARTS = ("compute_s", "copy_s", "launch_s", "sync_s", "transfer_s", "wait_s")


@dataclass(frozen=True, eq=False)
class LinkUse:
    """The load of one direction of a link, NIC or port.

    `utilisation` (0 to 1) is `carried_bytes` over the bytes that the link could have carried during the run.
    `link` is (kind, chip or host, axis, direction), as `cost.placed.Link` says.
    """

    link: Link
    rate_bytes_per_s: int
    carried_bytes: int
    utilisation: float

    @property
    def name(self) -> str:
        """Return the link in words, as in `link of chip 3, axis 1, backwards`."""
        kind, owner, axis, direction = self.link
        match kind:
            case "link" if direction:
                return f"link of chip {owner}, axis {axis}, {'forwards' if direction == 1 else 'backwards'}"
            case "up" | "down":
                return f"{kind}link of child {owner}, level {axis}"
            case "nic-out" | "nic-in":
                return f"{kind} of host {owner}, NIC {axis}"
            case "nics-out" | "nics-in":
                return f"{kind} of host {owner}"
            case "link" | "inner":  # of a full mesh: (kind, from, to, 0)
                return f"{'inner ' * (kind == 'inner')}link of chip {owner} to chip {axis}"
            case "direct":
                return f"direct link of child {owner} to child {direction}, level {axis}"
        return f"{kind} port of chip {owner}"


@dataclass(frozen=True, eq=False, repr=False)
class Simulation(Shown):
    """The result of `engine.simulate`. All times are integer picoseconds from the start of the run.

    Ops are numbered over all ranks: those of `ranks[i]` are `starts[i]` to `starts[i + 1]`, in program order.

    Attributes:
        ranks: the global ranks, ascending.
        template_ops: for each op, the number of the template op (`Program.ops`) that it is an instance of.
        outputs: the core's columns. By op: `issued_ps`; `ended_ps`; `cause`, the op whose end let it be issued (-1
            at the start); `last_partner`, the last to be issued of the partners that it exchanges messages
            with (-1 if none was issued after the op itself). By rank: `parts_ps`, in the order of `PARTS`.
            `carried`: bytes through the memory of each rank, then FLOPs of each rank, converted to the chip's
            `effective_flops_per_s`, then bytes over each link. And `num_events`.
        link_names: the links, in the order of their bytes in `carried`.
    """

    program: Program
    machine: Machine
    ranks: NDArray[np.int64]
    starts: NDArray[np.int64]
    template_ops: NDArray[np.int64]
    outputs: Mapping[str, Any]
    link_names: tuple[Link, ...]

    def __repr__(self) -> str:
        """Return the program, the ranks, their ops and the time, in a line."""
        return (
            f"<Simulation of {self.program.name}: {len(self.ranks)} ranks, {self.num_ops} ops, "
            f"{format_s(self.duration_s)}>"
        )

    @property
    def num_ops(self) -> int:
        """Return the number of ops of all ranks."""
        return int(self.starts[-1])

    @property
    def num_events(self) -> int:
        """Return the number of events that the core processed."""
        return int(self.outputs["num_events"])

    @cached_property
    def duration_ps(self) -> int:
        """Return the time from the start to the last end, in picoseconds."""
        return int(self.outputs["ended_ps"].max(initial=0))

    @property
    def duration_s(self) -> float:
        """Return the time from the start to the last end, in seconds."""
        return to_s(self.duration_ps)

    def position(self, rank: int) -> int:
        """Return the position of a global rank in `ranks`. Raises LayoutError where it is none of them."""
        at = int(np.searchsorted(self.ranks, rank))
        if at == len(self.ranks) or self.ranks[at] != rank:
            held = (
                f"{len(self.ranks)} ranks, {self.ranks[0]} to {self.ranks[-1]}"
                if len(self.ranks)
                else "no ranks"
            )
            raise LayoutError(f"the simulation of {self.program.name} has {held}; {rank} is none of them")
        return at

    def parts(self, rank: int) -> dict[str, float]:
        """Return the seconds that the ops of a rank spend on each of `PARTS`, summed whether ops overlap or not.

        The parts are products and calls, copies, and of its communication the launches, synchronisations,
        transfers and waits for late partners. What both ends of a message pack counts as launch. Raises
        LayoutError for a rank that was not simulated.
        """
        row = self.outputs["parts_ps"].reshape(-1, len(PARTS))[self.position(rank)]
        return {name: to_s(int(value)) for name, value in zip(PARTS, row, strict=True)}

    def exposed_s(self, rank: int) -> float:
        """Return the seconds of the whole run in which a global rank runs neither products nor calls.

        Raises LayoutError for a rank that was not simulated.
        """
        spans = sorted(
            (span.start_ps, span.end_ps) for span in self.spans(rank) if span.kind in ("matmul", "call")
        )
        busy = end = 0
        for start, stop in spans:
            busy += max(stop - max(start, end), 0)
            end = max(end, stop)
        return to_s(self.duration_ps - busy)

    def spans(self, rank: int) -> Iterable[Span]:
        """Yield the spans of the ops of one global rank in program order.

        Raises LayoutError for a rank that was not simulated.
        """
        position = self.position(rank)
        begin, stop = int(self.starts[position]), int(self.starts[position + 1])
        issued = self.outputs["issued_ps"][begin:stop].tolist()
        ended = self.outputs["ended_ps"][begin:stop].tolist()
        for index, bound in enumerate(self.program.ops_on_rank(rank)):
            op = bound.op
            yield Span(rank, index, op.lane, op.kind, bound.label, issued[index], ended[index])

    def trace(self, ranks: Iterable[int] | None = None) -> Trace:
        """Return the trace of some global ranks, or of all: a span for each of their ops, in order of start.

        Raises LayoutError for a rank that was not simulated.
        """
        wanted = self.ranks.tolist() if ranks is None else ranks
        spans = [span for rank in wanted for span in self.spans(rank)]
        spans.sort(key=lambda span: (span.start_ps, span.rank, span.lane, span.index))
        return Trace(self.program.name, "simulate", tuple(spans))

    @cached_property
    def links(self) -> tuple[LinkUse, ...]:
        """Return the load of every link that carried bytes.

        For the NICs of a host together ("nics-out", "nics-in") it is that of all of them.
        """
        carried = self.outputs["carried"][2 * len(self.ranks) :].tolist()
        whole_s = max(self.duration_s, 1e-12)
        uses = []
        for link, amount in zip(self.link_names, carried, strict=False):
            if amount:  # others were numbered by earlier simulations on an equal machine
                rate, weight = self.machine.weighted_link_rate(link), self.machine.link_weight(link)
                uses.append(LinkUse(link, rate // weight, amount // weight, amount / (rate * whole_s)))
        return tuple(uses)


# --- summary ----------------------------------------------------------------------------------------------

# Summaries of a simulated run: load of links by kind, the busiest links, mean parts of a rank's time.


@dataclass(frozen=True)
class LinkClass:
    """The links of one kind and direction that carried bytes.

    Attributes:
        name: the kind with its axis and direction, or its level.
        count: the number of these links.
        mean_utilisation, max_utilisation: over these links; shares (0 to 1) of what each could carry.
        carried_bytes: of all of them together.
    """

    name: str
    count: int
    mean_utilisation: float
    max_utilisation: float
    carried_bytes: int


def link_classes(run: Simulation) -> list[LinkClass]:
    """Return `Simulation.links` in groups of one kind and direction, the group with the busiest link first.

    Links of a torus are grouped by axis too, and those of a tree by level; all NICs of a kind are one group.
    """
    uses_of: dict[str, list[LinkUse]] = defaultdict(list)
    for use in run.links:
        kind, _, axis, direction = use.link
        if kind == "link" and direction:
            name = f"axis {axis}, {'forwards' if direction == 1 else 'backwards'}"
        else:
            name = f"{kind} level {axis}" if kind in ("up", "down", "direct") else kind
        uses_of[name].append(use)
    classes = [
        LinkClass(
            name,
            len(uses),
            sum(use.utilisation for use in uses) / len(uses),
            max(use.utilisation for use in uses),
            sum(use.carried_bytes for use in uses),
        )
        for name, uses in uses_of.items()
    ]
    return sorted(classes, key=lambda links: (-links.max_utilisation, links.name))


def busiest_links(run: Simulation, count: int) -> list[LinkUse]:
    """Return the `count` links with the largest utilisation, the largest first; equal ones by `LinkUse.link`."""
    return sorted(run.links, key=lambda use: (-use.utilisation, use.link))[:count]


def mean_parts(run: Simulation) -> dict[str, float]:
    """Return the seconds of each of `PARTS` ("compute_s", ...), averaged over all ranks."""
    rows = run.outputs["parts_ps"].reshape(-1, len(PARTS))
    mean = rows.mean(axis=0) if len(rows) else np.zeros(len(PARTS))
    return {name: float(value) / 1e12 for name, value in zip(PARTS, mean, strict=True)}
