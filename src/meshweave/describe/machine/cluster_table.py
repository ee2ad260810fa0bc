"""A cluster as the table of a cluster file, which `cluster_from` reads as an equal cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from meshweave.describe.machine.chip import Chip
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.gpu import is_catalog_gpu, load_gpu
from meshweave.describe.machine.kernels import ChipKernels, CpuProductConstants, SystolicConstants
from meshweave.describe.machine.links import NetworkAxis
from meshweave.describe.machine.network import (
    FullMeshNetwork,
    HostsNetwork,
    Network,
    RingNetwork,
    SwitchNetwork,
    TorusNetwork,
)
from meshweave.describe.machine.tree import TreeNetwork

_SECTIONS = {SystolicConstants: "systolic", CpuProductConstants: "cpu_products"}


def cluster_table(cluster: Cluster, *, whole: bool = True) -> dict[str, Any]:
    """Return the table of a cluster file that describes the cluster.

    Args:
        whole: whether the table holds the constants of kernels, and a GPU that is not in the catalog; else it has
            the catalog name or file of each, where there is one.

    Raises:
        DescriptionError: the file of the chip's GPU, which a `whole` table holds, is missing or wrong.
    """
    return _without_nothing(
        {
            "name": cluster.name,
            "source": cluster.source,
            "note": cluster.note,
            "host": asdict(cluster.host) if cluster.host else None,
            "send_buffer_bytes": cluster.send_buffer_bytes,
            "chip": _chip_table(cluster.chip, whole),
            "network": _network_table(cluster.network),
        }
    )


def _without_nothing(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table without the keys that have nothing to say: an optional key left out means the same."""
    return {key: value for key, value in table.items() if value is not None and value not in (0, "", {}, [])}


def _chip_table(chip: Chip, whole: bool) -> dict[str, Any]:
    kernels: Any = chip.kernels.reference if chip.kernels else None
    if chip.kernels and (whole or not kernels):
        kernels = kernels_table(chip.kernels)
    gpu: Any = chip.gpu
    if gpu and whole and not is_catalog_gpu(gpu):
        gpu = load_gpu(gpu).model_dump(mode="json", by_alias=True)
    optional = {
        "dtype_flops_per_s": dict(chip.dtype_flops_per_s),
        "call_flops_per_s": dict(chip.call_flops_per_s),
        "launch_s": chip.launch_s,
        "gemm_tile": None if chip.gemm_tile is None else list(chip.gemm_tile),
        "accumulate_share": chip.accumulate_share,
        "pack_launch_s": chip.pack_launch_s,
        "pack_bytes_per_s": chip.pack_bytes_per_s,
        "kernels": kernels,
        "gpu": gpu,
        "runtime": None if chip.runtime == "cuda" else chip.runtime,
        "fitted_as": chip.fitted_as,
    }
    return {
        "name": chip.name,
        "source": chip.source,
        "peak_flops_per_s": dict(chip.peak_flops_per_s),
        "effective_flops_per_s": chip.effective_flops_per_s,
        "memory_bytes": chip.memory_bytes,
        "memory_bytes_per_s": chip.memory_bytes_per_s,
        **_without_nothing(optional),
    }


def _network_table(network: Network) -> dict[str, Any]:
    match network:
        case TorusNetwork():
            shape = {"reconfigurable": True} if network.shape is None else {"shape": list(network.shape)}
            sizes = {
                "chips": network.chips,
                "min_chips": network.min_chips,
                "max_chips": network.max_chips,
            }
            table = {"kind": "torus", **shape, **sizes, "axes": [_axis_table(axis) for axis in network.axes]}
            table |= {"slices": _axis_table(network.slices)} if network.slices else {}
            return table | ({"sizes": list(network.sizes)} if network.sizes else {})
        case HostsNetwork():
            counts = {
                name: getattr(network, name) for name in ("num_hosts", "chips_per_host", "nics_per_host")
            }
            links = {"intra": _axis_table(network.intra), "nic": _axis_table(network.nic)}
            return {"kind": "hosts", **counts, **links}
        case FullMeshNetwork():
            counts = {name: getattr(network, name) for name in ("num_packages", "chips_per_package")}
            links = {"inner": _axis_table(network.inner), "link": _axis_table(network.link)}
            return {"kind": "full_mesh", **counts, **links}
        case TreeNetwork():
            levels = [
                {
                    "fanout": level.fanout,
                    "links": level.links,
                    "axis": _axis_table(level.axis),
                    **({"direct": _axis_table(level.direct)} if level.direct else {}),
                }
                for level in network.levels
            ]
            return {"kind": "tree", "levels": levels}
        case RingNetwork() | SwitchNetwork():
            kind = "ring" if isinstance(network, RingNetwork) else "switch"
            return {"kind": kind, "size": network.size, "axis": _axis_table(network.link)}


def _axis_table(axis: NetworkAxis) -> dict[str, Any]:
    return {
        "name": axis.name,
        "link_bytes_per_s": axis.link_bytes_per_s,
        "link_latency_s": axis.link_latency_s,
        "ways": axis.num_directions,
        "launch_s": axis.launch_s,
        **_without_nothing(
            {
                "source": axis.source,
                "burst_bytes": axis.burst_bytes,
                "constants": {kind: asdict(constants) for kind, constants in axis.constants},
            }
        ),
    }


def _given(table: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if value is not None}


def kernels_table(kernels: ChipKernels) -> dict[str, Any]:
    """Return the table of a kernels file; neighbouring dtypes with the same constants share an entry."""
    table: dict[str, Any] = {"name": kernels.name, "source": kernels.source}
    if kernels.outside != "model":
        table["outside"] = kernels.outside
    if kernels.switch_reduces:
        table["switch_reduces"] = True
    if kernels.sustained_share != 1:
        table["sustained_share"] = kernels.sustained_share
    for section, entries in (("products", kernels.products), ("attention", kernels.attention)):
        before = None
        for dtype, constants in entries:
            listed = table.setdefault(_SECTIONS.get(type(constants), section), [])
            if constants == before:
                listed[-1]["dtypes"].append(dtype)
            else:
                listed.append({"dtypes": [dtype], **_given(asdict(constants))})
            before = constants
    if kernels.collectives:
        table["collectives"] = [{"kind": kind, **asdict(each)} for kind, each in kernels.collectives]
    if kernels.elementwise is not None:
        launch_s, bytes_per_s = kernels.elementwise
        table["elementwise"] = {"launch_s": launch_s, "memory_bytes_per_s": bytes_per_s}
    if kernels.tables:
        table["tables"] = [
            {"dtypes": [dtype], "file": each.source, "points": [list(point) for point in each.points]}
            for dtype, each in kernels.tables
        ]
    return table
