"""What the ranks of a program tell one another before they move a byte: words in the store, and one program.

Words go through the store of the default process group, in rounds that are numbered per set of ranks; a round
ends when all have spoken. So no group of processes has to be formed, and any rank may be the one that is missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from meshweave.base.errors import BindError, DeadlineError, MeshweaveError, RankLostError
from meshweave.execute.ranks.blame import ranks_text
from meshweave.execute.torch import compat
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.groups import CountsPerWorld
from meshweave.ir.program import Program
from meshweave.ir.program.text import to_text

Talk = Callable[[Sequence[int], str, str], dict[int, str]]
"""(ranks, own words, what for) -> the words of each rank, as `exchange` with its context."""

_FIRST_S, _LONGEST_S = 0.0005, 0.01


def exchange(context: TorchContext, ranks: Sequence[int], words: str, what: str) -> dict[int, str]:
    """Return what each of `ranks` says, in ascending order. Collective among them.

    Args:
        words: what this rank says.
        what: completes "waiting for ..." in errors.

    Raises:
        BindError: there is no process group, or another rank waits for other ranks than this one does.
        RankLostError, DeadlineError: see `TorchContext.guard`.
    """
    ranks = tuple(sorted(ranks))
    if len(ranks) == 1:
        return {ranks[0]: words}
    if not context.is_distributed:
        raise BindError(f"ranks {ranks} have no way to talk ({what}): initialise torch.distributed")
    store: Any = compat.default_store()
    talks = _talks.counts()
    number = talks[ranks] = talks.get(ranks, 0) + 1
    me, folder = context.rank, f"meshweave/talk/{'-'.join(map(str, ranks))}"
    others = [rank for rank in ranks if rank != me]
    with waiting(context, what, others) as overdue:
        store.set(_now(me), json.dumps([ranks, number, what]))
        store.set(f"{folder}/{number}/{me}", words)
        keys = [f"{folder}/{number}/{rank}" for rank in others]
        pause_s = _FIRST_S
        while not store.check(keys):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_S)
            if pause_s == _LONGEST_S:
                _check_same_talk(store, talks, me, ranks, what, f"{folder}/{number}/broken")
            overdue()
        said = store.multi_get(keys)
        if number > 1:  # all that speak in this round have heard the last one
            with contextlib.suppress(RuntimeError, NotImplementedError):
                store.delete_key(f"{folder}/{number - 1}/{me}")
    heard = {rank: text.decode() for rank, text in zip(others, said, strict=True)}
    return {rank: words if rank == me else heard[rank] for rank in ranks}


_talks = CountsPerWorld()
"""Rounds so far by set of ranks: contexts come and go, and marks stay in the store."""


def _now(rank: int | None) -> str:
    return f"meshweave/talk/now/{rank}"


def _check_same_talk(
    store: Any,
    talks: dict[tuple[int, ...], int],
    me: int | None,
    ranks: tuple[int, ...],
    what: str,
    broken: str,
) -> None:
    """A rank that waits for us in a round that we are not in will wait for ever, and so shall we. Those of our own
    round learn it under the key `broken`: not all of them can see it for themselves."""
    if store.check([broken]):
        raise BindError(store.get(broken).decode())
    for rank in ranks:
        if rank != me and store.check([_now(rank)]):
            theirs, number, theirs_what = json.loads(store.get(_now(rank)))
            elsewhere = me in theirs and tuple(theirs) != ranks and talks.get(tuple(theirs), 0) < number
            # One that has spoken in our round has gone on to its next, and does not keep us.
            if elsewhere and not store.check([broken.removesuffix("broken") + str(rank)]):
                why = (
                    f"rank {me} waits with ranks {ranks} for {what}, "
                    f"rank {rank} with ranks {tuple(theirs)} for {theirs_what}"
                )
                store.set(broken, why)
                raise BindError(why)


@contextlib.contextmanager
def waiting(context: TorchContext, what: str, peers: Sequence[int]) -> Iterator[Callable[[], None]]:
    """Guard a wait by polling: yields what to call between two looks, which raises once time is up.

    Raises RankLostError or DeadlineError, see `TorchContext.guard`; UnsupportedError where another lane of this
    process has failed meanwhile.
    """
    with context.guard(what, peers) as wait:
        until = time.monotonic() + wait.timeout.total_seconds()

        def overdue() -> None:
            context.lane_threads.check()
            if time.monotonic() >= until:
                raise RuntimeError(f"timed out waiting for {what}")

        yield overdue


def lost(context: TorchContext, what: str, dead: Sequence[int]) -> MeshweaveError:
    """Return the error for ranks whose processes are known to have ended while they were waited for."""
    try:
        with context.guard(what, dead):
            raise RuntimeError(f"{ranks_text(dead)} closed the connection")
    except (RankLostError, DeadlineError) as error:
        if isinstance(error, RankLostError) and error.missing:
            return error
    except RuntimeError:
        pass
    return RankLostError(f"{ranks_text(dead)} ended while waiting for {what}", tuple(dead))


def agree(context: TorchContext, program: Program, *, talk: Talk | None = None) -> None:
    """Make sure that all ranks of `program` are about to run the very same one. Collective among them.

    Args:
        talk: how they tell each other, where not through the store.

    Raises:
        BindError: they are not; it names the ranks that differ.
        RankLostError, DeadlineError: see `TorchContext.guard`.
    """
    digest = hashlib.sha256(to_text(program).encode()).hexdigest()
    what = f"all to agree on program {program.name}"
    words = json.dumps([program.name, digest])
    said = talk(program.ranks, words, what) if talk else exchange(context, program.ranks, words, what)
    parties: dict[str, list[int]] = {}
    for rank, text in said.items():
        parties.setdefault(text, []).append(rank)
    if len(parties) > 1:
        sides = sorted(parties.items(), key=lambda side: (-len(side[1]), side[1]))
        sides_text = ", ".join(
            f"{ranks_text(ranks)} {json.loads(text)[0]!r} ({json.loads(text)[1][:8]})"
            for text, ranks in sides
        )
        raise BindError(f"ranks are about to run different programs: {sides_text}")
