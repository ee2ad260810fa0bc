"""Find the two kinds of numbers of the fitted reading of ATP's table 3, each on one of its rows.

The rate of products is the share of the catalog's with which M3 without chunks reaches the printed throughput on
IC3. With it, the rate of all links of another machine is the share with which M3 does there. No other row is
looked at.

    python validation/fit_atp.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from meshweave.describe.machine.cluster import Cluster
from meshweave_studies.atp.study import AtpStudy, Case, cluster_of, paper_mesh, with_links, with_products
from meshweave_studies.published import published_rows


class _Changed(AtpStudy):
    """A study on one changed machine."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self._cluster = cluster

    def cluster(self, case: Case) -> Cluster:
        return self._cluster


def share(case: Case, change: Callable[[float], Cluster], wanted: float) -> float:
    """Return the share with which a case reaches a throughput, by bisection, to three digits."""
    low, high = 0.05, 2.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        study = _Changed(change(middle))
        reached = study.tflops(case, study.seconds(case, paper_mesh(case)))
        low, high = (low, middle) if reached > wanted else (middle, high)
    return round((low + high) / 2, 3)


def main() -> None:
    """Print both kinds of shares."""
    (row,) = (row for row in published_rows("atp") if row.id == "table3_baseline_cal")
    cases = {name: Case.of(name, 8) for name in row.values}
    machines = {name: cluster_of(case.machine, 8) for name, case in cases.items()}
    products = share(cases["ic3-m3"], partial(with_products, machines["ic3-m3"]), row.values["ic3-m3"])
    print(f"FITTED_FLOPS = {products}")
    for name, case in cases.items():
        if name != "ic3-m3":
            slow = with_products(machines[name], products)
            links = share(case, partial(with_links, slow), row.values[name])
            print(f"{case.machine}: {links}")


if __name__ == "__main__":
    main()
