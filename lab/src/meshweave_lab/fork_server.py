"""Start ranks by forking processes that have imported torch already.

A new interpreter takes one to three seconds of a core to import torch and this package, which is most of the time
of a short launch. A fork server (as in `multiprocessing`) imports them once, starts no thread, and forks a rank on
request. Each rank is still a process of its own with its own process group: it may fail or be killed without harm
to the next.

    with fork_servers():
        launch("module:function", 4, payload, timeout_s=60)  # starts the servers
        launch("module:function", 4, payload, timeout_s=60)  # starts ranks in milliseconds

The server talks to its owner over a Unix socket. A request is one message of JSON with two descriptors, which
become the standard output and error of the rank. A reply is the JSON `[pid, null]` for a started rank and
`[pid, status]` for an ended one. The server ends once its owner's end of the socket closes, and its ranks end with
it.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

import meshweave
from meshweave.execute.ranks import launch
from meshweave.execute.ranks.launch import RankPlace
from meshweave.execute.ranks.worker import leave, run_rank
from meshweave_lab.network.entering import live_in_named_namespace

PRELOADED = (
    "meshweave.execute.torch.compat:import_all_of_dtensor",
    "meshweave.nn.linear",
    "meshweave.nn.matmul2d",
    "meshweave.nn.pipelining.pipeline",
    "meshweave.nn.reshard_state",
)
_IMPORTED_WITH = (
    "OMP_NUM_THREADS",
)  # variables that are read when torch is imported, so no rank can change them
_POLL_S = 0.02
_MAX_REQUEST_BYTES = 1 << 20


@dataclass(frozen=True)
class ForkRequest:
    """One rank to start.

    Attributes:
        folder: where the rank finds its job, see `launch`.
        environment: all environment variables of the rank.
        working_directory: the folder that the rank starts in.
        is_ours: whether the rank runs a function of this package, and imports nothing from the working directory.
        network_namespace: the name of the network namespace that the rank enters; empty for that of the server.
        startup: functions to call before the rank's own, as "module:function".
        imports: modules that the server imports before it forks, unless it has them.
    """

    folder: str
    environment: dict[str, str]
    working_directory: str
    is_ours: bool
    network_namespace: str = ""
    startup: Sequence[str] = ()
    imports: Sequence[str] = ()


class ForkedRank:
    """A rank that a server has forked, with the methods of `subprocess.Popen` that `launch` needs."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server, self.pid = server, pid
        self.status: int | None = None  # as the server has said so far

    def poll(self) -> int | None:
        """Return the exit status, -N for signal N, or None while the rank runs.

        It is that of SIGKILL once the server has ended.
        """
        is_gone = self._server.is_gone
        return -int(signal.SIGKILL) if self.status is None and is_gone else self.status

    def wait(self, timeout: float) -> int:
        """Wait for the end of the rank and return its exit status; raises TimeoutExpired after `timeout` s."""
        until = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() >= until:
                raise subprocess.TimeoutExpired(f"forked rank {self.pid}", timeout)
            time.sleep(_POLL_S)
        return status

    def terminate(self) -> None:
        """Send SIGTERM, unless the rank has ended."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, unless the rank has ended."""
        self._send(signal.SIGKILL)

    def _send(self, signum: signal.Signals) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signum)


def start_server(module: str, connection: socket.socket, preload: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start `python -m module` as a server on a socket, which imports `preload` (see `fork_servers`) first."""
    ours = (str(Path(file).parents[1]) for file in (__file__, meshweave.__file__))
    path = os.pathsep.join(filter(None, [*ours, os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(connection.fileno()), *preload],
        env={"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        pass_fds=[connection.fileno()],
    )


class ForkServer:
    """The owner's end of one server process: a new one, or a fork of the shared one that listens `at` a path."""

    def __init__(self, preload: Sequence[str], at: str = "") -> None:
        self._process: subprocess.Popen[bytes] | None = None
        if at:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._socket.connect(at)
        else:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = start_server(__name__, theirs, preload)
        self._lock = threading.Lock()  # over the socket and what was read from it
        self._started: list[ForkedRank] = []
        self._running: dict[int, ForkedRank] = {}
        self._is_gone = False

    @property
    def is_gone(self) -> bool:
        """Whether the server has ended, and all its ranks with it."""
        with self._lock:
            self._read(block=False)
            return self._is_gone

    def start(self, request: ForkRequest) -> ForkedRank:
        """Return a new rank; raises ChildProcessError if the server has ended."""
        with self._lock:
            try:
                socket.send_fds(self._socket, [json.dumps(asdict(request)).encode()], [1, 2])
                while not self._started and not self._is_gone:
                    self._read(block=True)
            except OSError:
                self._is_gone = True
            if not self._started:
                raise ChildProcessError("the fork server has ended")
            return self._started.pop()

    def close(self) -> None:
        """End the server, and with it whatever still runs of its ranks."""
        self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _read(self, block: bool) -> None:
        while not self._is_gone and select.select([self._socket], [], [], None if block else 0)[0]:
            try:
                message = self._socket.recv(256)
            except OSError:
                message = b""
            if not message:
                self._is_gone = True
                return
            pid, status = json.loads(message)
            if status is None:  # a new rank, though an earlier one may have had its number
                self._running[pid] = ForkedRank(self, pid)
                self._started.append(self._running[pid])
            else:
                self._running.pop(pid).status = status
            block = False


class ForkServers:
    """Servers that the ranks of a launch are dealt to in turn.

    The ranks of one server share its hash seed and those of different servers do not, so that what depends on the
    order of a set differs between ranks, as it does in a job. A server that has ended is started anew.
    """

    def __init__(self, preload: Sequence[str], num_servers: int, shared: Sequence[str] = ()) -> None:
        self._preload, self._shared = tuple(preload), shared or [""] * num_servers
        self._imports: tuple[str, ...] = ()
        self._servers: list[ForkServer | None] = [None] * len(self._shared)
        self._lock = threading.Lock()

    def can_start(self, environment: Mapping[str, str]) -> bool:
        """Whether a rank with these environment variables can be forked: on Linux, with OMP_NUM_THREADS=1."""
        return sys.platform == "linux" and all(environment.get(name) == "1" for name in _IMPORTED_WITH)

    def import_also(self, *modules: str) -> None:
        """Let the servers import further modules, before the next rank is forked."""
        self._imports = tuple(dict.fromkeys([*self._imports, *modules]))

    def start(
        self, rank: int, folder: Path, environment: dict[str, str], place: RankPlace, *, is_ours: bool
    ) -> ForkedRank:
        """Fork global rank `rank` of a launch, whose job is in `folder`, and return it."""
        where = str(folder), environment, str(Path.cwd()), is_ours, place.network_namespace
        request = ForkRequest(*where, place.fork_startup, self._imports)
        try:
            return self._server_of(rank).start(request)
        except ChildProcessError:  # the server was killed a moment ago
            return self._server_of(rank).start(request)

    def _server_of(self, rank: int) -> ForkServer:
        with self._lock:
            for index, server in enumerate(self._servers):  # all at once, so that they import side by side
                if server is None or server.is_gone:
                    if server is not None:
                        server.close()
                    self._servers[index] = ForkServer(self._preload, self._shared[index])
            server = self._servers[rank % len(self._servers)]
        assert server is not None
        return server

    def close(self) -> None:
        """End all servers."""
        with self._lock:
            for index, server in enumerate(self._servers):
                if server is not None:
                    server.close()
                self._servers[index] = None


@contextmanager
def fork_servers(
    preload: Sequence[str] = PRELOADED, num_servers: int = 2, shared: Sequence[str] = ()
) -> Iterator[ForkServers]:
    """Let every `launch` of this process fork its ranks, for as long as the context lasts.

    The servers start with the first launch. Launches that give their ranks another OMP_NUM_THREADS than 1, or a
    prefix of their command, start new interpreters as before.

    Args:
        preload: the modules to import and functions to call ("module:function") before forking; none may start a
            thread or touch a GPU.
        num_servers: how many servers share the ranks of a launch.
        shared: paths that `shared_fork_servers` yields, to fork those servers and use neither argument above.
    """
    servers, outer = ForkServers(preload, num_servers, shared), launch.rank_starter
    launch.rank_starter = servers
    try:
        yield servers
    finally:
        launch.rank_starter = outer
        servers.close()


# -- the server's end ------------------------------------------------------------------------------------


def serve(connection: socket.socket, preload: Sequence[str]) -> None:
    """Fork a rank for every request until the owner closes its end."""
    import_all(preload)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        readable = select.select([connection.fileno(), reader], [], [])[0]
        if connection.fileno() in readable:
            message, fds, _, _ = socket.recv_fds(connection, _MAX_REQUEST_BYTES, 2)
            if not message:
                return
            request = ForkRequest(**json.loads(message))
            _import_missing(request.imports)
            server, pid = os.getpid(), os.fork()
            if pid == 0:
                connection.close()
                os.close(reader)
                os.close(writer)
                _become_rank(request, fds, server)
            for fd in fds:
                os.close(fd)
            _reply(connection, pid, None)
        if reader in readable:
            os.read(reader, 4096)
            _report_ended(connection)


def import_all(preload: Sequence[str]) -> None:
    """Import modules and call functions, as the first thing a server does."""
    for name in preload:
        _import_or_call(name)
    _keep_from_ranks()


def _import_missing(modules: Sequence[str]) -> None:
    """Import the modules that this process has not imported; one that fails is left to the rank."""
    missing = [name for name in modules if name not in sys.modules]
    for name in missing:
        with suppress(Exception):
            importlib.import_module(name)
    if missing:
        _keep_from_ranks()


def _keep_from_ranks() -> None:
    """Keep collections in ranks, and their ends, from touching what was imported: they would copy its pages."""
    gc.collect()
    gc.freeze()
    for finalizer in tuple(vars(weakref.finalize)["_registry"]):  # torch has hundreds, for operators in C++
        finalizer.atexit = False


def _import_or_call(name: str) -> None:
    """Import "module", or call "module:function" without arguments."""
    module, _, function = name.partition(":")
    imported = importlib.import_module(module)
    if function:
        getattr(imported, function)()


def _report_ended(connection: socket.socket) -> None:
    with suppress(ChildProcessError):  # there are no more
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            _reply(connection, pid, os.waitstatus_to_exitcode(status))


def _reply(connection: socket.socket, pid: int, status: int | None) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # the next request shows that the owner has gone
        connection.send(json.dumps([pid, status]).encode())


def _become_rank(request: ForkRequest, fds: Sequence[int], server: int) -> NoReturn:
    """Make of this fork of the process `server` what `python -m meshweave.execute.ranks.worker FOLDER` would be,
    and run it.
    """
    for fd, standard in zip(fds, (1, 2), strict=True):
        os.dup2(fd, standard)
        os.close(fd)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(request.environment)
    if request.network_namespace:
        live_in_named_namespace(request.network_namespace)
    with suppress(FileNotFoundError):
        os.chdir(request.working_directory)
    first = [] if request.is_ours else [request.working_directory]
    path = request.environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = dict.fromkeys([*first, *filter(None, path), *sys.path])
    for name in request.startup:
        _import_or_call(name)
    run_rank(Path(request.folder), int(os.environ["RANK"]), server)
    _done.append(True)
    sys.exit(0)


_done: list[bool] = []
"""Not empty in a rank that has run its job."""


def end_rank() -> None:
    """End a rank that has run its job, as the last of its exit handlers.

    The interpreter would take down every module after that, which touches, and so copies, all the memory that the
    rank shares with the server: most of the time of a short launch.
    """
    if _done:
        leave()


def main() -> None:
    """Serve on the socket whose descriptor is given on the command line, with the modules named after it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner decides what becomes of Ctrl-C
    atexit.register(end_rank)  # before all others, so it runs after them
    fd, *preload = sys.argv[1:]
    with socket.socket(fileno=int(fd)) as connection:
        serve(connection, preload)


if __name__ == "__main__":
    main()
