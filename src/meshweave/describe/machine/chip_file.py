"""The keys of the table `chip` of a cluster file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from meshweave.describe.files import Count, Duration, FileModel, Name, Rate, Size
from meshweave.describe.machine.chip import Chip
from meshweave.describe.machine.gpu import GpuFile, gpu_reference
from meshweave.describe.machine.kernels import ChipKernels
from meshweave.describe.machine.kernels_file import KernelsFile, kernels_of, load_kernels


class ChipFile(FileModel):
    """The table `chip`."""

    name: Name = Field(description="the chip's name, a string of printable characters")
    source: str | None = Field(
        None, description="where the chip's numbers are from, a string (left out: as the cluster's)"
    )
    peak_flops_per_s: dict[str, Rate] = Field(
        description="a table of peak FLOP/s by dtype, each a number of at least 1", min_length=1
    )
    effective_flops_per_s: Rate | None = Field(
        None,
        description="FLOP/s that large GeMMs reach in dtypes without a rate of their own, at most the peak of a "
        "slower dtype (left out: the peak of each dtype, and the highest), a number of at least 1",
    )
    dtype_flops_per_s: dict[str, Rate] = Field(
        default_factory=dict,
        description="a table of FLOP/s that large GeMMs reach by dtype, each a number of at least 1",
    )
    call_flops_per_s: dict[str, Rate] = Field(
        default_factory=dict,
        description="a table of FLOP/s of calls by kind of work (attention, causal_attention, norm, softmax, "
        "loss, elementwise, reduction), each a number of at least 1 (left out: those of GeMMs)",
    )
    memory_bytes: Size = Field(description="the memory of one chip in bytes, a whole number of at least 1")
    memory_bytes_per_s: Rate = Field(description="the memory's bytes per second, a number of at least 1")
    launch_s: Duration = Field(0.0, description="seconds to start one kernel, from 0 to 1e6")
    gemm_tile: list[Count] | None = Field(
        None,
        description="a list of three counts, m, n and k in elements: the tiles in which a product streams "
        "through on-chip memory (left out: products do not load the memory)",
        min_length=3,
        max_length=3,
    )
    accumulate_share: float = Field(
        0.0,
        description="the share of the FLOP rate that products lose beside an accumulate, from 0 to 1",
        ge=0,
        le=1,
    )

    pack_launch_s: Duration = Field(
        0.0, description="seconds to start packing or unpacking a strided view of a message, from 0 to 1e6"
    )
    pack_bytes_per_s: float = Field(
        0.0,
        description="bytes per second at which strided views of messages are packed and unpacked (left out: for "
        "nothing)",
        ge=0,
        le=1e18,
    )
    kernels: str | KernelsFile | None = Field(
        None,
        description="the constants of its kernels: an entry of the catalog, a file, found from this one's "
        "folder, or the table of such a file (left out: one rate for all shapes)",
    )

    gpu: str | GpuFile | None = Field(
        None,
        description="the GPU in detail on which `meshweave simulate-gpu` runs programs, down to its memory: an "
        "entry of the catalog, a file, found from this one's folder, or the table of such a file (left out: the "
        "rates above alone)",
    )

    runtime: Literal["cuda", "tpu", "none"] = Field(
        "cuda",
        description="the software whose context and communication buffers take memory besides tensors: one of "
        '"cuda", "tpu" and "none" (a CPU)',
    )
    fitted_as: str = Field(
        "",
        description="how the name of a chip with the same compute units begins, whose fitted constants of "
        "software stand in where none were fitted on this one (left out: none stand in)",
    )

    def chip(self, source: str, folder: Path | None = None) -> Chip:
        """Return the chip that this table describes.

        Args:
            source: where its numbers are from, if the table does not say.
            folder: where files of kernels and GPUs are found from; None for the working directory.

        Raises:
            DescriptionError: a file that the table names does not exist or is wrong, or a value is out of
                range.
        """
        peaks = tuple(self.peak_flops_per_s.items())
        effective = self.effective_flops_per_s
        by_dtype = dict(peaks) if effective is None else {}
        changed: dict[str, Any] = {
            "peak_flops_per_s": peaks,
            "effective_flops_per_s": max(rate for _, rate in peaks) if effective is None else effective,
            "source": source if self.source is None else self.source,
            "gemm_tile": tuple(self.gemm_tile) if self.gemm_tile else None,
            "dtype_flops_per_s": tuple((by_dtype | self.dtype_flops_per_s).items()),
            "call_flops_per_s": tuple(self.call_flops_per_s.items()),
            "kernels": self._kernels(folder),
            "gpu": gpu_reference(self.gpu, folder) if self.gpu else "",
        }
        return Chip(**self.model_dump(exclude=set(changed)), **changed)

    def _kernels(self, folder: Path | None) -> ChipKernels | None:
        if isinstance(self.kernels, KernelsFile):
            return kernels_of(self.kernels, "kernels", folder)
        return load_kernels(self.kernels, folder) if self.kernels else None
