"""One rank of `launch`: `python -m meshweave.execute.ranks.worker FOLDER`, with the rank in the environment."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import importlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from meshweave.base.errors import BindError, MeshweaveError, RankLostError
from meshweave.execute.ranks.job import (
    STOPPED,
    LaunchJob,
    RankContext,
    Report,
    report_path,
    result_path,
    stacks_path,
    write_json,
)
from meshweave.execute.ranks.last_words import is_transport
from meshweave.execute.ranks.liveness import Liveness

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Make this process end, without cleanup, when its parent `parent_pid` ends; at once if it already has.

    On Linux the kernel kills this process as soon as the parent's thread that started it ends.
    """
    if sys.platform == "linux":
        # The kernel sends it when the *thread* that started us ends: `launch` waits in that thread. It is
        # SIGKILL because nobody is left to read a report, and a stuck process must go too.
        libc: Any = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch_parent, args=(parent_pid,), daemon=True).start()
    if os.getppid() != parent_pid:  # it was gone before we asked
        os._exit(1)


def _watch_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(0.5)
    os._exit(1)


def main() -> None:
    """Run one rank of the `LaunchJob` in folder `sys.argv[1]`; the environment variable RANK is the rank."""
    atexit.register(leave)  # the first to be registered is called last
    folder = Path(sys.argv[1])
    run_rank(folder, int(os.environ["RANK"]), LaunchJob.read(folder).parent_pid)


def leave() -> None:
    """End a process that has done its work, after all else that is to be done at its end.

    The interpreter is not taken down: a thread that comes back from C++ then, as from a group that another rank
    has refused to form, aborts the process, and a rank whose result is written would count as killed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_rank(folder: Path, rank: int, parent_pid: int) -> None:
    """Run the `LaunchJob` in `folder` as rank `rank` and write the result to `result-<rank>.json` there.

    An error is written to `report-<rank>.json`, and ends the process with exit status 1.

    Args:
        parent_pid: the process that started this one, which this one must not outlive.
    """
    job = LaunchJob.read(folder)
    die_with_parent(parent_pid)
    if not faulthandler.is_enabled():  # by PYTHONFAULTHANDLER, then on stderr
        faulthandler.enable(stacks_path(folder, rank).open("w"))
    # Ctrl-C reaches the whole foreground group; the parent decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _run(job, folder, rank)
    except BaseException as error:
        _fail(folder, rank, error)


def _run(job: LaunchJob, folder: Path, rank: int) -> None:
    function = resolve(job.target)
    import torch.distributed as dist

    from meshweave.execute.torch.world import await_joined, form_world

    num_ranks, patience = int(os.environ["WORLD_SIZE"]), timedelta(seconds=job.deadline_s)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, None, False, patience, wait_for_workers=False)
    liveness = Liveness(
        store,
        rank,
        range(num_ranks),
        interval_s=job.interval_s,
        stale_s=job.stale_s,
        deadline_s=job.deadline_s,
    )
    liveness.end_process = partial(_fail, folder, rank)
    with liveness:
        liveness.install_signal_report(write=lambda line, lost: _stopped(folder, rank, line, lost))
        form_world(liveness, store, num_ranks, "gloo", timeout=patience)
        try:
            result = function(RankContext(rank, num_ranks, store, liveness), job.payload)
        except (RuntimeError, OSError) as error:
            if isinstance(error, MeshweaveError) or not is_transport(error):
                raise
            # A wait without a guard. Unexplained it would make this rank the culprit in the others' eyes.
            with liveness.guard(job.target):
                raise
        try:
            write_json(result_path(folder, rank), result)
        except (TypeError, ValueError) as error:
            raise BindError(f"the result of {job.target} is not JSON: {error}") from None
        await_joined(liveness, store, num_ranks)
        dist.destroy_process_group()


def resolve(target: str) -> Callable[[RankContext, dict[str, Any]], Any]:
    """Return the function that `target`, "package.module:function", names.

    Raises BindError for text of another form, and where there is no such module or name, or it is not callable.
    """
    module, _, name = target.partition(":")
    if not module or not name:
        raise BindError(f"the target {target!r} is not of the form 'package.module:function'")
    try:
        function: Any = getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise BindError(f"the target {target!r} cannot be found: {error}") from error
    if not callable(function):
        raise BindError(f"the target {target!r} is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


def _stopped(folder: Path, rank: int, line: str, missing: tuple[int, ...]) -> None:
    if not report_path(folder, rank).exists():
        write_json(report_path(folder, rank), asdict(Report(STOPPED, line, ours=True, missing=missing)))


def _fail(folder: Path, rank: int, error: BaseException) -> NoReturn:
    missing = error.missing if isinstance(error, RankLostError) else ()
    message = " ".join(str(error).split())
    ours = isinstance(error, MeshweaveError)
    said = "".join(traceback.format_exception(error))
    is_echo = isinstance(error, BindError) and error.is_echo
    report = Report(type(error).__name__, message, ours, missing, said, is_echo)
    write_json(report_path(folder, rank), asdict(report))
    # No orderly end: taking a process group down with operations under way may hang or abort, and would hide
    # the error.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    main()
