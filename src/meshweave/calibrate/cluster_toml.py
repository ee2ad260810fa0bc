"""The TOML file of a cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from meshweave.describe.machine.cluster import (
    Cluster,
    FullMeshNetwork,
    HostsNetwork,
    Network,
    NetworkAxis,
    RingNetwork,
    SwitchNetwork,
    TorusNetwork,
    TreeNetwork,
)


def to_toml(cluster: Cluster, comments: Sequence[str] = ()) -> str:
    """Return the text of a file that `load_cluster` reads as this very cluster, headed by `comments`."""
    lines = [f"# {line}" for text in comments for line in _printable(text).split("\n")]
    lines += ["" for _ in comments[:1]]
    lines += [f"name = {_text(cluster.name)}", f"source = {_text(cluster.source)}"]
    lines += [f"note = {_text(cluster.note)}"] if cluster.note else []
    lines += [f"host_launch_s = {_number(cluster.host_launch_s)}"] if cluster.host_launch_s else []
    lines += [f"send_buffer_bytes = {cluster.send_buffer_bytes}"] if cluster.send_buffer_bytes else []
    chip = cluster.chip
    peaks = ", ".join(f"{dtype} = {_number(rate)}" for dtype, rate in chip.peak_flops_per_s)
    lines += [
        "",
        "[chip]",
        f"name = {_text(chip.name)}",
        f"source = {_text(chip.source)}",
        f"peak_flops_per_s = {{ {peaks} }}",
        f"effective_flops_per_s = {_number(chip.effective_flops_per_s)}",
        *_rates("dtype_flops_per_s", chip.dtype_flops_per_s),
        *_rates("call_flops_per_s", chip.call_flops_per_s),
        f"memory_bytes = {chip.memory_bytes}",
        f"memory_bytes_per_s = {_number(chip.memory_bytes_per_s)}",
        f"launch_s = {_number(chip.launch_s)}",
        *([f"gemm_tile = {list(chip.gemm_tile)}"] if chip.gemm_tile else []),
        *([f"gpu = {_text(chip.gpu)}"] if chip.gpu else []),
        *([f"kernels = {_text(chip.kernels.reference)}"] if chip.kernels and chip.kernels.reference else []),
        *([f"accumulate_share = {_number(chip.accumulate_share)}"] if chip.accumulate_share else []),
        *([f"pack_launch_s = {_number(chip.pack_launch_s)}"] if chip.pack_launch_s else []),
        *([f"pack_bytes_per_s = {_number(chip.pack_bytes_per_s)}"] if chip.pack_bytes_per_s else []),
        *([f"runtime = {_text(chip.runtime)}"] if chip.runtime != "cuda" else []),
        "",
        *_network(cluster.network),
    ]
    return "\n".join(lines) + "\n"


def _rates(key: str, rates: Sequence[tuple[str, float]]) -> list[str]:
    listed = ", ".join(f"{name} = {_number(rate)}" for name, rate in rates)
    return [f"{key} = {{ {listed} }}"] if rates else []


def _network(network: Network) -> Iterator[str]:
    yield "[network]"
    match network:
        case TorusNetwork():
            yield 'kind = "torus"'
            if network.shape is not None:
                yield f"shape = {list(network.shape)}"
            else:
                yield "reconfigurable = true"
            yield f"chips = {network.chips}"
            yield f"min_chips = {network.min_chips}"
            yield f"max_chips = {network.max_chips}"
            for axis in network.axes:
                yield from _axis("[[network.axes]]", "network.axes", axis)
        case HostsNetwork():
            yield 'kind = "hosts"'
            yield f"num_hosts = {network.num_hosts}"
            yield f"chips_per_host = {network.chips_per_host}"
            yield f"nics_per_host = {network.nics_per_host}"
            yield from _axis("[network.intra]", "network.intra", network.intra)
            yield from _axis("[network.nic]", "network.nic", network.nic)
        case FullMeshNetwork():
            yield 'kind = "full_mesh"'
            yield f"num_packages = {network.num_packages}"
            yield f"chips_per_package = {network.chips_per_package}"
            yield from _axis("[network.inner]", "network.inner", network.inner)
            yield from _axis("[network.link]", "network.link", network.link)
        case TreeNetwork():
            yield 'kind = "tree"'
            for level in network.levels:
                yield from ("", "[[network.levels]]", f"fanout = {level.fanout}", f"links = {level.links}")
                yield from _axis("[network.levels.axis]", "network.levels.axis", level.axis)
                if level.direct is not None:
                    yield from _axis("[network.levels.direct]", "network.levels.direct", level.direct)
        case RingNetwork() | SwitchNetwork():
            yield f'kind = "{"ring" if isinstance(network, RingNetwork) else "switch"}"'
            yield f"size = {network.size}"
            yield from _axis("[network.axis]", "network.axis", network.link)


def _axis(head: str, path: str, axis: NetworkAxis) -> Iterator[str]:
    yield ""
    yield head
    yield f"name = {_text(axis.name)}"
    if axis.source:
        yield f"source = {_text(axis.source)}"
    yield f"link_bytes_per_s = {_number(axis.link_bytes_per_s)}"
    yield f"link_latency_s = {_number(axis.link_latency_s)}"
    yield f"ways = {axis.num_directions}"
    yield f"launch_s = {_number(axis.launch_s)}"
    if axis.burst_bytes:
        yield f"burst_bytes = {axis.burst_bytes}"
    if axis.constants:
        yield ""
        yield f"[{path}.constants]"
        for kind, constants in axis.constants:
            yield (
                f"{kind} = {{ bytes_per_s = {_number(constants.bytes_per_s)}, "
                f"sync_s = {_number(constants.sync_s)}, launch_s = {_number(constants.launch_s)} }}"
            )


def _text(value: str) -> str:
    """Return a TOML basic string, whose escapes are those of JSON."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))
