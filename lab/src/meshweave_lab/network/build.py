"""Building a wiring: namespaces, veth pairs, bridges, routes and rates. Some ten commands per host, batched."""

from __future__ import annotations

import socket
import struct
import time
from collections import defaultdict
from fcntl import ioctl
from pathlib import Path

from meshweave.base.errors import UnsupportedError
from meshweave_lab.network.namespaces import inside, run_batch
from meshweave_lab.network.wiring import FABRIC, STORE_ADDRESS, Wiring

_SETTINGS = {
    # No neighbour discovery on links that are being measured. Absent where the kernel has no IPv6.
    "ipv6/conf/all/disable_ipv6": "1",
    "ipv6/conf/default/disable_ipv6": "1",
    # Congestion control that takes the loss at a token bucket's queue for what it is (bbr loses 6 to 10 %).
    "ipv4/tcp_congestion_control": "reno",
    # What one connection learnt of a path must not colour the next.
    "ipv4/tcp_no_metrics_save": "1",
}
_FORWARDING = {
    "ipv4/ip_forward": "1",
    # The same address on all links of a host, since answers may take another route.
    "ipv4/conf/all/rp_filter": "0",
    "ipv4/conf/default/rp_filter": "0",
    "ipv4/conf/all/send_redirects": "0",
    "ipv4/conf/default/send_redirects": "0",
}
_SIOCGIFFLAGS, _IFF_RUNNING = 0x8913, 0x40
_TBF = "tbf"
# A packet lost at the end of a message is sent again after this and not after 200 ms, longer than many a step.
# More than the 40 ms for which a receiver may hold an acknowledgement back.
_RETRY = "rto_min 50ms"
_OPTIONAL = ("ipv6/", "ipv4/tcp_no_metrics_save")


def build(wiring: Wiring, prefix: str, mtu_bytes: int) -> None:
    """Build a wiring under names that start with `prefix`; the caller removes it, also where this raises.

    Raises UnsupportedError with what `ip` or `tc` said.
    """
    run_batch(["ip"], [f"netns add {prefix}{space}" for space in wiring.spaces])
    for space in wiring.spaces:
        _configure(f"{prefix}{space}", forwards=wiring.forwards and space != FABRIC)
    run_batch(
        ["ip"],
        [
            # Two ends of the same index (numbered by namespace otherwise) take the kernel a second to come up.
            f"link add {c.a.interface} index {10 + 2 * i} mtu {mtu_bytes} netns {prefix}{c.a.space} type veth "
            f"peer name {c.b.interface} index {11 + 2 * i} mtu {mtu_bytes} netns {prefix}{c.b.space}"
            for i, c in enumerate(wiring.cables)
        ],
    )
    ip: dict[str, list[str]] = defaultdict(list)
    tc: dict[str, list[str]] = defaultdict(list)
    for space in wiring.spaces:
        ip[space].append("link set lo up")
    for bridge in wiring.bridges:
        ip[FABRIC].append(f"link add {bridge} mtu {mtu_bytes} type bridge stp_state 0 mcast_snooping 0")
        ip[FABRIC].append(f"link set {bridge} up")
    ip[FABRIC].append(f"address add {STORE_ADDRESS}/16 dev mgmt")
    for cable in wiring.cables:
        for port, bytes_per_s in cable.ends():
            if port.address:
                ip[port.space].append(f"address add {port.address} dev {port.interface}")
            master = f"master {port.bridge} " if port.bridge else ""
            ip[port.space].append(f"link set {port.interface} {master}up")
            if cable.link is not None:
                address, _, length = port.address.partition("/")
                if length == "16":
                    ip[port.space].append(
                        f"route replace 10.1.0.0/16 dev {port.interface} scope link src {address} {_RETRY}"
                    )
                tc[port.space].append(
                    f"qdisc add dev {port.interface} root {_TBF} rate {8 * bytes_per_s}bit "
                    f"burst {cable.link.bucket_bytes(bytes_per_s)}b latency {round(cable.link.queue_s * 1e6)}us"
                )
    for route in wiring.routes:
        ip[route.space].append(
            f"route add {route.address}/32 via {route.via} dev {route.interface} onlink {_RETRY}"
        )
    for space, lines in ip.items():
        run_batch(["ip", "-n", f"{prefix}{space}"], lines)
    for space, lines in tc.items():
        run_batch(["tc", "-n", f"{prefix}{space}"], lines)
    for space in wiring.spaces:
        with inside(f"{prefix}{space}"):
            _await_links([p.interface for c in wiring.cables for p, _ in c.ends() if p.space == space])


def _await_links(interfaces: list[str], timeout_s: float = 10.0) -> None:
    """Wait until the kernel has all links running; before that it drops what is sent."""
    until = time.monotonic() + timeout_s
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for interface in interfaces:
            request = struct.pack("16sh14x", interface.encode(), 0)
            while not struct.unpack_from("16xh", ioctl(any_socket, _SIOCGIFFLAGS, request))[0] & _IFF_RUNNING:
                if time.monotonic() > until:
                    raise UnsupportedError(f"link {interface} did not come up in {timeout_s:g} s")
                time.sleep(0.005)


def _configure(name: str, *, forwards: bool) -> None:
    with inside(name):  # what is under /proc/sys/net belongs to the namespace of the thread that looks
        for key, value in (_SETTINGS | (_FORWARDING if forwards else {})).items():
            try:
                Path(f"/proc/sys/net/{key}").write_text(value)
            except OSError as error:
                if not key.startswith(_OPTIONAL):
                    raise UnsupportedError(
                        f"a lab needs net.{key.replace('/', '.')} = {value}: {error}"
                    ) from None
