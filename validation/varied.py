"""Vary links, products and tiles of the papers' machines, and write what rows and verdicts do.

A row that counts and holds has to move: one that no constant moves could not fail. T3 varies in
`validation/t3_constants.py` and by its readings.

python validation/varied.py [PAPER ...]   # results/varied.json and .md, minutes; those of some papers alone
python validation/varied.py --page        # the page alone, from the saved numbers
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.describe.machine.links import NetworkAxis
from meshweave.describe.machine.network import with_axes
from meshweave_studies.alpacomm import rows as alpacomm_rows
from meshweave_studies.alpacomm.readings import BANDWIDTH
from meshweave_studies.alpacomm.readings import READINGS as ALPACOMM_READINGS
from meshweave_studies.alpacomm.study import AlpaCommStudy
from meshweave_studies.atp import rows as atp_rows
from meshweave_studies.atp.readings import READINGS as ATP_READINGS
from meshweave_studies.atp.study import AtpStudy, Case
from meshweave_studies.meshslice import rows as meshslice_rows
from meshweave_studies.meshslice.readings import PUBLIC, READINGS
from meshweave_studies.meshslice.study import MeshSliceStudy
from meshweave_studies.meshslice.times import Timer
from meshweave_studies.slicing import rows as slicing_rows
from meshweave_studies.slicing.study import SlicingStudy
from meshweave_studies.verdict import JudgedRow

OUT = Path(__file__).parent / "results" / "varied.json"
Change = Callable[[Cluster], Cluster]
ATP_READING = "framework-host"


def scaled(cluster: Cluster, share: float, most_alone: bool = False) -> Cluster:
    """Return a machine whose links have a share of their rates; `most_alone`: those above the slowest axis."""
    rates: list[float] = []

    def seen(axis: NetworkAxis) -> NetworkAxis:
        rates.append(axis.link_bytes_per_s)
        return axis

    with_axes(cluster.network, seen)

    def changed(axis: NetworkAxis) -> NetworkAxis:
        if most_alone and axis.link_bytes_per_s == min(rates):
            return axis
        constants = tuple(
            (kind, replace(known, bytes_per_s=known.bytes_per_s * share)) for kind, known in axis.constants
        )
        return replace(axis, link_bytes_per_s=axis.link_bytes_per_s * share, constants=constants)

    return replace(cluster, network=with_axes(cluster.network, changed))


def products(cluster: Cluster, share: float) -> Cluster:
    """Return a machine whose products run at a share of their rates."""
    chip = cluster.chip
    rates = {dtype: rate * share for dtype, rate in chip.dtype_flops_per_s}
    changed = replace(chip, dtype_flops_per_s=tuple(rates.items()), kernels=None)
    if chip.effective_flops_per_s:
        changed = replace(changed, effective_flops_per_s=chip.effective_flops_per_s * share)
    return replace(cluster, chip=changed)


def tiles(cluster: Cluster, share: float) -> Cluster:
    """Return a machine whose tiles of products have a share of their sides."""
    assert cluster.chip.gemm_tile is not None
    m, n, k = (int(side * share) for side in cluster.chip.gemm_tile)
    return replace(cluster, chip=replace(cluster.chip, gemm_tile=(m, n, k)))


CHANGES: dict[str, Change] = {
    "": lambda cluster: cluster,
    "links x 1/2": lambda cluster: scaled(cluster, 0.5),
    "links x 2": lambda cluster: scaled(cluster, 2),
    "faster axes x 1/2": lambda cluster: scaled(cluster, 0.5, most_alone=True),
    "products x 1/2": lambda cluster: products(cluster, 0.5),
}


def meshslice(change: Change) -> Sequence[JudgedRow]:
    """Return the rows of reading public by estimate."""
    pod = change(load_cluster(READINGS[PUBLIC].pod))
    study = MeshSliceStudy(pod, Timer("estimate", READINGS[PUBLIC].rule), measured=READINGS[PUBLIC].mesh)
    return meshslice_rows.rows(study, reading=READINGS[PUBLIC], fits=False)


def slicing(change: Change) -> Sequence[JudgedRow]:
    """Return the rows of reading all-factors."""
    machines = {name: change(load_cluster(f"{name}-node")) for name in ("pvc", "h100")}
    return slicing_rows.rows(SlicingStudy(machines))


def alpacomm(change: Change) -> Sequence[JudgedRow]:
    """Return the rows of reading bandwidth."""
    reading = ALPACOMM_READINGS[BANDWIDTH]
    return alpacomm_rows.rows(AlpaCommStudy(change(load_cluster(reading.cluster))), reading=reading)


class _ChangedAtp(AtpStudy):
    change: Change = CHANGES[""]

    def cluster(self, case: Case) -> Cluster:
        return self.change(super().cluster(case))


def atp(change: Change) -> Sequence[JudgedRow]:
    """Return the rows of simulated layers by a framework with a host."""
    study = _ChangedAtp(reading=ATP_READINGS[ATP_READING])
    study.change = change
    return atp_rows.rows(study, reading=ATP_READINGS[ATP_READING])


PAPERS: dict[str, dict[str, Callable[[], Sequence[JudgedRow]]]] = {
    "MeshSlice, public by estimate": {
        **{
            name: lambda change=change: meshslice(change)  # type: ignore[misc]
            for name, change in CHANGES.items()
            if not name.startswith("faster axes")
        },
        "tiles x 1/2": lambda: meshslice(lambda cluster: tiles(cluster, 0.5)),
    },
    "Slicing, all-factors": {
        name: lambda change=change: slicing(change)  # type: ignore[misc]
        for name, change in CHANGES.items()
        if not name.startswith("products")
    },
    "AlpaComm, bandwidth": {
        name: lambda change=change: alpacomm(change)  # type: ignore[misc]
        for name, change in CHANGES.items()
        if not name.startswith("products")
    },
    f"ATP, {ATP_READING}": {
        name: lambda change=change: atp(change)  # type: ignore[misc]
        for name, change in CHANGES.items()
        if not name.startswith("products")
    },
}
"""By paper and what is changed; "" changes nothing. Both axes of the pod are equally fast."""


def measure(papers: Sequence[str] = ()) -> None:
    """Save (value, verdict, whether it counts) of each row by paper and variation."""
    out = saved()
    for paper, variations in PAPERS.items():
        if papers and not any(paper.lower().startswith(name) for name in papers):
            continue
        of: dict[str, dict[str, Any]] = {}
        for name, compute in variations.items():
            for row in compute():
                known = of.setdefault(f"{row.id}, {row.model}", {})
                known[name] = [row.ours, row.verdict]
                known["counts"] = row.counts
            print(paper, name or "as it is", flush=True)
            out[paper] = of
            OUT.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")


def saved() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the saved rows by paper; none where nothing was computed."""
    rows: dict[str, dict[str, dict[str, Any]]] = json.loads(OUT.read_text("utf-8")) if OUT.exists() else {}
    return rows


def unmoved(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Return the rows that count, hold, and are the same to nine digits under every variation."""
    out = []
    for name, row in rows.items():
        values = {f"{value[0]:.9g}" for key, value in row.items() if key != "counts" and value[0] is not None}
        if row["counts"] and row[""][1] == "holds" and len(values) == 1:
            out.append(name)
    return out


def page(rows: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Return the page of the saved rows."""
    lines = [
        "# Machines varied, and what verdicts do",
        "",
        "Written by `validation/varied.py`: rows that count, of the paper's default reading where no other is "
        "named. Changed: those whose verdict is another one than with nothing varied. T3's are in "
        "[t3-constants.md](t3-constants.md).",
        "",
    ]
    for paper, of in rows.items():
        counted = {name: row for name, row in of.items() if row["counts"]}
        variations = [name for name in next(iter(of.values())) if name != "counts"]
        lines += [f"## {paper}", "", "| | hold | near | differ | changed |", "|---|---:|---:|---:|---:|"]
        for name in variations:
            found = [row[name][1] for row in counted.values() if name in row]
            numbers = [found.count(verdict) for verdict in ("holds", "near", "differs")]
            changed = sum(row[name][1] != row[""][1] for row in counted.values() if name in row)
            lines.append(f"| {name or 'as it is'} | {' | '.join(map(str, (*numbers, changed)))} |")
        same = unmoved(of)
        lines += ["", f"Rows that hold and that nothing here moves: {'; '.join(same) or 'none'}.", ""]
    return "\n".join(lines)


def main() -> int:
    """Compute and write the numbers and the page, or with --page the page alone."""
    if sys.argv[1:] != ["--page"]:
        measure([name.lower() for name in sys.argv[1:]])
    OUT.with_suffix(".md").write_text(page(saved()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
