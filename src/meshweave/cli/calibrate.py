"""`meshweave calibrate`: the constants of the cost model, measured on what it runs on."""

from __future__ import annotations

import datetime
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from meshweave.base.errors import DescriptionError, LayoutError, UnsupportedError
from meshweave.base.units import format_bytes
from meshweave.calibrate import Calibration, FitLimits, Sweep, plan_sweep
from meshweave.calibrate import fit_calibration as fit_all
from meshweave.calibrate.rank import is_under_launcher, measure_in_world
from meshweave.calibrate.write import COMPUTE, to_toml
from meshweave.cli.options import JSON_HELP, check_writable, print_json, read_mesh
from meshweave.describe.files import printable
from meshweave.describe.machine.cluster import Cluster, load_cluster

_TARGET = "meshweave.calibrate.rank:measure"


def calibrate(
    out: Annotated[Path, typer.Option(help="The cluster description to write, CLUSTER.toml.")],
    lab: Annotated[
        Path | None, typer.Option(help="LAB.toml: build this lab and calibrate it, see `meshweave lab`.")
    ] = None,
    ranks: Annotated[int, typer.Option(help="Calibrate so many local processes, without a lab.")] = 0,
    mesh: Annotated[
        str, typer.Option(help="ROWSxCOLS; by default the shape of a torus lab, else as square as can be.")
    ] = "",
    flops_per_s: Annotated[
        float, typer.Option(help="Pace products of a lab at this rate instead of the one in LAB.toml.")
    ] = 0.0,
    sizes: Annotated[
        str, typer.Option(help="Bytes per part, separated by commas; by default five that suit the links.")
    ] = "",
    repeat: Annotated[int, typer.Option(help="Measured repetitions, after one to warm up.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the order in which things are measured.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds after which everything is stopped.")] = 600.0,
    median_error: Annotated[
        float, typer.Option(help="Refuse constants whose median relative error is above this.")
    ] = 0.10,
    worst_error: Annotated[
        float, typer.Option(help="Refuse constants that are further off at any point than this.")
    ] = 0.30,
    accept_misfit: Annotated[
        bool, typer.Option("--accept-misfit", help="Write constants that do not fit the data.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite CLUSTER.toml.")] = False,
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Measure the constants of the cost model and write a cluster description.

    Runs all-gathers, reduce-scatters, ring steps and broadcasts and reduces in packets along each axis of a
    mesh, products and copies, over several sizes and step counts, alone and all at once, and fits launch +
    (P - 1) (sync + part / bandwidth), the rate and launch of products, and the rate of copies. The constants
    are those of the busy machine.

    Where: --lab LAB.toml, --ranks N local processes, or, with neither, as one of the ranks that torchrun
    starts. Constants that do not fit the data are refused (exit status 2) unless --accept-misfit.

    Example: meshweave calibrate --lab examples/labs/torus-4x4-50mbit.toml --out torus.toml
    """
    limits = _limits(repeat, timeout, median_error, worst_error)
    wanted = _read_sizes(sizes)
    place = _place(lab, ranks, flops_per_s)
    if place.rank == 0:  # under torchrun the others have nothing to write
        check_writable(out)
        if out.exists() and not force:
            raise DescriptionError(f"{printable(out)}: is there already; give another --out, or --force")
    shape = read_mesh(mesh) if mesh else place.mesh_shape
    sweep = plan_sweep(place.cluster, shape, wanted, skip_bytes=place.skip_bytes)
    if place.rank == 0:
        typer.echo(
            f"calibrate: {len(sweep.cases)} cases on a {'x'.join(map(str, shape))} mesh, parts of "
            f"{', '.join(format_bytes(size) for size in sweep.sizes)}; "
            f"{repeat + 1} repetitions of at least {sweep.expected_s:.0f} s",
            err=True,
        )
    payload = {
        "cases": [case.payload() for case in sweep.cases],
        "repeat": repeat,
        "seed": seed,
        "deadline_s": max(timeout - 10.0, timeout / 2),
        "is_one_host": place.is_one_host,
    }
    measured = place.measure(payload, timeout)
    if measured is None:
        return
    found = fit_all(
        sweep,
        measured,
        source=_source(place, sweep, measured, repeat),
        limits=limits,
        has_nominal_links=place.has_nominal_links,
        max_flops_per_s=place.most_flops_per_s,
        send_buffer_bytes=min(rank["send_buffer_bytes"] for rank in measured),
        note=place.note,
    )
    if json:
        misfit = bool(found.problems) and not accept_misfit
        print_json({**found.to_json(), "written": None if misfit else str(out)})
    else:
        _print(found)
    if found.problems and not accept_misfit:
        more = f" (and {len(found.problems) - 1} more)" if len(found.problems) > 1 else ""
        raise DescriptionError(
            f"the cost model does not fit what was measured: {found.problems[0]}{more}; measure again with "
            "nothing else running, more --repeat or other --sizes, or give --accept-misfit"
        )
    out.write_text(to_toml(found.cluster, _comments(found, place)), encoding="utf-8")
    if not json:
        typer.echo(f"written: {out}")


@dataclass
class _Place:
    """Where the ranks run. `measure` returns what they measured, or None in a rank that is not to report."""

    cluster: Cluster
    title: str
    mesh_shape: tuple[int, ...]
    skip_bytes: int = 0
    rank: int = 0
    is_one_host: bool = True
    has_nominal_links: bool = False
    most_flops_per_s: float = math.inf
    note: str = ""
    said: str = ""

    def measure(self, payload: Mapping[str, Any], timeout: float) -> list[Any] | None:
        raise AssertionError


class _LocalPlace(_Place):
    def measure(self, payload: Mapping[str, Any], timeout: float) -> list[Any] | None:
        try:
            from meshweave.execute.ranks.launch import launch
        except ImportError:
            raise UnsupportedError("calibrating needs torch: pip install 'meshweave[torch]'") from None
        # More ranks than cores may be slow to answer.
        return launch(_TARGET, self.cluster.num_chips, dict(payload), timeout_s=timeout, stale_s=5.0)


class _WorldPlace(_Place):
    def measure(self, payload: Mapping[str, Any], timeout: float) -> list[Any] | None:
        return measure_in_world(payload)


@dataclass
class _LabPlace(_Place):
    lab: Any = None

    def measure(self, payload: Mapping[str, Any], timeout: float) -> list[Any] | None:
        with self.lab.up() as running:
            measured: list[Any] = running.launch(_TARGET, dict(payload), timeout_s=timeout)
            reports = list(running.pace.values())
        if reports:
            count, late = sum(r.num_products for r in reports), sum(r.num_overruns for r in reports)
            self.said = f"{late} of {count} paced products overran their time"
            typer.echo(f"calibrate: {self.said}", err=True)
        return measured


def _place(lab: Path | None, ranks: int, flops_per_s: float) -> _Place:
    if lab is not None and ranks:
        raise DescriptionError("both --lab and --ranks are given; give one of them")
    if flops_per_s and lab is None:
        raise DescriptionError("--flops-per-s paces products of a lab; give --lab too")
    if lab is not None:
        return _lab_place(lab, flops_per_s)
    rank, is_one_host = 0, True
    if not ranks:
        if not is_under_launcher():
            raise DescriptionError(
                "nothing to calibrate: give --lab LAB.toml or --ranks N, or run it by torchrun"
            )
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        is_one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
        kind: type[_Place] = _WorldPlace
        title = f"{ranks} ranks of torchrun over gloo"
    else:
        kind, title = _LocalPlace, f"{ranks} local processes over gloo"
    if not 2 <= ranks <= 1024:
        raise LayoutError(f"{ranks} ranks: give 2 to 1024")
    cluster = replace(load_cluster("local-cpu").with_chips(ranks), name=f"calibrated-{ranks}")
    note = f"Measured on {title}; the rate of the links is the highest that any operation reached."
    return kind(cluster, title, _square(ranks), rank=rank, is_one_host=is_one_host, note=note)


def _lab_place(path: Path, flops_per_s: float) -> _Place:
    from meshweave.lab.description import SwitchLab, TorusLab, TreeLab
    from meshweave.lab.lab import Lab

    loaded = Lab.load(path)
    if flops_per_s:
        if not 1e3 <= flops_per_s <= 1e15:
            raise DescriptionError(f"--flops-per-s is {flops_per_s:g}; give 1e3 to 1e15")
        loaded = Lab(replace(loaded.description, flops_per_s=flops_per_s))
    network = loaded.description.network
    shape: tuple[int, ...] = _square(loaded.num_ranks)
    match network:
        case TorusLab():
            links = list(network.links)
            shape = network.shape if len(network.shape) == 2 else (1, *network.shape)
        case SwitchLab():
            links = [network.nic]
        case TreeLab():
            links = [network.nic, network.root]
    skip = max(
        link.bucket_bytes(rate) for link in links for rate in (link.bytes_per_s, link.back_bytes_per_s)
    )
    title = f"lab {loaded.description.name}"
    return _LabPlace(
        loaded.cluster(),
        title,
        shape,
        skip_bytes=skip,
        has_nominal_links=True,
        most_flops_per_s=loaded.description.flops_per_s or math.inf,
        lab=loaded,
    )


def _square(count: int) -> tuple[int, int]:
    rows = max(d for d in range(1, int(count**0.5) + 1) if count % d == 0)
    return rows, count // rows


def _limits(repeat: int, timeout: float, median_error: float, worst_error: float) -> FitLimits:
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


def _source(place: _Place, sweep: Sweep, measured: Sequence[Mapping[str, Any]], repeat: int) -> str:
    versions = measured[0]["versions"]
    cpu = _cpu()
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return (
        f"meshweave calibrate, {today}: {place.title}, mesh {'x'.join(map(str, sweep.mesh_shape))}, "
        f"{repeat} repetitions; {platform.system()} {platform.release()}, {cpu}, {os.cpu_count()} cores; "
        f"torch {versions['torch']}, Python {versions['python']}"
    )


def _cpu() -> str:
    """The processor's model; where the system does not say, its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return printable(next(models, "") or platform.machine())


def _comments(found: Calibration, place: _Place) -> list[str]:
    lines = ["Fitted on the busy machine:"]
    for (axis, kind), fit in found.busy.items():
        lines.append(f"  {kind}, {axis}: {fit.describe(_rate(axis, kind))}; {fit.quality}")
    lines.append("One operation at a time, for comparison:")
    for (axis, kind), fit in found.alone.items():
        lines.append(f"  {kind}, {axis}: {fit.describe(_rate(axis, kind))}; {fit.quality}")
    if place.said:
        lines.append(place.said)
    lines += [f"ACCEPTED ALTHOUGH: {problem}" for problem in found.problems]
    return lines


def _rate(axis: str, kind: str) -> Any:
    return (lambda rate: f"{rate:.4g} FLOP") if (axis, kind) == COMPUTE else format_bytes


def _print(found: Calibration) -> None:
    for (axis, kind), fit in found.busy.items():
        typer.echo(f"{kind}, {axis}")
        typer.echo(f"  busy   {fit.describe(_rate(axis, kind))}")
        typer.echo(f"         {fit.quality}")
        other = found.alone.get((axis, kind))
        if other is not None:
            typer.echo(f"  alone  {other.describe(_rate(axis, kind))}")
    for problem in found.problems:
        typer.echo(f"misfit: {problem}")
