"""What passes between `launch` and its ranks: a rank's context; as JSON files the job, results and reports."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshweave.base.errors import BindError
from meshweave.execute.ranks.liveness import Liveness

STOPPED = "stopped"
"""The `kind` in the `Report` of a rank that a signal ended."""


@dataclass(frozen=True)
class RankContext:
    """The first argument of a function that `launch` runs on a rank.

    The default process group, of all ranks over gloo, is initialised. Its timeout is the `deadline_s` of `launch`.

    Attributes:
        store: the TCPStore that all ranks share.
        liveness: this rank's heartbeat; a wait that fails inside its `guard` names the ranks to blame.
    """

    rank: int
    num_ranks: int
    store: Any
    liveness: Liveness


@dataclass(frozen=True)
class LaunchJob:
    """The arguments of `launch` that every rank reads, stored as `job.json` in the folder shared with the parent.

    `target` is the function ("package.module:function"), `payload` its argument; the times are in seconds.
    `parent_pid` is the process that called `launch`, which no rank outlives.
    """

    target: str
    payload: dict[str, Any]
    deadline_s: float
    interval_s: float
    stale_s: float
    parent_pid: int

    def write(self, folder: Path) -> None:
        """Write the job to `job.json` in `folder`. Raises BindError where the payload is not JSON."""
        try:
            text = json.dumps(asdict(self))
        except (TypeError, ValueError) as error:
            raise BindError(f"the payload of {self.target} is not JSON: {error}") from None
        (folder / "job.json").write_text(text)

    @classmethod
    def read(cls, folder: Path) -> LaunchJob:
        """Return the job that `write` put into `folder`."""
        return cls(**json.loads((folder / "job.json").read_text()))


@dataclass(frozen=True)
class Report:
    """The error or signal that ended a rank, stored as `report-<rank>.json`.

    Attributes:
        kind: the name of the error's class, or STOPPED.
        message: the error or the signal's report, in one line.
        ours: whether the error is a MeshweaveError or the report of a signal, which need no traceback.
        missing: the lost ranks that the error or the signal's report names.
        traceback: the traceback of the error as text; "" for a signal.
        is_echo: whether the error only repeats one that another rank has raised, see `BindError`.
    """

    kind: str
    message: str
    ours: bool = False
    missing: tuple[int, ...] = ()
    traceback: str = ""
    is_echo: bool = False

    @classmethod
    def read(cls, folder: Path, rank: int) -> Report | None:
        """Return the report of rank `rank` in `folder`; None where it wrote none."""
        path = report_path(folder, rank)
        if not path.exists():
            return None
        fields = json.loads(path.read_text())
        return cls(**{**fields, "missing": tuple(fields["missing"])})


def result_path(folder: Path, rank: int) -> Path:
    """Return the file `result-<rank>.json` in `folder`, into which a rank writes what its function returned."""
    return folder / f"result-{rank}.json"


def report_path(folder: Path, rank: int) -> Path:
    """Return the file `report-<rank>.json` in `folder`, into which a rank writes its `Report`."""
    return folder / f"report-{rank}.json"


def stacks_path(folder: Path, rank: int) -> Path:
    """Return the file in `folder` into which a rank writes its threads' stacks when a fault (SIGSEGV) ends it."""
    return folder / f"stacks-{rank}.txt"


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON to `path` atomically: a writer that is killed leaves no half-written file there.

    Threads may write one file at once, as those do that report why their process ends.
    """
    part = path.with_suffix(f".{threading.get_ident()}.part")
    part.write_text(json.dumps(value))
    part.replace(path)
