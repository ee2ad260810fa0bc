"""`meshweave bench fused`: a product fused with its collective by tiles, beside both rivals in a lab."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from json import dumps
from typing import TYPE_CHECKING

import typer

import meshweave_lab.cli.bench_options as options
from meshweave.base.errors import DescriptionError
from meshweave.base.outputs import write_file
from meshweave.base.units import format_s
from meshweave.cli.option_fields import option, with_options
from meshweave.cli.options import print_json
from meshweave_lab.provenance import describe_environment

if TYPE_CHECKING:
    from meshweave_lab.bench.fused import FusedTimes


@dataclass(frozen=True)
class FusedBenchOptions:
    """The product that is measured, and what is written."""

    op: options.FusedCollective = option(
        options.FusedCollective.REDUCE_SCATTER, "The collective: behind the product, or before it."
    )
    m: options.ProductM = 1024
    n: options.ProductN = 512
    k: options.ProductK = 512
    ratio: float = option(1.0, "Seconds of the product over those of the transfer; sets the pace.")
    cluster: options.CalibratedFile = None
    repeat: options.Repeat = 5
    timeout: options.Timeout = 300.0
    out: options.ResultsFile = None
    json: options.Json = False


@with_options
def fused(lab: options.LabFile, given: FusedBenchOptions) -> None:
    """Measure fused products in a lab whose hosts are on one switch, a rank to a host.

    With reduce-scatter each rank has columns of A and rows of B, and the sum of the products is scattered by rows;
    with all-gather it has rows of A, which all need, and columns of B. Measured by turns are the product and the
    collective in sequence, the looped product of Wang et al., and ours, by tiles. The bound is
    max(product, transfer) + the transfer of a tile. Every result is checked against the dense product.

    Example: meshweave bench fused --lab examples/labs/switch-4x1-50mbit.toml --op all-gather --json
    """
    from meshweave_lab import Lab
    from meshweave_lab.bench.fused import NOT_RUN, bench_fused, refuse_wrong_results

    options.check_run(given.repeat, given.timeout)
    if not 1e-3 <= given.ratio <= 1e3:
        raise DescriptionError(f"--ratio is {given.ratio:g}; it must be positive, from 0.001 to 1000")
    described = Lab.load(lab)
    calibrated = None if given.cluster is None else options.load_calibrated(given.cluster, described)
    measured = bench_fused(
        described,
        (given.m, given.n, given.k),
        given.ratio,
        op=given.op.value,
        calibrated=calibrated,
        repeat=given.repeat,
        timeout_s=given.timeout,
    )
    record = {
        "kind": "bench fused",
        "machine": describe_environment(),
        "lab": described.description.to_json(),
        "cluster": None if calibrated is None else calibrated.name,
        "op": given.op.value,
        "sizes": [given.m, given.n, given.k],
        "ratio": given.ratio,
        "repeat": given.repeat,
        "not_run": NOT_RUN,
        "rivals": [times.to_json() for times in measured],
    }
    if given.out is not None:
        write_file(given.out, dumps(record, indent=1) + "\n")
    if given.json:
        print_json(record)
    else:
        typer.echo(
            f"{given.op.value}, {given.m} x {given.n} x {given.k} at ratio {given.ratio:g}, "
            f"bound {format_s(measured[0].bound_s)}"
        )
        for line in table(measured):
            typer.echo(line)
        for name, why in NOT_RUN.items():
            typer.echo(f"{name}: {why}")
    refuse_wrong_results(measured)


def table(measured: Sequence[FusedTimes]) -> Iterator[str]:
    """Yield the lines of a table of times, with the tiles that were chosen."""
    yield f"{'':24}{'median':>12}{'over bound':>12}{'simulated':>12}  tiles"
    for times in measured:
        yield (
            f"{times.algorithm:24}{format_s(times.median_s):>12}{times.median_s / times.bound_s:>12.3f}"
            f"{format_s(times.simulated_s):>12}  {times.tiles}"
        ).rstrip()
