"""Checkpoints that are damaged or made to hurt, from a seeded generator, and what must become of each."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
import socket
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshweave.nn.training.manifest import MANIFEST

Rng = random.Random


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> Any:
        return Path.touch, (self._canary,)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change what a manifest says, and give it the checksum of the new text."""
    value = json.loads((folder / MANIFEST).read_text())
    del value["sha256"]
    made = change(value)
    seal(folder, json.dumps(value if made is None else made))


def seal(folder: Path, text: str) -> None:
    """Write a JSON table as a manifest that has the right checksum."""
    body = text[1:].encode()
    head = b'{"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'", '
    (folder / MANIFEST).write_bytes(head + body)


def files_of(folder: Path) -> list[Path]:
    """Return the files of tensors."""
    return sorted(path for path in folder.iterdir() if path.name != MANIFEST)


def _any_file(folder: Path, rng: Rng) -> Path:
    return rng.choice([*files_of(folder), folder / MANIFEST])


def truncated(folder: Path, rng: Rng) -> None:
    path = _any_file(folder, rng)
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def extended(folder: Path, rng: Rng) -> None:
    path = _any_file(folder, rng)
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.randint(1, 99)))


def flipped(folder: Path, rng: Rng) -> None:
    path = _any_file(folder, rng)
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def swapped(folder: Path, rng: Rng) -> None:
    one, other = files_of(folder)[0], _any_file(folder, rng)
    if one == other:
        other = folder / MANIFEST
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)


def replaced(folder: Path, rng: Rng) -> None:
    path = _any_file(folder, rng)
    kind = rng.choice(["zero", "self", "file", "fifo", "folder", "socket", "sparse", "device"])
    kept = path.with_name("kept")
    path.rename(kept)
    if kind == "zero":
        path.symlink_to("/dev/zero")
    elif kind == "self":
        path.symlink_to(path.name)
    elif kind == "file":
        moved = folder.parent.parent / f"outside-{rng.randrange(1 << 60)}"
        kept.rename(moved)
        path.symlink_to(moved)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            os.chdir(folder)
            made.bind(path.name)
    elif kind == "sparse":
        path.touch()
        os.truncate(path, 1 << 40)
    else:
        try:
            os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero
        except OSError:
            path.symlink_to("/dev/zero")
    kept.unlink(missing_ok=True)


def extra_entry(folder: Path, rng: Rng) -> None:
    path = folder / rng.choice([".metadata", "rank-00077.bin", "x\ny", "kept"])
    rng.choice([path.touch, path.mkdir, lambda: os.mkfifo(path), lambda: path.symlink_to("/etc/passwd")])()


def gone(folder: Path, rng: Rng) -> None:
    _any_file(folder, rng).unlink()


def pickled(folder: Path, rng: Rng) -> None:
    """A bomb as each file, with a manifest that vouches for it, and as torch's own metadata."""
    bomb = pickle.dumps(Bomb(folder.parent.parent / "canary"))
    (folder / rng.choice([".metadata", "__0_0.distcp", MANIFEST])).write_bytes(bomb)
    path = files_of(folder)[-1]
    path.write_bytes(bomb)
    if rng.random() < 0.5:
        seal(folder, json.dumps({"step": 4, "files": {path.name: len(bomb)}, "checksums": {}, "notes": {}}))


def bombed(folder: Path, rng: Rng) -> None:
    """JSON that is deep, long, or no table, under a right checksum."""
    deep = rng.choice([500, 5_000, 100_000, 1_000_000])
    text = rng.choice(
        [
            '{"notes": ' + "[" * deep + "]" * deep + "}",
            '{"notes": ' + '{"a":' * deep + "1" + "}" * deep + "}",
            '{"files": ' + "[" * deep,
            '{"tensors": [' + "[]," * 5_000_000 + "1]}",
            '{"tensors": [' + "1," * 20_000_000 + "1]}",
            '{"step": ' + "9" * 10_000 + "}",
            '{"step": NaN, "format": 2}',
            '{"format": 1e400}',
            '{"format": 2, "format": 2}',
            "[2]",
            "{}",
            '{"format": "2"}',
            '{"format": true}',
            '{"format": 3}',
            "\x00\xff",
        ]
    )
    seal(folder, text)


_WRONG: list[Any] = [
    *(None, True, -1, 1.0, float("nan"), float("inf"), 1 << 62, 10**400, "1", "", [], {}, [[]], {"a": 1}),
    *("../../etc/passwd", "/etc/passwd", "a\x00b", "\ud800", "x" * 100_000, 1 << 63, 0, 2, [None], [[], []]),
]


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values but those in notes."""
    if path[:1] == ("notes",):
        return []
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(each for key, item in inner for each in _places(item, (*path, key)))]


def falsified(folder: Path, rng: Rng) -> None:
    """Another value at any place of the manifest, under a right checksum."""

    def change(value: dict[str, Any]) -> None:
        *path, last = rng.choice(_places(value)[1:])
        at: Any = value
        for key in path:
            at = at[key]
        before = at[last]
        wrong = [each for each in _WRONG if repr(each) != repr(before) and last not in ("serial", "parent")]
        at[last] = rng.choice(wrong or [[]])

    rewrite(folder, change)


def renamed_file(folder: Path, rng: Rng) -> None:
    """A file under a name with a path, and the manifest that says so."""

    def change(value: dict[str, Any]) -> None:
        name = rng.choice(sorted(value["files"]))
        other = rng.choice(
            ["../x.bin", "/dev/zero", "..", ".", "", "rank-00000.bin/..", "a\0", "rank-٣٣٣٣٣.bin"]
        )
        value["files"][other] = value["files"].pop(name)

    rewrite(folder, change)


def overlapping(folder: Path, rng: Rng) -> None:
    """Boxes that lie on one another, are larger than the tensor, or leave some of it out; sizes agree."""

    def change(value: dict[str, Any]) -> None:
        name = rng.choice(sorted(name for name, each in value["files"].items() if each["boxes"]))
        boxes = value["files"][name]["boxes"]
        kind = rng.randrange(4)
        box = rng.choice([each for each in boxes if len(each) > 1])
        if kind == 0:
            boxes.append(list(box))
        elif kind == 1:
            boxes.remove(box)
        elif kind == 2:
            box[rng.randrange(1, len(box))] += rng.choice([-1, 1, 1 << 40])
        else:
            row = rng.choice([each for each in value["tensors"] if each[2]])
            row[2][0] = rng.choice([row[2][0] + 1, 1 << 40, 0])
        _resize(folder, name, value)

    rewrite(folder, change)


def _resize(folder: Path, name: str, value: dict[str, Any]) -> None:
    """Let a file have the bytes that its boxes ask for, where they are few, and the manifest agree."""
    item = {"float32": 4, "float64": 8, "int64": 8, "bool": 1, "uint8": 1, "bfloat16": 2}
    total = 0
    for number, *numbers in value["files"][name]["boxes"]:
        count = 1
        for size in numbers[len(numbers) // 2 :]:
            count *= size
        total += count * item[value["tensors"][number][1]]
    if not 0 <= total < 1 << 20:
        with (folder / name).open("ab") as file:
            file.truncate(max(min(total, 1 << 42), 0))
        value["files"][name]["bytes"] = total
        return
    data = (folder / name).read_bytes()
    data = (data + bytes(total))[:total]
    (folder / name).write_bytes(data)
    value["files"][name] |= {"bytes": total, "crc32": zlib.crc32(data)}


def other_model(folder: Path, rng: Rng) -> None:
    """Another dtype or shape, a tensor too many or too few, huge ones too; everything in it agrees."""
    item = {"float32": 4, "float64": 8, "int64": 8, "bool": 1, "uint8": 1, "bfloat16": 2}

    def change(value: dict[str, Any]) -> None:
        rows, (name, file) = value["tensors"], next(iter(value["files"].items()))
        kind = rng.randrange(3)
        if kind == 0:
            row = rng.choice(rows)
            row[1] = rng.choice([each for each in item if each != row[1]])
        elif kind == 1:
            rows.append(["more", "float32", [2]])
            file["boxes"].append([len(rows) - 1, 0, 2])
        else:
            rows.append(["huge", "uint8", [1 << 41]])
            file["boxes"].append([len(rows) - 1, 0, 1 << 41])
        _resize(folder, name, value)
        for other in list(value["files"])[1:]:
            _resize(folder, other, value)

    rewrite(folder, change)


def bad_bool(folder: Path, rng: Rng) -> None:
    """A byte of a bool that is neither 0 nor 1, with the right checksum."""
    value = json.loads((folder / MANIFEST).read_text())
    numbers = [number for number, row in enumerate(value["tensors"]) if row[1] == "bool"]
    name = next(n for n, file in value["files"].items() if any(box[0] in numbers for box in file["boxes"]))
    data = bytearray((folder / name).read_bytes())
    at, item = 0, {"float32": 4, "float64": 8, "int64": 8, "bool": 1, "uint8": 1, "bfloat16": 2}
    for number, *sizes in value["files"][name]["boxes"]:
        if number in numbers:
            data[at] = rng.randint(2, 255)
            break
        count = item[value["tensors"][number][1]]
        for size in sizes[len(sizes) // 2 :]:
            count *= size
        at += count
    (folder / name).write_bytes(data)
    rewrite(folder, lambda value: value["files"][name].update(crc32=zlib.crc32(data)))


def linked(folder: Path, rng: Rng) -> None:
    """The whole folder is a link, a file or a pipe."""
    away = folder.parent.parent / f"away-{rng.randrange(1 << 60)}"
    folder.rename(away)
    if rng.random() < 0.5:
        folder.symlink_to(away)
    else:
        rng.choice([folder.touch, lambda: os.mkfifo(folder), folder.mkdir])()


def other_step(folder: Path, rng: Rng) -> None:
    """The files of another step under this one's name."""
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("step-00000002"), folder)


HARMS: tuple[Callable[[Path, Rng], None], ...] = (
    *(
        truncated,
        extended,
        flipped,
        swapped,
        replaced,
        extra_entry,
        gone,
        pickled,
        bombed,
        falsified,
        falsified,
    ),
    *(renamed_file, overlapping, overlapping, other_model, bad_bool, linked, other_step),
)


def harmed_checkpoint(pristine: Path, into: Path, seed: int) -> str:
    """Copy checkpoints of steps 2 and 4, and harm that of step 4. Return what was done to it."""
    rng = Rng(seed)
    shutil.copytree(pristine, into)
    harm = HARMS[seed % len(HARMS)]
    here = Path.cwd()
    try:
        harm(into / "step-00000004", rng)
    finally:
        os.chdir(here)
    return f"{harm.__name__} {seed}"
