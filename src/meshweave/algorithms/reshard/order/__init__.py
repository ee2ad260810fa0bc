"""Which sender serves each unit task, and in which order (AlpaComm, MLSys '23, section 3.2).

`best` is the one to use; the others are its parts, the paper's baselines, and the optimum to compare with.
"""

from __future__ import annotations

from collections.abc import Callable

from meshweave.algorithms.reshard.order.baselines import balance, in_order, naive
from meshweave.algorithms.reshard.order.bounds import bound, exclusive_bound
from meshweave.algorithms.reshard.order.cp_sat import exact
from meshweave.algorithms.reshard.order.depth_first import dfs
from meshweave.algorithms.reshard.order.jobs import JobSchedule, JobSet, TransferJob, schedule_in_order
from meshweave.algorithms.reshard.order.list_greedy import greedy
from meshweave.algorithms.reshard.order.portfolio import best

ORDERS: dict[str, Callable[[JobSet], JobSchedule]] = {
    "naive": naive,
    "in_order": in_order,
    "balance": balance,
    "dfs": dfs,
    "greedy": greedy,
    "best": best,
    "exact": exact,
}
"""By name, each with its default limits."""

__all__ = [
    "ORDERS",
    "JobSchedule",
    "JobSet",
    "TransferJob",
    "balance",
    "best",
    "bound",
    "dfs",
    "exact",
    "exclusive_bound",
    "greedy",
    "in_order",
    "naive",
    "schedule_in_order",
]
