"""From measured times to a cluster with these constants."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshweave.base.units import format_s
from meshweave.calibrate.fit import Fit, FitLimits, Sample, fit_samples
from meshweave.calibrate.sweep import CHAINS, KINDS, Sweep
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.links import COMM_KINDS, CommConstants, NetworkAxis
from meshweave.describe.machine.network import with_axes
from meshweave.estimate.chains import chain_period

BUSY_NOTE = (
    "Constants are those of all mesh axes busy at once, in both ring directions, with products beside them, as "
    "they meet in overlapped programs. Collectives are rings of permute, their own copies and sums included; "
    "those of broadcasts and reduces are of one packet over one hop of a chain. "
    "Those of a single operation on an idle machine are in the comments."
)

CHAIN_LIMITS = FitLimits(median_error=0.25, worst_error=0.75)
"""Beyond these a broadcast or reduce gets a remark. Chains are longer and lose more to late threads than single
messages, and only SUMMA has them: no reason to refuse all others."""
CHIP = "chip"
COMPUTE, COPIES = (CHIP, "products"), (CHIP, "copies")


@dataclass(frozen=True)
class Calibration:
    """The fitted constants of a machine.

    Attributes:
        cluster: the cluster with these constants, also where there are problems.
        busy, alone: fits by (network axis, kind of collective), from measurements with all lanes in use and of
            one operation at a time; the keys of products and copies are `COMPUTE` and `COPIES`.
        problems: why the constants are not to be used; empty if they are good.
        samples: the fitted samples, by (key of the fit, whether the machine was busy).
    """

    cluster: Cluster
    busy: Mapping[tuple[str, str], Fit]
    alone: Mapping[tuple[str, str], Fit]
    problems: tuple[str, ...]
    samples: Mapping[tuple[tuple[str, str], bool], Sequence[Sample]]

    def to_json(self) -> dict[str, Any]:
        """Return the cluster's name, the problems, and the fits with their samples as JSON values."""

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
    """Return the constants that fit what the ranks measured.

    Fits of broadcasts and reduces never count as problems, they only get a remark: see `CHAIN_LIMITS`.

    Args:
        ranks: for each rank what `calibrate.rank.measure` returned there.
        source: machine, versions and date, for the `source` of every number.
        limits: how large the errors and how few the points of a fit may be; beyond, it is a problem. None for
            the default ones.
        has_nominal_links: whether the sweep's cluster has the true rates of its links and its chip's peak; if
            not, these are taken from the measurement too.
        max_flops_per_s: the FLOP rate to which products are slowed; infinite where they are not.
        send_buffer_bytes: what the cluster gets as `send_buffer_bytes`.
        note: begins the cluster's note, in place of that of the sweep's cluster; `BUSY_NOTE` follows.
    """
    limits = limits or FitLimits()
    samples = _samples(sweep, [rank["times"] for rank in ranks], send_buffer_bytes)
    max_rates = {COMPUTE: max_flops_per_s}
    if has_nominal_links:
        for axis in sweep.axes:
            for kind in (*KINDS, *CHAINS):
                directions = 1 if kind == "send_recv" or kind in CHAINS else axis.ring_directions
                max_rates[axis.link.name, kind] = directions * axis.link.link_bytes_per_s
    busy, alone = (
        {
            key: _fit(key, points, max_rates.get(key, math.inf))
            for (key, was_busy), points in samples.items()
            if was_busy == is_busy
        }
        for is_busy in (True, False)
    )
    cluster = _cluster(sweep, busy, alone, source, has_nominal_links, note, limits.num_points)
    cluster = replace(cluster, send_buffer_bytes=send_buffer_bytes)
    problems = tuple(
        problem for (_, kind), fit in busy.items() if kind not in CHAINS for problem in fit.problems(limits)
    )
    return Calibration(cluster, busy, alone, problems, samples)


def _fit(key: tuple[str, str], samples: Sequence[Sample], max_per_s: float) -> Fit:
    where, kind = key
    if where != CHIP:
        fit = fit_samples(f"{kind} along {where}", samples, max_per_s=max_per_s)
        if kind in CHAINS and (problems := fit.problems(CHAIN_LIMITS)):
            said = "; ".join(problem.partition(": ")[2] for problem in problems)
            fit = replace(fit, remark=f"{fit.remark}; {said}".removeprefix("; "))
        return fit
    fit = fit_samples(kind, samples, is_transfer=False, max_per_s=max_per_s)
    if key == COPIES and fit.launch_s:
        # Without it the rate would be that of small copies, and no rate of memory.
        remark = f"the {format_s(fit.launch_s)} that each copy takes besides are not in the cost model"
        fit = replace(fit, remark=remark)
    return fit


def _samples(
    sweep: Sweep, times: Sequence[Any], send_buffer_bytes: int
) -> dict[tuple[tuple[str, str], bool], list[Sample]]:
    """Return the samples by (key, whether the machine was busy).

    The seconds of each are the median over repetitions of the mean over ranks.
    """
    links = {axis.name: axis.link.name for axis in sweep.axes}
    counts = {axis.name: axis.count for axis in sweep.axes}
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
                    statistics.fmean(times_of_ranks)
                    for times_of_ranks in zip(*(rank[number][run][at] for rank in times), strict=True)
                ]
                for run in range(len(times[0][number]))
            ]
            seconds = [statistics.median(values) for values in zip(*runs, strict=True)]
            if loop.kind == "compute":
                out[COMPUTE, case.is_busy].append(Sample(seconds[0], loop.amount))
                out[COPIES, case.is_busy].append(Sample(seconds[1], loop.copy_bytes))
            else:
                key = links[loop.axis], loop.kind
                steps = loop.steps
                if loop.kind in CHAINS:
                    steps = chain_period(counts[loop.axis], loop.packets, loop.amount <= send_buffer_bytes)
                out[key, case.is_busy].append(Sample(seconds[0], loop.amount, steps))
    for is_busy in (True, False):
        for key in (COMPUTE, COPIES):
            out[key, is_busy] = _pooled(out[key, is_busy])
    return {key: samples for key, samples in out.items() if samples}


def _pooled(samples: Sequence[Sample]) -> list[Sample]:
    """Return one sample per amount, the median: several cases have the same products and copies beside them."""
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
    num_points: int,
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
            chip.with_flops_per_s(rate),
            peak_flops_per_s=peaks,
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
            of_link = [
                fit
                for fits in (busy, alone)
                for (name, _), fit in fits.items()
                if name == axis.name and math.isfinite(fit.rate_per_s)
            ]
            # A line through two or three points may have any rate, and no error shows it.
            rates = [fit.rate_per_s for fit in of_link if fit.num_points >= num_points]
            link = _at_least_one(max(rates or [fit.rate_per_s for fit in of_link], default=math.inf))
            latency_s = _rounded(fits["send_recv"].sync_s)
            axis = replace(axis, link_bytes_per_s=link, link_latency_s=latency_s)
        return replace(axis, constants=constants, source=f"{source}; {said}")

    notes = " ".join(f"{text.rstrip('.')}." for text in (note or base.note, BUSY_NOTE) if text)
    network = with_axes(base.network, calibrated)
    return replace(base, chip=chip, network=network, source=source, note=notes)


def _at_least_one(rate_per_s: float) -> float:
    """Return a rate within what a description may have, also if the fit has none."""
    return min(max(_rounded(rate_per_s), 1.0), 1e24)


def _rounded(value: float) -> float:
    """Return the value rounded to six digits, more than any measurement is good for."""
    return float(f"{value:.6g}")
