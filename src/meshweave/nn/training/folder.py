"""The folder of all checkpoints: which are whole, how one becomes so, which go, and whose the folder is.

name               what it is
-----------------  ---------------------------------------------------------------------------------------------
`step-N.part`      is being written, or was when its writer ended
`step-N`           whole, unless it was harmed later: then its manifest or its files say so
`step-N.new`       whole, too, and later than `step-N`, whose place it is about to take
`step-N.old`       is being removed

Every change of a name is one rename. Whatever happens between two of them, each step that was whole is whole under
`step-N` or `step-N.new`, and the next save puts the names right.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshweave.base.errors import CheckpointError, printable
from meshweave.base.limits import MANIFEST_BYTES
from meshweave.nn.training.files import opened_file, opened_folder, write_synced
from meshweave.nn.training.manifest import MANIFEST, MAX_STEP, Manifest

_NAME = re.compile(r"step-([0-9]{8,16})(\.new|\.part|\.old)?")


def folder_name(step: int) -> str:
    """Return the name of the folder of a whole checkpoint, such as step-00000007."""
    return f"step-{step:08d}"


def part_name(step: int) -> str:
    """Return the name of the folder that a checkpoint is written into, such as step-00000007.part."""
    return f"{folder_name(step)}.part"


@dataclass(frozen=True)
class FoundCheckpoint:
    """A folder with the name of a whole checkpoint.

    Attributes:
        step: the step that its name says.
        name: the name of the folder.
        manifest: None where it cannot be read.
        wrong: why it is not whole, by the names and sizes of its files; "" where it is.
    """

    step: int
    name: str
    manifest: Manifest | None
    wrong: str


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the checkpoint folder `path`, after a check of names and sizes of the files there.

    Contents of files are not read. Raises CheckpointError if the manifest cannot be read, a file is missing or has
    another size, or there is a file that the manifest does not list.
    """
    manifest, wrong = _seen_in(path)
    if manifest is None or wrong:
        raise CheckpointError(wrong)
    return manifest


def _seen_in(path: Path) -> tuple[Manifest | None, str]:
    """Return the manifest of a checkpoint, None where it cannot be read, and in words what is wrong with it."""
    manifest = None
    try:
        with opened_folder(path) as folder:
            with (
                opened_file(folder, MANIFEST) as descriptor,
                os.fdopen(descriptor, "rb", closefd=False) as file,
            ):
                text = file.read(MANIFEST_BYTES.most + 1)
            try:
                manifest = Manifest.parse(text)
            except CheckpointError as error:
                raise CheckpointError(f"has a {MANIFEST} that {error}") from None
            _check_files(folder, manifest)
    except CheckpointError as error:
        return manifest, str(error)
    except OSError as error:
        return manifest, f"cannot be read ({error.strerror})"
    return manifest, ""


def _check_files(folder: int, manifest: Manifest) -> None:
    """Raise CheckpointError where a folder has not exactly the files of its manifest, in the sizes given there."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name != MANIFEST and entry.name not in manifest.files:
                raise CheckpointError(f"has a file {printable(entry.name)} that its {MANIFEST} does not list")
    for name, file in manifest.files.items():
        with opened_file(folder, name, file.num_bytes):
            pass


def found_checkpoint(folder: Path, step: int) -> FoundCheckpoint | None:
    """Return the checkpoint of a step, whole or not; None where `folder` has none of this step.

    A step that was saved again may have two folders: the later one is taken, unless it is not whole and the
    earlier one is. `wrong` of the result says why it is not whole, by its manifest and the sizes of its files;
    nothing is raised.
    """
    checkpoint = None
    for name in (folder_name(step), f"{folder_name(step)}.new"):
        if not os.path.lexists(folder / name):
            continue
        manifest, wrong = _seen_in(folder / name)
        if manifest is not None and manifest.step != step:
            wrong = f"has a {MANIFEST} that is of step {manifest.step}"
        if checkpoint is None or not wrong or checkpoint.wrong:
            checkpoint = FoundCheckpoint(step, name, manifest, wrong)
    return checkpoint


def found_checkpoints(folder: Path) -> list[FoundCheckpoint]:
    """Return all checkpoints in a folder, whole or not, in the order in which they were saved.

    Those whose manifest cannot be read come first.
    """
    if not folder.is_dir():
        return []
    steps = {step for step, suffix, _ in _named(folder) if suffix in ("", ".new")}
    every = [each for step in steps if (each := found_checkpoint(folder, step)) is not None]
    return sorted(every, key=lambda each: (each.manifest.serial if each.manifest else -1, each.step))


def whole_steps(folder: Path) -> list[int]:
    """Return the steps of the whole checkpoints in a folder, ascending."""
    return sorted(each.step for each in found_checkpoints(folder) if not each.wrong)


def _named(folder: Path) -> Iterator[tuple[int, str, Path]]:
    """Yield step, suffix and path of each entry of a folder that is called like a checkpoint."""
    for path in sorted(folder.iterdir()):
        match = _NAME.fullmatch(path.name)
        if match and (step := int(match[1])) < MAX_STEP and path.name == folder_name(step) + (match[2] or ""):
            yield step, match[2] or "", path


def sweep(folder: Path) -> None:
    """Clear the folder of all checkpoints of what killed writers left.

    A `step-N.new` is renamed to `step-N` if whole, else removed; `step-N.part` and `step-N.old` are removed.
    Raises OSError where that fails.
    """
    for step, suffix, path in _named(folder):
        if suffix == ".new":
            checkpoint = found_checkpoint(folder, step)
            if checkpoint is not None and checkpoint.name == path.name and not checkpoint.wrong:
                _take_place(folder, path, folder / folder_name(step))
            else:
                remove(path)
    for _, suffix, path in _named(folder):
        if suffix in (".part", ".old"):
            remove(path)


def remove(path: Path) -> None:
    """Remove a folder with all that is in it, or a file, or of a link the link alone; a missing one is no error.

    Raises OSError where that fails.
    """
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path)
        else:
            path.unlink()


def make_whole(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into the `.part` folder of its step, and rename that folder to `step-N`.

    An earlier checkpoint of the same step is removed after that.

    Args:
        folder: the folder of all checkpoints, in which the `.part` folder is.
        manifest: of the checkpoint; its step names both folders.

    Raises:
        CheckpointError: the `.part` folder lacks a file of the manifest, has one that it does not list, or one of
            another size; or the manifest could not be read again.
        OSError: it cannot be written.
    """
    part, final = folder / part_name(manifest.step), folder / folder_name(manifest.step)
    text = manifest.text()
    Manifest.parse(text)
    with opened_folder(part) as descriptor:
        _check_files(descriptor, manifest)
        write_synced(descriptor, MANIFEST, [memoryview(text)])
        os.fsync(descriptor)
    if os.path.lexists(final):  # a step that was trained again
        new = final.with_name(f"{final.name}.new")
        part.rename(new)
        sync_folder(folder)
        _take_place(folder, new, final)
    else:
        part.rename(final)
        sync_folder(folder)


def _take_place(folder: Path, new: Path, final: Path) -> None:
    """Give the folder `new` the name `final`, and remove what has it."""
    old = final.with_name(f"{final.name}.old")
    remove(old)
    if os.path.lexists(final):
        final.rename(old)
    new.rename(final)
    sync_folder(folder)
    remove(old)


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names of the files in a folder. Raises OSError where that fails."""
    with opened_folder(folder.resolve()) as descriptor:
        os.fsync(descriptor)


def remove_older(folder: Path, keep: int) -> None:
    """Remove whole checkpoints until `keep`, at least 1, are left; never the one that was saved last.

    First go those from which the last saved one does not descend: they belong to a training that another one,
    begun at an earlier step or anew, has replaced. Then go those that were saved first. Raises OSError where that
    fails.
    """
    whole = [each for each in found_checkpoints(folder) if not each.wrong and each.manifest is not None]
    by_serial = {each.manifest.serial: each for each in whole if each.manifest}
    line: list[FoundCheckpoint] = []
    at = max(by_serial, default=None)
    while at is not None and (each := by_serial.pop(at, None)) is not None:
        line.append(each)
        at = each.manifest.parent if each.manifest else None
    others = [each for each in whole if each not in line]
    for each in [*others, *line[::-1]][: max(len(whole) - keep, 0)]:
        old = (folder / folder_name(each.step)).with_suffix(".old")
        remove(old)
        (folder / each.name).rename(old)
        remove(old)


class FolderLock:
    """The right to save into a folder, of one process at a time, and in it of one `Checkpoints` at a time.

    It is a lock of the kernel (flock) on the folder itself, which ends with the process however that ends.
    """

    _held: dict[tuple[int, int], FolderLock] = {}  # noqa: RUF012 - by device and inode

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._holder: weakref.ref[Any] | None = None

    @classmethod
    def take(cls, folder: Path, holder: Any, is_busy: Callable[[Any], bool]) -> None:
        """Take the lock on a folder for `holder`, as long as that lives; do nothing where `holder` has it.

        Another holder in this process loses it, unless it is saving now. Where a file system has no such locks,
        warn, and keep no other process out.

        Args:
            folder: the folder of all checkpoints.
            holder: the `Checkpoints` that saves into it.
            is_busy: called with the other holder; returns whether that is saving now.

        Raises:
            CheckpointError: another process has the lock, or another holder of this one is saving.
            OSError: the folder cannot be opened.
        """
        status = folder.stat()
        key = status.st_dev, status.st_ino
        lock = cls._held.get(key)
        if lock is None:
            lock = cls._held[key] = cls(_locked(folder))
        other = lock._holder() if lock._holder is not None else None
        if other is holder:
            return
        if other is not None and is_busy(other):
            raise CheckpointError(f"another Checkpoints of this process saves into {folder}")
        lock._holder = weakref.ref(holder, lambda _: lock._drop(key))

    def _drop(self, key: tuple[int, int]) -> None:
        if (self._holder is None or self._holder() is None) and self._held.pop(key, None) is self:
            os.close(self._descriptor)


def _locked(folder: Path) -> int:
    """Return a descriptor that holds the lock of a folder. Raises CheckpointError where another process has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        inode = os.fstat(descriptor).st_ino
        os.close(descriptor)
        raise CheckpointError(
            f"{_owner(inode)} saves into {folder}; give each job a folder of its own, or end the other one"
        ) from None
    except OSError as error:  # a file system without such locks
        warnings.warn(
            f"{folder} cannot be locked ({error.strerror}): nothing tells two jobs that save into it apart",
            stacklevel=2,
        )
    return descriptor


def _owner(inode: int) -> str:
    """Return in words which process locks an inode, as far as this host knows."""
    try:
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == str(inode):
                command = Path(f"/proc/{int(fields[4])}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                return f"process {fields[4]} ({printable(command.strip())})"
    except (OSError, ValueError, IndexError):
        pass
    return "another process"


def _forget_locks() -> None:
    """Let go of the locks that a process inherits when it is forked: they are its parent's."""
    for lock in FolderLock._held.values():
        with contextlib.suppress(OSError):
            os.close(lock._descriptor)
    FolderLock._held.clear()


os.register_at_fork(after_in_child=_forget_locks)
