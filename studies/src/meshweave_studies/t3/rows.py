"""What T3's text says of its figures, row by row of `published/t3.toml`, beside ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import exp, log
from statistics import geometric_mean, mean

from meshweave_studies.gpu.kernels import Source
from meshweave_studies.published import PaperRows, published_rows
from meshweave_studies.t3.end_to_end import BASES, Basis, Phase
from meshweave_studies.t3.groups import (
    BIG,
    DOUBLED,
    GENERATED,
    SHARED,
    SMALL,
    all_times,
    geomean_gain,
    iterations,
    twice_gain,
    twice_jobs,
)
from meshweave_studies.t3.models import LARGE, LARGE_DEGREE, STUDIED, SubLayer, sub_layer_of, sub_layers
from meshweave_studies.t3.readings import READINGS, TABLE_1
from meshweave_studies.t3.study import (
    FUSED_ALONE,
    GPU,
    GPU_2X,
    SEQUENTIAL,
    SIZES_MB,
    SPLITS,
    T3,
    T3_MCA,
    GpuJob,
    T3Study,
    last_sum_s,
    ring_job,
    ring_times,
    shared_times,
    split_job,
)
from meshweave_studies.verdict import HOLDS, NEAR, JudgedRow, OurValue

PAPER = "t3"
CONFIGURATIONS = {"ideal_overlap": "ideal", "t3": "t3", "mca": "mca"}


def _statistic(gains: dict[SubLayer, float], subject: str) -> OurValue:
    """Return the geomean or the largest of gains, and whose it is."""
    if subject == "geomean":
        return OurValue(geomean_gain(gains.values()))
    largest = max(gains, key=gains.__getitem__)
    return OurValue(gains[largest], str(largest))


# --- sub-layers --------------------------------------------------------------------------------------------------


def gain(study: T3Study, subject: str, *, configuration: str, layers: Sequence[SubLayer]) -> OurValue:
    """Return a configuration's gain over sequential: the geomean for subject "geomean", else the largest."""
    times = all_times(study, layers)
    return _statistic({layer: one.gain(configuration) for layer, one in times.items()}, subject)


def ideal_case(study: T3Study, subject: str) -> OurValue:
    """Return the gain of ideal overlap in a sub-layer."""
    return OurValue(study.times(sub_layer_of(subject)).gain("ideal"))


def mca_over_t3(study: T3Study, subject: str) -> OurValue:
    """Return T3-MCA's gain over T3: the geomean for subject "geomean", else the largest."""
    times = all_times(study, SMALL)
    return _statistic({layer: 100 * (one.t3 / one.mca - 1) for layer, one in times.items()}, subject)


def points_off(study: T3Study, subject: str) -> OurValue:
    """Return by how many percentage points our geomean differs from the published one."""
    name = {"T3": "t3", "T3-MCA": "mca"}.get(subject, "large")
    published = next(row for row in published_rows(PAPER) if row.id == name).values["geomean"]
    ours = OURS[name](study, "geomean").value
    assert ours is not None
    return OurValue(abs(ours - published))


def order(study: T3Study, subject: str) -> OurValue:
    """Return the number of sub-layers whose configurations stand in another order than sequential, T3, T3-MCA."""
    times = all_times(study, SMALL)
    wrong = [str(layer) for layer, one in times.items() if not one.mca <= one.t3 < one.sequential]
    return OurValue(len(wrong), "; ".join(wrong))


def near_memory(study: T3Study, subject: str) -> OurValue:
    """Return the geomean gain of near-memory reduction in a reduce-scatter at the degree of subject "TP n"."""
    degree = int(subject.removeprefix("TP "))
    times = all_times(study, sub_layers(*STUDIED, degrees=(degree,)))
    return OurValue(geomean_gain(100 * (one.reduce_scatter / one.near_memory - 1) for one in times.values()))


def near_memory_gain(study: T3Study, subject: str) -> OurValue:
    """Return the further gain of ideal overlap by a near-memory reduce-scatter: geomean, or else the largest."""
    times = all_times(study, SMALL)
    gains = {layer: 100 * (one.ideal / one.ideal_near_memory - 1) for layer, one in times.items()}
    return _statistic(gains, subject)


def op_close(study: T3Study, subject: str) -> OurValue:
    """Return the smallest speed of T3 in an OP, in percent of ideal overlap's."""
    times = all_times(study, sub_layers(*STUDIED, names=("OP",)))
    worst = min(times, key=lambda layer: times[layer].ideal / times[layer].t3)
    return OurValue(100 * times[worst].ideal / times[worst].t3, str(worst))


def op_exceeds(study: T3Study, subject: str) -> OurValue:
    """Return the number of OPs in which T3 is faster than ideal overlap."""
    times = all_times(study, sub_layers(*STUDIED, names=("OP",)))
    faster = [str(layer) for layer, one in times.items() if one.t3 < one.ideal]
    return OurValue(len(faster), "; ".join(faster))


def fc_far(study: T3Study, subject: str) -> OurValue:
    """Return by how many percent ideal overlap is faster than T3 in FC-1 and FC-2: geomean, or else the most."""
    times = all_times(study, sub_layers(*STUDIED, names=("FC-2", "FC-1")))
    return _statistic({layer: 100 * (one.t3 / one.ideal - 1) for layer, one in times.items()}, subject)


def mca_far(study: T3Study, subject: str) -> OurValue:
    """Return by how many points more T3-MCA is slower than ideal overlap in a sub-layer than on average."""
    times = all_times(study, SMALL)
    lost = {str(layer): 100 * (one.mca / one.ideal - 1) for layer, one in times.items()}
    return OurValue(lost[subject] - mean(lost.values()), f"{lost[subject]:.1f} % there")


# --- compute units, reduce-scatter -------------------------------------------------------------------------------


def split_value(study: T3Study, subject: str, *, value: str) -> OurValue:
    """Return the geomean over figure 6's sub-layers under the split `subject`, one of `SPLITS`.

    `value` is "product" or "all-reduce" for its slowdown in percent, "potential" for the potential speed-up.
    """
    study.prefetch(split_job(layer, split) for layer in SHARED for split in ("ideal", *SPLITS))
    shared = [shared_times(study, layer, subject) for layer in SHARED]
    if value == "potential":
        return OurValue(geometric_mean([one.potential for one in shared]))
    if value == "product":
        return OurValue(geomean_gain(100 * (one.split_product / one.product - 1) for one in shared))
    return OurValue(geomean_gain(100 * (one.split_all_reduce / one.all_reduce - 1) for one in shared))


def ring_error(study: T3Study, subject: str, *, with_sum: bool = False) -> OurValue:
    """Return the geomean distance of simulated reduce-scatters from bandwidth theory, in percent.

    `with_sum` adds the last part's sum to theory.
    """
    study.prefetch(map(ring_job, SIZES_MB))
    distances = {}
    for size in SIZES_MB:
        theory, simulated = ring_times(study, size)
        distances[size] = abs(log(simulated / (theory + with_sum * last_sum_s(study, size))))
    worst = max(distances, key=distances.__getitem__)
    most = 100 * (exp(distances[worst]) - 1)
    return OurValue(100 * (exp(mean(distances.values())) - 1), f"{most:.1f} % at {worst} MB")


# --- memory ------------------------------------------------------------------------------------------------------


def product_slowed(study: T3Study, subject: str) -> OurValue:
    """Return by how many percent T3's product takes longer than the product alone."""
    product = sub_layer_of(subject).product
    jobs = [GpuJob(product, what) for what in (SEQUENTIAL, T3, T3_MCA, FUSED_ALONE)]
    study.prefetch(jobs)
    alone, fused, mca, silent = (study.run(job).kernel_ps("product") for job in jobs)
    beside = (
        f"T3-MCA {100 * (mca / alone - 1):+.1f} %, without communication {100 * (silent / alone - 1):+.1f} %"
    )
    return OurValue(100 * (fused / alone - 1), beside)


def traffic(study: T3Study, subject: str) -> OurValue:
    """Return by how many percent T3-MCA has fewer DRAM accesses than sequential, on average or at most."""
    changes = {
        str(layer): 100 * (1 - sum(after) / sum(before)) for layer, before, after in _traffics(study, SMALL)
    }
    if subject == "mean":
        return OurValue(mean(changes.values()))
    largest = max(changes, key=changes.__getitem__)
    return OurValue(changes[largest], largest)


def traffic_ratio(study: T3Study, subject: str, *, sources: tuple[Source, ...], fewer: bool) -> OurValue:
    """Return the geomean of accesses by some sources, sequential over T3-MCA, or how many percent fewer."""
    degrees = () if subject == "geomean" else (int(subject.removeprefix("TP ")),)
    ratios = [
        sum(before[source] for source in sources) / sum(after[source] for source in sources)
        for _, before, after in _traffics(study, sub_layers(*STUDIED, degrees=degrees))
    ]
    whole = geometric_mean(ratios)
    return OurValue(100 * (1 - 1 / whole) if fewer else whole)


def _traffics(study: T3Study, layers: Sequence[SubLayer]) -> list[tuple[SubLayer, list[int], list[int]]]:
    """Return (sub-layer, bytes by source sequentially, bytes by source with T3-MCA)."""
    all_times(study, layers)
    out = []
    for layer in layers:
        before, after = (study.traffic(layer, what) for what in (SEQUENTIAL, T3_MCA))
        out.append((layer, [before[source] for source in Source], [after[source] for source in Source]))
    return out


# --- end to end, larger and faster -------------------------------------------------------------------------------


def end_to_end(study: T3Study, subject: str, *, phase: Phase, basis: Basis) -> OurValue:
    """Return the geomean or maximum of the gain of T3 or T3-MCA over iterations of the studied models."""
    configuration, statistic = subject.split(", ")
    gains = {
        name: one.gain("t3" if configuration == "T3" else "mca")
        for name, one in iterations(study, STUDIED, phase, basis).items()
    }
    if statistic == "geomean":
        return OurValue(geomean_gain(gains.values()))
    largest = max(gains, key=gains.__getitem__)
    return OurValue(gains[largest], largest)


def large_end_to_end(study: T3Study, subject: str, *, basis: Basis) -> OurValue:
    """Return the largest gain of T3-MCA over iterations of the large models."""
    phase: Phase = "training" if subject == "training" else "prompt"
    gains = {
        name: one.gain("mca") for name, one in iterations(study, LARGE, phase, basis, (LARGE_DEGREE,)).items()
    }
    largest = max(gains, key=gains.__getitem__)
    return OurValue(gains[largest], largest)


def communication_share(
    study: T3Study, subject: str, *, basis: Basis, faster_products: float = 1
) -> OurValue:
    """Return the largest share of collectives in training and prompt, in percent.

    Args:
        subject: a model, or "very large" for the large ones, at the degrees of the paper.
        faster_products: products are so many times as fast as simulated.
    """
    models, degrees = (LARGE, (LARGE_DEGREE,)) if subject == "very large" else ((subject,), ())
    phases: tuple[Phase, ...] = ("training", "prompt")
    shares = {
        f"{name}, {phase}": one.share_with_faster_products(faster_products)
        for phase in phases
        for name, one in iterations(study, models, phase, basis, degrees).items()
    }
    largest = max(shares, key=shares.__getitem__)
    return OurValue(shares[largest], largest)


def twice(study: T3Study, subject: str, *, name: str, sign: int) -> OurValue:
    """Return by how many points the mean gain of T3-MCA grows (sign 1) or falls (-1) with twice the compute."""
    study.prefetch(twice_jobs())
    before, after = (mean(twice_gain(study, layer, gpu) for layer in DOUBLED[name]) for gpu in (GPU, GPU_2X))
    return OurValue(sign * (after - before), f"{before:.1f} % and {after:.1f} %")


def generation(study: T3Study, subject: str) -> OurValue:
    """Return the speed of T3-MCA in a sub-layer with one token a sequence, in percent of ideal overlap's."""
    layer = GENERATED[subject.split(" TP ")[0]]
    one = study.times(layer)
    parts = f"product {1e6 * one.product:.0f} us, reduce-scatter {1e6 * one.reduce_scatter:.0f} us"
    return OurValue(
        100 * one.ideal / one.mca, f"{layer.tokens} tokens, {parts}, {one.gain('mca'):.1f} % faster"
    )


# --- all rows ----------------------------------------------------------------------------------------------------

_PRODUCT = (Source.PRODUCT_READ,)
_WRITES = (Source.PRODUCT_WRITE, Source.REDUCE_SCATTER_WRITE)
_PHASES: tuple[Phase, ...] = ("training", "prompt")
OURS: dict[str, Callable[[T3Study, str], OurValue]] = {
    **{row: partial(gain, configuration=of, layers=SMALL) for row, of in CONFIGURATIONS.items()},
    "ideal_case": ideal_case,
    "mca_over_t3": mca_over_t3,
    "points_off": points_off,
    "order": order,
    "near_memory": near_memory,
    "near_memory_gain": near_memory_gain,
    "op_close": op_close,
    "op_exceeds": op_exceeds,
    "fc_far": fc_far,
    "mca_far": mca_far,
    "split_all_reduce": partial(split_value, value="all-reduce"),
    "split_product": partial(split_value, value="product"),
    "split_speedup": partial(split_value, value="potential"),
    "ring_error": ring_error,
    "ring_error_with_sum": partial(ring_error, with_sum=True),
    "product_slowed": product_slowed,
    "traffic": traffic,
    "scatter_reads": partial(traffic_ratio, sources=(Source.REDUCE_SCATTER_READ,), fewer=False),
    "writes": partial(traffic_ratio, sources=_WRITES, fewer=True),
    "product_reads": partial(traffic_ratio, sources=_PRODUCT, fewer=False),
    **{f"communication_share_{basis}": partial(communication_share, basis=basis) for basis in BASES},
    **{
        f"faster_products_{basis}": partial(communication_share, basis=basis, faster_products=2)
        for basis in BASES
    },
    **{
        f"{phase}_{basis}": partial(end_to_end, phase=phase, basis=basis)
        for phase in _PHASES
        for basis in BASES
    },
    "large": partial(gain, configuration="mca", layers=BIG),
    **{f"large_end_to_end_{basis}": partial(large_end_to_end, basis=basis) for basis in BASES},
    "twice_fc2": partial(twice, name="FC-2", sign=1),
    "twice_op": partial(twice, name="OP", sign=-1),
    "generation": generation,
}
"""For each id of the file the function that computes it."""


def findings(judged: Sequence[JudgedRow] = ()) -> tuple[str, ...]:
    """Return what to know of all rows, and how many of those end to end hold by each reading."""
    return (
        *_readings_beside(judged),
        "Ideal overlap is the row that the machine was checked against once; its constants and tiles were "
        "committed before any other row was computed. Mechanisms were added after rows had been seen (decision "
        "0050).",
        "Figures 16 and 18 have 16 sub-layers: OP, FC-2, FC-1 and IP of Mega-GPT-2 and T-NLG at TP 8 and 16. "
        "Larger models are cut along the hidden dimension, since 2048 tokens over 32 ranks are half a tile; at TP "
        "64 they are ours alone.",
        "End to end, counted: all besides the sliced sub-layers by count of operations; stated: 42.5 % of the "
        "time is besides products and all-reduces (section 6.3).",
        "The paper's 13 % of T3-MCA over T3 does not follow from its 30 % and 20 % over sequential, 8 %.",
    )


def _readings_beside(judged: Sequence[JudgedRow]) -> list[str]:
    """Return a sentence about how many rows hold and are near by each reading; none without such rows."""
    scores = []
    for basis in BASES:
        verdicts = [one.verdict for one in judged if one.id.endswith(f"_{basis}")]
        holds, near = verdicts.count(HOLDS), verdicts.count(NEAR)
        if verdicts:
            scores.append(f"{basis} {holds} hold and {near} are near of {len(verdicts)}")
    return [f"End to end, by reading: {'; '.join(scores)}."] if scores else []


rows = PaperRows(PAPER, OURS, READINGS[TABLE_1])
