"""Goodput between ranks of a lab, over plain TCP sockets: what the links really carry."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from meshweave.base.errors import DeadlineError, RankLostError
from meshweave.base.owner import temporary_folder
from meshweave_lab.lab import RunningLab
from meshweave_lab.network import probe_rank


@dataclass(frozen=True)
class ProbeFlow:
    """A message of `num_bytes` from one rank to another."""

    src: int
    dst: int
    num_bytes: int


@dataclass(frozen=True)
class Arrival:
    """How a flow arrived: at how many bytes per second, and the seconds from the start to its last byte."""

    bytes_per_s: float
    end_s: float


def goodput(lab: RunningLab, flows: Sequence[ProbeFlow], *, timeout_s: float = 60.0) -> list[Arrival]:
    """Return how each flow arrived, all of them started together (within 20 ms).

    The first eighth of a flow, but at least 128 KiB and at most half of it, does not count in its rate: until
    then the token bucket is full, and TCP looks for its rate.

    Raises RankLostError or DeadlineError where a rank failed or was late.
    """
    errors: list[str] = []

    def take(rank: int, line: str, is_error: bool) -> None:
        if rank >= 0 and is_error:
            errors.append(f"rank {rank}: {line}")

    with temporary_folder("probe") as folder:
        text = json.dumps([astuple(flow) for flow in flows])
        script = [sys.executable, "-I", "-S", str(Path(probe_rank.__file__)), text, str(timeout_s), folder]
        result = lab.run(script, timeout_s=timeout_s, on_line=take, grace_s=1.0)
        if result.timed_out:
            raise DeadlineError(f"the probe: {result.message}")
        if result.exit_status:
            said = f" ({errors[-1]})" if errors else ""
            raise RankLostError(f"the probe: {result.message}{said}", ())
        arrivals: dict[str, list[float]] = {}
        for rank in range(lab.num_ranks):
            arrivals |= json.loads((Path(folder) / f"arrivals-{rank}.json").read_text())
    return [Arrival(*arrivals[str(number)]) for number in range(len(flows))]
