"""Amounts that share resources: max-min fair rates in integers.

A flow moves an amount (bytes or FLOPs) over all its resources at once, at most at its cap; it uses its weight
times its rate of each. Flows that share a resource share its rate max-min fairly (progressive filling). Rates
are whole units per second, rounded down; what is left is kept in units x picoseconds per second, so that
nothing drifts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from meshweave.base.units import PS_PER_S

Resource = Hashable


@dataclass(eq=False)
class Flow:
    """An amount under way.

    Attributes:
        uses: its weight on each resource.
        cap: most units per second.
        left: what is left, in units x picoseconds per second.
        ended: called when the flow is over.
        version: tells a scheduled end that a later one has replaced it.
    """

    uses: Mapping[Resource, int]
    cap: int
    left: int
    ended: Callable[[], None] = lambda: None
    rate: int = 0
    since_ps: int = 0
    version: int = 0


@dataclass
class FlowTable:
    """All flows under way. `rate_of` returns a resource's rate per second. Rates change in `share` only."""

    rate_of: Callable[[Resource], int]
    capacity: dict[Resource, int] = field(default_factory=dict)
    on: dict[Resource, dict[Flow, None]] = field(default_factory=dict)
    touched: dict[Flow, None] = field(default_factory=dict)

    def start(self, flow: Flow) -> None:
        """Add a flow, which has no rate before the next `share`; its cap becomes what it could have alone."""
        for resource, weight in flow.uses.items():
            if resource not in self.capacity:
                self.capacity[resource] = self.rate_of(resource)
            flow.cap = min(flow.cap, max(self.capacity[resource] // weight, 1))
            self.on.setdefault(resource, {})[flow] = None
        self.touched[flow] = None

    def end(self, flow: Flow) -> None:
        """Take a flow out; the others keep their rates until the next `share`."""
        for resource in flow.uses:
            del self.on[resource][flow]
            self.touched.update(self.on[resource])
        self.touched.pop(flow, None)

    def share(self, now_ps: int) -> list[Flow]:
        """Share the rates anew where flows came or went, and return the flows whose rate changed."""
        flows = self._together(self.touched)
        self.touched.clear()
        rates = self._max_min(flows)
        changed = []
        for flow in flows:
            rate = rates[flow]
            if rate != flow.rate:
                flow.left = max(flow.left - flow.rate * (now_ps - flow.since_ps), 0)
                flow.since_ps, flow.rate = now_ps, rate
                flow.version += 1
                changed.append(flow)
        return changed

    def end_ps(self, flow: Flow) -> int:
        """Return when the flow ends if its rate stays."""
        return flow.since_ps + -(-flow.left // flow.rate)

    def _together(self, seeds: Iterable[Flow]) -> list[Flow]:
        """The flows that are tied to the seeds by shared resources, directly or through others."""
        tied = dict.fromkeys(seeds)
        todo, seen = list(tied), set()
        while todo:
            for resource in todo.pop().uses:
                if resource in seen:
                    continue
                seen.add(resource)
                for other in self.on[resource]:
                    if other not in tied:
                        tied[other] = None
                        todo.append(other)
        return list(tied)

    def _max_min(self, flows: list[Flow]) -> dict[Flow, int]:
        """Rates for flows that share with no others. They do not depend on the order of the flows."""
        left = {resource: self.capacity[resource] for flow in flows for resource in flow.uses}
        weights = dict.fromkeys(left, 0)
        for flow in flows:
            for resource, weight in flow.uses.items():
                weights[resource] += weight
        open_flows = dict.fromkeys(flows)
        rates: dict[Flow, int] = {}
        while open_flows:
            shares = {resource: left[resource] // weight for resource, weight in weights.items() if weight}
            share = min(shares.values(), default=0)
            chosen = [flow for flow in open_flows if flow.cap <= share or not flow.uses]
            if not chosen:
                tight = {resource for resource, at_most in shares.items() if at_most == share}
                chosen = [flow for flow in open_flows if not tight.isdisjoint(flow.uses)]
            for flow in chosen:
                rate = rates[flow] = max(min(flow.cap, share) if flow.uses else flow.cap, 1)
                del open_flows[flow]
                for resource, weight in flow.uses.items():
                    left[resource] = max(left[resource] - weight * rate, 0)
                    weights[resource] -= weight
        return rates


def amount_left(amount: int) -> int:
    """Return an amount in the units of `Flow.left`."""
    return amount * PS_PER_S
