"""Run kernels on a GPU described in detail, and say where time and traffic went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshweave._core import ProgramFault as ProgramFault
from meshweave._core import run_channel as run_channel
from meshweave._core import run_gpus as run_gpus
from meshweave.describe.machine.gpu import ARBITRATIONS, Arbitration, GpuFile
from meshweave_studies.gpu.kernels import Column, Kernels, Source

BIN_PS = 1_000_000
"""The bins of time in which traffic and queues are counted."""
_COUNTERS = (
    "threshold",
    "most_tracked",
    "tracker_overflows",
    "cache_hits",
    "cache_misses",
    "sent_bytes",
    "activates",
    "bus_turns",
    "column_commands",
    "held_cycles",
    "busy_cycles",
    "queued_cycles",
    "compute_behind_cycles",
    "communication_behind_cycles",
)


@dataclass(frozen=True)
class Arbiter:
    """How memory controllers choose between computing and communication (T3, section 4.5).

    Attributes:
        policy: `round-robin`, falling back to the other stream if one is empty; `compute-first`;
            `communication-aware`: compute first, and communication only while the queue has fewer entries than a
            threshold, or after it has waited too long.
        threshold: entries; 0 takes one from how full the queues are while the first work groups run alone.
        starvation: cycles of the memory after which communication goes first; 0 for those of the GPU.
        drains: whether no threshold holds from the end of a kernel's last work group to the next kernel.
    """

    policy: Arbitration = "round-robin"
    threshold: int = 0
    starvation: int = 0
    drains: bool = False


@dataclass(frozen=True)
class GpuRun:
    """What a GPU did.

    Attributes:
        spans: (name, start, end) of each kernel, in picoseconds.
        traffic_bytes: bytes that memory read and wrote, by source.
        traffic_over_time: bytes by bin of `BIN_PS` and source, shape (bins, sources).
        queued: entries in the queues of all channels, mean by bin.
        waits: cycles by bin, summed over channels, shape (bins, 3): in which the policy held communication back
            though there was room; computing waited while communication went into the queue; and the reverse.
        counters: see `_COUNTERS`; cycles are sums over channels.
    """

    spans: tuple[tuple[str, int, int], ...]
    traffic_bytes: Mapping[Source, int]
    traffic_over_time: Column
    queued: Column
    waits: Column
    counters: Mapping[str, int]

    @property
    def duration_ps(self) -> int:
        """Return picoseconds from the first kernel's start to the last one's end."""
        return self.spans[-1][2] - self.spans[0][1]

    def kernel_ps(self, name: str) -> int:
        """Return the picoseconds of all kernels of a name together; 0 where there is none."""
        return sum(end - start for label, start, end in self.spans if label == name)


def run(
    kernels: Kernels,
    gpu: GpuFile,
    *,
    link_bytes_per_s: int,
    link_ps: int,
    arbiter: Arbiter | None = None,
    num_gpus: int = 1,
    plain_sets: bool = False,
) -> GpuRun:
    """Return the run of these kernels on a GPU of a ring, of which all GPUs run the same.

    Args:
        link_bytes_per_s, link_ps: bytes per second and latency of the link to the next GPU.
        num_gpus: GPUs that are simulated: one that stands for all, or the whole ring.
        plain_sets: whether the set of a line is its number modulo the sets of the cache, and not a hash of it.

    Raises:
        ValueError: the columns are out of range.
        ProgramFault: units wait for what never happens.
    """
    columns = columns_of(kernels, gpu, link_bytes_per_s, link_ps, arbiter or Arbiter(), plain_sets)
    out = run_gpus(columns, num_gpus)
    count = len(kernels.kernels)
    spans = tuple(
        (kernel.name, int(start), int(end))
        for kernel, start, end in zip(
            kernels.kernels, out["kernel_starts"][:count], out["kernel_ends"][:count], strict=True
        )
    )
    column = gpu.memory.column_bytes
    return GpuRun(
        spans,
        {source: int(out["traffic"][source]) * column for source in Source},
        out["bins"].reshape(-1, 16)[:, : len(Source)] * column,
        out["occupancy"] // (BIN_PS * int(gpu.memory.clock_hz) // 10**12),
        out["waits"].reshape(-1, 3),
        dict(zip(_COUNTERS, out["counters"].tolist(), strict=True)),
    )


def columns_of(
    kernels: Kernels,
    gpu: GpuFile,
    link_bytes_per_s: int,
    link_ps: int,
    arbiter: Arbiter,
    plain_sets: bool = False,
) -> dict[str, Column]:
    """Return the columns that the core takes (`csrc/gpu.hpp`)."""
    watches = arbiter.policy == "communication-aware" and not arbiter.threshold
    watch = gpu.compute_units * gpu.slots if watches else 0
    return {
        **kernels.columns(gpu.launch_ps, gpu.slots, gpu.compute_units, watch),
        "spec": _spec(gpu, link_bytes_per_s, link_ps),
        "timing": _timing(gpu),
        "controller": _controller(gpu, arbiter),
        "options": np.array([arbiter.drains, plain_sets], dtype=np.int64),
    }


def _spec(gpu: GpuFile, link_bytes_per_s: int, link_ps: int) -> Column:
    cache, memory, tracker = gpu.cache, gpu.memory, gpu.tracker
    return np.array(
        [
            *(gpu.compute_units, int(gpu.flops_per_s) // gpu.compute_units),
            max(gpu.in_flight_bytes // cache.line_bytes, 1),
            *(
                cache.line_bytes,
                cache.num_bytes // cache.line_bytes,
                cache.lines_per_set,
                cache.banks,
                cache.bank_ps,
            ),
            *(cache.hit_ps, cache.to_memory_ps, cache.from_memory_ps, gpu.store_ps),
            *(memory.channels, 10**12 // int(memory.clock_hz), link_bytes_per_s, link_ps),
            *(tracker.dma_lines, tracker.dma_ps, tracker.sets, tracker.entries_per_set, BIN_PS),
        ],
        dtype=np.int64,
    )


def _timing(gpu: GpuFile) -> Column:
    memory, t = gpu.memory, gpu.memory.timing
    delays = (t.ccd, t.ccdl, t.ccdwl, t.rcd, t.rp, t.ras, t.rc, t.rrd, t.cl, t.wl, t.wtr, t.wr, t.rtp)
    return np.array(
        [memory.bank_groups, memory.banks, memory.row_bytes // memory.column_bytes, *delays], dtype=np.int64
    )


def _controller(gpu: GpuFile, arbiter: Arbiter) -> Column:
    memory = gpu.memory
    threshold = arbiter.threshold or memory.queue + 1
    policy = ARBITRATIONS.index(arbiter.policy)
    return np.array(
        [
            *(policy, memory.queue, memory.turn_limit, memory.age_limit, threshold),
            arbiter.starvation or memory.starvation,
        ],
        dtype=np.int64,
    )
