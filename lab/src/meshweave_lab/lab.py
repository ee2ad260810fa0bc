"""`Lab`, a description, and `RunningLab`, the machine while it stands."""

from __future__ import annotations

import atexit
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from meshweave.base.errors import BindError, UnsupportedError
from meshweave.base.owner import temporary_folder
from meshweave.describe.machine.cluster import Cluster
from meshweave_lab import startup
from meshweave_lab.description import LabDescription
from meshweave_lab.description_file import load_lab
from meshweave_lab.network.build import build
from meshweave_lab.network.check import STILL_WORKS, obvious_problem
from meshweave_lab.network.namespaces import (
    inside,
    kill_inside,
    lab_namespaces,
    new_prefix,
    remove,
    remove_leftovers,
)
from meshweave_lab.network.signals import SIGNALS, deferred_signals
from meshweave_lab.network.wiring import FABRIC, STORE_ADDRESS, Wiring, wire
from meshweave_lab.pace import PaceReport, read_reports
from meshweave_lab.processes import LineHandler, RankProcesses, RunResult, print_line

MASTER_PORT = 29500
"""The port of the ranks' own rendezvous. It is free, since the namespace is new."""


@dataclass(frozen=True)
class Lab:
    """A described lab. `up()` builds it: `with Lab.load("LAB.toml").up() as lab: lab.run([...])`."""

    description: LabDescription

    @classmethod
    def load(cls, path: str | Path) -> Lab:
        """Return the lab that a LAB.toml describes. Raises DescriptionError."""
        return cls(load_lab(path))

    @property
    def num_ranks(self) -> int:
        """The number of ranks, over all hosts."""
        return self.description.num_ranks

    def cluster(self) -> Cluster:
        """Return the same machine as a cluster description, for estimates and simulations."""
        return self.description.cluster()

    def up(self) -> RunningLab:
        """Return the lab to enter with `with`. Entering needs root, `ip`, and `tc` with tbf."""
        return RunningLab(self.description)


@dataclass
class RunningLab:
    """A lab that stands while its `with` block runs; leaving takes it down, whatever happened inside.

    Entering first removes what killed labs left behind, and raises UnsupportedError where there can be no lab
    on this machine. In the main thread, SIGTERM and SIGHUP (where nobody handles them) become SystemExit for
    the time of the block, and signals that come during the take-down wait for its end. A lab whose process is
    killed is removed by the next one. Not to be entered twice.

    `pace` is what the ranks of the last run reported about their pacing, by rank; `removed` has the names of the
    namespaces of killed labs that entering removed.
    """

    description: LabDescription
    pace: dict[int, PaceReport] = field(default_factory=dict)
    removed: tuple[str, ...] = ()
    _wiring: Wiring = field(init=False)
    _prefix: str = field(init=False, default="")
    _busy: threading.Lock = field(init=False, default_factory=threading.Lock)
    _pid: int = field(init=False, default_factory=os.getpid)
    _handlers: dict[int, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._wiring = wire(self.description)

    def __enter__(self) -> Self:
        if problem := obvious_problem():
            raise UnsupportedError(f"no lab on this machine: {problem}; {STILL_WORKS}")
        assert not self._prefix, "entered twice"
        with deferred_signals():
            self.removed = tuple(remove_leftovers())
        self._prefix, self._pid = new_prefix(), os.getpid()
        # An interrupt in the first steps of `__exit__` would be the end of that.
        atexit.register(self._down)
        try:
            self._handle_signals()
            build(self._wiring, self._prefix, self.description.mtu_bytes)
        except BaseException as error:
            prefix = self._prefix
            self._down()
            if isinstance(error, UnsupportedError):
                said = str(error).replace(prefix, "")
                raise UnsupportedError(f"no lab on this machine: {said}; {STILL_WORKS}") from error
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._down()

    @property
    def num_ranks(self) -> int:
        """The number of ranks, over all hosts."""
        return self.description.num_ranks

    def namespace(self, rank: int) -> str:
        """Return the name of the network namespace of a rank's host, for `ip netns exec`."""
        return f"{self._prefix}{self._wiring.host_of(rank).name}"

    def address(self, rank: int) -> str:
        """Return the IPv4 address of a rank's host on the shaped links."""
        return self._wiring.host_of(rank).address

    def environment(self, rank: int) -> dict[str, str]:
        """Return what the lab adds to the environment of a rank: as torchrun does, for env:// rendezvous."""
        host, per_host = self._wiring.host_of(rank), len(self._wiring.hosts[0].ranks)
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.num_ranks),
            "LOCAL_RANK": str(rank % per_host),
            "LOCAL_WORLD_SIZE": str(per_host),
            "GROUP_RANK": str(rank // per_host),
            "GROUP_WORLD_SIZE": str(len(self._wiring.hosts)),
            # The rendezvous goes over the management network, gloo's own connections over the shaped links.
            "MASTER_ADDR": self._wiring.host_of(0).management_address,
            "MASTER_PORT": str(MASTER_PORT),
            "GLOO_SOCKET_IFNAME": host.interface,
            "TP_SOCKET_IFNAME": host.interface,
            "OMP_NUM_THREADS": "1",
            # Hosts have no names here, about which torch would warn at every connection.
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
            "MESHWEAVE_LAB_ADDRESSES": ",".join(map(self.address, range(self.num_ranks))),
        }

    def run(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        grace_s: float = 5.0,
        on_line: LineHandler = print_line,
    ) -> RunResult:
        """Run a command once per rank, inside the rank's namespace, and wait for all.

        The ranks inherit the environment, with `env` and then the lab's variables on top. Once a rank fails, the
        others are ended after `grace_s` seconds; after `timeout_s` all are ended. No process that a rank has
        started outlives the call. A lab has one run at a time.

        Args:
            command: the program and its arguments.
            timeout_s: seconds from the start.
            on_line: takes what the ranks print, line by line; by default it is printed behind `[rank]`.

        Raises:
            BindError: there is no command.
            UnsupportedError: another run is in progress in this lab, or the lab is not up.
        """
        if not command:
            raise BindError("there is no command to run; give one, such as python script.py")
        with self._one_run(env or {}) as pacing:
            with RankProcesses(time.monotonic() + timeout_s, on_line) as processes:
                for rank in range(self.num_ranks):
                    environment = {**os.environ, **pacing, **self.environment(rank)}
                    processes.start(rank, [*self._enter(rank), *command], environment)
                processes.wait(grace_s)
            return processes.result(self.num_ranks)

    def launch(
        self,
        target: str,
        payload: dict[str, Any],
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> list[Any]:
        """Run `function(context, payload)` in each rank and return what each returned.

        Arguments, `options` and errors are those of `meshweave.execute.ranks.launch.launch`. Heartbeats take the
        management network. A rank counts as lost after 5 s of silence by default, since there may be many more
        ranks than cores.
        """
        import torch.distributed as dist

        from meshweave.execute.ranks.launch import RankPlace, launch

        options = {"interval_s": 0.5, "stale_s": 5.0, **options}
        self._check_up()
        with inside(f"{self._prefix}{FABRIC}"):
            # Through its loopback: torch warns about an address of its own that has no name.
            store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        is_paced = self.description.flops_per_s is not None
        places = [
            RankPlace(
                env={k: v for k, v in self.environment(rank).items() if k != "MASTER_PORT"}
                | {"MASTER_ADDR": STORE_ADDRESS},
                network_namespace=self.namespace(rank),
                fork_startup=("meshweave_lab.pace:pace_from_environment",) if is_paced else (),
            )
            for rank in range(self.num_ranks)
        ]
        with self._one_run(env or {}) as pacing:
            return launch(
                target,
                self.num_ranks,
                payload,
                timeout_s=timeout_s,
                env=pacing,
                places=places,
                store=store,
                **options,
            )

    def _enter(self, rank: int) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.namespace(rank))

    def _check_up(self) -> None:
        if not self._prefix:
            raise UnsupportedError("the lab is not up; enter it with `with`")

    @contextmanager
    def _one_run(self, env: Mapping[str, str]) -> Iterator[dict[str, str]]:
        """Let one run at a time into the lab; at its end, kill whatever its ranks have started and left."""
        self._check_up()
        # Named now: without the prefix of a lab that is up, these names may be of somebody else.
        spaces = [f"{self._prefix}{host.name}" for host in self._wiring.hosts]
        if not self._busy.acquire(blocking=False):
            raise UnsupportedError("another run is under way in this lab; bring up a second one")
        try:
            with self._pacing(env) as pacing:
                yield pacing
        finally:
            kill_inside(spaces)
            self._busy.release()

    @contextmanager
    def _pacing(self, env: Mapping[str, str]) -> Iterator[dict[str, str]]:
        """Yield `env` with what makes ranks pace themselves, and collect their reports afterwards."""
        self.pace = {}
        rate = self.description.flops_per_s
        if rate is None:
            yield dict(env)
            return
        with temporary_folder("pace") as folder:
            path = env.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
            python_path = os.pathsep.join(filter(None, [str(Path(startup.__file__).parent), path]))
            pacing = {
                "MESHWEAVE_PACE_FLOPS_PER_S": repr(rate),
                "MESHWEAVE_PACE_CALL_FLOPS_PER_S": json.dumps(dict(self.description.call_flops_per_s)),
                "MESHWEAVE_PACE_REPORT": folder,
            }
            try:
                yield {**pacing, **env, "PYTHONPATH": python_path}
            finally:
                self.pace = read_reports(Path(folder))

    # -- taking down -----------------------------------------------------------------------------------------

    def _down(self) -> None:
        if os.getpid() != self._pid or not self._prefix:
            return  # a forked child leaves the block; the lab is its parent's
        try:
            with deferred_signals():
                remove([name for name in lab_namespaces() if name.startswith(self._prefix)])
                self._prefix = ""
        finally:
            if not self._prefix:  # else it was interrupted before signals were held, and goes down at exit
                atexit.unregister(self._down)
                for number, handler in self._handlers.items():
                    signal.signal(number, handler)
                self._handlers.clear()

    def _handle_signals(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for signum in SIGNALS:
                if signal.getsignal(signum) == signal.SIG_DFL:
                    self._handlers[signum] = signal.signal(signum, _exit_on)


def _exit_on(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)
