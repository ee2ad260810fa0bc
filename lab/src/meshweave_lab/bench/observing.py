"""The private names of torch by which lab and tests count what DTensor moves, each behind one documented function.

The rules are those of `meshweave.execute.torch.compat`.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

from meshweave.base.errors import UnsupportedError
from meshweave.execute.torch.compat import CHECKED_VERSIONS, _private

_TESTING, _DISPATCH = (f"torch.{name}" for name in ("testing._internal", "utils._python_dispatch"))


@contextlib.contextmanager
def fake_default_group(rank: int, num_ranks: int) -> Iterator[None]:
    """Make this process `rank` of a default process group whose other ranks do not exist.

    Relies on `torch.testing._internal.distributed.fake_pg.FakeStore` and the backend "fake" (torch 2.9 and 2.13).

    Raises:
        UnsupportedError: the store is gone.
    """
    store = _private(f"{_TESTING}.distributed.fake_pg", "FakeStore")()
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def observe_ops(watch: Callable[[Any, tuple[Any, ...]], None]) -> Iterator[None]:
    """Call `watch(op, args)` before each op on plain tensors inside, those that ops on DTensors become included.

    Relies on `torch.utils._python_dispatch.TorchDispatchMode` and its `__torch_dispatch__` (torch 2.9 and 2.13).

    Raises:
        UnsupportedError: the class is gone.
    """
    base: Any = _private(_DISPATCH, "TorchDispatchMode")
    dtensor = _private("torch.distributed.tensor", "DTensor")

    class Watching(base):  # type: ignore[misc]
        def __torch_dispatch__(
            self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if any(issubclass(kind, dtensor) for kind in types):
                return NotImplemented  # DTensor makes plain calls of it first
            watch(op, args)
            return op(*args, **(kwargs or {}))

    with Watching():
        yield


@contextlib.contextmanager
def observe_shard_dim_alltoall(watch: Callable[[Tensor, Any, int], None]) -> Iterator[Callable[[], bool]]:
    """Call `watch(local, mesh, mesh_dim)` before each all-to-all by which DTensor changes the dim of a shard.

    Yields a function that returns whether such an all-to-all is under way: on a CPU torch makes it of other
    collectives.

    Replaces `placement_types.shard_dim_alltoall(local, gather_dim, shard_dim, mesh, mesh_dim)` (2.9 and 2.13)
    for the time of the block.

    Raises:
        UnsupportedError: the function is gone.
    """
    module = importlib.import_module("torch.distributed.tensor.placement_types")
    shard_dim_alltoall = getattr(module, "shard_dim_alltoall", None)
    if shard_dim_alltoall is None:
        raise UnsupportedError(f"this torch does its all-to-all elsewhere than torch {CHECKED_VERSIONS}")
    is_running = False

    def all_to_all(local: Tensor, gather_dim: int, shard_dim: int, mesh: Any, mesh_dim: int) -> Any:
        nonlocal is_running
        watch(local, mesh, mesh_dim)
        is_running = True
        try:
            return shard_dim_alltoall(local, gather_dim, shard_dim, mesh, mesh_dim)
        finally:
            is_running = False

    module.shard_dim_alltoall = all_to_all  # type: ignore[attr-defined]
    try:
        yield lambda: is_running
    finally:
        module.shard_dim_alltoall = shard_dim_alltoall  # type: ignore[attr-defined]
