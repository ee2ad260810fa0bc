"""Start ranks as processes of this host, and wait for them with a time limit.

The parent hosts the store. So any rank may die, and the other ranks still learn which. It listens on the loopback
interface alone, and what ranks say of each other through it is signed with a token of the run (`signing`). Jobs,
results and reports pass between parent and ranks as JSON files in a private temporary folder.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from meshweave.base import errors
from meshweave.base.errors import (
    BindError,
    DeadlineError,
    MeshweaveError,
    RankLostError,
    require_count,
    require_seconds,
)
from meshweave.base.owner import temporary_folder
from meshweave.execute.ranks.blame import ranks_text
from meshweave.execute.ranks.job import STOPPED, LaunchJob, Report, result_path, stacks_path
from meshweave.execute.ranks.signing import TOKEN_VARIABLE, new_token

_POLL_S = 0.02


class RankError(RuntimeError):
    """An exception on `rank` that is not a MeshweaveError; `remote_traceback` is its traceback there, as text."""

    def __init__(self, message: str, rank: int, remote_traceback: str) -> None:
        super().__init__(message)
        self.rank, self.remote_traceback = rank, remote_traceback
        self.add_note(remote_traceback)


@dataclass(frozen=True)
class RankPlace:
    """Where a rank runs.

    Attributes:
        prefix: a command, such as `taskset -c 3`, to which the command of the rank is appended.
        env: environment variables on top of those of `launch`.
        network_namespace: the name of a network namespace that the rank runs in, as `ip netns` lists it.
        fork_startup: functions, as "module:function", that a rank calls at its start where a `RankStarter` forks
            it: they do what a `sitecustomize` does in a new interpreter.
    """

    prefix: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    network_namespace: str = ""
    fork_startup: tuple[str, ...] = ()


def launch(
    target: str,
    num_ranks: int,
    payload: dict[str, Any],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    deadline_s: float | None = None,
    grace_s: float = 10.0,
    interval_s: float = 0.2,
    stale_s: float = 2.0,
    places: Sequence[RankPlace] = (),
    address: str = "127.0.0.1",
    store: Any = None,
) -> list[Any]:
    """Run `function(context, payload)` in `num_ranks` processes on this host; return the results in rank order.

    Needs torch. The ranks inherit stdout, stderr and the environment. No rank outlives the call or this process.
    An error that comes from the ranks has an attribute `reports`, a dict from each rank without a result to its
    error in one line. Where a fault (SIGSEGV, SIGABRT) ended a rank, a note of the error says where its threads
    were.

    Args:
        target: "package.module:function", importable in a new interpreter (see `env`). It is given a
            `RankContext` and the payload, and returns something that JSON can carry.
        num_ranks: number of processes.
        payload: given to every rank by way of JSON.
        timeout_s: seconds from the start after which the ranks that still run are ended.
        env: environment variables on top of the inherited ones, PYTHONPATH for instance. OMP_NUM_THREADS is 1
            unless given here, GLOO_SOCKET_IFNAME the loopback interface unless given here or inherited.
        deadline_s: seconds that a wait of a rank for another may take. By default 10 less than `timeout_s`, or
            half of it if that is more, so that ranks can find out, and say, what is wrong.
        grace_s: seconds that the others have to end by themselves once one rank has failed.
        interval_s: seconds between heartbeats, see `Liveness`.
        stale_s: seconds without a heartbeat after which a rank counts as lost.
        places: where each rank runs, one for each rank or none. A `prefix` must exec the command of the rank, and
            not start it as a child process.
        address: an address of this host that the store listens on, and by which ranks reach it. Anybody who
            reaches it can disturb the run, so take another than loopback only for ranks on other hosts.
        store: a TCPStore that this process hosts, in place of a new one at `address`; the `env` of each of
            `places` then gives its MASTER_ADDR.

    Raises:
        RankLostError: ranks died without a word, or the ranks agree that some stopped answering; `missing`
            names them.
        DeadlineError: the ranks did not finish in `timeout_s`, or a wait in `deadline_s`.
        MeshweaveError: of the same kind as one that a rank raised.
        RankError: a rank raised any other exception.
        BindError: `num_ranks` is below 1, a time is negative, `interval_s` is not below `stale_s`, `target`
            names no function, the payload or a result is not JSON, or the store cannot listen on `address`.
    """
    num_ranks = require_count(num_ranks, "num_ranks", BindError)
    assert len(places) in (0, num_ranks), places
    timeout_s = require_seconds(timeout_s, "timeout_s")
    deadline_s = max(timeout_s - 10.0, timeout_s / 2) if deadline_s is None else deadline_s
    deadline_s, grace_s = (
        require_seconds(deadline_s, "deadline_s"),
        require_seconds(grace_s, "grace_s", may_be_0=True),
    )
    interval_s, stale_s = require_seconds(interval_s, "interval_s"), require_seconds(stale_s, "stale_s")
    if interval_s >= stale_s:
        raise BindError(f"heartbeats each {interval_s} s are stale after {stale_s} s; give a longer stale_s")
    with temporary_folder("launch") as name:
        folder = Path(name)
        LaunchJob(target, payload, deadline_s, interval_s, stale_s, os.getpid()).write(folder)
        if store is None:
            store = host_store(address)
        is_ours = target.startswith("meshweave.")
        run = _LaunchedRanks(folder, num_ranks, time.monotonic() + timeout_s, is_ours)
        env = {"MASTER_ADDR": address, TOKEN_VARIABLE: new_token(), **(env or {})}
        try:
            run.start_all(places or [RankPlace()] * num_ranks, store.port, env)
            run.wait(grace_s)
            # A rank that is told to end listens for some `stale_s` before it reports and goes.
            run.stop_rest(grace_s=2 * stale_s + 1.0)
        finally:
            run.kill_rest()
        if run.failed:
            raise run.error(timeout_s)
        return [json.loads(result_path(folder, rank).read_text()) for rank in range(num_ranks)]


def _environment(rank: int, num_ranks: int, port: int, env: Mapping[str, str]) -> dict[str, str]:
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    merged = {"GLOO_SOCKET_IFNAME": loopback, **os.environ, "OMP_NUM_THREADS": "1", **env}
    # The ranks must find this very meshweave, installed or not.
    ours = str(Path(__file__).parents[3])
    merged["PYTHONPATH"] = os.pathsep.join(filter(None, [ours, merged.get("PYTHONPATH")]))
    merged.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    merged["MASTER_PORT"] = str(port)
    return merged


def host_store(address: str = "127.0.0.1", port: int = 0) -> Any:
    """Return a new TCPStore that this process serves on one address alone; `port` 0 takes a free port.

    A TCPStore that opens its socket itself listens on all interfaces, whatever host it is given (torch 2.9 and
    2.13), so it is handed one that is bound already.

    Raises:
        BindError: this host does not have the address, or the port is taken.
    """
    import torch.distributed as dist  # here, for what launches need not import torch

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        try:
            listener.bind((address, port))
        except OSError as error:
            raise BindError(f"the store cannot listen on {address}:{port}: {error.strerror}") from None
        listener.listen(1024)
        port = listener.getsockname()[1]
        descriptor = listener.detach()  # the store's from here on
    return dist.TCPStore(address, port, None, True, wait_for_workers=False, master_listen_fd=descriptor)


class _Process(Protocol):
    """A started rank: a new interpreter (`subprocess.Popen`), or what a `RankStarter` started."""

    @property
    def pid(self) -> int:
        """Return the number of the process."""

    def poll(self) -> int | None:
        """Return the exit status, that of a signal negative; None while the process runs."""

    def wait(self, timeout: float) -> int:
        """Return the exit status once the process has ended. Raises where it runs after `timeout` seconds."""

    def terminate(self) -> None:
        """Send SIGTERM."""

    def kill(self) -> None:
        """Send SIGKILL."""


class RankStarter(Protocol):
    """Starts ranks in another manner than as new interpreters, such as forks of a process that imported torch."""

    def can_start(self, environment: Mapping[str, str]) -> bool:
        """Return whether this starter can start a rank with these environment variables."""

    def start(
        self, rank: int, folder: Path, environment: dict[str, str], place: RankPlace, *, is_ours: bool
    ) -> _Process:
        """Start rank `rank` and return its process.

        `folder` has the `LaunchJob`, `environment` are all its environment variables, `place` says where it runs,
        and `is_ours` whether the job's target is a function of meshweave.
        """


rank_starter: RankStarter | None = None
"""Starts the ranks of every launch that it can start, for as long as it is set."""


@dataclass
class _LaunchedRanks:
    """The processes of one `launch`."""

    folder: Path
    num_ranks: int
    until: float  # monotonic seconds
    is_ours: bool = False  # whether the target is a function of this package
    running: dict[int, _Process] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)  # rank: exit status; in the order of their ends
    ended_by_us: set[int] = field(default_factory=set)  # ranks that we ended
    suspended: list[int] = field(default_factory=list)  # of these, the ranks that a signal had stopped

    def start_all(self, places: Sequence[RankPlace], port: int, env: Mapping[str, str]) -> None:
        """Start a process for each place; `port` is the store's, `env` what all have in their environment."""
        for rank, place in enumerate(places):
            environment = {**_environment(rank, self.num_ranks, port, env), **place.env}
            self._start(rank, environment, place)

    def _start(self, rank: int, environment: dict[str, str], place: RankPlace) -> None:
        starter, namespace = rank_starter, place.network_namespace
        if starter is not None and not place.prefix and starter.can_start(environment):
            self.running[rank] = starter.start(rank, self.folder, environment, place, is_ours=self.is_ours)
            return
        # A target of ours needs nothing from the folder the user is in, where a stray module could shadow one.
        safe = ["-P"] if self.is_ours else []
        inside = ["ip", "netns", "exec", namespace] if namespace else []
        command = [
            *place.prefix,
            *inside,
            sys.executable,
            *safe,
            "-m",
            "meshweave.execute.ranks.worker",
            str(self.folder),
        ]
        self.running[rank] = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)

    @property
    def failed(self) -> bool:
        """Return whether a rank has not ended, ended with another status than 0, or left no result."""
        return len(self.ended) < self.num_ranks or any(self._is_bad(rank) for rank in self.ended)

    def _is_bad(self, rank: int) -> bool:
        return self.ended[rank] != 0 or not result_path(self.folder, rank).exists()

    def _reap(self) -> None:
        for rank, process in list(self.running.items()):
            status = process.poll()
            if status is not None:
                self.ended[rank] = status
                del self.running[rank]

    def wait(self, grace_s: float) -> None:
        """Wait until all ranks have ended, the time is up, or `grace_s` seconds after a first failure."""
        until = self.until
        while self.running and time.monotonic() < until:
            num_ended = len(self.ended)
            self._reap()
            if any(self._is_bad(rank) for rank in list(self.ended)[num_ended:]):
                until = min(until, time.monotonic() + grace_s)
            time.sleep(_POLL_S)

    def stop_rest(self, grace_s: float) -> None:
        """Send SIGTERM to all running ranks, upon which they report and end; wait `grace_s` seconds for that.

        Ranks that a signal has suspended cannot report, and are not waited for.
        """
        self.ended_by_us.update(self.running)
        self.suspended = [rank for rank, process in self.running.items() if _is_suspended(process.pid)]
        for process in self.running.values():
            process.terminate()
        until = time.monotonic() + grace_s
        while set(self.running) - set(self.suspended) and time.monotonic() < until:
            self._reap()
            time.sleep(_POLL_S)

    def kill_rest(self) -> None:
        """Kill the ranks that still run, and wait for the end of each, 10 s at most."""
        for process in self.running.values():
            process.kill()
        for rank, process in self.running.items():
            self.ended[rank] = process.wait(10.0)
        self.running.clear()

    def error(self, timeout_s: float) -> Exception:
        """Return the error to raise: that of a rank that died or failed, before those that lost it."""
        said = {rank: Report.read(self.folder, rank) for rank in self.ended if self._is_bad(rank)}
        reports = {rank: _last_words(report, self.ended[rank]) for rank, report in sorted(said.items())}
        error = self._root(said, timeout_s)
        vars(error)["reports"] = reports  # whatever its class
        return error

    def _stacks(self, rank: int) -> str:
        """Return where the threads of a rank were when a fault ended it; "" for any other end."""
        path = stacks_path(self.folder, rank)
        text = path.read_text(errors="replace").partition("\nExtension modules")[0] if path.exists() else ""
        return f"rank {rank}: {text}" if text else ""

    def _root(self, said: dict[int, Report | None], timeout_s: float) -> Exception:
        unasked = {rank: report for rank, report in said.items() if rank not in self.ended_by_us}
        dead = [rank for rank, report in unasked.items() if report is None or report.kind == STOPPED]
        victims = (RankLostError.__name__, DeadlineError.__name__)
        late = f"had not finished after {timeout_s:g} s and had to be ended"
        for rank, report in unasked.items():  # in the order of their ends
            if rank in dead:
                causes = ", ".join(f"rank {r} {_cause(self.ended[r])}" for r in sorted(dead))
                lost_ranks = RankLostError(causes, sorted(dead))
                for stacks in filter(None, map(self._stacks, sorted(dead))):
                    lost_ranks.add_note(stacks)
                return lost_ranks
            if report is not None and report.kind not in victims and not report.is_echo:
                return _revive(rank, report)
        for rank, report in unasked.items():
            if report is not None and report.is_echo:
                return _revive(rank, report)
        spoke = {rank: report for rank, report in said.items() if report is not None and report.ours}
        lost = sorted({rank for report in spoke.values() for rank in report.missing})
        for kind in victims:
            for rank, report in spoke.items():
                if report.kind == kind:
                    words = f"rank {rank}: {report.message}"
                    return RankLostError(words, lost) if report.kind == victims[0] else DeadlineError(words)
        if self.suspended:
            stopped = (
                f"{ranks_text(self.suspended)} {'were' if self.suspended[1:] else 'was'} stopped by a signal"
            )
            return RankLostError(f"{stopped}; {ranks_text(self.ended_by_us)} {late}", self.suspended)
        # By the reports of ranks that were told to end. Those that had yet to begin ended by that at once.
        early = {
            rank for rank, report in said.items() if report is None and self.ended[rank] == -signal.SIGTERM
        }
        if silent := sorted({*lost} - early):
            words = f"{ranks_text(silent)} stopped answering; {ranks_text(self.ended_by_us)} {late}"
            return RankLostError(words, silent)
        return DeadlineError(f"{ranks_text(self.ended_by_us)} {late}")


def _is_suspended(pid: int) -> bool:
    """Return whether a signal has stopped a process; on Linux, else False."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def _cause(status: int) -> str:
    return end_text(status) + (" and no result" if status >= 0 else "")


def end_text(status: int) -> str:
    """Return how a process ended, in words: "was killed by SIGKILL" (-9), "ended with exit status 3"."""
    if status < 0:
        try:
            return f"was killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"was killed by signal {-status}"
    return f"ended with exit status {status}"


def _last_words(report: Report | None, status: int) -> str:
    if report is None:
        return _cause(status)
    return report.message if report.ours else f"{report.kind}: {report.message}"


def _revive(rank: int, report: Report) -> Exception:
    """Return the rank's error in this process: of the same kind if it is one of ours."""
    kind = getattr(errors, report.kind, None)
    if report.ours and isinstance(kind, type) and issubclass(kind, MeshweaveError):
        return kind(f"rank {rank}: {report.message}")
    return RankError(f"rank {rank}: {report.kind}: {report.message}", rank, report.traceback)
