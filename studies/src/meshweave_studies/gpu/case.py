"""Programs simulated on GPUs in detail: the run, its memory over time, and what is shown of both."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from meshweave.base.units import to_s
from meshweave.describe.machine.gpu import GpuFile, load_gpu
from meshweave.trace import Counter, Span, Trace
from meshweave.tune.cases import SimulationCase
from meshweave_studies.gpu import Arbiter, GpuRun, simulate_in_detail
from meshweave_studies.gpu.kernels import Source
from meshweave_studies.gpu.run import BIN_PS

WAITS = ("communication held back", "computing behind communication", "communication behind computing")
"""Who waited for whom at the memory controllers: by policy although there was room, or while the other went in."""


@dataclass(frozen=True)
class GpuCase:
    """A case with its run on one GPU in detail, which stands for all."""

    case: SimulationCase
    run: GpuRun
    arbiter: Arbiter

    @property
    def gpu(self) -> GpuFile:
        """Return the description of the GPU."""
        return load_gpu(self.case.machine.cluster.chip.gpu)

    @property
    def duration_s(self) -> float:
        """Return the seconds of the run."""
        return to_s(self.run.duration_ps)

    @property
    def memory_bytes_per_s(self) -> float:
        """Return the peak bandwidth of the GPU's memory in bytes per second."""
        return self.gpu.memory.bytes_per_s

    @property
    def moved_bytes(self) -> int:
        """Return the bytes that memory read and wrote."""
        return sum(self.run.traffic_bytes.values())

    @property
    def threshold(self) -> int | None:
        """Return the entries of a queue below which communication was issued at the end; None for no limit."""
        threshold = self.run.counters["threshold"]
        limits = self.arbiter.policy == "communication-aware" and threshold <= self.gpu.memory.queue
        return threshold if limits else None

    @property
    def starvation(self) -> int:
        """Return the cycles of the memory after which waiting communication went first."""
        return self.arbiter.starvation or self.gpu.memory.starvation

    @property
    def queued(self) -> tuple[float, float]:
        """Return the entries of a queue: the mean over the run, and in the fullest bin; both means of channels."""
        queued = self.run.queued / self.gpu.memory.channels
        return (float(queued.mean()), float(queued.max())) if len(queued) else (0.0, 0.0)

    def waited_share(self, name: str) -> float:
        """Return a counter of cycles of `GpuRun.counters` over all cycles of all channels."""
        cycles = self.duration_s * self.gpu.memory.clock_hz * self.gpu.memory.channels
        return self.run.counters[name] / cycles if cycles else 0.0

    @property
    def moved_share(self) -> float:
        """Return the bytes that memory moved over what it could have moved; 0 where nothing took time."""
        could = self.duration_s * self.memory_bytes_per_s
        return self.moved_bytes / could if could else 0.0

    @cached_property
    def counters(self) -> tuple[Counter, ...]:
        """Return memory over time: GB/s requested by source, entries of a queue, and who waited in what share."""
        run, channels = self.run, self.gpu.memory.channels
        cycles = channels * BIN_PS * self.gpu.memory.clock_hz / 1e12
        times = tuple(BIN_PS * number for number in range(len(run.traffic_over_time)))
        sources = {
            source.name.lower().replace("_", " "): tuple(
                (run.traffic_over_time[:, source] / BIN_PS * 1e3).tolist()
            )
            for source in Source
            if run.traffic_bytes[source]
        }
        queue_times = tuple(BIN_PS * number for number in range(len(run.queued)))
        return (
            Counter(0, "memory requests, GB/s", times, sources),
            Counter(
                0,
                "queue, entries",
                queue_times,
                {"mean of channels": tuple((run.queued / channels).tolist())},
            ),
            Counter(
                0,
                "waiting, % of cycles",
                queue_times,
                {name: tuple((100 * run.waits[:, at] / cycles).tolist()) for at, name in enumerate(WAITS)},
            ),
        )

    def trace(self) -> Trace:
        """Return the kernels as spans of rank 0, with the counters."""
        spans = tuple(
            Span(0, number, "kernels", "matmul" if name == "product" else name, name, start, end)
            for number, (name, start, end) in enumerate(self.run.spans)
        )
        return Trace(self.case.program.name, self.case.title, spans, self.counters)

    def to_json(self) -> dict[str, Any]:
        """Return the run as JSON values. All times are in seconds."""
        return {
            "title": self.case.title,
            "what": self.case.subject,
            "program": self.case.program.name,
            "cluster": self.case.machine.cluster.name,
            "gpu": self.gpu.name,
            "num_ranks": len(self.case.program.ranks),
            "duration_s": self.duration_s,
            "kernels": [
                {"name": name, "start_s": to_s(start), "end_s": to_s(end)}
                for name, start, end in self.run.spans
            ],
            "memory_bytes": {
                source.name.lower(): count for source, count in self.run.traffic_bytes.items() if count
            },
            "arbitration": {
                "policy": self.arbiter.policy,
                "threshold": self.threshold,
                "starvation_cycles": self.starvation,
            },
            "queue_entries": dict(zip(("mean", "most"), self.queued, strict=True)),
            "waited_share": {
                name.removesuffix("_cycles"): self.waited_share(name)
                for name in ("communication_behind_cycles", "compute_behind_cycles", "held_cycles")
            },
            "counters": dict(self.run.counters),
            "over_time": [
                {
                    "name": counter.name,
                    "times_s": [to_s(at) for at in counter.times_ps],
                    "values": {name: list(values) for name, values in counter.values.items()},
                }
                for counter in self.counters
            ],
        }


def simulate_gpu_case(case: SimulationCase, arbiter: Arbiter | None = None) -> GpuCase:
    """Simulate a case on a GPU in detail, round-robin where no other arbiter is given.

    Raises:
        UnsupportedError: GPUs in detail do not run such a program, or not on such a cluster.
        ProgramError: the program waits for what never happens.
    """
    chosen = arbiter or Arbiter()
    return GpuCase(case, simulate_in_detail(case.program, case.machine, chosen), chosen)
