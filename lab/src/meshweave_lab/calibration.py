"""What `meshweave calibrate --lab` measures: the ranks of a lab."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from meshweave.base.errors import DescriptionError
from meshweave.calibrate.target import RANK_FUNCTION, CalibrationTarget
from meshweave.describe.layout.shapes import near_square
from meshweave_lab.lab import Lab


def lab_target(path: Path, flops_per_s: float, remarks: list[str]) -> CalibrationTarget:
    """Return the ranks of the lab of a LAB.toml, products paced at `flops_per_s`; 0 for the lab's own rate.

    A run appends to `remarks` how many paced products overran their time. Raises DescriptionError for a wrong
    file or rate.
    """
    lab = Lab.load(path)
    if flops_per_s:
        if not 1e3 <= flops_per_s <= 1e15:
            raise DescriptionError(f"--flops-per-s is {flops_per_s:g}; give 1e3 to 1e15")
        lab = Lab(replace(lab.description, flops_per_s=flops_per_s))

    def run_ranks(payload: Mapping[str, Any], timeout_s: float) -> list[Any]:
        with lab.up() as running:
            measured: list[Any] = running.launch(RANK_FUNCTION, dict(payload), timeout_s=timeout_s)
            reports = list(running.pace.values())
        if reports:
            count, late = sum(r.num_products for r in reports), sum(r.num_overruns for r in reports)
            remarks.append(f"{late} of {count} paced products overran their time")
            typer.echo(f"calibrate: {remarks[-1]}", err=True)
        return measured

    shape = tuple(getattr(lab.description.network, "shape", near_square(lab.num_ranks)))
    return CalibrationTarget(
        lab.cluster(),
        f"lab {lab.description.name}",
        shape if len(shape) == 2 else (1, *shape),
        run_ranks,
        skip_bytes=lab.description.max_bucket_bytes,
        has_nominal_links=True,
        max_flops_per_s=lab.description.flops_per_s or math.inf,
    )
