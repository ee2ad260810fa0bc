"""The part of one rank in a probe. A script on its own, so that many start at once on few cores:
`python -I -S probe_rank.py FLOWS TIMEOUT_S FOLDER`, rank and addresses in the environment."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from pathlib import Path

_PORT = 20000
_CHUNK_BYTES = 1 << 18


def main() -> None:
    """Connect, wait until all other ranks have, then receive and send the flows of this rank."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    addresses = os.environ["MESHWEAVE_LAB_ADDRESSES"].split(",")
    flows, until, folder = json.loads(sys.argv[1]), time.monotonic() + float(sys.argv[2]), Path(sys.argv[3])
    arrivals: dict[int, tuple[float, float]] = {}
    servers = {
        number: socket.create_server((addresses[rank], _PORT + number))
        for number, (_, dst, _) in enumerate(flows)
        if dst == rank
    }
    _barrier(folder, "listening", rank, num_ranks, until)
    outgoing = {
        number: socket.create_connection((addresses[dst], _PORT + number), timeout=_left(until))
        for number, (src, dst, _) in enumerate(flows)
        if src == rank
    }
    incoming = {}
    for number, server in servers.items():
        server.settimeout(_left(until))
        incoming[number] = server.accept()[0]
    _barrier(folder, "connected", rank, num_ranks, until)
    begin = time.perf_counter()
    threads = [
        threading.Thread(target=_send, args=(connection, flows[number][2]), daemon=True)
        for number, connection in outgoing.items()
    ] + [
        threading.Thread(
            target=_receive, args=(connection, number, flows[number][2], begin, arrivals), daemon=True
        )
        for number, connection in incoming.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_left(until))
    if len(arrivals) < len(servers):
        sys.exit("not everything arrived")
    (folder / f"arrivals-{rank}.json").write_text(json.dumps(arrivals))


def _left(until: float) -> float:
    return max(until - time.monotonic(), 0.1)


def _barrier(folder: Path, name: str, rank: int, num_ranks: int, until: float) -> None:
    (folder / f"{name}-{rank}").touch()
    while not all((folder / f"{name}-{other}").exists() for other in range(num_ranks)):
        if time.monotonic() > until:
            sys.exit("not all ranks are there")
        time.sleep(0.02)


def _receive(
    connection: socket.socket,
    number: int,
    num_bytes: int,
    begin: float,
    arrivals: dict[int, tuple[float, float]],
) -> None:
    received, skipped, start = 0, 0, 0.0
    skip = min(max(num_bytes // 8, 1 << 17), num_bytes // 2)
    with connection:
        while data := connection.recv(_CHUNK_BYTES):
            received += len(data)
            if not start and received >= skip:
                start, skipped = time.perf_counter(), received
        end = time.perf_counter()
    if received == num_bytes:
        arrivals[number] = (received - skipped) / (end - start), end - begin


def _send(connection: socket.socket, num_bytes: int) -> None:
    with connection:
        connection.sendall(bytes(num_bytes))


if __name__ == "__main__":
    main()
