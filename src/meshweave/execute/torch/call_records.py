"""The calls of a context as data: what each one was, how many there were, and which one is under way."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from meshweave.base.errors import DeadlineError, RankLostError

REFUSED = "refuse"
"""The key of a call in whose place a rank raises an error."""

_NUM_REMEMBERED = 32


@dataclass(frozen=True)
class CallKind:
    """What a call (something that ranks do together, such as a run of a program) does.

    Attributes:
        key: equal on all ranks that do the same; different for any two bound programs.
        title: what the call does, in words.
        refusal: the error for which this rank did not take part, or that ended its part; "" if it took part.
    """

    key: str
    title: str
    refusal: str = ""


class SharedCalls:
    """The calls of one context among one set of ranks.

    Attributes:
        count: the calls begun so far; equal on all ranks between calls.
        recent: (number, kind) of the last 32 calls begun, the latest last; numbers start at 1.
        tokens: for each rank, as far as known, the token that names the record of its calls in the store.
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
        sequences: the calls among each set of ranks, by these ranks in ascending order.
        current: the sequence to which the call under way belongs; None between calls.
        serial: number of calls begun so far in all sequences.
        verdict: why calls of ranks are out of order, in words; "" as long as they are in order.
    """

    def __init__(self, rank: int, token: str) -> None:
        self.rank, self.token = rank, token
        self.sequences: Mapping[tuple[int, ...], SharedCalls] = {}
        self.current: SharedCalls | None = None
        self.serial = 0
        self.verdict = ""


def error_words(error: Exception) -> str:
    """Return an error as one line, "<class name>: <message>"."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def is_of_distributed(error: BaseException) -> bool:
    """Return whether the innermost frame of an error's traceback is code of torch.distributed."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and str(frame.tb_frame.f_globals.get("__name__")).startswith("torch.distributed")


def news_of(error: BaseException | None) -> str:
    """Return an error that other ranks must be told of as one line (`error_words`); "" for any other, or None.

    Not told are RankLostError, DeadlineError, errors raised by torch.distributed unless another error caused
    them, and what is no Exception, such as KeyboardInterrupt.
    """
    while error is not None and is_of_distributed(error) and error.__cause__ is not None:
        error = error.__cause__  # what a stage raised, in the words of torch's pipelining
    if not isinstance(error, Exception) or isinstance(error, RankLostError | DeadlineError):
        return ""
    return "" if is_of_distributed(error) else error_words(error)


_SHARED = "is_known_to_other_ranks"


def mark_as_shared(error: BaseException) -> None:
    """Mark an error that `share_refusal` need not tell: other ranks raise it too, or none waits for this rank."""
    with contextlib.suppress(AttributeError):
        setattr(error, _SHARED, True)


def is_shared(error: BaseException) -> bool:
    """Return whether `mark_as_shared` has marked an error."""
    return bool(getattr(error, _SHARED, False))
