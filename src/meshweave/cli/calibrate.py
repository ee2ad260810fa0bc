"""`meshweave calibrate`: the constants of the cost model, measured on what it runs on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from meshweave.base.errors import DescriptionError, printable
from meshweave.base.installed import offered_by_ours
from meshweave.base.outputs import claim_output, write_file
from meshweave.base.units import format_bytes
from meshweave.calibrate import Calibration, FitLimits, Sweep, to_toml
from meshweave.calibrate.run import rate_format, run_calibration, summary_lines
from meshweave.calibrate.target import (
    CalibrationTarget,
    local_target,
    torchrun_target,
)
from meshweave.cli.option_fields import option, refuse_given, with_options
from meshweave.cli.options import JSON_HELP, print_json, read_mesh

CALIBRATION = "meshweave.calibration"
"""The group of entry points by which the lab gives its ranks, and the studies products compiled for TPUs."""


_OF_DEVICE = ("dtype", "products")
_OF_RANKS = ("mesh", "flops_per_s", "sizes", "timeout", "median_error", "worst_error", "accept_misfit")
"""The options that change nothing without --device, and with it."""


@dataclass(frozen=True)
class CalibrateOptions:
    """What is calibrated, how long it is measured, and how well constants must fit."""

    lab: Path | None = option(None, "Build the lab of this LAB.toml and calibrate it, see `meshweave lab`.")
    ranks: int = option(0, "Calibrate this many local processes, without a lab.")
    device: str = option(
        "",
        "Calibrate the products of one torch device (cpu, cuda, cuda:1), or as the compiler of a TPU "
        "expects them (tpu-v4, tpu-v4-core, tpu-v5e, tpu-v6e; needs no TPU), and write a kernels file, "
        "which a cluster file names by chip.kernels.",
    )
    dtype: str = option("", "With --device: the dtype. Default: float32 on cpu, else bfloat16.")
    products: int = option(150, "With --device: the number of products, of at least 20.")
    mesh: str = option(
        "", "Mesh shape, ROWSxCOLS. Default: the shape of a torus lab, else the shape nearest to a square."
    )
    flops_per_s: float = option(0.0, "Pace products of a lab at this rate instead of the one in LAB.toml.")
    sizes: str = option("", "Bytes per part, separated by commas. Default: five sizes that suit the links.")
    repeat: int = option(3, "Number of measured repetitions, after one to warm up.")
    seed: int = option(0, "Seed of the order in which cases are measured.")
    timeout: float = option(600.0, "Seconds after which everything is stopped.")
    median_error: float = option(0.10, "Refuse constants whose median relative error is above this.")
    worst_error: float = option(0.30, "Refuse constants whose relative error at any point is above this.")
    accept_misfit: bool = option(False, "Write the constants even if they do not fit the data.")
    force: bool = option(False, "Overwrite CLUSTER.toml.")
    json: bool = option(False, JSON_HELP)


@with_options
def calibrate(
    out: Annotated[Path, typer.Option(help="Write the cluster description to this file, CLUSTER.toml.")],
    options: CalibrateOptions,
) -> None:
    """Measure the constants of the cost model and write a cluster description.

    All-gathers, reduce-scatters, ring steps, and broadcasts and reduces in packets run along each axis of a
    mesh. They run over several sizes and step counts, alone and all at once, and so do products and copies. The
    times are fitted by launch + (P - 1) (sync + part / bandwidth), by rate and launch of products, and by the
    rate of copies. The constants are those of the busy machine.

    With --device, constants of products by their shape are fitted instead, to products of seeded shapes.

    The ranks are those of --lab LAB.toml, --ranks N local processes or, with neither option, those that torchrun
    starts. Constants that do not fit the data are refused (exit status 2) unless --accept-misfit is given.

    Example: meshweave calibrate --lab examples/labs/torus-4x4-50mbit.toml --out torus.toml
    """
    if os.environ.get("RANK", "0") == "0":  # under torchrun the others have nothing to write
        _check_out(out, options.force)
    limits = _read_limits(options.repeat, options.timeout, options.median_error, options.worst_error)
    if options.device:
        if options.lab is not None or options.ranks:
            raise DescriptionError("--device calibrates one device; leave out --lab and --ranks")
        _calibrate_device(out, options)
        return
    refuse_given(options, _OF_DEVICE, "what runs on ranks", "has no --device")
    part_sizes = _read_sizes(options.sizes)
    remarks: list[str] = []
    target = _target(options.lab, options.ranks, options.flops_per_s, remarks)
    calibration = run_calibration(
        target,
        read_mesh(options.mesh) if options.mesh else None,
        part_sizes,
        limits=limits,
        repeat=options.repeat,
        seed=options.seed,
        timeout_s=options.timeout,
        on_plan=lambda sweep: _announce(sweep, options.repeat) if target.rank == 0 else None,
    )
    if calibration is None:
        return
    is_refused = bool(calibration.problems) and not options.accept_misfit
    if options.json:
        print_json({**calibration.to_json(), "written": None if is_refused else str(out)})
    else:
        _print(calibration)
    if is_refused:
        _refuse(calibration.problems)
    comments = summary_lines(calibration, "; ".join(remarks))
    write_file(out, to_toml(calibration.cluster, comments))
    if not options.json:
        typer.echo(f"written: {out}")


def _calibrate_device(out: Path, options: CalibrateOptions) -> None:
    from meshweave.calibrate.cluster_toml import kernels_toml
    from meshweave.calibrate.device import DEVICE_DTYPES, calibrate_device

    device, products, seed = options.device, options.products, options.seed
    is_tpu = device.startswith("tpu")
    refuse_given(
        options, _OF_RANKS + ("repeat",) * is_tpu, f"--device {device}", "has no ranks and no such choice"
    )
    dtype = options.dtype or ("bfloat16" if is_tpu or device.startswith("cuda") else "float32")
    if dtype not in DEVICE_DTYPES:
        raise DescriptionError(f"dtype '{printable(dtype)}': give one of {', '.join(DEVICE_DTYPES)}")
    if not 20 <= products <= 10_000:
        raise DescriptionError(f"--products is {products}; give 20 to 10000")
    if is_tpu and dtype != "bfloat16":
        raise DescriptionError(f"products of TPUs are compiled in bfloat16; leave out --dtype {dtype}")

    def say(text: str) -> None:
        typer.echo(text, err=True)

    if is_tpu:
        made = offered_by_ours(CALIBRATION, "tpu")(device, products, seed, say)
    else:
        made = calibrate_device(device, dtype, products, options.repeat, seed, say)
    write_file(out, kernels_toml(made.kernels, [made.quality]))
    if options.json:
        errors = {"mean": made.mean_error, "worst": made.worst_error}
        print_json({"kernels": asdict(made.kernels), "errors": errors, "written": str(out)})
    else:
        typer.echo(f"products, {dtype}: {made.quality}\nwritten: {out}")


def _check_out(out: Path, force: bool) -> None:
    claim_output(out, "--out")
    if out.exists() and not force:
        raise DescriptionError(f"{printable(out)}: is there already; give another --out, or --force")


def _refuse(problems: Sequence[str]) -> NoReturn:
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    raise DescriptionError(
        f"the cost model does not fit what was measured: {problems[0]}{more}; measure again "
        "with nothing else running, more --repeat or other --sizes, or give --accept-misfit"
    )


def _announce(sweep: Sweep, repeat: int) -> None:
    typer.echo(
        f"calibrate: {len(sweep.cases)} cases on a {'x'.join(map(str, sweep.mesh_shape))} mesh, parts of "
        f"{', '.join(format_bytes(size) for size in sweep.sizes)}; "
        f"{repeat + 1} repetitions of at least {sweep.expected_s:.0f} s",
        err=True,
    )


def _target(lab: Path | None, ranks: int, flops_per_s: float, remarks: list[str]) -> CalibrationTarget:
    """Return the ranks that the options name. A lab appends what it has to say of its run to `remarks`."""
    if lab is not None and ranks:
        raise DescriptionError("both --lab and --ranks are given; give one of them")
    if flops_per_s and lab is None:
        raise DescriptionError("--flops-per-s paces products of a lab; give --lab too")
    if lab is None:
        return local_target(ranks) if ranks else torchrun_target()
    target: CalibrationTarget = offered_by_ours(CALIBRATION, "lab")(lab, flops_per_s, remarks)
    return target


def _read_limits(repeat: int, timeout: float, median_error: float, worst_error: float) -> FitLimits:
    if not (1 <= repeat <= 100 and 0 < timeout < 1e6):
        raise DescriptionError("repeat must be 1 to 100, timeout positive seconds")
    if not (0 < median_error < 10 and 0 < worst_error < 10):
        raise DescriptionError(
            "median-error and worst-error are relative errors: give a part of one, such as 0.1"
        )
    return FitLimits(median_error, worst_error)


def _read_sizes(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and len(part) < 12 for part in parts):
        raise DescriptionError(
            f"sizes '{printable(text)}' are not whole bytes separated by commas, such as 16384,65536"
        )
    if len(parts) == 1:
        raise DescriptionError("one size cannot tell a bandwidth; give several, such as 16384,65536,262144")
    return tuple(map(int, parts))


def _print(calibration: Calibration) -> None:
    for (axis, kind), fit in calibration.busy.items():
        typer.echo(f"{kind}, {axis}")
        typer.echo(f"  busy   {fit.describe(rate_format((axis, kind)))}")
        typer.echo(f"         {fit.quality}")
        alone = calibration.alone.get((axis, kind))
        if alone is not None:
            typer.echo(f"  alone  {alone.describe(rate_format((axis, kind)))}")
    for problem in calibration.problems:
        typer.echo(f"misfit: {problem}")
