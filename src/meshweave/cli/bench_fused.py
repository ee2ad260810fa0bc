"""`meshweave bench fused`: a product and its reduce-scatter, fused by tiles, beside both rivals in a lab."""

from __future__ import annotations

from json import dumps

import typer

import meshweave.cli.bench_options as options
from meshweave.base.errors import DescriptionError
from meshweave.base.units import format_s
from meshweave.cli.options import print_json
from meshweave.describe.machine.cluster import load_cluster
from meshweave.report.provenance import describe_environment


def fused(
    lab: options.LabFile,
    m: options.ProductM = 1024,
    n: options.ProductN = 512,
    k: options.ProductK = 512,
    ratio: options.FusedRatio = 1.0,
    cluster: options.CalibratedFile = None,
    repeat: options.Repeat = 5,
    timeout: options.Timeout = 300.0,
    out: options.ResultsFile = None,
    json: options.Json = False,
) -> None:
    """Measure fused products in a lab whose hosts are on one switch, a rank to a host.

    Each rank has columns of A and rows of B; the sum of the products is scattered by rows. Measured by turns are a
    product and a reduce-scatter in sequence, the looped product of Wang et al., and ours, by tiles around a ring
    and straight to the owners. The bound is max(product, transfer) + the transfer of the last tile. Every result
    is checked against the dense product.

    Example: meshweave bench fused --lab examples/labs/switch-4x1-50mbit.toml --json
    """
    from meshweave.lab import Lab
    from meshweave.lab.bench.fused import NOT_RUN, bench_fused

    options.check_run(repeat, timeout, out, None)
    if ratio <= 0:
        raise DescriptionError(f"--ratio is {ratio:g}; it must be positive")
    described = Lab.load(lab)
    calibrated = None if cluster is None else load_cluster(str(cluster))
    measured = bench_fused(
        described, (m, n, k), ratio, calibrated=calibrated, repeat=repeat, timeout_s=timeout
    )
    record = {
        "kind": "bench fused",
        "machine": describe_environment(),
        "lab": described.description.to_json(),
        "cluster": None if calibrated is None else calibrated.name,
        "sizes": [m, n, k],
        "ratio": ratio,
        "repeat": repeat,
        "not_run": NOT_RUN,
        "rivals": [times.to_json() for times in measured],
    }
    if out is not None:
        out.write_text(dumps(record, indent=1) + "\n")
    if json:
        print_json(record)
        return
    typer.echo(f"{m} x {n} x {k} at ratio {ratio:g}, bound {format_s(measured[0].bound_s)}")
    typer.echo(f"{'':24}{'median':>12}{'over bound':>12}{'simulated':>12}")
    for times in measured:
        typer.echo(
            f"{times.algorithm:24}{format_s(times.median_s):>12}{times.median_s / times.bound_s:>12.3f}"
            f"{format_s(times.simulated_s):>12}"
        )
    for name, why in NOT_RUN.items():
        typer.echo(f"{name}: {why}")
