"""Which ranks failed or hang, as one rank concludes from the heartbeats of the others.

The functions are pure: no clock, no store, no thread.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, cast

# A rank in any state but `alive` leaves. `lost`: because of other ranks. `overdue`: it gave up on
# a wait. `stopped`: a signal ended it. `failed`: it has an error of its own. `done`: its function has returned.
State = Literal["alive", "lost", "overdue", "stopped", "failed", "done"]


@dataclass(frozen=True, slots=True)
class Beat:
    """One heartbeat of a rank.

    Attributes:
        count: number of the heartbeat, which only grows.
        state: "alive", or why the rank leaves: because of others ("lost"), it gave up on a wait ("overdue"),
            a signal ended it ("stopped"), it has an error of its own ("failed"), or it has finished ("done").
        detail: words for the state, such as the message of an error.
        heard: the digest of the last `News` that the rank has read; "-" before that.
    """

    count: int
    state: State = "alive"
    detail: str = ""
    heard: str = "-"

    def encode(self) -> str:
        """Return the heartbeat as text for the store: "<count> <state> <heard> <detail>"."""
        return f"{self.count} {self.state} {self.heard} {self.detail}"

    @classmethod
    def decode(cls, value: str) -> Beat:
        """Return the heartbeat that `encode` turned into `value`."""
        count, state, heard, detail = value.split(" ", 3)
        return cls(int(count), cast(State, state), detail, heard)


NO_RANK = -1


@dataclass(frozen=True, slots=True)
class News:
    """What all ranks must know even after the store is gone. It is one value of the store, which every rank reads.

    Attributes:
        lost: the ranks that some rank has given up.
        store_rank: the rank whose process hosts the store; NO_RANK where none of them does; None where no rank has
            said.
        farewell: why `store_rank` leaves, as "<state> <detail>" of its last `Beat`; "" while it stays.
    """

    lost: frozenset[int] = frozenset()
    store_rank: int | None = None
    farewell: str = ""

    def merge(self, other: News) -> News:
        """Return the union of the lost ranks, with `store_rank` and `farewell` of self, or of `other` if unset."""
        store_rank = other.store_rank if self.store_rank is None else self.store_rank
        return News(self.lost | other.lost, store_rank, self.farewell or other.farewell)

    def encode(self) -> str:
        """Return the news as JSON text for the store: [lost ranks ascending, store_rank, farewell]."""
        return json.dumps([sorted(self.lost), self.store_rank, self.farewell])

    @classmethod
    def decode(cls, value: str) -> News:
        """Return the news that `encode` turned into `value`."""
        lost, store_rank, farewell = json.loads(value)
        return cls(frozenset(lost), store_rank, farewell)

    @property
    def digest(self) -> str:
        """Return the first 12 hexadecimal digits of the SHA-256 of these news: the `heard` of a `Beat`."""
        return hashlib.sha256(self.encode().encode()).hexdigest()[:12]


class HeartbeatWatch:
    """The heartbeats of other ranks that one rank has read since the watch began.

    Attributes:
        stale_s: seconds without a new heartbeat after which a rank is silent.
        beats: the last heartbeat of each other rank; None where there was none.
        num_rounds: number of readings, which are calls of `feed`.
        stopped_before: the ranks that were in state "stopped" (ended by a signal) at the first reading.
    """

    def __init__(self, others: Iterable[int], *, interval_s: float, stale_s: float) -> None:
        self._interval_s, self.stale_s = interval_s, stale_s
        self._first: dict[int, int] = {}
        self._silence_s = dict.fromkeys(others, 0.0)
        self.beats: dict[int, Beat | None] = dict.fromkeys(self._silence_s)
        self.num_rounds = 0
        self.stopped_before: list[int] = []
        self._ended: frozenset[int] = frozenset()

    def feed(
        self,
        elapsed_s: float,
        beats: Mapping[int, Beat | None],
        unreadable: Collection[int] = (),
        ended: Iterable[int] = (),
    ) -> None:
        """Record one reading of all other ranks' heartbeats, `elapsed_s` seconds after the last one.

        A reading adds `elapsed_s` to the silence of a rank without a new heartbeat, but at most two heartbeat
        intervals, or a third of `stale_s` where that is more: this process may have been paused itself.

        Args:
            beats: the last heartbeat of each rank, None where it has none.
            unreadable: ranks whose value in the store is no heartbeat of this run; adds nothing to their silence.
            ended: ranks whose processes had ended before the reading, so that their last heartbeat is final.
        """
        self._ended = frozenset(ended)
        most_s = max(2 * self._interval_s, self.stale_s / 3)
        heard_s = min(elapsed_s, most_s) if self.num_rounds else 0.0
        for rank, before in self.beats.items():
            beat = beats.get(rank)
            if beat is not None:
                self._first.setdefault(rank, beat.count)
            if rank not in unreadable:
                self._silence_s[rank] = 0.0 if beat != before else self._silence_s[rank] + heard_s
        self.beats = {rank: beats.get(rank) for rank in self.beats}
        self.num_rounds += 1
        if self.num_rounds == 1:
            self.stopped_before = self.in_state("stopped")

    def in_state(self, *states: State) -> list[int]:
        """Return the ranks whose last heartbeat has one of these states."""
        return [rank for rank, beat in self.beats.items() if beat is not None and beat.state in states]

    @property
    def silent(self) -> list[int]:
        """Return the ranks that gave no reason to leave, but sent nothing new for `stale_s` seconds or have ended.

        A rank that has never sent a heartbeat is one of these after `stale_s` seconds.
        """
        return [rank for rank in self.beats if self._is_silent(rank) and not self._has_left(rank)]

    def _is_silent(self, rank: int) -> bool:
        return rank in self._ended or self._silence_s[rank] >= self.stale_s

    @property
    def suspects(self) -> list[int]:
        """Return the ranks that stopped sending heartbeats: none for `stale_s` seconds, or their process ended.

        Such ranks count even if they announced an error, or that they leave. Ranks whose last state is "done",
        and ranks that have sent no heartbeat yet, do not.
        """
        beating = {rank: beat for rank, beat in self.beats.items() if beat is not None}
        return [rank for rank, beat in beating.items() if self._is_silent(rank) and beat.state != "done"]

    @property
    def is_undecided(self) -> bool:
        """Return whether it is still open for some rank if it is alive, has left or is silent.

        A rank counts as alive after two more heartbeats since the first reading, the last one recent.
        """
        return self.num_rounds == 0 or any(
            not (self._has_left(rank) or self._is_silent(rank) or self._is_well(rank)) for rank in self.beats
        )

    def _has_left(self, rank: int) -> bool:
        beat = self.beats[rank]
        return beat is not None and beat.state != "alive"

    def _is_well(self, rank: int) -> bool:
        # One more beat proves nothing: the last of a dead rank may have been under way at the first reading.
        beat = self.beats[rank]
        fresh = beat is not None and beat.count >= self._first[rank] + 2
        return fresh and self._silence_s[rank] <= 3 * self._interval_s


@dataclass(frozen=True)
class BlamedRanks:
    """The ranks to blame for a failed wait.

    Attributes:
        missing: the ranks to blame; empty if all may still work.
        reason: what the missing ranks did, in words.
        given_up: a sentence on a rank that ran into its own deadline first; "" if there is none.
        has_left: whether `missing` are blamed for leaving alone, perhaps because of others: they were `stopped`
            after this rank had begun to listen, or are `done` (5 and 6 in `blame`). True also where `blame` has
            found neither a rank nor who gave up.
    """

    missing: tuple[int, ...]
    reason: str
    given_up: str = ""
    has_left: bool = False


def ranks_text(ranks: Collection[int]) -> str:
    """Return one or more ranks in words, ascending: `rank 2`, `ranks 2 and 5`, `ranks 2, 5 and 7`."""
    names = [str(rank) for rank in sorted(ranks)]
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def given_up_text(rank: int) -> str:
    """Return the sentence of an error on `rank` itself that says that the other ranks have given it up."""
    return f"the other ranks gave rank {rank} (this one) up: it did not answer"


def blame(
    rank: int, watch: HeartbeatWatch, accused: Iterable[int], peers: Iterable[int] | None, overdue: bool
) -> BlamedRanks:
    """Return which ranks `rank` blames for its failed wait.

    A rank that others have accused blames all accused ranks, itself included. Otherwise the first of these sets
    that is not empty is blamed, by heartbeat state. A rank in state "lost", which left because of others, is
    not blamed for that.

    1. the silent, failed and accused ranks
    2. those of `peers` that are `done`
    3. no rank, where some are `overdue`: they gave up first
    4. the ranks `stopped` before this rank looked, for a launcher stops the others because of the first
    5. all ranks that were `stopped`
    6. the ranks that are `done`, where `peers` is unknown and the wait broke off

    Args:
        watch: the heartbeats that `rank` has read.
        accused: ranks that other ranks blame.
        peers: the ranks waited for; None if unknown.
        overdue: whether the wait reached its deadline, instead of breaking off.
    """
    accused = set(accused)
    if rank in accused:
        return BlamedRanks(tuple(sorted(accused)), given_up_text(rank))
    blamed = sorted({*watch.silent, *watch.in_state("failed"), *accused})
    done = set(watch.in_state("done"))
    if peers is not None:
        blamed = blamed or sorted(done & set(peers))
    gave_up = watch.in_state("overdue")
    if not blamed and gave_up:
        beat = watch.beats[gave_up[0]]
        return BlamedRanks((), "", f"{ranks_text(gave_up)} gave up first ({beat.detail if beat else ''})")
    blamed = blamed or watch.stopped_before
    has_left = not blamed
    blamed = blamed or watch.in_state("stopped")
    # An overdue wait may well be for a rank that still works; a broken connection was somebody's who left.
    if peers is None and not overdue:
        blamed = blamed or sorted(done)
    by_reason: dict[str, list[int]] = {}
    for culprit in blamed:
        by_reason.setdefault(_reason(watch.beats.get(culprit)), []).append(culprit)
    said = [
        (rs, f"were{reason[3:]}" if rs[1:] and reason.startswith("was ") else reason)
        for reason, rs in by_reason.items()
    ]
    reason_text = ", ".join(f"{ranks_text(rs)} {reason}" for rs, reason in said)
    return BlamedRanks(tuple(blamed), reason_text, has_left=has_left)


def _reason(beat: Beat | None) -> str:
    if beat is None:
        return "never answered"
    by_state = {
        "failed": f"failed ({beat.detail})",
        "stopped": f"was told to stop ({beat.detail})",
        "done": "left early",
    }
    return by_state.get(beat.state, "stopped answering")
