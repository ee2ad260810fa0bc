"""The errors that a user can cause and mend: one base class, one subclass per kind of mistake.

A message says what is wrong, where, and what would be right, on one line; a description file with several
problems gets a line for each. The command line prints the message and exits with status 2; a library caller
catches `MeshweaveError`. Mistakes of the library itself are `assert`s.

A message quotes what a user wrote, which may be a megabyte long. `MeshweaveError` shortens every message, so that
no quoted word is longer than `MAX_QUOTED` and no line longer than `MAX_LINE` characters.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from numbers import Integral, Real

# `re` and `difflib` are imported where a message needs them: they would be most of `import meshweave`.
MAX_QUOTED = 160
"""Characters of a word or of a quotation of the input that an error shows: a line of a screen."""
MAX_LINE = 640
"""Characters of one line of an error."""
MAX_NAMES = 12
"""Known names that an error lists; it counts the others."""
_SPELT = 64
"""Characters of a name that is compared with known names, of which at most `_COMPARED` are."""
_COMPARED = 200

_LONG_QUOTATION = rf"'[^'\n]{{{MAX_QUOTED + 1},}}'"
_LINE_BREAK = r"\n(?=  )"
_LONG_WORD = rf"\S{{{MAX_QUOTED + 1},}}"


MOST_SECONDS = 1e8
"""Three years: clocks of the system take more, but not by much."""


def printable(text: object) -> str:
    """Return `text` as one line of at most `MAX_QUOTED` characters, with "?" for each that is not printable."""
    line = str(text)
    return without_control_characters(line if len(line) <= MAX_QUOTED else f"{line[: MAX_QUOTED - 3]}...")


def without_control_characters(text: str) -> str:
    """Return `text` with a question mark for each character that does not print, line breaks among them."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def shortened(message: str) -> str:
    """Return `message` cut to what an error may show: no long word, quotation or line, only printable text.

    Line breaks followed by two spaces stay, since lists of problems are written so. Others become spaces.
    """
    if len(message) <= MAX_QUOTED and message.isprintable():
        return message
    import re

    return "\n".join(map(_shortened_line, re.split(_LINE_BREAK, message)))


def _shortened_line(line: str) -> str:
    import re

    if not line.isprintable():
        line = without_control_characters(" ".join(line.splitlines()))
    line = re.sub(_LONG_QUOTATION, lambda match: f"{match[0][: MAX_QUOTED - 4]}...'", line)
    line = re.sub(_LONG_WORD, lambda match: f"{match[0][: MAX_QUOTED - 3]}...", line)
    # The end of a line says what would be right.
    return line if len(line) <= MAX_LINE else f"{line[: MAX_LINE - 245]} ... {line[-240:]}"


def listed(names: Iterable[object]) -> str:
    """Return names joined by commas: at most `MAX_NAMES` of them, then how many more there are."""
    known = list(names)
    shown = ", ".join(map(printable, known[:MAX_NAMES]))
    return shown if len(known) <= MAX_NAMES else f"{shown} and {len(known) - MAX_NAMES} more"


class MeshweaveError(ValueError):
    """Base class of every error that a user can cause and mend. Its message is shortened."""

    def __init__(self, message: str = "") -> None:
        super().__init__(shortened(message))


class DescriptionError(MeshweaveError):
    """A cluster, model, workload or plan file (or its values) is wrong."""


class CheckpointError(DescriptionError):
    """A checkpoint is damaged, of another model, or could not be written; raised on all ranks alike."""


class LayoutError(MeshweaveError):
    """A mesh, shape or placement does not fit the tensor it is meant for."""


class ProgramError(MeshweaveError):
    """A program is malformed, or does not compute what it declares. Its message is one line, whatever it quotes.

    `op`, `rank` and `buffer` name the culprit where they are known.
    """

    def __init__(
        self, message: str, *, op: str | None = None, rank: int | None = None, buffer: str | None = None
    ) -> None:
        message = " ".join(message.splitlines())
        where = [
            f"{key} {printable(value)}"
            for key, value in (("op", op), ("rank", rank), ("buffer", buffer))
            if value is not None
        ]
        super().__init__(f"{message} ({', '.join(where)})" if where else message)
        self.message, self.op, self.rank, self.buffer = shortened(message), op, rank, buffer


class BindError(MeshweaveError):
    """The arguments of a call (tensors, dtypes, ranks, functions) do not fit, or differ between ranks.

    `is_echo` is True where this error only follows from one on another rank: the other rank failed in the call,
    and raises the cause itself, or made another call.
    """

    is_echo = False


class UnsupportedError(MeshweaveError):
    """A request is understood, but not available here."""


class PlanError(MeshweaveError):
    """A plan cannot be carried out as it says by the model or software that is to run it."""


class ProofError(MeshweaveError):
    """A parallelised model does not compute what its original does."""


class RankLostError(MeshweaveError, RuntimeError):
    """One or more ranks died or stopped answering; `missing` names them."""

    def __init__(self, message: str, missing: Sequence[int]) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class DeadlineError(MeshweaveError, TimeoutError):
    """A wait ran past its deadline although every rank still answers."""


def nearest_word(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that is spelt most like `word`, or None if none is near.

    None as well for what is no text, and for a word of over 64 characters; no known word that is longer is
    compared. Of the known words the first 200 count.
    """
    if not isinstance(word, str) or len(word) > _SPELT:
        return None
    import difflib

    short = [name for name in islice(known, _COMPARED) if len(name) <= _SPELT]
    return next(iter(difflib.get_close_matches(word, short, n=1, cutoff=0.5)), None)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` for the known word nearest to `word`, or the empty string."""
    nearest = nearest_word(word, known)
    return f" (did you mean '{nearest}'?)" if nearest else ""


def require_whole(value: object, what: str, kind: type[MeshweaveError]) -> int:
    """Return a whole number, also one of numpy, whose products overflow, as an int.

    Raises an error of class `kind` where `value` is none, or a bool; `what` begins the message.
    """
    if type(value) is bool or not isinstance(value, Integral):
        raise kind(f"{what} is {printable(repr(value))}; give a whole number")
    return int(value)


def require_kind(value: object, kind: type | tuple[type, ...], what: str, instead: str) -> None:
    """Raise BindError where an argument of a call is no instance of `kind`.

    The message is "`what` is ...; give `instead`".
    """
    if not isinstance(value, kind):
        raise BindError(f"{what} is {printable(repr(value))}; give {instead}")


def require_seconds(value: object, what: str, *, may_be_0: bool = False) -> float:
    """Return a time in seconds, above 0 unless it `may_be_0`, at most `MOST_SECONDS`.

    Raises BindError for anything else; `what` begins the message.
    """
    if type(value) is not bool and isinstance(value, Real):
        seconds = float(value)
        if 0 < seconds <= MOST_SECONDS or (may_be_0 and seconds == 0):
            return seconds
    least = "0 or more" if may_be_0 else "above 0"
    raise BindError(
        f"{what} is {printable(repr(value))}; give seconds, {least} and at most {MOST_SECONDS:.0e}"
    )


def require_wholes(record: object, names: Sequence[str], kind: type[MeshweaveError]) -> None:
    """Let fields of a frozen record be ints, as `require_whole` makes them.

    Raises an error of class `kind` where the value of a field is none.
    """
    for name in names:
        value = getattr(record, name)
        if type(value) is not int:
            whole = require_whole(value, f"{name} of {type(record).__name__}", kind)
            object.__setattr__(record, name, whole)


def require_count(value: object, what: str, kind: type[MeshweaveError]) -> int:
    """Return what `require_whole` does. Raises an error of class `kind` where it is below 1, too."""
    count = require_whole(value, what, kind)
    if count < 1:
        raise kind(f"{what} is {count}; give at least 1")
    return count


def require_number(value: object, least: float, what: str, right: str, kind: type[MeshweaveError]) -> float:
    """Return a finite number of at least `least`, also one of numpy, as a float.

    Raises an error of class `kind` where `value` is none; the message is `what` "is" the value; "give" `right`.
    """
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:  # an int beyond floats
        number = math.inf
    if not least <= number < math.inf:
        raise kind(f"{what} is {printable(str(value))}; give {right}")
    return number


def require_known(
    name: str, known: Collection[str], what: str, kind: type[MeshweaveError], there_are: str = ""
) -> None:
    """Raise an error of class `kind` where `name` is not in `known`; it suggests the nearest known name.

    `what` begins the message. Where `there_are` is given, the message lists the known names after it: "there
    is no level" and "there are" give `there is no level 'inf' (did you mean 'info'?); there are info`.
    """
    if name not in known:
        listed_names = f"; {there_are} {listed(known)}" if there_are else ""
        raise kind(f"{what} '{printable(name)}'{did_you_mean(name, known)}{listed_names}")
