"""A whole calibration: plan the sweep, run it on a target, fit the constants."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshweave.base.errors import printable
from meshweave.base.units import format_bytes
from meshweave.calibrate.constants import COMPUTE, Calibration, fit_calibration
from meshweave.calibrate.fit import FitLimits
from meshweave.calibrate.sweep import Sweep, plan_sweep
from meshweave.calibrate.target import CalibrationTarget


def run_calibration(
    target: CalibrationTarget,
    mesh_shape: tuple[int, ...] | None = None,
    sizes: Sequence[int] = (),
    *,
    limits: FitLimits | None = None,
    repeat: int = 3,
    seed: int = 0,
    timeout_s: float = 600.0,
    on_plan: Callable[[Sweep], None] = lambda sweep: None,
) -> Calibration | None:
    """Return the constants of the cost model as measured on a target; None on ranks other than 0.

    Args:
        mesh_shape: (rows, columns), with all ranks; None for the target's.
        sizes: the sizes of messages: bytes of one member's part; () for five that suit the links.
        limits: how large the errors and how few the points of a fit may be; beyond, it is a problem. None for
            the default ones.
        repeat: measured repetitions, after one to warm up.
        seed: seed of the order in which things are measured.
        timeout_s: seconds after which everything is stopped.
        on_plan: called with the sweep before it is run.

    Raises:
        LayoutError, DescriptionError: the mesh does not fit the ranks or the network, or sizes are out of range.
        RankLostError, DeadlineError: ranks died, hung or took too long.
        UnsupportedError: torch is missing.
    """
    sweep = plan_sweep(target.cluster, mesh_shape or target.mesh_shape, sizes, skip_bytes=target.skip_bytes)
    on_plan(sweep)
    payload = {
        "cases": [case.payload() for case in sweep.cases],
        "repeat": repeat,
        "seed": seed,
        "deadline_s": max(timeout_s - 10.0, timeout_s / 2),
        "is_one_host": target.is_one_host,
    }
    measured = target.run_ranks(payload, timeout_s)
    if measured is None:
        return None
    return fit_calibration(
        sweep,
        measured,
        source=_source(target, sweep, measured, repeat),
        limits=limits,
        has_nominal_links=target.has_nominal_links,
        max_flops_per_s=target.max_flops_per_s,
        send_buffer_bytes=min(rank["send_buffer_bytes"] for rank in measured),
        note=target.note,
    )


def _source(
    target: CalibrationTarget, sweep: Sweep, measured: Sequence[Mapping[str, Any]], repeat: int
) -> str:
    """Return machine, versions and date, for the `source` of every constant."""
    versions = measured[0]["versions"]
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return (
        f"meshweave calibrate, {today}: {target.title}, mesh {'x'.join(map(str, sweep.mesh_shape))}, "
        f"{repeat} repetitions; {platform.system()} {platform.release()}, {_cpu()}, {os.cpu_count()} cores; "
        f"torch {versions['torch']}, Python {versions['python']}"
    )


def _cpu() -> str:
    """Return the processor's model; where the system does not say, its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return printable(next(models, "") or platform.machine())


def summary_lines(calibration: Calibration, remark: str = "") -> list[str]:
    """Return lines of text: fits of the busy machine and of single operations, the remark, and each problem."""
    lines = ["Fitted on the busy machine:"]
    for key, fit in calibration.busy.items():
        lines.append(f"  {key[1]}, {key[0]}: {fit.describe(rate_format(key))}; {fit.quality}")
    lines.append("One operation at a time, for comparison:")
    for key, fit in calibration.alone.items():
        lines.append(f"  {key[1]}, {key[0]}: {fit.describe(rate_format(key))}; {fit.quality}")
    if remark:
        lines.append(remark)
    return lines + [f"ACCEPTED ALTHOUGH: {problem}" for problem in calibration.problems]


def rate_format(key: tuple[str, str]) -> Callable[[float], str]:
    """Return the function that formats the rate of a fit for `Fit.describe`, which appends "/s".

    It writes "1.2e+14 FLOP" for products and "1.5 GB" for all else; its argument is FLOPs or bytes per second.

    Args:
        key: of the fit: (axis, kind of operation); `COMPUTE` for products.
    """
    return (lambda rate: f"{rate:.4g} FLOP") if key == COMPUTE else format_bytes
