"""GPUs simulated down to their memory controllers (T3: Pati et al., ASPLOS '24, section 5.1).

A program becomes the kernels of one GPU (`lower`): products as work groups that load and store tiles, ring
collectives as blocks that compute units read and send, tracked copies as regions that the tracker passes to the
DMA engine. `run` simulates them in the core (`csrc/gpu.hpp`), with one GPU that stands for all: what it sends
comes back to it as what its neighbour sent at the same time.
"""

from __future__ import annotations

from meshweave_studies.gpu.lower import lower as lower
from meshweave_studies.gpu.machine import simulate_in_detail as simulate_in_detail
from meshweave_studies.gpu.run import Arbiter as Arbiter
from meshweave_studies.gpu.run import GpuRun as GpuRun
from meshweave_studies.gpu.run import run as run
