"""What the ranks of a program tell one another before they move a byte: words in the store, and one program.

Words go through the store of the default process group, under the number of the call (`torch.call_order`); an
agreement ends when all have spoken. So no group of processes has to be formed, and any rank may be the one that is
missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from meshweave.base.errors import BindError, RankLostError
from meshweave.execute.ranks.blame import ranks_text
from meshweave.execute.torch.call_order import CallSequence, call_order
from meshweave.execute.torch.call_watch import out_of_order
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.groups import PerWorld
from meshweave.execute.torch.world import SignedStore, signed_store
from meshweave.ir.program import Program
from meshweave.ir.program.text import to_text

Talk = Callable[[Sequence[int], str, str], dict[int, str]]
"""(ranks, own words, what for) -> the words of each rank, as `exchange` with its context."""

_FIRST_S, _LONGEST_S = 0.0005, 0.01
_UNHEARD_S = 1.0  # for a look at who has not spoken


def exchange(
    context: TorchContext, ranks: Sequence[int], words: str, what: str, *, topic: str = ""
) -> dict[int, str]:
    """All-gather texts through the store: return {rank: its text} in ascending order. Collective among `ranks`.

    Args:
        words: this rank's text.
        what: completes "waiting for ..." in errors.
        topic: the kind of exchange; must be equal on all ranks.

    Raises:
        BindError: there is no process group; another rank is in another call, has raised an error in place
            of this call, or waits for other ranks than this one does.
        RankLostError, DeadlineError: another rank died, or did not come in time.
        UnsupportedError: an earlier call in this context was out of order, or an earlier run in it failed.
    """
    ranks = tuple(sorted(ranks))
    if len(ranks) == 1:
        return {ranks[0]: words}
    if not context.is_distributed:
        raise BindError(f"ranks {ranks} have no way to talk ({what}): initialise torch.distributed")
    order = call_order(context)
    sequence = order.sequence(ranks)
    with sequence.agreement(what) as number:
        spoken = {"topic": topic, "title": order.title or what, "token": order.token, "words": words}
        said = _said_by_all(context, sequence, number, json.dumps(spoken), what)
        parties: dict[tuple[str, str], list[int]] = {}
        for rank, answer in said.items():
            if "refuses" in answer:
                raise BindError(f"rank {rank} refuses {answer['title']}: {answer['refuses']}")
            parties.setdefault((answer["topic"], answer["title"]), []).append(rank)
        if len({topic for topic, _ in parties}) > 1:
            raise BindError(out_of_order(parties, number))
    sequence.tokens = {rank: answer["token"] for rank, answer in said.items()}
    return {rank: answer["words"] for rank, answer in said.items()}


def _said_by_all(
    context: TorchContext, sequence: CallSequence, number: int, spoken: str, what: str
) -> dict[int, Any]:
    """Return what each rank of a sequence says in call `number`, as JSON; this one says `spoken`."""
    store = signed_store(context.deadline_s)
    me, ranks = sequence.order.rank, sequence.ranks
    others = [rank for rank in ranks if rank != me]
    known = _begun.kept()
    known[ranks, sequence.session] = number
    keys = [sequence.words_key(number, rank) for rank in others]

    def unheard() -> list[int]:
        quick = signed_store(_UNHEARD_S)
        return [rank for rank, key in zip(others, keys, strict=True) if not quick.check([key])]

    with _no_longer_waits(me), waiting(context, what, others, unheard) as overdue:
        folder = f"{sequence.folder}/{number}"
        store.set(_now(me), json.dumps([ranks, sequence.session, number, what, folder]))
        store.set(sequence.words_key(number, me), spoken)
        pause_s = _FIRST_S
        while not store.check(keys):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_S)
            if pause_s == _LONGEST_S:
                _check_same_talk(store, known, me, ranks, what, folder)
            try:
                overdue()
            except RankLostError:
                _check_broken(store, folder)  # those that broke this off may have left since
                raise
        said = store.multi_get(keys)
        if sequence.last_key:  # all that speak now have heard the last words
            with contextlib.suppress(RuntimeError, NotImplementedError):
                store.delete_key(sequence.last_key)
        sequence.last_key = sequence.words_key(number, me)
    heard = dict(zip(others, said, strict=True))
    return {rank: json.loads(spoken if rank == me else heard[rank]) for rank in ranks}


_begun: PerWorld[int] = PerWorld()
"""The last call in which this rank has spoken, by (ranks, session)."""


def _now(rank: int) -> str:
    return f"meshweave/talk/now/{rank}"


@contextlib.contextmanager
def _no_longer_waits(rank: int) -> Iterator[None]:
    """Take back what a rank says of where it waits if an error ends the wait: nobody is kept by that any more."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(RuntimeError, OSError):  # the store may be gone
            signed_store(_UNHEARD_S).set(_now(rank), json.dumps([[], 0, 0, "", ""]))
        raise


def _check_same_talk(
    store: SignedStore,
    begun: Mapping[tuple[tuple[int, ...], int], int],
    me: int,
    ranks: tuple[int, ...],
    what: str,
    folder: str,
) -> None:
    """Raise BindError where a rank waits for this one in an agreement of other ranks: both would wait for ever.

    The others of both agreements learn it under a key in the `folder` of theirs: not all can see it themselves,
    and this rank waits no longer once it has seen it.
    """
    _check_broken(store, folder)
    for rank in ranks:
        if rank != me and store.check([_now(rank)]):
            theirs, session, number, theirs_what, their_folder = json.loads(store.get(_now(rank)))
            is_begun = begun.get((tuple(theirs), session), 0) >= number
            elsewhere = me in theirs and tuple(theirs) != ranks and not is_begun
            # One that has spoken in our agreement has gone on to its next, and does not keep us.
            if elsewhere and not store.check([f"{folder}/{rank}"]):
                why = (
                    f"rank {me} waits with ranks {ranks} for {what}, "
                    f"rank {rank} with ranks {tuple(theirs)} for {theirs_what}"
                )
                for each in (their_folder, folder):
                    store.set(_broken(each), why)
                raise BindError(why)


def _broken(folder: str) -> str:
    return f"{folder}/broken"


def _check_broken(store: SignedStore, folder: str) -> None:
    """Raise BindError where a rank has found that the agreement of this folder cannot end."""
    if store.check([_broken(folder)]):
        raise BindError(store.get(_broken(folder)).decode())


@contextlib.contextmanager
def waiting(
    context: TorchContext, what: str, peers: Sequence[int], unheard: Callable[[], Sequence[int]] = tuple
) -> Iterator[Callable[[], None]]:
    """Guard a wait that polls: yield a function to call at each poll; it raises once a peer ended or time is up.

    Time is up after the deadline of `context`.

    Args:
        what: completes "waiting for ..." in errors.
        peers: the ranks waited for.
        unheard: returns the peers still waited for: only the end of one of these is an error. Errors name them.

    Raises:
        RankLostError, DeadlineError: a peer ended; time is up.
        BindError: this rank's call is out of order with that of another one.
        UnsupportedError: another lane of this process has failed meanwhile.
    """
    with context.guard(what, peers) as wait:
        until = time.monotonic() + wait.timeout.total_seconds()

        order = call_order(context)

        def overdue() -> None:
            order.check_verdict()
            context.lane_threads.check()
            wait.check_peers(unheard)
            if time.monotonic() >= until:
                with contextlib.suppress(RuntimeError, OSError):  # the store may be gone
                    wait.unheard = tuple(unheard())
                raise RuntimeError(f"timed out waiting for {what}")

        yield overdue


def agree(context: TorchContext, program: Program, *, talk: Talk | None = None) -> None:
    """Check that all ranks of `program` hold the same program text. Collective among the program's ranks.

    Args:
        talk: exchanges texts among ranks; None to use the store of the process group (`exchange`).

    Raises:
        BindError: the ranks' programs differ (the error names the ranks); a rank is in another call, or has
            raised an error in place of this call; or there is no process group and no `talk`.
        RankLostError, DeadlineError: another rank died, or did not come in time.
    """
    digest = _digest(program)
    what = f"all to agree on program {program.name}"
    words = json.dumps([program.name, digest])
    if talk:
        said = talk(program.ranks, words, what)
    else:
        said = exchange(context, program.ranks, words, what, topic="agreeing on a program")
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


def agree_once(context: TorchContext, program: Program) -> None:
    """Run `agree` for a program unless its ranks have agreed on a program of the same text before.

    Collective among the program's ranks the first time. No-op for one rank, or without a process group.

    Raises:
        BindError: ranks are about to run different programs; the error names them.
        RankLostError, DeadlineError: another rank died, or did not come in time.
    """
    if not context.is_distributed or len(program.ranks) == 1:
        return
    agreed, digest = call_order(context).sequence(program.ranks).digests, _digest(program)
    if digest not in agreed:
        agree(context, program)
        agreed.add(digest)


_digests: dict[int, tuple[weakref.ref[Program], str]] = {}


def _digest(program: Program) -> str:
    """Return a digest of a program's text, made once per object: large programs print slowly."""
    known = _digests.get(id(program))
    if known is not None and known[0]() is program:
        return known[1]
    digest = hashlib.sha256(to_text(program).encode()).hexdigest()
    key = id(program)
    _digests[key] = weakref.ref(program, lambda _: _digests.pop(key, None)), digest
    return digest
