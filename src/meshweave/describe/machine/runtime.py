"""The software that drives a chip: bytes of its memory that no framework's allocator counts."""

from __future__ import annotations

from dataclasses import dataclass

_MIB = 1 << 20


@dataclass(frozen=True)
class Runtime:
    """The memory of a chip that the allocator of a framework does not hand out, in bytes.

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
