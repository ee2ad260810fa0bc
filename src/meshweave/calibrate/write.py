"""From measured times to a cluster, and from a cluster to its TOML file."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshweave.base.units import format_s
from meshweave.calibrate.fit import Fit, FitLimits, Sample, fit_samples
from meshweave.calibrate.sweep import CHAINS, KINDS, Sweep
from meshweave.describe.machine.cluster import (
    COMM_KINDS,
    Cluster,
    CommConstants,
    FullMeshNetwork,
    HostsNetwork,
    Network,
    NetworkAxis,
    RingNetwork,
    SwitchNetwork,
    TorusNetwork,
    TreeNetwork,
)

BUSY_NOTE = (
    "Constants are those of all mesh axes busy at once, in both ring directions, with products beside them, as "
    "they meet in overlapped programs. Collectives are rings of permute, their own copies and sums included; "
    "broadcasts and reduces are chains of messages, one after the other from roots in turn. "
    "Those of a single operation on an idle machine are in the comments."
)

CHAIN_LIMITS = FitLimits(median_error=0.25, worst_error=0.75)
"""Beyond these a broadcast or reduce gets a remark. One op's closed form cannot say how successive ones pipeline
into each other, so that worse constants are the best there are, and no reason to refuse all others."""
CHIP = "chip"
COMPUTE, COPIES = (CHIP, "products"), (CHIP, "copies")


@dataclass(frozen=True)
class Calibration:
    """Fits by (network axis, kind), busy and alone; those of products and copies by `COMPUTE` and `COPIES`.

    `samples` are what they were fitted on, by the same key and whether the machine was busy. `problems` says
    why the constants are not to be used; `cluster` has them all the same.
    """

    cluster: Cluster
    busy: Mapping[tuple[str, str], Fit]
    alone: Mapping[tuple[str, str], Fit]
    problems: tuple[str, ...]
    samples: Mapping[tuple[tuple[str, str], bool], Sequence[Sample]]

    def to_json(self) -> dict[str, Any]:
        def listed(fits: Mapping[tuple[str, str], Fit], is_busy: bool) -> list[dict[str, Any]]:
            return [
                {
                    "axis": axis,
                    "kind": kind,
                    **fit.to_json(),
                    "samples": [asdict(sample) for sample in self.samples[(axis, kind), is_busy]],
                }
                for (axis, kind), fit in fits.items()
            ]

        return {
            "cluster": self.cluster.name,
            "problems": list(self.problems),
            "busy": listed(self.busy, True),
            "alone": listed(self.alone, False),
        }


def fit_calibration(
    sweep: Sweep,
    ranks: Sequence[Mapping[str, Any]],
    *,
    source: str,
    limits: FitLimits | None = None,
    has_nominal_links: bool = True,
    max_flops_per_s: float = math.inf,
    send_buffer_bytes: int = 0,
    note: str = "",
) -> Calibration:
    """Fits what the ranks measured (a list over ranks of what `calibrate.rank.measure` returns).

    Args:
        source: machine, versions and date, for the `source` of every number.
        has_nominal_links: whether the sweep's cluster knows the rates of its links and its chip's peak; else
            these too are what was measured.
        most_flops_per_s: the pace, where products are paced.
        send_buffer_bytes: of the cluster, see there.

    Broadcasts and reduces are never among the problems, only remarked upon: see `CHAIN_LIMITS`.
    """
    limits = limits or FitLimits()
    samples = _samples(sweep, [rank["times"] for rank in ranks], has_nominal_links)
    most = {COMPUTE: max_flops_per_s}
    if has_nominal_links:
        for axis in sweep.axes:
            # A ring step goes one way; so does a chain, but two that follow each other may seem to be faster.
            for kind in (*KINDS, *CHAINS):
                ways = 1 if kind == "send_recv" else axis.ring_directions
                most[axis.link.name, kind] = ways * axis.link.link_bytes_per_s
    busy, alone = (
        {
            key: _fit(key, found, most.get(key, math.inf))
            for (key, at), found in samples.items()
            if at == is_busy
        }
        for is_busy in (True, False)
    )
    cluster = _cluster(sweep, busy, alone, source, has_nominal_links, note)
    cluster = replace(cluster, send_buffer_bytes=send_buffer_bytes)
    problems = tuple(
        problem for (_, kind), fit in busy.items() if kind not in CHAINS for problem in fit.problems(limits)
    )
    return Calibration(cluster, busy, alone, problems, samples)


def _fit(key: tuple[str, str], samples: Sequence[Sample], most_per_s: float) -> Fit:
    where, kind = key
    if where != CHIP:
        fit = fit_samples(f"{kind} along {where}", samples, max_per_s=most_per_s)
        if kind in CHAINS and (problems := fit.problems(CHAIN_LIMITS)):
            said = "; ".join(problem.partition(": ")[2] for problem in problems)
            fit = replace(fit, remark=f"{fit.remark}; {said}".removeprefix("; "))
        return fit
    fit = fit_samples(kind, samples, is_transfer=False, max_per_s=most_per_s)
    if key == COPIES and fit.launch_s:
        # Without it the rate would be that of small copies, and no rate of memory.
        remark = f"the {format_s(fit.launch_s)} that each copy takes besides are not in the cost model"
        fit = replace(fit, remark=remark)
    return fit


def _samples(
    sweep: Sweep, times: Sequence[Any], has_nominal_links: bool
) -> dict[tuple[tuple[str, str], bool], list[Sample]]:
    """Of each point the median over repetitions of the mean over ranks, by what it is a point of."""
    links = {axis.name: axis.link.name for axis in sweep.axes}
    # All of a chain's part crosses one link, see `price`; without a nominal rate that is not known.
    rates = {axis.name: axis.link.link_bytes_per_s if has_nominal_links else math.inf for axis in sweep.axes}
    out: dict[tuple[tuple[str, str], bool], list[Sample]] = {}
    # As descriptions list them, whatever ran first.
    for kind in sorted((*KINDS, *CHAINS), key=COMM_KINDS.index):
        for name in dict.fromkeys(links.values()):
            for is_busy in (True, False):
                out[(name, kind), is_busy] = []
    for is_busy in (True, False):
        out[COMPUTE, is_busy], out[COPIES, is_busy] = [], []
    for number, case in enumerate(sweep.cases):
        for at, loop in enumerate(case.loops):
            runs = [
                [
                    statistics.fmean(found)
                    for found in zip(*(rank[number][run][at] for rank in times), strict=True)
                ]
                for run in range(len(times[0][number]))
            ]
            seconds = [statistics.median(values) for values in zip(*runs, strict=True)]
            if loop.kind == "compute":
                out[COMPUTE, case.is_busy].append(Sample(seconds[0], loop.amount))
                out[COPIES, case.is_busy].append(Sample(seconds[1], loop.copy_bytes))
            else:
                key = links[loop.axis], loop.kind
                least_s = loop.packets * loop.amount / rates[loop.axis] if loop.kind in CHAINS else 0.0
                out[key, case.is_busy].append(Sample(seconds[0], loop.amount, loop.steps, least_s))
    for is_busy in (True, False):
        for key in (COMPUTE, COPIES):
            out[key, is_busy] = _pooled(out[key, is_busy])
    return {key: found for key, found in out.items() if found}


def _pooled(samples: Sequence[Sample]) -> list[Sample]:
    """One sample per amount: several cases have the same products and copies beside them."""
    amounts = sorted({sample.amount for sample in samples})
    return [
        Sample(statistics.median(s.seconds for s in samples if s.amount == amount), amount)
        for amount in amounts
    ]


# --- the cluster ------------------------------------------------------------------------------------------


def _cluster(
    sweep: Sweep,
    busy: Mapping[tuple[str, str], Fit],
    alone: Mapping[tuple[str, str], Fit],
    source: str,
    has_nominal_links: bool,
    note: str,
) -> Cluster:
    base = sweep.cluster
    chip = base.chip
    if COMPUTE in busy:
        rate = _at_least_one(busy[COMPUTE].rate_per_s)
        peaks: tuple[tuple[str, float], ...] = (("float32", rate),)
        if (
            has_nominal_links
        ):  # products are float32; where they are not paced, they may beat what is described
            peaks = tuple((d, max(f, rate) if d == "float32" else f) for d, f in chip.peak_flops_per_s)
        chip = replace(
            chip,
            peak_flops_per_s=peaks,
            effective_flops_per_s=rate,
            launch_s=_rounded(busy[COMPUTE].launch_s),
            memory_bytes_per_s=_at_least_one(busy[COPIES].rate_per_s),
            source=f"{source}; products: {busy[COMPUTE].quality}; copies: {busy[COPIES].quality}",
        )

    def calibrated(axis: NetworkAxis) -> NetworkAxis:
        fits = {kind: fit for (name, kind), fit in busy.items() if name == axis.name}
        constants = tuple(
            (kind, CommConstants(_at_least_one(fit.rate_per_s), _rounded(fit.sync_s), _rounded(fit.launch_s)))
            for kind, fit in fits.items()
            if kind not in CHAINS or math.isfinite(fit.rate_per_s)  # else those of all_gather are better
        )
        if not constants:  # no mesh axis of two members lies on it
            return axis
        said = "; ".join(f"{kind}: {fit.quality}" for kind, fit in fits.items())
        if not has_nominal_links:
            rates = [
                fit.rate_per_s
                for fits in (busy, alone)
                for (name, _), fit in fits.items()
                if name == axis.name
            ]
            link = _at_least_one(max(rate for rate in rates if math.isfinite(rate)) if rates else math.inf)
            latency_s = _rounded(fits["send_recv"].sync_s)
            axis = replace(axis, link_bytes_per_s=link, link_latency_s=latency_s)
        return replace(axis, constants=constants, source=f"{source}; {said}")

    notes = " ".join(f"{text.rstrip('.')}." for text in (note or base.note, BUSY_NOTE) if text)
    network = _with_axes(base.network, calibrated)
    return replace(base, chip=chip, network=network, source=source, note=notes)


def _at_least_one(rate_per_s: float) -> float:
    """A rate that a description may have, also where the fit found none."""
    return min(max(_rounded(rate_per_s), 1.0), 1e24)


def _rounded(value: float) -> float:
    """To six digits, which is more than any of it is good for."""
    return float(f"{value:.6g}")


def _with_axes(network: Network, change: Any) -> Network:
    match network:
        case TorusNetwork():
            return replace(network, axes=tuple(change(axis) for axis in network.axes))
        case HostsNetwork():
            return replace(network, intra=change(network.intra), nic=change(network.nic))
        case FullMeshNetwork():
            return replace(network, inner=change(network.inner), link=change(network.link))
        case TreeNetwork():
            return replace(network, levels=tuple(replace(x, axis=change(x.axis)) for x in network.levels))
        case RingNetwork() | SwitchNetwork():
            return replace(network, link=change(network.link))


# --- the file ---------------------------------------------------------------------------------------------


def to_toml(cluster: Cluster, comments: Sequence[str] = ()) -> str:
    """The file that `load_cluster` reads as this very cluster, behind `comments`."""
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
        f"memory_bytes = {chip.memory_bytes}",
        f"memory_bytes_per_s = {_number(chip.memory_bytes_per_s)}",
        f"launch_s = {_number(chip.launch_s)}",
        *([f"gemm_tile = {list(chip.gemm_tile)}"] if chip.gemm_tile else []),
        *([f"accumulate_share = {_number(chip.accumulate_share)}"] if chip.accumulate_share else []),
        "",
        *_network(cluster.network),
    ]
    return "\n".join(lines) + "\n"


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
    if axis.constants:
        yield ""
        yield f"[{path}.constants]"
        for kind, found in axis.constants:
            yield (
                f"{kind} = {{ bytes_per_s = {_number(found.bytes_per_s)}, sync_s = {_number(found.sync_s)}, "
                f"launch_s = {_number(found.launch_s)} }}"
            )


def _text(value: str) -> str:
    """A basic string, whose escapes are those of JSON."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))
