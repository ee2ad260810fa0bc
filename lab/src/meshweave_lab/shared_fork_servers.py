"""Share what fork servers have imported among several processes, as the workers of a test run.

    with shared_fork_servers() as paths:
        ...  # in another process:
        with fork_servers(shared=paths):
            launch("module:function", 4, payload, timeout_s=60)

A shared server forks itself for every owner that connects, and the fork serves that one (see `fork_server`).
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from meshweave.base.owner import temporary_folder
from meshweave.execute.ranks.worker import die_with_parent
from meshweave_lab.fork_server import PRELOADED, end_rank, import_all, serve, start_server


@contextmanager
def shared_fork_servers(preload: Sequence[str] = PRELOADED, num_servers: int = 2) -> Iterator[list[str]]:
    """Run servers for as long as the context lasts, and yield the paths of the sockets on which they listen.

    They end with this process.

    Args:
        preload: the modules to import and functions to call before forking, see `fork_servers`.
        num_servers: how many servers.
    """
    processes, paths = [], []
    with temporary_folder("fork") as folder:
        try:
            for number in range(num_servers):
                paths.append(f"{folder}/{number}")
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                    listener.bind(paths[-1])
                    listener.listen(64)  # who connects before all is imported waits
                    processes.append(start_server(__name__, listener, [str(os.getpid()), *preload]))
            yield paths
        finally:
            for process in processes:
                process.kill()
                process.wait()


def share(listener: socket.socket, preload: Sequence[str]) -> None:
    """Serve every owner that connects, by a fork of this process."""
    import_all(preload)
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            serve(connection, ())
            os._exit(0)
        connection.close()


def main() -> None:
    """Share on the socket whose descriptor the command line gives, then the owner's number and modules."""
    atexit.register(end_rank)  # before all others, so it runs after them
    fd, owner, *preload = sys.argv[1:]
    die_with_parent(int(owner))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # owners decide what becomes of Ctrl-C
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks of owners that have gone leave no trace
    with socket.socket(fileno=int(fd)) as listener:
        share(listener, preload)


if __name__ == "__main__":
    main()
