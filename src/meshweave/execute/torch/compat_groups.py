"""The private names of torch's process groups that meshweave uses: a part of `compat`, under the same rules."""

from __future__ import annotations

import contextlib
import importlib
import threading
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


_names: dict[int, Callable[[Sequence[int]], str]] = {}
"""By thread inside `override_group_names`, what names the groups that it forms."""
_naming = threading.Lock()


@contextlib.contextmanager
def override_group_names(name_of: Callable[[Sequence[int]], str]) -> Iterator[None]:
    """Use `name_of(ranks)` as the name of each group that this thread forms in the block, of its own ranks alone.

    torch names a group of `new_group(use_local_synchronization=True)` after its ranks and the number of groups
    that the calling rank is in. Where ranks are in unequally many groups, each would wait for the others under
    another name.

    Replaces `distributed_c10d._process_group_name(ranks, use_hashed_name)` (torch 2.9 and 2.13) while a thread is
    in such a block. Groups that all ranks of the world form, and those of other threads, keep torch's name.

    Raises:
        UnsupportedError: the function is gone.
    """
    module: Any = importlib.import_module(_C10D)
    torch_name_of, me = _private(_C10D, "_process_group_name"), threading.get_ident()

    def group_name(ranks: Sequence[int], use_hashed_name: bool) -> Any:
        own = _names.get(threading.get_ident())
        return own(ranks) if own and use_hashed_name else torch_name_of(ranks, use_hashed_name)

    with _naming:
        _names[me], module._process_group_name = name_of, group_name
    try:
        yield
    finally:
        with _naming:
            del _names[me]
            if not _names:
                module._process_group_name = torch_name_of
