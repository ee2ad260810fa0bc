"""What the paper prints, row by row of `published/atp.toml`, beside ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from itertools import pairwise

from meshweave_studies.atp.framework import COLLECTIVE, DEPTH, SUMMA
from meshweave_studies.atp.readings import RATES
from meshweave_studies.atp.readings import READINGS as NAMED
from meshweave_studies.atp.study import (
    CHUNKS,
    FITTED,
    LOAD,
    MODELS,
    READINGS,
    SIMULATED_SIZES,
    AtpStudy,
    Case,
    cluster_of,
    flops_per_layer,
    paper_mesh,
    simulated_communication_s,
)
from meshweave_studies.matrix.device_meshes import MeshTime, mesh_bandwidth, rank_meshes
from meshweave_studies.matrix.hierarchy import (
    CommunicationMatrix,
    MatrixLayer,
    MeasuredBandwidth,
    communication_matrix,
)
from meshweave_studies.published import PaperRows
from meshweave_studies.verdict import OurValue

PAPER = "atp"
SERIAL, OWN_MESH = "serial", "own_mesh"
"""Readings of figure 10: Megatron-LM runs one op after another; ATP runs on the mesh that is fastest here."""
GIGA = 10**9
FIGURE_7A = CommunicationMatrix(
    "figure 7(a)",
    (
        MatrixLayer.uniform("200 Gb/s HDR", 4, 25 * GIGA, 25 * GIGA),
        MatrixLayer.uniform("NVLink", 4, 200 * GIGA, 600 * GIGA),
    ),
)
"""As printed: both directions of NVLink, one of InfiniBand."""
CALIBRATED = (
    MeasuredBandwidth((2, 4), 1_200_000_000, 4_950_000_000),
    MeasuredBandwidth((8, 1), 970_000_000, None),
)
"""Section 5.3: what was measured on IC1."""
SIZES = tuple(2**exponent for exponent in range(1, 10))
"""Numbers of devices in figure 12."""


# --- equations ---------------------------------------------------------------------------------------------------


def table2(study: AtpStudy, subject: str) -> OurValue:
    """Return the FLOPs of a layer of a model, in 2^40."""
    return OurValue(flops_per_layer(MODELS[subject]) / 2**40)


def first_link(study: AtpStudy, subject: str) -> OurValue:
    """Return B1' of DeviceMesh(8, 2) on figure 7(a), in GB/s."""
    return _gigabytes(mesh_bandwidth(FIGURE_7A, (8, 2)).first_link)


def second_link(study: AtpStudy, subject: str) -> OurValue:
    """Return B2' of DeviceMesh(8, 2) on figure 7(a), in GB/s, without the point-to-point correction."""
    return _gigabytes(mesh_bandwidth(FIGURE_7A, (8, 2), corrected=False).second_link)


def second_link_corrected(study: AtpStudy, subject: str) -> OurValue:
    """Return B2' of DeviceMesh(8, 2) on figure 7(a), in GB/s, with the point-to-point correction."""
    return _gigabytes(mesh_bandwidth(FIGURE_7A, (8, 2)).second_link)


def _gigabytes(rate: Fraction | None) -> OurValue:
    return OurValue(None if rate is None else float(rate / GIGA))


def calibrated_gain(study: AtpStudy, subject: str) -> OurValue:
    """Return by how many percent equation 2 has ATP-4 below ATP-1, with the calibrated bandwidths of IC1."""
    one = CommunicationMatrix("IC1", (MatrixLayer.uniform("PCIe", 8, 1, 1),), CALIBRATED)
    times = {time.mesh_shape: time.total_s for time in rank_meshes(one, MODELS["m1"], LOAD)}
    return OurValue(100 * float(1 - times[2, 4] / times[8, 1]))


def choice(study: AtpStudy, subject: str) -> OurValue:
    """Return d2 of the best mesh (d1, d2) of a machine by equations 2 to 4."""
    return _chosen(rank_meshes(_machine(subject), MODELS["m4"], LOAD))


def choice_printed(study: AtpStudy, subject: str) -> OurValue:
    """Return d2 of the best mesh by equations 2 to 4, with B1' divided by d2 on every layer."""
    return _chosen(rank_meshes(_machine(subject), MODELS["m4"], LOAD, sharing="printed"))


def choice_without_equation_4(study: AtpStudy, subject: str) -> OurValue:
    """Return d2 of the best mesh where bandwidths are not divided as equation 4 says (B = B')."""
    return _chosen(rank_meshes(_machine(subject), MODELS["m4"], LOAD, with_equation_4=False))


def _machine(subject: str) -> CommunicationMatrix:
    """Return the matrix of a machine: for IC4 figure 7(a) as printed, else a view of the catalog's entry."""
    if subject == "ic4":
        return FIGURE_7A
    return communication_matrix(cluster_of(subject, 16 if subject == "ic4-flat" else 8))


def _chosen(times: Sequence[MeshTime]) -> OurValue:
    detail = ", ".join(
        f"ATP-{time.mesh_shape[1]} {float(time.total_s / times[0].total_s):.3f}" for time in times[:3]
    )
    return OurValue(times[0].mesh_shape[1], f"T over the best: {detail}")


@cache
def figure_12_times(machine: str) -> dict[int, dict[int, Fraction]]:
    """Return T of equation 2 over 2 L b s h e / GroupBW, by number of devices and then by i of ATP-i."""
    out = {}
    for size in SIZES:
        ranked = rank_meshes(cluster_of(machine, size), MODELS["m4"], LOAD)
        times = {time.mesh_shape[1]: time.total_s for time in ranked}
        flat = next(time for time in ranked if time.mesh_shape == (size, 1))
        link = flat.bandwidth.first_link
        assert link is not None
        unit = 2 * LOAD.tokens * MODELS["m4"].hidden * 2 / link
        out[size] = {i: seconds / unit for i, seconds in times.items()}
    return out


def _count(values: Sequence[Fraction], rises: bool) -> OurValue:
    count = sum((b > a) if rises else (b < a) for a, b in pairwise(values))
    return OurValue(count, ", ".join(f"{float(value):.3f}" for value in values))


def atp1_rises(study: AtpStudy, subject: str) -> OurValue:
    """Return at how many numbers of devices ATP-1 costs more than on half as many (figure 12)."""
    return _count([times[1] for times in figure_12_times(subject).values()], rises=True)


def atp2_falls(study: AtpStudy, subject: str) -> OurValue:
    """Return at how many numbers of devices, from 8 on, ATP-2 costs less than on half as many (figure 12)."""
    return _count([times[2] for size, times in figure_12_times(subject).items() if size >= 4], rises=False)


def atp4_falls(study: AtpStudy, subject: str) -> OurValue:
    """Return at how many numbers of devices, from 16 on, ATP-4 costs less than on half as many (figure 12)."""
    return _count([times[4] for size, times in figure_12_times(subject).items() if size >= 8], rises=False)


def optimum_falls(study: AtpStudy, subject: str) -> OurValue:
    """Return at how many numbers of devices the best mesh costs less than on half as many (figure 12)."""
    return _count([min(times.values()) for times in figure_12_times(subject).values()], rises=False)


def simulated_optimum(study: AtpStudy, subject: str) -> OurValue:
    """Return at how many sizes the simulated communication is least on the mesh that equation 2 chooses."""
    by_equation = figure_12_times(subject)
    agree, detail = 0, []
    for size in SIMULATED_SIZES:
        simulated = simulated_communication_s(subject, size)
        best = min(simulated, key=lambda i: simulated[i])
        agree += best == min(by_equation[size], key=lambda i: by_equation[size][i])
        detail.append(f"{size}: ATP-{best}")
    return OurValue(agree, ", ".join(detail))


# --- figure 11 ---------------------------------------------------------------------------------------------------


def simulated_choice(study: AtpStudy, subject: str) -> OurValue:
    """Return d2 of the mesh (d1, d2) on which ATP is fastest without chunks, simulated."""
    case = Case.of(subject)
    best = study.best_mesh(case)
    times = {mesh: study.seconds(case, mesh) for mesh in study.meshes(case)}
    detail = ", ".join(f"ATP-{mesh[1]} {seconds / times[best]:.3f}" for mesh, seconds in times.items())
    return OurValue(best[1], f"time over the best: {detail}")


def small_model_degrades(study: AtpStudy, subject: str) -> OurValue:
    """Return by how many percent ATP-2 is faster than ATP-1."""
    case = Case.of(subject)
    flat, two = (study.seconds(case, (case.num_gpus // i, i)) for i in (1, 2))
    return OurValue(_faster(two, flat))


# --- figure 10 ---------------------------------------------------------------------------------------------------


def _faster(ours_s: float, other_s: float) -> float:
    """Return by how many percent something is faster: other time over own time."""
    return 100 * (other_s / ours_s - 1)


def gains(study: AtpStudy, machine: str, reading: str) -> dict[str, float]:
    """Return for each model by how many percent ATP is faster than Megatron-LM.

    ATP runs on the paper's mesh in its best chunks. `reading` is one of `study.READINGS`, or `SERIAL` or
    `OWN_MESH`.
    """
    out = {}
    for model in MODELS:
        case = Case.of(f"{machine}-{model}", reading=reading)
        flat = (case.num_gpus, 1)
        rival_s = study.serial_seconds(case) if reading == SERIAL else study.seconds(case, flat)
        mesh = study.best_mesh(case) if reading == OWN_MESH else paper_mesh(case)
        out[model] = _faster(study.chunked_seconds(case, mesh), rival_s)
    return out


def _gain_row(
    which: Callable[[dict[str, float]], float], reading: str
) -> Callable[[AtpStudy, str], OurValue]:
    def value(study: AtpStudy, subject: str) -> OurValue:
        by_model = gains(study, subject, reading)
        return OurValue(
            which(by_model), ", ".join(f"{model} {gain:+.1f}" for model, gain in by_model.items())
        )

    return value


def _least(by_model: dict[str, float]) -> float:
    return min(by_model.values())


def _largest(by_model: dict[str, float]) -> float:
    return max(by_model.values())


def _of_m4(by_model: dict[str, float]) -> float:
    return by_model["m4"]


def _megatron_over_2d(strategy: str) -> Callable[[AtpStudy, str], OurValue]:
    def value(study: AtpStudy, subject: str) -> OurValue:
        leads = {}
        for model in MODELS:
            case = Case.of(f"{subject}-{model}")
            flat_s = study.seconds(case, (case.num_gpus, 1))
            leads[model] = _faster(flat_s, study.rival_2d_seconds(case, strategy))
        detail = ", ".join(f"{model} {lead:+.1f}" for model, lead in leads.items())
        return OurValue(min(leads.values()), detail)

    return value


def _atp_over_2d(strategy: str, turned: bool) -> Callable[[AtpStudy, str], OurValue]:
    def value(study: AtpStudy, subject: str) -> OurValue:
        case = Case.of(subject)
        own_s = study.chunked_seconds(case, paper_mesh(case))
        rival_s = study.rival_2d_seconds(case, strategy)
        return OurValue(_faster(rival_s, own_s) if turned else _faster(own_s, rival_s))

    return value


def _2d_fades(strategy: str) -> Callable[[AtpStudy, str], OurValue]:
    def value(study: AtpStudy, subject: str) -> OurValue:
        leads = []
        for model in ("m1", "m4"):
            case = Case.of(f"{subject}-{model}")
            flat_s = study.seconds(case, (case.num_gpus, 1))
            leads.append(_faster(study.rival_2d_seconds(case, strategy), flat_s))
        return OurValue(leads[0] - leads[1], f"{leads[0]:+.1f} and {leads[1]:+.1f}")

    return value


# --- table 3 -----------------------------------------------------------------------------------------------------


def _table3(chunks: int, reading: str) -> Callable[[AtpStudy, str], OurValue]:
    def value(study: AtpStudy, subject: str) -> OurValue:
        case = Case.of(subject, 8, reading)
        mesh = paper_mesh(case)
        return OurValue(study.tflops(case, study.seconds(case, mesh, chunks)), f"ATP-{mesh[1]}")

    return value


def _chunk_gain(chunks: int, reading: str) -> Callable[[AtpStudy, str], OurValue]:
    def value(study: AtpStudy, subject: str) -> OurValue:
        case = Case.of(subject, 8, reading)
        mesh = paper_mesh(case)
        return OurValue(
            _faster(study.seconds(case, mesh, chunks), study.seconds(case, mesh)), f"ATP-{mesh[1]}"
        )

    return value


OURS: dict[str, Callable[[AtpStudy, str], OurValue]] = {
    "table2": table2,
    "first_link": first_link,
    "second_link": second_link,
    "second_link_corrected": second_link_corrected,
    "calibrated_gain": calibrated_gain,
    "choice": choice,
    "choice_flat": choice,
    "choice_printed": choice_printed,
    "choice_without_equation_4": choice_without_equation_4,
    "atp1_rises": atp1_rises,
    "atp2_falls": atp2_falls,
    "atp4_falls": atp4_falls,
    "optimum_falls": optimum_falls,
    "simulated_optimum": simulated_optimum,
    "simulated_choice": simulated_choice,
    "small_model_degrades": small_model_degrades,
}
for _suffix, _strategy in (("", SUMMA), ("_25d", DEPTH), ("_collective", COLLECTIVE)):
    OURS[f"megatron_over_2d{_suffix}"] = _megatron_over_2d(_strategy)
    OURS[f"atp_over_2d{_suffix}"] = _atp_over_2d(_strategy, turned=False)
    OURS[f"2d_over_atp_small{_suffix}"] = _atp_over_2d(_strategy, turned=True)
    OURS[f"2d_fades{_suffix}"] = _2d_fades(_strategy)
for _reading in (*READINGS, SERIAL, OWN_MESH):
    _suffix = f"_{_reading}" if _reading else ""
    OURS[f"least_gain{_suffix}"] = _gain_row(_least, _reading)
    OURS[f"largest_gain{_suffix}"] = _gain_row(_largest, _reading)
    OURS[f"gain_of_m4{_suffix}"] = _gain_row(_of_m4, _reading)
for _reading in (*READINGS, FITTED):
    _suffix = f"_{_reading}" if _reading else ""
    for _chunks in CHUNKS:
        _name = "baseline" if _chunks == 1 else f"chunk{_chunks}"
        if _reading != "one_stream":
            OURS[f"table3_{_name}{_suffix}"] = _table3(_chunks, _reading)
        if _chunks > 1:
            OURS[f"gain_of_{_name}{_suffix}"] = _chunk_gain(_chunks, _reading)
OURS["table3_baseline_cal"] = _table3(1, FITTED)

rows = PaperRows(PAPER, OURS, NAMED[RATES])


def findings() -> tuple[str, ...]:
    """Return what the rows say together."""
    return (
        "One reading gives all three printed choices: equation 2 with B = B', equation 4 left out, and IC4 as one "
        "layer. Section 5.4 has equation 4 in its formula, and by that IC2 and IC3 choose ATP-2.",
        "Equation 3 divides B1' by d2 where d2 groups leave a rank together. Figure 7(a) and section 5.4 agree "
        "only if fewer groups leave a rank of fewer devices: divided everywhere, ATP-1 is best on IC5, too.",
        "Figure 7(a) counts both directions of NVLink (200 and 600 GB/s) and one of InfiniBand (25 GB/s). An "
        "all-reduce uses both at once, so that the catalog has one direction everywhere.",
        "The calibrated bandwidths of IC1 say that one flow crosses its root at 1.7 GB/s and four at 4.8 GB/s "
        "together. No group bandwidth says both; the catalog's tree does, by a limit for one flow.",
        "These bandwidths allow twice the throughput of table 3 if sums have 2 bytes an element; with 4 bytes "
        "ATP-4 comes within 4 to 15 % of it.",
        "By equation 2 ATP-4 is 83 % faster than ATP-1 on IC1 where only communication counts. The printed 37 to "
        "64 % end to end are less, ours more: chunks hide sums along rows behind those along columns. With one "
        "collective at a time, as on one NCCL stream, chunks gain the printed 1 to 3 % there.",
        "Simulated communication of a layer on IC6 is equation 2 to three digits.",
    )
