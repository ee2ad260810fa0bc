"""The time of direct execution, to be compared with that of stages."""

from __future__ import annotations

import math
from itertools import accumulate

from meshweave.algorithms.universal.issue_order import IssueOrder
from meshweave_studies.slicing.stages import ScheduleGraph


def pipelined_s(issue: IssueOrder, graph: ScheduleGraph, prefetch: int) -> float:
    """Return the seconds of direct execution with asynchrony between iterations (section 4.2), without stages.

    Fetches, products and accumulates have a lane each, which is first-in-first-out and waits for data only. A tile
    that the i-th product is the first to use is not fetched before product i - 1 - `prefetch` is done, as in a
    program with `prefetch` + 1 sets of buffers. A tile issued ahead of a more urgent one is as urgent as that one.
    One transfer runs at a time: the one that can start first, a fetch if both can.
    """
    assert prefetch >= 0
    position = {product: i for i, product in enumerate(issue.products)}
    first_uses = [
        min(position[i] for i, need in enumerate(graph.needs) if need >> tile & 1) for tile in issue.fetches
    ]
    # For each fetch the position of the first product that needs it, or a fetch issued after it.
    deadlines = list(accumulate(reversed(first_uses), min))[::-1]
    arrived_s: dict[int, float] = {}
    done_s: list[float] = []
    fetch_lane_s = accumulate_lane_s = 0.0
    num_fetched = num_accumulated = 0
    while True:
        while len(done_s) < len(issue.products):
            product = graph.products[issue.products[len(done_s)]]
            if any(tile not in arrived_s for tile in product.needs):
                break
            start_s = max([done_s[-1] if done_s else 0.0, *(arrived_s[tile] for tile in product.needs)])
            done_s.append(start_s + product.seconds)
        fetch_s = accumulate_s = math.inf
        if num_fetched < len(deadlines):
            awaited = deadlines[num_fetched] - 1 - prefetch
            fetch_s = max(fetch_lane_s, done_s[awaited] if awaited >= 0 else 0.0)
        if num_accumulated < len(issue.accumulates):
            source = position[issue.accumulates[num_accumulated]]
            if source < len(done_s):
                accumulate_s = max(accumulate_lane_s, done_s[source])
        if fetch_s == accumulate_s == math.inf:
            assert len(done_s) == len(issue.products) and num_accumulated == len(issue.accumulates)
            return max([0.0, fetch_lane_s, accumulate_lane_s, *done_s[-1:]])
        if fetch_s <= accumulate_s:
            tile = issue.fetches[num_fetched]
            fetch_lane_s = arrived_s[tile] = fetch_s + graph.fetches[tile].seconds
            accumulate_lane_s = fetch_lane_s
            num_fetched += 1
        else:
            product = graph.products[issue.accumulates[num_accumulated]]
            accumulate_lane_s = accumulate_s + product.accumulate_s
            fetch_lane_s = accumulate_lane_s
            num_accumulated += 1
