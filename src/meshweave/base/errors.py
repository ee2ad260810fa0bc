"""The errors that a user can cause and mend: one base class, one subclass per kind of mistake.

A message says what is wrong, where, and what would be right, on one line; a description file with several
problems gets a line for each. The command line prints the message and exits with status 2; a library caller
catches `MeshweaveError`. Mistakes of the library itself are `assert`s.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class MeshweaveError(ValueError):
    """Base class of every error that a user can cause and mend."""


class DescriptionError(MeshweaveError):
    """A cluster, model, workload or plan file (or its values) is wrong."""


class LayoutError(MeshweaveError):
    """A mesh, shape or placement does not fit the tensor it is meant for."""


class ProgramError(MeshweaveError):
    """A program is malformed, or does not compute what it declares.

    `op`, `rank` and `buffer` name the culprit where they are known.
    """

    def __init__(
        self, message: str, *, op: str | None = None, rank: int | None = None, buffer: str | None = None
    ) -> None:
        where = [
            f"{key} {value}"
            for key, value in (("op", op), ("rank", rank), ("buffer", buffer))
            if value is not None
        ]
        super().__init__(f"{message} ({', '.join(where)})" if where else message)
        self.message, self.op, self.rank, self.buffer = message, op, rank, buffer


class BindError(MeshweaveError):
    """Tensors or process groups given at `bind` do not fit the program."""


class UnsupportedError(MeshweaveError):
    """A request is understood, but not available here."""


class RankLostError(MeshweaveError, RuntimeError):
    """One or more ranks died or stopped answering; `missing` names them."""

    def __init__(self, message: str, missing: Sequence[int]) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class DeadlineError(MeshweaveError, TimeoutError):
    """A wait ran past its deadline although every rank still answers."""


def nearest_word(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that is spelt most like `word`, or None if none is near."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)), None)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` for the known word nearest to `word`, or the empty string."""
    nearest = nearest_word(word, known)
    return f" (did you mean '{nearest}'?)" if nearest else ""
