"""One call for each paper: `reproduce_meshslice`, `reproduce_slicing`, `reproduce_alpacomm`, `reproduce_atp`,
`reproduce_zero_bubble`, `reproduce_t3`.

Each returns a `Reproduction`: rows (published number, our value, verdict) and the paper's figures as data.
`meshweave_studies.tables` and `meshweave_studies.output` turn it into Markdown, JSON, HTML and pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from meshweave.base.errors import UnsupportedError
from meshweave.base.progress import Progress, no_progress
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.describe.machine.gpu import GpuFile, load_gpu
from meshweave_studies.alpacomm import figures as alpacomm_figures
from meshweave_studies.alpacomm import readings as alpacomm_readings
from meshweave_studies.alpacomm import rows as alpacomm_rows
from meshweave_studies.alpacomm.study import AlpaCommStudy
from meshweave_studies.atp import figures as atp_figures
from meshweave_studies.atp import readings as atp_readings
from meshweave_studies.atp import rows as atp_rows
from meshweave_studies.atp.study import MACHINES as ATP_MACHINES
from meshweave_studies.atp.study import AtpStudy
from meshweave_studies.figures import Figure, PaperFigures, parse_figure_numbers
from meshweave_studies.meshslice import figures as meshslice_figures
from meshweave_studies.meshslice import rows as meshslice_rows
from meshweave_studies.meshslice.readings import PUBLIC, READINGS, PaperReading
from meshweave_studies.meshslice.study import MeshSliceStudy
from meshweave_studies.meshslice.times import Reading, Timer
from meshweave_studies.published import NamedReading, StudyT, published_rows, reading_named, select_rows
from meshweave_studies.reproduction import PaperSummary, Reproduction, Selection, file_stem
from meshweave_studies.slicing import figures as slicing_figures
from meshweave_studies.slicing import readings as slicing_readings
from meshweave_studies.slicing import rows as slicing_rows
from meshweave_studies.slicing.partitionings import NAMED, every_partitioning
from meshweave_studies.slicing.study import BATCHES, SlicingStudy
from meshweave_studies.t3 import figures as t3_figures
from meshweave_studies.t3 import groups as t3_groups
from meshweave_studies.t3 import orderings as t3_orderings
from meshweave_studies.t3 import readings as t3_readings
from meshweave_studies.t3 import rows as t3_rows
from meshweave_studies.t3.study import GPU as T3_GPU
from meshweave_studies.t3.study import GPU_2X as T3_GPU_2X
from meshweave_studies.t3.study import T3Study, times_jobs
from meshweave_studies.verdict import JudgedRow
from meshweave_studies.zero_bubble import rows as zero_bubble_rows
from meshweave_studies.zero_bubble.readings import HOSTS as ZERO_BUBBLE_HOSTS
from meshweave_studies.zero_bubble.study import ZeroBubbleStudy

MESHSLICE, SLICING, ALPACOMM = meshslice_rows.PAPER, slicing_rows.PAPER, alpacomm_rows.PAPER
ATP, ZERO_BUBBLE, T3 = atp_rows.PAPER, zero_bubble_rows.PAPER, t3_rows.PAPER
FIGURES: dict[str, tuple[int, ...]] = {
    MESHSLICE: tuple(meshslice_figures.FIGURES),
    SLICING: tuple(slicing_figures.MACHINES),
    ALPACOMM: tuple(alpacomm_figures.FIGURES),
    ATP: tuple(atp_figures.FIGURES),
    ZERO_BUBBLE: (),
    T3: tuple(t3_figures.FIGURES),
}
"""The numbers of the figures that are computed, by paper."""
EVERYTHING = Selection()

ProgressBar = Callable[[str], AbstractContextManager[Progress]]
"""Takes the title of a stage ("rows" or "figures"); its `Progress` is called while the stage runs."""


def no_progress_bar(title: str) -> AbstractContextManager[Progress]:
    """Report nothing: the default of the functions below."""
    return nullcontext(no_progress)


def select(paper: str, rows: Sequence[str] = (), figures: Sequence[str] = ()) -> Selection:
    """Return a selection of rows and figures by their names; everything where neither are named.

    Raises UnsupportedError for a row or figure that the paper does not have here.
    """
    select_rows(published_rows(paper), rows)
    numbers = parse_figure_numbers(figures, FIGURES[paper])
    if not (rows or numbers):
        return EVERYTHING
    return Selection(tuple(rows) or None, numbers or None)


def reproduce_meshslice(
    cluster: str | Cluster | None = None,
    selection: Selection = EVERYTHING,
    *,
    reading: str = PUBLIC,
    by: Reading = "simulate",
    progress_bar: ProgressBar = no_progress_bar,
) -> Reproduction:
    """Compute the numbers of MeshSlice's evaluation and its figures 9 to 14.

    Args:
        cluster: the pod whose constants are judged: a cluster, or its catalog name or TOML file. None for that of
            the reading.
        selection: the rows and figures to compute. All rows are those that the reading covers; figures are of
            pods.
        reading: what the paper leaves open, one of `meshslice.readings.READINGS`.
        by: what gives the times of products; estimates choose meshes and slice counts in both cases.
        progress_bar: shows how many rows and figures are done.

    Raises:
        DescriptionError: there is no such cluster.
        LayoutError: the cluster cannot have 256 chips.
        UnsupportedError: there is no such reading, it does not cover a row or figure, or it has no simulation.
    """
    chosen = reading_named(READINGS, reading)
    if chosen.rule == "pooled" and by == "simulate":
        raise UnsupportedError(
            f"reading {reading} has no simulation: links belong to an axis there; give by='estimate'"
        )
    selection = _covered(chosen, selection)
    where = cluster or chosen.pod or READINGS[PUBLIC].pod
    pod = load_cluster(where) if isinstance(where, str) else where
    fits = bool(chosen.fit) or pod.name != chosen.pod
    study = MeshSliceStudy(pod, Timer(by, chosen.rule), measured=chosen.mesh)
    compute_rows = partial(meshslice_rows.rows, reading=chosen, fits=fits)
    rows, figures = _compute(study, selection, compute_rows, meshslice_figures.figures, progress_bar)
    summary = PaperSummary(
        "MeshSlice",
        "Nam, Gerogiannis, Torrellas: MeshSlice (ISCA '25, doi 10.1145/3695053.3731077).",
        _described(_machines(chosen, pod)),
        f"{'estimates' if by == 'estimate' else 'simulation; meshes and slice counts chosen by estimate'}; "
        f"reading {reading}: {chosen.title}",
    )
    said = {"name": chosen.name, "title": chosen.title, "fit": chosen.fit}
    inputs = _inputs(summary.machines, "clusters", by=by, reading=said)
    return Reproduction(MESHSLICE, summary, inputs, rows, figures, f"{MESHSLICE}-{_file_name(chosen, pod)}")


def _covered(reading: PaperReading, selection: Selection) -> Selection:
    """Return a selection without figures where a reading is of the 4x4 mesh alone.

    Raises UnsupportedError where it names figures then.
    """
    if reading.pod or not selection.figures:
        return selection if reading.pod else replace(selection, figures=None)
    raise UnsupportedError(f"reading {reading.name} has no figures: they are of the simulated pod")


def _machines(reading: PaperReading, pod: Cluster) -> list[Cluster]:
    """Return the clusters that a reading's rows are of."""
    mesh = [load_cluster(reading.mesh.cluster)] if reading.mesh is not None else []
    return ([pod] if reading.pod else []) + mesh


def _file_name(reading: PaperReading, pod: Cluster) -> str:
    """Return the end of the names of the files: the reading, and the pod where it is another one."""
    return reading.name if not reading.pod or pod.name == reading.pod else f"{reading.name}-{pod.name}"


def reproduce_slicing(
    pvc: str | Cluster = "pvc-node",
    h100: str | Cluster = "h100-node",
    selection: Selection = EVERYTHING,
    *,
    reading: str = slicing_readings.ALL_FACTORS,
    all_partitionings: bool = False,
    progress_bar: ProgressBar = no_progress_bar,
) -> Reproduction:
    """Compute figures 2 and 3 of Slicing Is All You Need, and what its text says of them.

    Args:
        pvc: the machine of figure 2: a cluster, or its catalog name or TOML file.
        h100: that of figure 3.
        selection: the rows and figures to compute.
        reading: what the paper leaves open, one of `slicing.readings.READINGS`.
        all_partitionings: figures with all 28 partitionings instead of those of the paper's figures.
        progress_bar: shows how many rows and figures are done.

    Raises:
        DescriptionError: there is no such cluster.
        UnsupportedError: there is no such reading.
    """
    chosen = reading_named(slicing_readings.READINGS, reading)
    machines = {
        name: chosen.machine(load_cluster(cluster) if isinstance(cluster, str) else cluster)
        for name, cluster in (("pvc", pvc), ("h100", h100))
    }
    partitionings = every_partitioning() if all_partitionings else NAMED
    study = SlicingStudy(machines, partitionings=partitionings, reading=chosen)
    rows, figures = _compute(study, selection, slicing_rows.rows, slicing_figures.figures, progress_bar)
    summary = PaperSummary(
        "Slicing Is All You Need",
        "Brock, Golin: Slicing Is All You Need: Towards A Universal One-Sided Algorithm for Distributed Matrix "
        "Multiplication.",
        _described(machines.values()),
        f"simulation, batches of {', '.join(map(str, BATCHES))}, fp32; reading {reading}: {chosen.title}",
        subject="case",
    )
    said = {"name": chosen.name, "title": chosen.title}
    inputs = _inputs(summary.machines, "clusters", batches=list(BATCHES), reading=said)
    names = [cluster.name for cluster in machines.values()]
    stem = file_stem(SLICING, chosen.name, names, ["pvc-node", "h100-node"], slicing_readings.ALL_FACTORS)
    return Reproduction(SLICING, summary, inputs, rows, figures, stem)


def reproduce_alpacomm(
    cluster: str | Cluster | None = None,
    selection: Selection = EVERYTHING,
    *,
    reading: str = alpacomm_readings.BANDWIDTH,
    progress_bar: ProgressBar = no_progress_bar,
) -> Reproduction:
    """Compute the microbenchmarks and training runs of AlpaComm: figures 5 to 9, and what the text says of them.

    Args:
        cluster: hosts of four chips or more with one NIC each, of which five are taken: a cluster, or its catalog
            name or TOML file. None for those of the reading.
        selection: the rows and figures to compute. All rows are those that the reading covers.
        reading: what the paper leaves open, one of `alpacomm.readings.READINGS`.
        progress_bar: shows how many rows and figures are done.

    Raises:
        DescriptionError: there is no such cluster.
        UnsupportedError: the cluster's network is another one; there is no such reading, or it lacks a row
            or figure.
    """
    chosen = reading_named(alpacomm_readings.READINGS, reading)
    if chosen.rows:
        selection = selection.without_figures(chosen.name)
    where = cluster or chosen.cluster
    hosts = load_cluster(where) if isinstance(where, str) else where
    study = AlpaCommStudy(hosts, rivals=chosen.rivals)
    compute_rows = partial(alpacomm_rows.rows, reading=chosen)
    rows, figures = _compute(study, selection, compute_rows, alpacomm_figures.figures, progress_bar)
    summary = PaperSummary(
        "AlpaComm",
        "Zhuang, Zhao, Zheng, Li, Xing, Ho, Gonzalez, Stoica, Zhang: On Optimizing the Communication of Model "
        "Parallelism (MLSys '23).",
        _described([hosts]),
        f"simulation at full size, fp32; reading {reading}: {chosen.title}",
        alpacomm_rows.findings(study) if chosen.rivals == "planned" else (),
        subject="of",
    )
    said = {"name": chosen.name, "title": chosen.title}
    inputs = _inputs(summary.machines, "cluster", reading=said, findings=list(summary.findings))
    stem = file_stem(ALPACOMM, chosen.name, [hosts.name], [chosen.cluster], alpacomm_readings.BANDWIDTH)
    return Reproduction(ALPACOMM, summary, inputs, rows, figures, stem)


def reproduce_atp(
    selection: Selection = EVERYTHING,
    *,
    reading: str = atp_readings.RATES,
    progress_bar: ProgressBar = no_progress_bar,
) -> Reproduction:
    """Compute the equations, choices, figures 10 to 12 and table 3 of ATP on its interconnects.

    Args:
        selection: the rows and figures to compute. All rows are those that the reading covers.
        reading: what the paper leaves open, one of `atp.readings.READINGS`.
        progress_bar: shows how many rows and figures are done.

    Raises:
        UnsupportedError: there is no such reading, or it lacks a row or figure.
    """
    chosen = reading_named(atp_readings.READINGS, reading)
    if chosen.rows:
        selection = selection.without_figures(chosen.name)
    study = AtpStudy(reading=chosen)
    compute_rows = partial(atp_rows.rows, reading=chosen)
    rows, figures = _compute(study, selection, compute_rows, atp_figures.figures, progress_bar)
    machines = [load_cluster(name) for name in ATP_MACHINES.values()]
    summary = PaperSummary(
        "ATP",
        "Cheng, Liu, Du, You: ATP: Adaptive Tensor Parallelism for Foundation Models.",
        _described(machines),
        f"equations 2 to 4, and simulation of {study.layers} layers, fp16; reading {reading}: {chosen.title}",
        atp_rows.findings(),
        subject="of",
    )
    said = {"name": chosen.name, "title": chosen.title}
    inputs = _inputs(summary.machines, "clusters", reading=said, findings=list(summary.findings))
    stem = file_stem(ATP, chosen.name, [], [], atp_readings.RATES)
    return Reproduction(ATP, summary, inputs, rows, figures, stem)


def reproduce_zero_bubble(
    selection: Selection = EVERYTHING, *, progress_bar: ProgressBar = no_progress_bar
) -> Reproduction:
    """Compute the gains and memories of Zero Bubble's table 4 by three readings of the times of stages.

    Args:
        selection: the rows to compute.
        progress_bar: shows how many rows are done.
    """
    study = ZeroBubbleStudy()
    no_figures = PaperFigures[ZeroBubbleStudy]({})
    rows, figures = _compute(study, selection, zero_bubble_rows.rows, no_figures, progress_bar)
    hosts = load_cluster(ZERO_BUBBLE_HOSTS)
    summary = PaperSummary(
        "Zero Bubble",
        "Qi, Wan, Huang, Lin: Zero Bubble Pipeline Parallelism (arXiv 2401.10241).",
        _described([hosts]),
        "simulation of our schedules, fp16",
        zero_bubble_rows.findings(),
        subject="model, micro-batches",
    )
    inputs = _inputs(summary.machines, "cluster", findings=list(summary.findings))
    return Reproduction(ZERO_BUBBLE, summary, inputs, rows, figures)


def reproduce_t3(
    selection: Selection = EVERYTHING,
    *,
    reading: str = t3_readings.TABLE_1,
    progress_bar: ProgressBar = no_progress_bar,
) -> Reproduction:
    """Compute the sub-layers of T3's evaluation and its figures 4, 6 and 14 to 20, down to the memory controller.

    All simulations of a whole reproduction run first, two at a time; those of a selection when they are needed.

    Args:
        selection: the rows and figures to compute. All rows are those that the reading covers.
        reading: what the paper leaves open, one of `t3.readings.READINGS`.
        progress_bar: shows how many simulations, rows and figures are done.

    Raises:
        UnsupportedError: there is no such reading, or it lacks a row or figure.
    """
    chosen = reading_named(t3_readings.READINGS, reading)
    if chosen.rows:
        selection = selection.without_figures(chosen.name)
    study = T3Study(chosen)
    if () in (selection.rows, selection.figures):
        with progress_bar("simulations") as progress:
            layers = t3_groups.SMALL if chosen.rows else ()
            jobs = [job for layer in layers for job in times_jobs(layer)] or t3_groups.every_job()
            study.prefetch(jobs, progress)
    compute_rows = partial(t3_rows.rows, reading=chosen)
    rows, figures = _compute(study, selection, compute_rows, t3_figures.figures, progress_bar)
    gpus = [load_gpu(name) for name in (T3_GPU, T3_GPU_2X)]
    summary = PaperSummary(
        "T3",
        "Pati, Aga, Islam, Jayasena, Sinclair: T3: Transparent Tracking & Triggering for Fine-grained Overlap of "
        "Compute & Collectives (ASPLOS '24, doi 10.1145/3620665.3640410).",
        _described(gpus),
        f"simulation of one GPU of a ring down to its memory controllers, fp16; reading {reading}: {chosen.title}",
        t3_rows.findings(rows),
        subject="of",
    )
    said = {"name": chosen.name, "title": chosen.title}
    inputs = _inputs(summary.machines, "gpus", reading=said, findings=list(summary.findings))
    orderings = t3_orderings.orderings(study) if selection.rows == () and not chosen.rows else ()
    stem = file_stem(T3, chosen.name, [], [], t3_readings.TABLE_1)
    return Reproduction(T3, summary, inputs, rows, figures, stem, orderings)


def _compute(
    study: StudyT,
    selection: Selection,
    compute_rows: Callable[[StudyT, Sequence[str], Progress], list[JudgedRow]],
    compute_figures: Callable[[StudyT, Sequence[int], Progress], list[Figure]],
    progress_bar: ProgressBar,
) -> tuple[tuple[JudgedRow, ...], tuple[Figure, ...]]:
    rows: list[JudgedRow] = []
    figures: list[Figure] = []
    if selection.rows is not None:
        with progress_bar("rows") as progress:
            rows = compute_rows(study, selection.rows, progress)
    if selection.figures is not None:
        with progress_bar("figures") as progress:
            figures = compute_figures(study, selection.figures, progress)
    return tuple(rows), tuple(figures)


def _described(machines: Iterable[Cluster | GpuFile]) -> tuple[tuple[str, str], ...]:
    return tuple((machine.name, machine.source) for machine in machines)


def _inputs(machines: Sequence[tuple[str, str]], kind: str, **more: Any) -> dict[str, Any]:
    """Return what the JSON says of a run: its machines under the name of their kind, and more."""
    listed = [{"name": name, "source": source} for name, source in machines]
    return {kind: listed if kind.endswith("s") else listed[0], **more}


STUDIES: dict[str, tuple[Callable[..., Reproduction], Mapping[str, NamedReading]]] = {
    MESHSLICE: (reproduce_meshslice, READINGS),
    SLICING: (reproduce_slicing, slicing_readings.READINGS),
    ALPACOMM: (reproduce_alpacomm, alpacomm_readings.READINGS),
    ATP: (reproduce_atp, atp_readings.READINGS),
    ZERO_BUBBLE: (reproduce_zero_bubble, {}),
    T3: (reproduce_t3, t3_readings.READINGS),
}
"""By paper the call that computes it and its readings; the longest run is the last."""
