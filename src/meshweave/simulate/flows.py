"""Amounts that share links: max-min fair rates in integers.

A flow moves `amount` (bytes or FLOPs) over all its links at once, at most at its cap. Flows that share a
link share its rate max-min fairly (progressive filling). Rates are whole units per second, rounded down;
what is left is kept in units x picoseconds per second, so that nothing drifts.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from meshweave.units import PS_PER_S


@dataclass(eq=False)
class Flow:
    """`ways` is over how many directions the flow spreads: each link carries rate / ways. `nodes` are the
    ops (rank, index) that it serves; those in `freed` do not wait for its end, only for its start. `version`
    tells a scheduled end that a later one has replaced it."""

    number: int
    nodes: tuple[tuple[int, int], ...]
    links: tuple[Hashable, ...]
    cap: int
    left: int
    ways: int = 1
    freed: frozenset[tuple[int, int]] = frozenset()
    rate: int = 0
    since_ps: int = 0
    version: int = 0


@dataclass
class FlowTable:
    """All flows under way. `capacity` gives a link's rate per second."""

    capacity: dict[Hashable, int] = field(default_factory=dict)
    on_link: dict[Hashable, dict[int, Flow]] = field(default_factory=dict)

    def add(self, flow: Flow, now_ps: int) -> list[Flow]:
        """Starts a flow; returns the flows whose rate changed, itself included."""
        flow.since_ps = now_ps
        for link in flow.links:
            self.on_link.setdefault(link, {})[flow.number] = flow
        return self._share(self._together([flow]), now_ps)

    def remove(self, flow: Flow, now_ps: int) -> list[Flow]:
        """Ends a flow; returns the others whose rate changed."""
        neighbours = [other for other in self._together([flow]) if other is not flow]
        for link in flow.links:
            del self.on_link[link][flow.number]
        return self._share(neighbours, now_ps) if neighbours else []

    def end_ps(self, flow: Flow) -> int:
        """When the flow ends if its rate stays."""
        return flow.since_ps + -(-flow.left // flow.rate)

    def _together(self, seeds: Iterable[Flow]) -> list[Flow]:
        """The flows that are tied to the seeds by shared links, directly or through others, by number."""
        found = {flow.number: flow for flow in seeds}
        todo = list(found.values())
        while todo:
            for link in todo.pop().links:
                for number, other in self.on_link.get(link, {}).items():
                    if number not in found:
                        found[number] = other
                        todo.append(other)
        return [found[number] for number in sorted(found)]

    def _share(self, flows: list[Flow], now_ps: int) -> list[Flow]:
        rates = self._max_min(flows)
        changed = []
        for flow in flows:
            rate = rates[flow.number]
            if rate != flow.rate:
                flow.left = max(flow.left - flow.rate * (now_ps - flow.since_ps), 0)
                flow.since_ps, flow.rate = now_ps, rate
                flow.version += 1
                changed.append(flow)
        return changed

    def _max_min(self, flows: list[Flow]) -> dict[int, int]:
        left = {link: self.capacity[link] for flow in flows for link in flow.links}
        open_flows = {flow.number: flow for flow in flows}
        rates: dict[int, int] = {}
        while open_flows:
            # Each open flow takes 1 / ways of its rate on a link; halves keep that in integers.
            halves: dict[Hashable, int] = {}
            for flow in open_flows.values():
                for link in flow.links:
                    halves[link] = halves.get(link, 0) + 2 // flow.ways
            share = min((2 * left[link] // weight for link, weight in halves.items()), default=0)
            capped = [flow for flow in open_flows.values() if flow.cap <= share or not flow.links]
            tight = {link for link, weight in halves.items() if 2 * left[link] // weight <= share}
            chosen = capped or [flow for flow in open_flows.values() if not tight.isdisjoint(flow.links)]
            for flow in chosen:
                rate = rates[flow.number] = max(min(flow.cap, share) if flow.links else flow.cap, 1)
                del open_flows[flow.number]
                for link in flow.links:
                    left[link] = max(left[link] - -(-rate // flow.ways), 0)
        return rates


def amount_left(amount: int) -> int:
    """An amount in the units in which flows count what is left."""
    return amount * PS_PER_S
