"""Native transports of one-sided ops: memory that ranks reach without the other's help."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import Literal

from meshweave.base.errors import BindError, require_known
from meshweave.execute.memory.base import RemoteMemory as RemoteMemory
from meshweave.execute.torch.context import TorchContext

Kind = Literal["shared", "mpi", "symmetric", "auto"]
KINDS = ("shared", "mpi", "symmetric", "auto")


def open_memory(
    kind: Kind, context: TorchContext, *, pool_bytes: int = 16 << 20, ranks: Sequence[int] | None = None
) -> RemoteMemory:
    """Open a pool of memory: each rank owns a part, and can read and write the parts of the other ranks.

    Collective among all ranks of the context, or `ranks`.

    Args:
        kind: "shared", between processes of one Linux host; "mpi", windows of an MPI that started the ranks
            (needs the extra `mpi`); "symmetric", CUDA symmetric memory; "auto", what fits the context:
            symmetric on CUDA, MPI for ranks of an MPI launcher without a process group, else shared.
        pool_bytes: bytes that each rank sets aside at its first program; the pool grows where they are too
            few.
        ranks: those that open "shared" memory; None for all ranks of the context. The other kinds ignore it:
            all ranks open them.

    Raises:
        UnsupportedError: such memory is not available here; one line says why.
        BindError: there is no such kind, or some ranks cannot have it.
        RankLostError, DeadlineError: another rank died, or did not come in time.
    """
    require_known(kind, KINDS, "there is no memory", BindError)
    if kind == "auto":
        kind = _fitting(context)
    if kind == "shared":
        from meshweave.execute.memory.shared import SharedMemory

        return SharedMemory.open(context, pool_bytes, ranks)
    if kind == "mpi":
        from meshweave.execute.memory.mpi import MpiMemory

        return MpiMemory.open(context, pool_bytes)
    from meshweave.execute.memory.symmetric import SymmetricMemory

    return SymmetricMemory.open(context, pool_bytes)


def _fitting(context: TorchContext) -> Kind:
    if context.device.type == "cuda":
        return "symmetric"
    launched = any(name in os.environ for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"))
    if launched and not context.is_distributed and importlib.util.find_spec("mpi4py") is not None:
        return "mpi"
    return "shared"
