"""What tests take of statements and branches in their own process, by the rooms of the three packages.

    python benchmarks/coverage_by_room.py build/coverage.json

`make coverage` calls it on coverage's report. Ranks and commands that tests start are other processes, which are
not followed: rooms that run on ranks, as `nn` and `execute` do, are tested by more than is counted.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

from machine import save

COUNTED = ("num_statements", "covered_lines", "num_branches", "covered_branches")


def room_of(path: str) -> str:
    """Return the package, or the folder of the wheel, that a file is in."""
    parts = Path(path).parts
    if parts[0] != "src":
        return parts[0]
    return parts[2] if len(parts) > 3 else "top"


def main(path: str) -> None:
    """Save the counts of each room and of all, with the percentage of both kinds together."""
    rooms: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(COUNTED, 0))
    for name, file in json.loads(Path(path).read_text())["files"].items():
        for room in (room_of(name), "all"):
            for count in COUNTED:
                rooms[room][count] += file["summary"][count]
    rows = []
    for room, of in sorted(rooms.items()):
        total, taken = of["num_statements"] + of["num_branches"], of["covered_lines"] + of["covered_branches"]
        rows.append({"room": room, **of, "percent": round(100 * taken / max(total, 1), 1)})
        print(f"{room:<12} {rows[-1]['percent']:5.1f} %")
    print(f"saved {save('coverage', rows)}")


if __name__ == "__main__":
    main(sys.argv[1])
