"""What a rank's host issues in a layer, and how long its chip waits for it (`describe.machine.host`).

A host that waits for nothing issues a layer in the time of its operations, whatever the chip does: in the long run
a layer takes as long as the slower of the two. That is the greatest mean of the cycles of the recurrence, in which
the host's lane feeds the chip's and nothing leads back. A host that waits for collectives is held back by them,
and they by it: there the recurrence is followed, with one lane more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from meshweave.base.recurrence import follow
from meshweave.base.units import to_ps
from meshweave.describe.machine.host import HostRates

IssuedKind = Literal["kernel", "collective", "transfer"]
"""What a host issues."""
_PASSES = 3
"""So many equal layers one after the other show what one takes between others."""


@dataclass(frozen=True)
class IssuedTask:
    """A task of a layer's forward or backward part, as its host issues it.

    Attributes:
        kind: "kernel", "collective", or "transfer" for a point-to-point message.
        ticks: picoseconds on the chip.
        waits: numbers, in the list of the part's tasks, of those that it waits for.
    """

    kind: IssuedKind
    ticks: int
    waits: tuple[int, ...]


@dataclass(frozen=True)
class IssueCounts:
    """How many operations the host issues in the forward or backward part of a layer.

    Attributes:
        kernels, collectives: how many of these it issues.
        messages: how many point-to-point messages it issues.
        layers: of how many layers it runs the Python code.
    """

    kernels: int = 0
    collectives: int = 0
    messages: int = 0
    layers: int = 0

    def seconds(self, host: HostRates, graphs: bool = False, captured: float = 0.0) -> float:
        """Return the seconds in which a host issues these operations.

        Args:
            host: the seconds that the host takes per kernel, collective, message and layer of Python code.
            graphs: whether all of them are one captured graph, which costs as much as one kernel.
            captured: without `graphs`, the share (0 to 1) of kernels and Python code that costs nothing.
        """
        if graphs:
            return host.kernel_s * (self.kernels > 0)
        one_by_one_s = self.kernels * host.kernel_s + self.layers * host.layer_s
        others_s = self.collectives * host.collective_s + self.messages * host.transfer_s
        return (1 - captured) * one_by_one_s + others_s


def paced_ps(tasks: Sequence[IssuedTask], counts: IssueCounts, host: HostRates, added_ps: int) -> int:
    """Return the picoseconds that a layer's forward or backward part takes in a run of equal parts.

    The host waits for the end of each collective before it issues the next operation.

    Args:
        tasks: the tasks of the part, in order of issue.
        counts: what the host issues for it. All its kernels, those beyond the tasks included, and the Python code
            are spread evenly over the tasks that compute.
        host: the seconds of each operation that the host issues.
        added_ps: picoseconds of the part on the chip beyond its tasks, spread evenly over the tasks that compute.
    """
    computing = sum(task.kind == "kernel" for task in tasks)
    whole_ps = to_ps(counts.kernels * host.kernel_s + counts.layers * host.layer_s)
    issue_ps = {
        "kernel": whole_ps // max(computing, 1),
        "collective": to_ps(host.collective_s),
        "transfer": to_ps(host.transfer_s),
    }
    more_ps = added_ps // max(computing, 1)
    count = len(tasks)
    host_at, chip_at = 2 * count, 2 * count + 1
    steps: list[tuple[int, int, Sequence[int]]] = []
    before: tuple[int, ...] = (host_at,)
    for number, task in enumerate(tasks):
        steps.append((count + number, issue_ps[task.kind], before))
        ticks = task.ticks + (more_ps if task.kind == "kernel" else 0)
        steps.append((number, ticks, (chip_at, count + number, *task.waits)))
        before = (count + number, number) if task.kind == "collective" else (count + number,)
    host_ps = chip_ps = taken_ps = 0
    for _ in range(_PASSES):
        ends = [0] * (2 * count + 2)
        ends[host_at], ends[chip_at] = host_ps, chip_ps
        follow(steps, ends)
        end_ps = max(ends[:count], default=0)
        taken_ps = end_ps - chip_ps
        host_end_ps = max(ends[place] for place in before)
        base_ps = min(end_ps, host_end_ps)
        host_ps, chip_ps = host_end_ps - base_ps, end_ps - base_ps
    return taken_ps
