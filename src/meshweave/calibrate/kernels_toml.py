"""Write the kernels of a chip as TOML that `load_kernels` reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from meshweave.describe.machine.kernels import ChipKernels, CpuProductConstants, SystolicConstants

_SECTIONS = {SystolicConstants: "systolic", CpuProductConstants: "cpu_products"}


def kernels_toml(kernels: ChipKernels, comments: Sequence[str] = ()) -> str:
    """Return the text of a kernels file, without its tables of measured products.

    Dtypes with the same constants share a table.
    """
    lines = [f"# {comment}" for comment in comments]
    lines += [f"name = {json.dumps(kernels.name)}", f"source = {json.dumps(kernels.source)}"]
    if kernels.switch_reduces:
        lines.append("switch_reduces = true")
    if kernels.sustained_share != 1:
        lines.append(f"sustained_share = {kernels.sustained_share!r}")
    for section, entries in (("products", kernels.products), ("attention", kernels.attention)):
        dtypes: dict[Any, list[str]] = {}
        for dtype, constants in entries:
            dtypes.setdefault(constants, []).append(dtype)
        for constants, names in dtypes.items():
            name = _SECTIONS.get(type(constants), section)
            lines += ["", f"[[{name}]]", f"dtypes = {json.dumps(names)}", *_values(asdict(constants))]
    for kind, collective in kernels.collectives:
        lines += ["", "[[collectives]]", f'kind = "{kind}"', *_values(asdict(collective))]
    if kernels.elementwise is not None:
        launch_s, bytes_per_s = kernels.elementwise
        lines += ["", "[elementwise]", f"launch_s = {launch_s!r}", f"memory_bytes_per_s = {bytes_per_s!r}"]
    return "\n".join(lines) + "\n"


def _values(values: dict[str, Any]) -> list[str]:
    return [f"{key} = {json.dumps(value)}" for key, value in values.items()]
