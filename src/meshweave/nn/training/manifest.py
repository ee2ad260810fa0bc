"""What makes a checkpoint whole.

A checkpoint is written into a folder whose name ends in `.part`. When all its files are on the disk, a manifest of
these is written there, and the folder gets its final name. So a folder with a final name is whole, unless files in
it were changed or lost later: then their sizes or checksums are not those of the manifest.

Each rank leaves the checksums of the files that it wrote in a file of its own beside them, from which the first
rank takes them into the manifest.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8,})")
_SUMS = "checksums."
"""What the files begin with in which ranks leave checksums, before the rank."""
_READ_BYTES = 1 << 22
_PART = re.compile(r"step-\d{8,}\.(part|old)")


@dataclass(frozen=True)
class Manifest:
    """What is written beside the files of a checkpoint.

    Attributes:
        step: how many steps were trained.
        files: the bytes of each file, by name.
        checksums: the CRC-32 of each file, by name, as its writer computed it.
        notes: what is the same on all ranks and no tensor, as JSON.
    """

    step: int
    files: dict[str, int]
    checksums: dict[str, int]
    notes: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """Return the manifest of a folder; None where there is none, or a file has not the size that it says."""
        try:
            manifest = cls(**json.loads((folder / MANIFEST).read_text()))
            for name, size in manifest.files.items():
                if (folder / name).stat().st_size != size:
                    return None
        except (OSError, ValueError, TypeError, AttributeError):
            return None
        return manifest

    def changed_file(self, folder: Path, share: int = 0, num_shares: int = 1) -> str | None:
        """Return the name of a file that has not its checksum, None where all have.

        Args:
            share: which of `num_shares` parts of the files to read.
        """
        for name in sorted(self.files)[share::num_shares]:
            try:
                is_same = checksum(folder / name) == self.checksums.get(name)
            except OSError:
                is_same = False
            if not is_same:
                return name
        return None


def folder_name(step: int) -> str:
    """Return the name of the folder of a whole checkpoint."""
    return f"step-{step:08d}"


def part_name(step: int) -> str:
    """Return the name of the folder that a checkpoint is written into."""
    return f"{folder_name(step)}.part"


def checksum(path: Path) -> int:
    """Return the CRC-32 of the bytes of a file."""
    value = 0
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            value = zlib.crc32(part, value)
    return value


def note_checksums(part: Path, rank: int, names: Iterable[str]) -> None:
    """Leave the checksums of files that a rank wrote in a folder, for `make_whole`."""
    sums = {name: checksum(part / name) for name in names}
    (part / f"{_SUMS}{rank}").write_text(json.dumps(sums))


def _take_checksums(part: Path) -> dict[str, int]:
    """Return the checksums of all files in a folder: those that ranks left, and those of the others.

    The files in which they were left are removed.
    """
    sums: dict[str, int] = {}
    for left in sorted(part.glob(f"{_SUMS}*")):
        sums |= json.loads(left.read_text())
        left.unlink()
    names = {path.name for path in part.iterdir()} - {MANIFEST}
    return {name: sums[name] if name in sums else checksum(part / name) for name in sorted(names)}


def make_whole(folder: Path, step: int, notes: dict[str, Any]) -> None:
    """Write the manifest of the checkpoint in `.part`, and give it its final name.

    Args:
        folder: that of all checkpoints.
    """
    part, final = folder / part_name(step), folder / folder_name(step)
    sums = _take_checksums(part)
    files = {name: (part / name).stat().st_size for name in sums}
    with (part / MANIFEST).open("w") as out:
        json.dump(asdict(Manifest(step, files, sums, notes)), out)
        out.flush()
        os.fsync(out.fileno())
    _sync_folder(part)
    if final.exists():  # a step that was trained again
        aside = final.with_suffix(".old")
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
    part.rename(final)
    _sync_folder(folder)
    shutil.rmtree(final.with_suffix(".old"), ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def whole_steps(folder: Path) -> list[int]:
    """Return the steps of the whole checkpoints in a folder, ascending."""
    if not folder.is_dir():
        return []
    named = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return sorted(int(match[1]) for match, path in named if Manifest.read(path) is not None)


def remove_parts(folder: Path) -> None:
    """Remove what writers left that were ended before a checkpoint was whole."""
    for path in folder.iterdir():
        if _PART.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def remove_older(folder: Path, keep: int) -> None:
    """Remove all whole checkpoints but the last `keep`."""
    for step in whole_steps(folder)[:-keep]:
        old = (folder / folder_name(step)).with_suffix(".old")
        (folder / folder_name(step)).rename(old)
        shutil.rmtree(old, ignore_errors=True)
