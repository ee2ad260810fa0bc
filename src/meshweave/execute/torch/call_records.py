"""The calls of a context as data: what each one was, how many there were, and which one is under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

_NUM_REMEMBERED = 32


@dataclass(frozen=True)
class CallKind:
    """What a call does.

    Attributes:
        key: equal on all ranks that do the same; different for any two bound programs.
        title: what it does, in words.
        refusal: the error for which a rank did not take part, "" if it did.
    """

    key: str
    title: str
    refusal: str = ""


class SharedCalls:
    """The calls of one context among one set of ranks.

    Attributes:
        count: the calls begun so far; equal on all ranks between calls.
        recent: (number, kind) of the last 32 calls begun, the latest last; numbers start at 1.
        tokens: by rank, the token that names its record in the store, as far as that is known.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.count = 0
        self.recent: deque[tuple[int, CallKind]] = deque(maxlen=_NUM_REMEMBERED)
        self.tokens: dict[int, str] = {}


class ContextCalls:
    """All calls of one context of a rank.

    Attributes:
        token: names the record of this context in the store.
        sequences: the calls among each set of ranks.
        current: the calls among the ranks of the one that is under way; None between calls.
        serial: the calls begun so far, of all sequences.
        verdict: why calls are out of order; "" as long as they are not.
    """

    def __init__(self, rank: int, token: str) -> None:
        self.rank, self.token = rank, token
        self.sequences: Mapping[tuple[int, ...], SharedCalls] = {}
        self.current: SharedCalls | None = None
        self.serial = 0
        self.verdict = ""
