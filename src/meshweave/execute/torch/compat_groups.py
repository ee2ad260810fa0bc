"""The private names of torch's process groups that meshweave uses: a part of `compat`, under the same rules."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from meshweave.execute.torch.compat import _private

_C10D = "torch.distributed.distributed_c10d"


def default_store() -> Any:
    """Return the store that the default process group was made with, a `torch.distributed.Store`.

    Relies on `distributed_c10d._get_default_store` (torch 2.9 and 2.13); torch has no public name for it.

    Raises:
        UnsupportedError: the function is gone.
        ValueError: there is no default process group.
    """
    return _private(_C10D, "_get_default_store")()


def process_groups() -> list[Any]:
    """Return the process groups of this process, the default one included.

    Relies on `distributed_c10d._world.pg_map` (torch 2.9 and 2.13); torch has no public list of them.

    Raises:
        UnsupportedError: the name is gone.
    """
    return list(_private(_C10D, "_world").pg_map)


def group_by_name(name: str) -> Any:
    """Return the process group with this name, as functional collectives are given one.

    Relies on `distributed_c10d._resolve_process_group` (torch 2.9 and 2.13).

    Raises:
        UnsupportedError: the function is gone.
    """
    return _private(_C10D, "_resolve_process_group")(name)


@contextlib.contextmanager
def override_group_names(name_of: Callable[[Sequence[int]], str]) -> Iterator[None]:
    """Use `name_of(ranks)` as the name of each group that only its own ranks form in the block.

    torch names a group of `new_group(use_local_synchronization=True)` after its ranks and the number of groups
    that the calling rank is in. Where ranks are in unequally many groups, each would wait for the others under
    another name.

    Replaces `distributed_c10d._process_group_name(ranks, use_hashed_name)` (torch 2.9 and 2.13) within the
    block. Groups that all ranks of the world form keep torch's name.

    Raises:
        UnsupportedError: the function is gone.
    """
    module = importlib.import_module(_C10D)
    torch_name_of = _private(_C10D, "_process_group_name")

    def group_name(ranks: Sequence[int], use_hashed_name: bool) -> Any:
        return name_of(ranks) if use_hashed_name else torch_name_of(ranks, use_hashed_name)

    module._process_group_name = group_name  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module._process_group_name = torch_name_of  # type: ignore[attr-defined]
