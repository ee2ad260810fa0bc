"""Which sender serves each unit task, and in which order (AlpaComm, MLSys '23, section 3.2).

`best` is the one to use; the others are its parts, the paper's baselines, and the optimum to compare with.
"""

from __future__ import annotations

from collections.abc import Callable

from meshweave.algorithms.reshard.order.baselines import balance as balance
from meshweave.algorithms.reshard.order.baselines import in_order as in_order
from meshweave.algorithms.reshard.order.baselines import naive as naive
from meshweave.algorithms.reshard.order.bounds import bound as bound
from meshweave.algorithms.reshard.order.bounds import exclusive_bound as exclusive_bound
from meshweave.algorithms.reshard.order.depth_first import dfs as dfs
from meshweave.algorithms.reshard.order.jobs import JobSchedule as JobSchedule
from meshweave.algorithms.reshard.order.jobs import JobSet as JobSet
from meshweave.algorithms.reshard.order.jobs import TransferJob as TransferJob
from meshweave.algorithms.reshard.order.jobs import schedule_in_order as schedule_in_order
from meshweave.algorithms.reshard.order.list_greedy import greedy as greedy
from meshweave.algorithms.reshard.order.portfolio import best as best
from meshweave.base.installed import offered_by_ours


def exact(jobs: JobSet) -> JobSchedule:
    """Return the schedule that constraint programming finds within 10 s; it is of the package `meshweave-studies`.

    Raises:
        UnsupportedError: that package or OR-tools is not installed.
    """
    schedule: JobSchedule = offered_by_ours("meshweave.reshard_orders", "exact")(jobs)
    return schedule


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
