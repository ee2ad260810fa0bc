"""What a training says while it runs: one live line, TensorBoard events, and a summary at the end."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO


@dataclass
class Report:
    """The steps of a run on the first rank.

    Attributes:
        tokens: of a step.
        steps: the number of each step that was trained here.
        losses: of these steps.
        seconds: of these steps, from the end of one to the end of the next.
        waits: seconds of these in which this rank waited for others, bubbles included.
    """

    tokens: int
    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    @property
    def settled(self) -> slice:
        """Return the steps after the first, which binds what it runs."""
        return slice(1, None) if len(self.seconds) > 1 else slice(None)

    @property
    def step_s(self) -> float:
        """Return the median seconds of a step."""
        return statistics.median(self.seconds[self.settled]) if self.seconds else math.nan

    @property
    def waits_share(self) -> float:
        """Return the share of the time that was waited, after the first step."""
        total = sum(self.seconds[self.settled])
        return sum(self.waits[self.settled]) / total if total else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return steps and losses, and the summary."""
        return {
            "steps": self.steps,
            "losses": self.losses,
            "step_s": self.step_s,
            "tokens_per_s": self.tokens / self.step_s if self.seconds else 0.0,
            "exposed_communication": self.waits_share,
        }


class LiveLine:
    """One line that is written over on a terminal, and written every few seconds elsewhere."""

    def __init__(self, stream: TextIO = sys.stderr, every_s: float = 5.0) -> None:
        self._stream, self._every_s = stream, 0.2 if stream.isatty() else every_s
        self._last, self._begun = -math.inf, time.monotonic()

    def show(self, report: Report, predicted_s: float | None = None, saved: int | None = None) -> None:
        """Write the line, unless it was written a moment ago."""
        now = time.monotonic()
        if now - self._last < self._every_s:
            return
        self._last = now
        recent = report.seconds[-10:]
        each_s, waits = statistics.median(recent), sum(report.waits[-10:]) / max(sum(recent), 1e-9)
        words = [
            f"step {report.steps[-1]}",
            f"loss {report.losses[-1]:.3f}",
            f"{report.tokens / each_s:,.0f} tokens/s",
            f"{1e3 * each_s:.0f} ms a step"
            + (f" (predicted {1e3 * predicted_s:.0f})" if predicted_s else ""),
            f"exposed communication {waits:.0%}",
        ]
        words += [f"saved step {saved}"] if saved else []
        line = "  ".join(words)
        end = "\r" if self._stream.isatty() else "\n"
        print(f"{line:<100}", end=end, file=self._stream, flush=True)

    def end(self) -> None:
        """Leave the last line where it is."""
        if self._stream.isatty():
            print(file=self._stream)


class Events:
    """TensorBoard events of the first rank; nothing where there is no folder for them."""

    def __init__(self, folder: Path | None) -> None:
        self._writer: Any = None
        if folder is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder))

    def add(self, report: Report, steps: Sequence[int]) -> None:
        """Write what a report says of some of its last steps."""
        if self._writer is None:
            return
        for step in steps:
            at = report.steps.index(step)
            seconds = report.seconds[at]
            self._writer.add_scalar("loss", report.losses[at], step)
            self._writer.add_scalar("tokens_per_s", report.tokens / seconds, step)
            self._writer.add_scalar("exposed_communication", report.waits[at] / seconds, step)

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()
