"""Chips: how fast one accelerator computes and reads its memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from meshweave.base.errors import DescriptionError, did_you_mean, require_known
from meshweave.describe.machine.kernels import ChipKernels
from meshweave.describe.machine.links import require_at_least

# --- memory that no allocator counts ----------------------------------------------------------------------

# The software that drives a chip: bytes of its memory that no framework's allocator counts.

_MIB = 1 << 20


@dataclass(frozen=True)
class Runtime:
    """The memory of a chip that its driver and communicators take, outside of a framework's allocator, in bytes.

    Attributes:
        context_bytes: of a process: driver, kernels that are loaded, and workspaces of libraries.
        pair_bytes, group_bytes: of the buffers of a communicator of two ranks, and of more.
        source: where the numbers are from.
    """

    context_bytes: int
    pair_bytes: int
    group_bytes: int
    source: str

    def communicator_bytes(self, num_ranks: int) -> int:
        """Return the bytes of a chip's buffers for a communicator of `num_ranks` ranks; 0 for a rank alone."""
        return 0 if num_ranks < 2 else self.pair_bytes if num_ranks == 2 else self.group_bytes


RUNTIMES = {
    "cuda": Runtime(
        (426 + 32) * _MIB,
        544 * _MIB,
        688 * _MIB,
        "Context: 426 MiB with PyTorch 2.10 and CUDA 13.0, loaded lazily (GitHub, unslothai/unsloth-zoo, "
        "pull request 1053; PyTorch's issue 109888 has about 400 MB), and 32 MiB of cuBLAS workspace (CUDA's "
        "documentation of cublasSetWorkspace, Hopper). NCCL: 544 MiB a communicator of 2 A100s, 688 MiB of 3 or 4 "
        "(github.com/NVIDIA/nccl, issue 964); more ranks take no more (issue 986)",
    ),
    "tpu": Runtime(
        1280 * _MIB,
        0,
        0,
        "What XLA says that it reserves of a TPU v4, 1.25 of 32 GiB (github.com/erfanzar/EasyDeL, issue 166). Its "
        "collectives work in buffers of the program",
    ),
    "none": Runtime(0, 0, 0, "a CPU, whose memory is that of the host"),
}
"""The known ones, by the name that a cluster file gives under `runtime`; "cuda" where it gives none."""


# --- chip -------------------------------------------------------------------------------------------------

WORK_KINDS = (
    "attention",
    "causal_attention",
    "matmul",
    "matmul_batch",
    "experts",
    "norm",
    "softmax",
    "loss",
    "elementwise",
    "reduction",
)
"""The kinds of work that a `call` may name for its price, and that a chip may have a rate for."""


@dataclass(frozen=True)
class Chip:
    """One accelerator (or process) of a cluster.

    Attributes:
        peak_flops_per_s: (dtype, FLOP/s) pairs.
        effective_flops_per_s: the FLOP/s that large GEMMs reach, in every dtype that `dtype_flops_per_s` lacks; in
            a dtype that is slower than another, no more than its peak.
        memory_bytes, memory_bytes_per_s: size and bandwidth of the chip's main memory.
        launch_s: seconds to start one kernel.
        gemm_tile: (m, n, k) in elements, the tiles in which a GEMM streams through on-chip memory; None if
            GEMMs put no load on the main memory.
        accumulate_share: the share of the FLOP rate, from 0 to 1, that GEMMs lose while an accumulate into
            another chip's memory (a kernel) runs at its full rate. Only simulation uses it.
        dtype_flops_per_s: (dtype, FLOP/s) that large GEMMs reach in a dtype.
        call_flops_per_s: (kind of work, FLOP/s) of calls, such as norms, that run at a rate of their own.
        pack_launch_s, pack_bytes_per_s: what a strided view costs at either end of a message: seconds to start
            packing it, and bytes of it per second. A rate of 0 packs for nothing.
        gpu: name or file of the GPU in detail (`describe.machine.gpu`) on which programs are simulated down to its
            memory; empty where rates say all.
        kernels: the constants by which products, attention and element-wise calls are priced by their shape; None
            where one rate holds for all shapes.
        runtime: the software that drives it, a name of `RUNTIMES`.
        fitted_as: how the names of other chips with the same compute units begin. Constants of software that were
            fitted on those hold for this one where none were fitted on it. Empty where there is no such chip.

    Raises:
        DescriptionError: a value is out of range, the runtime is unknown, or `gemm_tile` is given beside
            `kernels`.
    """

    name: str
    peak_flops_per_s: tuple[tuple[str, float], ...]
    effective_flops_per_s: float
    memory_bytes: int
    memory_bytes_per_s: float
    launch_s: float = 0.0
    source: str = ""
    gemm_tile: tuple[int, int, int] | None = None
    accumulate_share: float = 0.0
    dtype_flops_per_s: tuple[tuple[str, float], ...] = ()
    call_flops_per_s: tuple[tuple[str, float], ...] = ()
    kernels: ChipKernels | None = None
    pack_launch_s: float = 0.0
    pack_bytes_per_s: float = 0.0
    gpu: str = ""
    runtime: str = "cuda"
    fitted_as: str = ""

    def __post_init__(self) -> None:
        if not self.peak_flops_per_s:
            raise DescriptionError(f"chip {self.name}: peak_flops_per_s is empty; give one dtype at least")
        require_at_least(
            f"chip {self.name}", 1, **{f"peak_flops_per_s.{d}": f for d, f in self.peak_flops_per_s}
        )
        require_at_least(f"chip {self.name}", 1, effective_flops_per_s=self.effective_flops_per_s)
        for key in ("dtype_flops_per_s", "call_flops_per_s"):
            rates = {f"{key}.{name}": rate for name, rate in getattr(self, key)}
            require_at_least(f"chip {self.name}", 1, **rates)
        require_at_least(
            f"chip {self.name}", 1, memory_bytes=self.memory_bytes, memory_bytes_per_s=self.memory_bytes_per_s
        )
        require_at_least(
            f"chip {self.name}", 0, launch_s=self.launch_s, accumulate_share=self.accumulate_share
        )
        require_at_least(
            f"chip {self.name}", 0, pack_launch_s=self.pack_launch_s, pack_bytes_per_s=self.pack_bytes_per_s
        )
        require_known(
            self.runtime, RUNTIMES, f"chip {self.name}: there is no runtime", DescriptionError, "there are"
        )
        if self.accumulate_share > 1:
            raise DescriptionError(
                f"chip {self.name}: accumulate_share is {self.accumulate_share}; give a share from 0 to 1"
            )
        if self.gemm_tile is not None and (len(self.gemm_tile) != 3 or min(self.gemm_tile) < 1):
            raise DescriptionError(
                f"chip {self.name}: gemm_tile is {self.gemm_tile}; give three counts (m, n, k) of at least 1"
            )
        if self.gemm_tile is not None and self.kernels is not None:
            raise DescriptionError(
                f"chip {self.name}: gemm_tile and kernels both say what products load; give one of them"
            )

    @property
    def driver(self) -> Runtime:
        """Return the `Runtime` of the chip, such as CUDA's: the memory that contexts and communicators take."""
        return RUNTIMES[self.runtime]

    def peak(self, dtype: str) -> float:
        """Return the peak FLOP/s in `dtype`. Raises DescriptionError if the chip's table has none."""
        for known, flops_per_s in self.peak_flops_per_s:
            if known == dtype:
                return flops_per_s
        known_dtypes = [known for known, _ in self.peak_flops_per_s]
        raise DescriptionError(
            f"chip {self.name} has no peak_flops_per_s for '{dtype}'{did_you_mean(dtype, known_dtypes)}; "
            f"it has {', '.join(known_dtypes)}"
        )

    def flops_per_s(self, dtype: str, call: str = "") -> float:
        """Return the FLOP/s of work in `dtype` ("" for any) and of the kind `call` ("" for GEMMs).

        A kind in `call_flops_per_s` has that rate in every dtype. All other work has the rate of GEMMs: that of
        `dtype_flops_per_s`, else `effective_flops_per_s`, but at most the peak of a dtype that is not the
        fastest.
        """
        for known, rate in self.call_flops_per_s:
            if known == call:
                return rate
        for known, rate in self.dtype_flops_per_s:
            if known == dtype:
                return rate
        peaks = dict(
            self.peak_flops_per_s
        )  # the rate is that of the fastest dtype: no other reaches more than its peak
        is_slower = peaks.get(dtype, math.inf) < max(peaks.values())
        return min(self.effective_flops_per_s, peaks[dtype]) if is_slower else self.effective_flops_per_s

    def with_flops_per_s(self, rate: float) -> Chip:
        """Return the chip with one FLOP rate for all dtypes, kinds of work and shapes; its peaks stay."""
        by_dtype = tuple((dtype, rate) for dtype, _ in self.peak_flops_per_s)
        return replace(
            self, effective_flops_per_s=rate, dtype_flops_per_s=by_dtype, call_flops_per_s=(), kernels=None
        )
