"""What all contexts of a process share in one default process group: its liveness, and its store.

Contexts come and go, and a process has one heartbeat: a thread, a connection to the store, and 5 beats a second,
each of one write, one check and one read of keys (0.1 ms of processor time a beat over loopback).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from meshweave.base.errors import BindError, RankLostError, require_seconds
from meshweave.execute.ranks.heart import innermost_store
from meshweave.execute.ranks.last_words import install_last_words
from meshweave.execute.ranks.liveness import Liveness
from meshweave.execute.ranks.patience import call_within
from meshweave.execute.ranks.signing import sign, verify
from meshweave.execute.torch import compat_groups

_Result = TypeVar("_Result")

_current: tuple[weakref.ref[Any], Liveness] | None = None  # the default process group, and its liveness
_lock = threading.Lock()


def world_liveness() -> Liveness | None:
    """Return the `Liveness` (heartbeat) of this process in the default process group; the first call starts it.

    Return None for a single rank, without a process group, or where the group has no store.
    """
    global _current
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    world = dist.group.WORLD
    with _lock:
        if _current is None or _current[0]() is not world or _current[1].is_closed:
            try:
                store = compat_groups.default_store()
            except ValueError:
                return None
            reference = weakref.ref(world)
            liveness = Liveness(
                store,
                dist.get_rank(),
                range(dist.get_world_size()),
                likely_store_rank=_usual_store_rank(store),
                is_wanted=lambda: _is_default(reference),
            )
            _current = reference, liveness
            install_last_words(lambda: None if _current is None else _current[1])
        return _current[1]


def _usual_store_rank(store: Any) -> int | None:
    """Return the rank that hosts a store by torch's own rendezvous; None where another one may have made it.

    By the environment rank 0 does (`torch.distributed.rendezvous`, torch 2.9 and 2.13), unless an agent of
    torchrun does, which sets TORCHELASTIC_USE_AGENT_STORE.
    """
    port = getattr(innermost_store(store), "port", None)
    is_by_environment = port is not None and os.environ.get("MASTER_PORT") == str(port)
    return 0 if is_by_environment and not _is_hosted_by_agent() else None


def _is_hosted_by_agent() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def adopt(liveness: Liveness) -> None:
    """Make `liveness`, which covers all ranks, the result of `world_liveness` for the default process group."""
    global _current
    with _lock:
        _current = weakref.ref(dist.group.WORLD), liveness


def join_ranks(backend: str = "gloo", *, deadline_s: float = 60.0) -> None:
    """Make the default process group from the environment, as `init_process_group()` does. Collective.

    Each rank has a heartbeat from the first moment, so that errors name a rank that does not come, or is lost
    before the first context is made.

    Args:
        backend: as for `torch.distributed.init_process_group`.
        deadline_s: seconds that the other ranks may take to come; also seconds without a heartbeat after which a
            rank counts as lost from then on.

    Raises:
        BindError: there is a default process group already, or the environment lacks RANK, WORLD_SIZE,
            MASTER_ADDR or MASTER_PORT, or has no whole number for one but MASTER_ADDR.
        RankLostError, DeadlineError: ranks did not come.
    """
    global _current
    deadline_s = require_seconds(deadline_s, "deadline_s")
    if dist.is_initialized():
        raise BindError("there is a default process group already; join_ranks makes it")
    try:
        rank, num_ranks, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        address = os.environ["MASTER_ADDR"]
    except KeyError as error:
        raise BindError(f"join_ranks needs {error.args[0]} in the environment, as torchrun sets it") from None
    except ValueError as error:
        raise BindError(f"join_ranks needs whole numbers in the environment: {error}") from None
    patience, is_hosted = timedelta(seconds=deadline_s), _is_hosted_by_agent()
    hosts = rank == 0 and not is_hosted
    try:
        options: dict[str, Any] = {"wait_for_workers": False, "multi_tenant": True}
        connect = partial(dist.TCPStore, address, port, None, hosts, patience, **options)
        store = call_within(deadline_s, connect)  # which may take twice its timeout
    except (RuntimeError, TimeoutError) as error:
        host = "the agent of torchrun" if is_hosted else "rank 0, which hosts the store,"
        raise RankLostError(
            f"{host} never answered at {address}:{port}", () if is_hosted else (0,)
        ) from error
    formed: list[weakref.ref[Any]] = []
    liveness = Liveness(
        store,
        rank,
        range(num_ranks),
        deadline_s=deadline_s,
        likely_store_rank=None if is_hosted else 0,
        is_wanted=lambda: not formed or _is_default(formed[0]),
    )
    liveness.watch_peers(deadline_s, close_connections)
    install_last_words(lambda: None if _current is None else _current[1])
    # Before there is a group: what ends this process meanwhile is told, too.
    _current = weakref.ref(liveness), liveness
    form_world(liveness, store, num_ranks, backend)
    formed.append(weakref.ref(dist.group.WORLD))


def form_world(liveness: Liveness, store: Any, num_ranks: int, backend: str, **options: Any) -> None:
    """Make the default process group within the deadline of `liveness`, and `adopt` that. Collective.

    Args:
        store: a `torch.distributed.Store` that all ranks share.
        num_ranks: the number of ranks of the group.
        options: further arguments of `torch.distributed.init_process_group`.

    Raises RankLostError or DeadlineError where ranks do not come.
    """
    own_store = dist.PrefixStore("group", store)
    form = partial(
        dist.init_process_group, backend, store=own_store, rank=liveness.rank, world_size=num_ranks, **options
    )
    others = [rank for rank in range(num_ranks) if rank != liveness.rank]
    with liveness.guard("all ranks to join", peers=others) as wait:
        call_within(wait.timeout.total_seconds(), form, partial(wait.check_peers, others.copy))
    adopt(liveness)
    store.set(_joined(liveness.rank), "1")


def _joined(rank: int) -> str:
    return f"meshweave: {rank} has joined"


def await_joined(liveness: Liveness, store: Any, num_ranks: int) -> None:
    """Wait until all ranks have returned from `form_world`: a rank that ends earlier breaks others' connections.

    Raises RankLostError or DeadlineError where ranks do not come.
    """

    def missing() -> list[int]:
        return [rank for rank in range(num_ranks) if not store.check([_joined(rank)])]

    with liveness.guard("all ranks to join", peers=range(num_ranks)) as wait:
        end_s = time.monotonic() + wait.timeout.total_seconds()
        while missing():
            if time.monotonic() > end_s:
                raise TimeoutError
            wait.check_peers(missing)
            time.sleep(0.01)


def _is_default(reference: weakref.ref[Any]) -> bool:
    world = reference()
    return world is not None and dist.group.WORLD is world


_ABORT_TAG = (1 << 16) - 2  # of no program: the first has number 1


def close_connections(groups: Sequence[Any] | None = None) -> None:
    """Close the gloo connections of process groups, None for all of this process, so that waits over them fail.

    It posts a receive with a timeout of 1 ms: at a timeout gloo closes all connections of the group. Groups of
    other backends stay open.
    """
    for group in compat_groups.process_groups() if groups is None else groups:
        with contextlib.suppress(RuntimeError, ValueError):
            if dist.get_backend(group) != "gloo":
                continue
            me = dist.get_rank()
            for peer in dist.get_process_group_ranks(group):  # one that is still connected serves for all
                if peer != me:
                    with contextlib.suppress(RuntimeError, ValueError):
                        work = dist.irecv(torch.empty(1), peer, group=group, tag=_ABORT_TAG)
                        work.wait(timedelta(milliseconds=1))


class SignedStore:
    """A `torch.distributed.Store` whose values are signed with the token of the run; see `ranks.signing`.

    A value that no rank of this run has written counts as absent in `check`, and as an error where it is read.

    Args:
        store: where the values are.
        limit_s: seconds that any one call may take, after which it raises TimeoutError: a call to a store whose
            host is suspended never returns. None for no limit.
    """

    def __init__(self, store: Any, limit_s: float | None = None) -> None:
        self._store, self._limit_s = store, limit_s

    def set(self, key: str, value: str) -> None:
        """Write `value`, signed, under `key`."""
        self._call(partial(self._store.set, key, sign(key, value)))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all `keys` have values that ranks of this run have signed."""
        keys = list(keys)

        def are_there() -> bool:
            if not self._store.check(keys):
                return False
            values = self._store.multi_get(keys) if keys else []
            return all(verify(key, value) is not None for key, value in zip(keys, values, strict=True))

        return self._call(are_there)

    def get(self, key: str) -> bytes:
        """Return the value of `key`, which must have one, without its signature.

        Raises RuntimeError where no rank of this run has signed it.
        """
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of `keys` in order, without their signatures; every key must have a value.

        Raises RuntimeError where no rank of this run has signed one of them.
        """
        values = self._call(partial(self._store.multi_get, list(keys)))
        texts = [verify(key, value) for key, value in zip(keys, values, strict=True)]
        if None in texts:
            raise RuntimeError(f"the store has a value for {keys[texts.index(None)]} that no rank has signed")
        return [text.encode() for text in texts if text is not None]

    def delete_key(self, key: str) -> None:
        """Remove `key` and its value. Raises RuntimeError or NotImplementedError where the store cannot."""
        self._call(partial(self._store.delete_key, key))

    def clone(self) -> SignedStore:
        """Return the same store over a new connection; over this one where the store cannot be cloned."""
        clone = getattr(self._store, "clone", None)
        return SignedStore(self._store if clone is None else clone(), self._limit_s)

    def _call(self, function: Callable[[], _Result]) -> _Result:
        return function() if self._limit_s is None else call_within(self._limit_s, function)


def signed_store(limit_s: float | None = None) -> SignedStore:
    """Return the store of the default process group as a `SignedStore`; `limit_s` bounds each call, in seconds.

    Raises ValueError where there is no default process group.
    """
    return SignedStore(compat_groups.default_store(), limit_s)
