"""Flows that share resources: max-min fair rates in integers.

A flow moves an amount (bytes or FLOPs) through all its resources at once, at most at its cap. It takes its weight
times its rate from each resource. Flows share the rate of a resource max-min fairly (progressive filling;
Bertsekas and Gallager, Data Networks, section 6.5.2). Rates are whole units per second, rounded down. The
remaining amount is kept in units x picoseconds per second, so that rounding does not accumulate.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from meshweave.base.units import PS_PER_S

Resource = Hashable


@dataclass(eq=False)
class Flow:
    """A transfer or computation in progress.

    Attributes:
        uses: the weight of the flow on each resource.
        cap: the highest rate, in units per second.
        left: the remaining amount at `since_ps`, in units x picoseconds per second.
        on_end: the callback when the flow ends.
        version: the number of changes of the rate; a scheduled end of an older version is stale.
    """

    uses: Mapping[Resource, int]
    cap: int
    left: int
    on_end: Callable[[], None] = lambda: None
    rate: int = 0
    since_ps: int = 0
    version: int = 0


@dataclass
class FlowTable:
    """All flows in progress. `rate_of` returns a resource's units per second. Only `share` changes rates.

    Attributes:
        capacity: units per second of each resource.
        flows_of: the flows on each resource.
        changed: the flows whose rate must be computed anew, because a flow on a shared resource began or ended.
    """

    rate_of: Callable[[Resource], int]
    capacity: dict[Resource, int] = field(default_factory=dict)
    flows_of: dict[Resource, dict[Flow, None]] = field(default_factory=dict)
    changed: dict[Flow, None] = field(default_factory=dict)

    def start(self, flow: Flow) -> None:
        """Add a flow with rate 0 until the next `share`, and lower its cap to the rate it would have alone."""
        for resource, weight in flow.uses.items():
            if resource not in self.capacity:
                self.capacity[resource] = self.rate_of(resource)
            flow.cap = min(flow.cap, max(self.capacity[resource] // weight, 1))
            self.flows_of.setdefault(resource, {})[flow] = None
        self.changed[flow] = None

    def end(self, flow: Flow) -> None:
        """Remove a flow; the others keep their rates until the next `share`."""
        for resource in flow.uses:
            del self.flows_of[resource][flow]
            self.changed.update(self.flows_of[resource])
        self.changed.pop(flow, None)

    def share(self, now_ps: int) -> list[Flow]:
        """Compute the rates anew where flows began or ended, and return the flows whose rate changed."""
        flows = self._together(self.changed)
        self.changed.clear()
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
        """Return the time at which the flow ends if its rate stays, in picoseconds."""
        return flow.since_ps + -(-flow.left // flow.rate)

    def _together(self, seeds: Iterable[Flow]) -> list[Flow]:
        """Return the flows connected to the seeds by shared resources, directly or through other flows."""
        tied = dict.fromkeys(seeds)
        todo, seen = list(tied), set()
        while todo:
            for resource in todo.pop().uses:
                if resource in seen:
                    continue
                seen.add(resource)
                for neighbour in self.flows_of[resource]:
                    if neighbour not in tied:
                        tied[neighbour] = None
                        todo.append(neighbour)
        return list(tied)

    def _max_min(self, flows: list[Flow]) -> dict[Flow, int]:
        """Return max-min fair rates of flows that share no resource with others, whatever their order."""
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
