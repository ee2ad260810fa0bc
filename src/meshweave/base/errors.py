"""What can go wrong through no fault of ours: one base class, one subclass per kind of user mistake.

Each message is one line that says what is wrong, where, and what would be right. The command line prints
it and exits with status 2; a library caller catches `MeshweaveError`. Our own mistakes are `assert`s.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class MeshweaveError(ValueError):
    """Base class of every error that a user can cause and a user can mend."""


class DescriptionError(MeshweaveError):
    """A cluster, model, workload or plan file (or its values) is wrong."""


class LayoutError(MeshweaveError):
    """A mesh, shape or placement does not fit the tensor it is meant for."""


class ProgramError(MeshweaveError):
    """A program is malformed or does not mean what it declares.

    `op`, `rank` and `buffer` name the culprit where it is known.
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
    """What was asked for is understood, and not available here."""


class RankLostError(MeshweaveError, RuntimeError):
    """One or more ranks died or stopped answering; `missing` names them."""

    def __init__(self, message: str, missing: Sequence[int]) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class DeadlineError(MeshweaveError, TimeoutError):
    """A wait ran past its deadline although every rank still answers."""


def nearest(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the known word nearest to `word`, or the empty string."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean '{matches[0]}'?)" if matches else ""
