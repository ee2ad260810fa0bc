"""What is calibrated: where the ranks run, and what is known of the machine beforehand."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshweave.base.errors import DescriptionError, LayoutError, UnsupportedError
from meshweave.calibrate.rank import is_under_launcher, measure_in_world
from meshweave.describe.layout.shapes import near_square
from meshweave.describe.machine.cluster import Cluster, load_cluster

RANK_FUNCTION = "meshweave.calibrate.rank:measure"
"""The function that each rank runs, as `launch` takes it."""

RunRanks = Callable[[Mapping[str, Any], float], list[Any] | None]
"""Takes the payload of `RANK_FUNCTION` and a time limit in seconds. Returns what each rank measured, or None in a
process that is not to report."""


@dataclass(frozen=True)
class CalibrationTarget:
    """Ranks to calibrate.

    Attributes:
        cluster: what is known of the machine; one chip per rank.
        title: a few words that name the ranks.
        mesh_shape: the mesh by default.
        run_ranks: takes the payload of `calibrate.rank.measure` and a timeout in seconds, measures on all ranks,
            and returns their results by rank; None on ranks other than 0.
        skip_bytes: the bytes that a link lets through before it keeps to its rate.
        rank: the rank of this process, under torchrun; else 0.
        is_one_host: whether all ranks read the same clock.
        has_nominal_links: whether `cluster` has the true rates of the links.
        max_flops_per_s: the pace of products; infinite without a pace.
        note: what to know of the result before use.
    """

    cluster: Cluster
    title: str
    mesh_shape: tuple[int, ...]
    run_ranks: RunRanks
    skip_bytes: int = 0
    rank: int = 0
    is_one_host: bool = True
    has_nominal_links: bool = False
    max_flops_per_s: float = math.inf
    note: str = ""


def local_target(num_ranks: int) -> CalibrationTarget:
    """Return a target of `num_ranks` processes of this machine.

    Raises LayoutError for fewer than 2 or more than 1024.
    """

    def run_ranks(payload: Mapping[str, Any], timeout_s: float) -> list[Any]:
        try:
            from meshweave.execute.ranks.launch import launch
        except ImportError:
            raise UnsupportedError("calibrating needs torch: pip install 'meshweave[torch]'") from None
        # More ranks than cores may be slow to answer.
        return launch(RANK_FUNCTION, num_ranks, dict(payload), timeout_s=timeout_s, stale_s=5.0)

    return _process_target(num_ranks, f"{num_ranks} local processes over gloo", run_ranks)


def torchrun_target() -> CalibrationTarget:
    """Return a target of the ranks that torchrun started, of which this process is one.

    Raises:
        DescriptionError: torchrun did not start this process.
        LayoutError: there are fewer than 2 ranks or more than 1024.
    """
    if not is_under_launcher():
        raise DescriptionError(
            "nothing to calibrate: give --lab LAB.toml or --ranks N, or run it by torchrun"
        )
    num_ranks = int(os.environ["WORLD_SIZE"])
    target = _process_target(
        num_ranks,
        f"{num_ranks} ranks of torchrun over gloo",
        lambda payload, timeout_s: measure_in_world(payload),
    )
    is_one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    return replace(target, rank=int(os.environ["RANK"]), is_one_host=is_one_host)


def _process_target(num_ranks: int, title: str, run_ranks: RunRanks) -> CalibrationTarget:
    if not 2 <= num_ranks <= 1024:
        raise LayoutError(f"{num_ranks} ranks: give 2 to 1024")
    cluster = replace(load_cluster("local-cpu").with_chips(num_ranks), name=f"calibrated-{num_ranks}")
    note = f"Measured on {title}; the rate of the links is the highest that any operation reached."
    return CalibrationTarget(cluster, title, near_square(num_ranks), run_ranks, note=note)
