"""What packing of strided tiles would have to cost for AlpaComm's gains in cases 3, 4 and 9: a scan of its rate.

    python benchmarks/reshard_packing.py [--save]

The paper's broadcast is 3 to 10 times as fast as its rival's all-gather in exactly the cases with strided tiles
(section 5.1.2). Here every strategy packs at the same rate, from that of a V100's memory to less than a NIC's,
with the rivals of our planner and with those of Alpa's public code. Times are simulated at full size.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any, get_args

from machine import save

from meshweave.describe.machine.cluster import load_cluster
from meshweave_studies.alpacomm.readings import Rivals
from meshweave_studies.alpacomm.study import AlpaCommStudy

CASES = (3, 4, 9)
BYTES_PER_S = (450e9, 100e9, 30e9, 12e9, 5e9, 2e9, 1e9, 0.5e9)


def row(bytes_per_s: float, rivals: Rivals) -> dict[str, Any]:
    """All-gather over broadcast, and the broadcast's seconds, by case."""
    cluster = load_cluster("p3.8xlarge")
    chip = replace(cluster.chip, pack_bytes_per_s=bytes_per_s)
    study = AlpaCommStudy(replace(cluster, chip=chip), rivals=rivals)
    return {
        "pack_bytes_per_s": bytes_per_s,
        "rivals": rivals,
        "over_broadcast": {number: study.over_gather(number) for number in CASES},
        "broadcast_s": {number: study.case(number).seconds for number in CASES},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/reshard_packing.json")
    options = parser.parse_args()
    rows = [row(rate, rivals) for rivals in get_args(Rivals) for rate in BYTES_PER_S]
    for one in rows:
        ratios = ", ".join(f"case {number}: {ratio:.2f}" for number, ratio in one["over_broadcast"].items())
        print(f"{one['rivals']:8} {one['pack_bytes_per_s'] / 1e9:5.1f} GB/s  {ratios}")
    if options.save:
        print(save("reshard_packing", rows))


if __name__ == "__main__":
    main()
