"""Files that are written whole or not at all, and never over an input or over each other.

A command claims its outputs before it computes: each claim is checked at once, and inputs that are read afterwards
must not be one of them. `write_file` writes beside the target and renames.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from meshweave.base.errors import DescriptionError, listed, printable

_NAME_BYTES = 255
_NOT_PERMITTED = "not permitted; give a file in a directory of yours"


@dataclass
class CommandOutputs:
    """What one command is to write, by the options that name it, and what it has written.

    Attributes:
        claimed: for each path that is to be written, with its links resolved, the option that names it.
        read: (device, inode) of each regular file that was read.
        written: the files that were written, as they were named.
        notes: sentences that are printed after the command; where it fails they are dropped.
        is_command: False outside of commands, where files that are read or written are not recorded.
    """

    is_command: bool = False
    claimed: dict[str, str] = field(default_factory=dict)
    read: set[tuple[int, int]] = field(default_factory=set)
    written: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def claim(self, path: Path, option: str) -> None:
        """Record that `option` of this command writes the file `path`; devices and pipes are not recorded.

        Raises:
            DescriptionError: no file can be written there, the command has read it, or another option or
                stdout writes it.
        """
        check_writable(path)
        real = os.path.realpath(path)
        if _is_device(real):  # /dev/null takes any number of outputs
            return
        if _identity(real) in self.read:
            raise _over_input(path, option)
        if _identity(real) is not None and _identity(real) == _regular_identity(1):
            raise DescriptionError(
                f"{printable(path)}: {option} and stdout are the same file; give another path"
            )
        for other, name in self.claimed.items():
            if name != option and _same(real, other):
                raise DescriptionError(
                    f"{printable(path)}: {name} and {option} are the same file; give each its own path"
                )
        self.claimed = {other: name for other, name in self.claimed.items() if name != option} | {
            real: option
        }

    def summary(self) -> str:
        """Return in words which files were written, and which claimed ones were not."""
        if not self.written:
            return "nothing was written"
        done = {os.path.realpath(path) for path in self.written}
        left = [f"{printable(path)} ({option})" for path, option in self.claimed.items() if path not in done]
        missing = f"; not written: {listed(left)}" if left else ""
        return f"written: {listed(self.written)}{missing}"


outputs = CommandOutputs()
"""The outputs of the command that runs in this process, none outside of one."""


@contextlib.contextmanager
def outputs_of_command() -> Iterator[CommandOutputs]:
    """Yield new outputs, which this module's functions use until the block ends."""
    global outputs
    before, outputs = outputs, CommandOutputs(is_command=True)
    try:
        yield outputs
    finally:
        outputs = before


def claim_output(path: Path, option: str) -> None:
    """Record that `option` of the running command writes the file `path`; devices and pipes are not recorded.

    Raises DescriptionError where no file can be written there, the command has read it, or another option or
    stdout writes it.
    """
    outputs.claim(path, option)


def note(sentence: str) -> None:
    """Add a sentence that the command line prints on stderr when the running command has succeeded."""
    outputs.notes.append(sentence)


def taken_notes() -> list[str]:
    """Return the sentences that `note` has added, in order, and forget them."""
    taken, outputs.notes = outputs.notes, []
    return taken


def refuse_input(descriptor: int, path: str | Path) -> None:
    """Raise DescriptionError where the running command has claimed an opened input as an output; else record it.

    Files are compared, not names. Of pipes and devices, and outside of a command, nothing is recorded.

    Args:
        descriptor: the file descriptor of the input.
        path: what the error calls it.
    """
    opened = _regular_identity(descriptor)
    if not outputs.is_command or opened is None:
        return
    for claimed, option in outputs.claimed.items():
        if _identity(claimed) == opened:
            raise _over_input(path, option)
    outputs.read.add(opened)


def _over_input(path: str | Path, option: str) -> DescriptionError:
    return DescriptionError(
        f"{printable(path)}: is read, and {option} would write over it; give another path"
    )


def check_writable(path: Path) -> None:
    """Raise DescriptionError where no file can be written to `path`; tries it with an empty file beside it."""
    reason = _unwritable(path)
    if reason:
        raise DescriptionError(f"{printable(path)}: cannot write: {reason}")


def _unwritable(path: Path) -> str:
    """Return why no file can be written to a path, or ""; a file is made beside it and removed."""
    try:
        real = Path(os.path.realpath(path))
        if real.is_dir():
            return "it is a directory; give a file"
        if not real.parent.is_dir():
            return f"there is no directory {printable(path.parent)}"
        if len(os.fsencode(path.name)) > _NAME_BYTES:
            return f"its name is longer than {_NAME_BYTES} bytes"
        if real.exists() and not os.access(real, os.W_OK):
            return _NOT_PERMITTED
        if not (_is_device(real) or _is_mount(real)):
            beside = _beside(real)
            beside.touch(exist_ok=False)  # a superuser is permitted, and yet cannot everywhere
            beside.unlink()
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return _NOT_PERMITTED
    return ""


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file, text as UTF-8: beside it first, then in its place, so that a failure leaves the old one whole.

    A link keeps its place, and what it leads to is replaced. Devices, and files that are mounts, are written in
    place. Raises DescriptionError where writing fails, or this command has read the file.
    """
    data = content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace")
    try:
        real = Path(os.path.realpath(path))
        if _identity(str(real)) in outputs.read:  # of names that follow from a result
            raise _over_input(path, "the result")
        if _is_device(real):
            _write_to(os.open(real, os.O_WRONLY | os.O_NONBLOCK), data)
        else:
            _replace(real, data)
    except DescriptionError:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "not a path"
        raise DescriptionError(f"{printable(path)}: cannot write: {reason}") from None
    if outputs.is_command and str(path) not in outputs.written:
        outputs.written.append(str(path))


def _replace(real: Path, data: bytes) -> None:
    before = real.stat() if real.exists() else None
    beside = _beside(real)
    try:
        try:
            _write_to(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), data)
            if before is not None:
                beside.chmod(stat.S_IMODE(before.st_mode))
                with contextlib.suppress(OSError):
                    os.chown(beside, before.st_uid, before.st_gid)
            beside.replace(real)
        finally:
            beside.unlink(missing_ok=True)
    except OSError:
        if not _is_mount(real):
            raise
        _write_in_place(real, data)


def _beside(real: Path) -> Path:
    return real.with_name(f".{real.name[:40]}.{secrets.token_hex(6)}")


def _write_in_place(real: Path, data: bytes) -> None:
    old = real.read_bytes()
    try:
        _write_to(os.open(real, os.O_WRONLY | os.O_TRUNC), data)
    except BaseException:
        _write_to(os.open(real, os.O_WRONLY | os.O_TRUNC), old)
        raise


def _write_to(descriptor: int, data: bytes) -> None:
    with os.fdopen(descriptor, "wb") as out:
        os.set_blocking(descriptor, True)
        out.write(data)


def _is_device(path: str | Path) -> bool:
    """Return whether a path is there and neither a file nor a directory, such as /dev/null or a pipe."""
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116
    except (OSError, ValueError):
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _is_mount(real: Path) -> bool:
    """Return whether a file is a mount of its own, as in a container: nothing can take its place."""
    return real.exists() and real.stat().st_dev != real.parent.stat().st_dev


def _identity(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)  # noqa: PTH116
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino


def _regular_identity(descriptor: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else None


def _same(one: str, other: str) -> bool:
    """Return whether paths are, or would be on a file system without cases, one file."""
    fold = [unicodedata.normalize("NFC", path).casefold() for path in (one, other)]
    return fold[0] == fold[1] or (_identity(one) is not None and _identity(one) == _identity(other))
