"""Messages between ranks about their checkpoints, through the store of the default process group.

A deadline counts the silence of ranks and not the time that they take: one that reads or writes says so now and
then, and is waited for while its heart beats and its disk finishes something within `STALLED_S`.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from typing import Any

from meshweave.base.errors import CheckpointError
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.groups import PerWorld
from meshweave.execute.torch.world import signed_store

STALLED_S = 60.0
"""Seconds in which a disk finishes nothing that is asked of it, after which it is taken to hang."""
_FIRST_S, _LONGEST_S = 0.0005, 0.02
_TICK_S = 0.2
_sessions: PerWorld[int] = PerWorld()


class AgreementRound:
    """One exchange of messages between ranks through the store of the default process group.

    Each rank gives a message once, and gets those of all ranks or of one.

    Args:
        context: deadline and liveness of waits.
        key: begins the keys of the round in the store; the same on all ranks, and of no other round.
        what: completes "waiting for ..." in errors.

    Attributes:
        is_given_up: whether this rank has stopped waiting for the round, after an error.
    """

    def __init__(self, context: TorchContext, key: str, what: str) -> None:
        self._context, self._key, self._what = context, key, what
        self._rank, self._num_ranks = context.rank or 0, context.num_ranks
        self._own: dict[str, str] = {}  # where there is one rank
        self._is_alone = not context.is_distributed or context.num_ranks == 1
        self._num_ticks, self._ticked_at = 0, 0.0
        self.is_given_up = False

    def _name(self, rank: int | str) -> str:
        return f"{self._key}/{rank}"

    def give(self, words: Any, name: int | str | None = None) -> None:
        """Write JSON values `words` into the store for other ranks, under `name` (None: this rank's number)."""
        name = self._rank if name is None else name
        if self._is_alone:
            self._own[self._name(name)] = json.dumps(words)
        else:
            signed_store(self._context.deadline_s).set(self._name(name), json.dumps(words))

    def tick(self) -> None:
        """Tell the others through the store that this rank is at work; at most once in `_TICK_S` seconds."""
        now = time.monotonic()
        if now - self._ticked_at < _TICK_S:
            return
        self._ticked_at, self._num_ticks = now, self._num_ticks + 1
        with contextlib.suppress(RuntimeError, OSError):  # whoever waits finds out that the store is gone
            self.give(self._num_ticks, f"tick{self._rank}")

    def given(self, names: Sequence[int | str]) -> list[Any] | None:
        """Return what was written under each of `names`, in order, without waiting; None until all is there."""
        keys = [self._name(name) for name in names]
        if self._is_alone:
            return [json.loads(self._own[key]) for key in keys] if self._own.keys() >= set(keys) else None
        store = signed_store(self._context.deadline_s)
        return [json.loads(words) for words in store.multi_get(keys)] if store.check(keys) else None

    def forget(self) -> None:
        """Remove from the store what this rank wrote in the round; rank 0 also removes "result".

        Call it once all ranks have read these.
        """
        if not self._is_alone:
            store = signed_store(self._context.deadline_s)
            for name in (self._rank, f"tick{self._rank}", *(() if self._rank else ("result",))):
                with contextlib.suppress(RuntimeError, OSError, NotImplementedError):
                    store.delete_key(self._name(name))

    def wait_for(self, names: Sequence[int | str]) -> list[Any]:
        """Wait until something is written under each of `names` (see `give`), and return it, in their order.

        Raises RankLostError where a rank died; DeadlineError where a rank that has yet to write did neither that
        nor `tick` in time.
        """
        seen: dict[int, tuple[int, float]] = {}  # of ranks at work: how far they were when, as seen here
        stalled_s = max(STALLED_S, self._context.deadline_s)
        others = [rank for rank in range(self._num_ranks) if rank != self._rank]
        while True:
            with self._context.guard(self._what, others) as wait:
                until = time.monotonic() + wait.timeout.total_seconds()
                pause_s = _FIRST_S
                while time.monotonic() < until:
                    if (said := self.given(names)) is not None:
                        return said
                    wait.check_peers(self._unheard)
                    self._context.lane_threads.check()
                    time.sleep(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_S)
                unheard = self._unheard()
                if (said := self.given(names)) is not None:
                    return said
                silent = [rank for rank in unheard if not self._works(rank, seen, stalled_s)]
                if silent or self._are_missing(unheard):
                    wait.unheard = tuple(silent or unheard)
                    raise RuntimeError(f"timed out waiting for {self._what}")

    def _unheard(self) -> list[int]:
        """Return the ranks that have yet to speak; the first where all have, and it has yet to conclude."""
        return [rank for rank in range(self._num_ranks) if self.given([rank]) is None] or [0]

    def _works(self, rank: int, seen: dict[int, tuple[int, float]], within_s: float) -> bool:
        """Return whether a rank has said that it works, and was seen to get on in the last seconds."""
        ticks = self.given([f"tick{rank}"])
        now = time.monotonic()
        if ticks is None:
            return False
        if rank not in seen or seen[rank][0] != ticks[0]:
            seen[rank] = ticks[0], now
        return now - seen[rank][1] < within_s

    def is_at_work(self, within_s: float, seen: dict[int, tuple[int, float]]) -> bool:
        """Return whether another rank made a `tick` in the last `within_s` seconds, as far as this rank has seen.

        Only ranks that have yet to `give` count; where all have given, rank 0, which has yet to write the result.

        Args:
            within_s: seconds.
            seen: {rank: (number of the last tick that earlier calls saw, when on the monotonic clock, in
                seconds)}; {} at first, and updated. A tick that it lacks counts as made now.
        """
        return any(rank != self._rank and self._works(rank, seen, within_s) for rank in self._unheard())

    def _are_missing(self, ranks: Sequence[int]) -> bool:
        liveness = self._context.liveness
        return liveness is not None and bool(set(liveness.missing()) & set(ranks))


class Rounds:
    """The rounds (exchanges of messages) of one `Checkpoints`, which all ranks begin in the same order."""

    def __init__(self, context: TorchContext) -> None:
        self._context, self._count = context, 0
        self._ended: list[AgreementRound] = []
        self._session = 0
        if context.is_distributed:
            counts = _sessions.kept()
            self._session = counts["made"] = counts.get("made", 0) + 1

    def begin(self, what: str) -> AgreementRound:
        """Return the next round, and tell the others that this rank is at work in it.

        Args:
            what: completes "waiting for ..." in errors.
        """
        self._count += 1
        round_ = AgreementRound(self._context, f"meshweave/checkpoints/{self._session}/{self._count}", what)
        round_.tick()
        return round_

    def end(self, round_: AgreementRound) -> None:
        """Note that a round is over; what was written in it is removed once all ranks are in a later one."""
        self._ended.append(round_)

    def agree(self, round_: AgreementRound, topic: str, words: dict[str, Any]) -> list[dict[str, Any]]:
        """Exchange `words` in a round; return each rank's, with `topic`, by ascending rank. Collective.

        Args:
            round_: the round, as `begin` returned it.
            topic: what this rank is about to do, in words, which must be the same on all ranks.
            words: JSON values; a non-empty `wrong` says why this rank refuses.

        Raises:
            CheckpointError: a rank refuses, or ranks are about to do different things; on all ranks the same.
            RankLostError, DeadlineError: other ranks are lost, or neither gave their words nor ticked in time.
        """
        round_.give({**words, "topic": topic})
        said = round_.wait_for(range(self._context.num_ranks))
        for ended in self._ended:  # all that speak now have heard what was said before
            ended.forget()
        self._ended = [round_]
        for rank, each in enumerate(said):
            if each.get("wrong"):
                raise CheckpointError(str(each["wrong"]))
            if each["topic"] != said[0]["topic"]:
                raise CheckpointError(
                    f"ranks are to do different things: rank 0 {said[0]['topic']}, rank {rank} {each['topic']}"
                )
        return said
