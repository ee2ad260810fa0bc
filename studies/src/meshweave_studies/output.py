"""A reproduction written to files: tables as Markdown and JSON, pictures as SVG and PNG, one page of HTML."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshweave.base.errors import DescriptionError, printable
from meshweave.base.outputs import write_file
from meshweave.report.png import write_png
from meshweave_studies.pictures import pictures
from meshweave_studies.reproduction import Reproduction
from meshweave_studies.tables import html, markdown


def prepare_directory(directory: Path | None) -> None:
    """Make the directory that tables and pictures go into; to be called before anything is computed.

    Raises:
        DescriptionError: the path cannot be a directory.
    """
    try:
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            if not os.access(directory, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or "not a path"
        raise DescriptionError(
            f"{printable(directory)}: cannot be a directory to write into: {reason}"
        ) from None


def write_page(reproduction: Reproduction, path: Path) -> Path:
    """Write the table and all pictures as one self-contained HTML page; return its path."""
    write_file(path, html(reproduction))
    return path


def write_directory(reproduction: Reproduction, directory: Path, png: bool = False) -> list[Path]:
    """Write tables and pictures into a directory, with `png` also as PNG; return the paths in order of writing.

    Rows and each figure go into files of their own, named after `Reproduction.stem`, so that computing one of them
    leaves the others as they are.
    """
    return list(_written(reproduction, directory, png))


def _written(reproduction: Reproduction, directory: Path, png: bool) -> Iterator[Path]:
    stem = reproduction.stem
    if reproduction.rows:
        yield _write(directory / f"{stem}.md", markdown(reproduction))
        yield _write(directory / f"{stem}.json", _json(replace(reproduction, figures=()).to_json()))
    for figure in reproduction.figures:
        name = f"{stem}-figure-{figure.number}"
        panels = pictures(figure)
        files = {panel: f"{name}-{panel.replace(' ', '-')}.svg" for panel in panels}
        for panel, svg in panels.items():
            path = _write(directory / files[panel], svg)
            yield path
            if png:
                write_png(path.with_suffix(".png"), svg)
                yield path.with_suffix(".png")
        links = "".join(f"![{panel}]({file})\n" for panel, file in files.items())
        yield _write(directory / f"{name}.md", f"{figure.markdown()}\n{links}")
        figure_alone = replace(reproduction, rows=(), figures=(figure,), orderings=())
        yield _write(directory / f"{name}.json", _json(figure_alone.to_json()))


def _write(path: Path, text: str) -> Path:
    write_file(path, text)
    return path


def _json(values: Any) -> str:
    return json.dumps(values, indent=1) + "\n"
