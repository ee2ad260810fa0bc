"""What AlpaComm says of its end-to-end runs, its overlap ablation and its memory, computed here, row by row.

Zhuang et al.: On Optimizing the Communication of Model Parallelism (MLSys '23), sections 4, 5.2 and 5.3.2.
"""

from __future__ import annotations

from collections.abc import Callable

from meshweave_studies.alpacomm.models import ALL_CASES, CASES
from meshweave_studies.alpacomm.study import AlpaCommStudy
from meshweave_studies.alpacomm.training import ALL_GATHER, BOUND, BROADCAST, DELAYED, EAGER, OVERLAP
from meshweave_studies.verdict import OurValue

FEW = 4
"""Micro-batches of the ablation's small batch; the paper does not say how many."""
SMALLER, LARGER, SINGLE = "U-Transformer 1B", "U-Transformer 2.1B", "U-Transformer 2.1B, fp32"
HIDDEN, SEQUENCE, ROWS, DEGREE = 12288, 1024, 2, 8
"""Of table 1: one layer of GPT-3, a micro-batch of two sequences, tensor parallelism of eight."""


def end_to_end(study: AlpaCommStudy, subject: str) -> OurValue:
    """Return the throughput of eager-1F1B over that of all-gathers without overlap (figure 7)."""
    training = study.training
    detail = ", ".join(
        f"{name} {training.faster(subject, name, ALL_GATHER):.3f}"
        for name in (BROADCAST, OVERLAP, DELAYED, BOUND)
    )
    return OurValue(training.faster(subject, EAGER, ALL_GATHER), detail)


def share_of_bound(study: AlpaCommStudy, subject: str) -> OurValue:
    """Return the share of the bound's throughput that eager-1F1B reaches, in percent (figure 7).

    `subject` is a case; for any other text it is the lowest share of all cases of table 3.
    """
    if subject in ALL_CASES:
        return OurValue(study.training.share_of_bound(subject))
    lowest = min(CASES, key=study.training.share_of_bound)
    return OurValue(study.training.share_of_bound(lowest), lowest)


def closer(study: AlpaCommStudy, subject: str) -> OurValue:
    """Return the share of its bound that one U-Transformer reaches, over that of another (section 5.2).

    `subject` is "larger" for the larger over the smaller one, else it is the one in fp32 over that in fp16.
    """
    training = study.training
    pair = (LARGER, SMALLER) if subject == "larger" else (SINGLE, LARGER)
    return OurValue(training.share_of_bound(pair[0]) / training.share_of_bound(pair[1]))


def signal_gain(study: AlpaCommStudy, subject: str) -> OurValue:
    """Return the throughput of the bound over that of all-gathers (section 4).

    `subject` is a case, or "smallest" or "largest" of all cases of table 3.
    """
    if subject in ALL_CASES:
        return OurValue(study.training.faster(subject, BOUND, ALL_GATHER))
    gains = {case: study.training.faster(case, BOUND, ALL_GATHER) for case in CASES}
    case = (min if subject == "smallest" else max)(gains, key=lambda name: gains[name])
    return OurValue(gains[case], case)


def overlap_gain(study: AlpaCommStudy, subject: str) -> OurValue:
    """Return the throughput of 1F1B with overlap over that of broadcasts without (figure 9)."""
    return OurValue(study.training.faster(subject, OVERLAP, BROADCAST))


def eager_gain(study: AlpaCommStudy, subject: str) -> OurValue:
    """Return the throughput of eager-1F1B over that of 1F1B with overlap (figure 9)."""
    return OurValue(study.training.faster(subject, EAGER, OVERLAP))


def delay_gain(study: AlpaCommStudy, subject: str) -> OurValue:
    """Return the throughput with delayed weight gradients over that of eager-1F1B (section 4)."""
    delay = study.training.step(subject, DELAYED).delay
    return OurValue(
        study.training.faster(subject, DELAYED, EAGER), f"by {delay} micro-batch{'es' * (delay != 1)}"
    )


SCANNED = (2, 3, 8, 16)
"""Numbers of micro-batches beside the few of figure 9, which the paper does not say."""


def few_micro_batches(study: AlpaCommStudy, subject: str) -> OurValue:
    """Return by how many percent 1F1B with overlap is slower than eager-1F1B with few micro-batches (figure 9)."""
    slower = {
        count: 100 * (1 - study.training.faster(subject, OVERLAP, EAGER, count)) for count in (*SCANNED, FEW)
    }
    others = ", ".join(f"{count}: {slower[count]:.1f} %" for count in SCANNED)
    return OurValue(slower[FEW], f"{FEW} micro-batches; {others}")


def more_stashes(study: AlpaCommStudy, subject: str) -> OurValue:
    """Return the most stashes that eager-1F1B keeps on a stage beyond those of 1F1B (section 4)."""
    one_by_one, eager = (study.training.step(subject, name).stash_bytes for name in (OVERLAP, EAGER))
    sizes = one_by_one[0] / 2, one_by_one[1]
    stages = zip(one_by_one, eager, sizes, strict=True)
    return OurValue(max((more - less) / size for less, more, size in stages))


def table_1(study: AlpaCommStudy, subject: str) -> OurValue:
    """Return an entry of table 1, which follows from its formulas alone."""
    per_gpu = HIDDEN**2 // DEGREE
    activations = ROWS * SEQUENCE * HIDDEN
    values = {
        "parameters": 12 * per_gpu / 2**20,
        "optimizer states": 24 * per_gpu / 2**20,
        "activations": activations / 2**20,
        "weights and optimizer, GiB": round(14 * 12 * per_gpu / 2**30, 2),
        "activations, MiB": 2 * activations / 2**20,
    }
    return OurValue(values[subject])


OURS: dict[str, Callable[[AlpaCommStudy, str], OurValue]] = {
    "end_to_end": end_to_end,
    "share_of_bound": share_of_bound,
    "share_of_bound_goal": share_of_bound,
    "closer": closer,
    "signal_gain": signal_gain,
    "signal_gain_fitted": signal_gain,
    "overlap_gain": overlap_gain,
    "eager_gain": eager_gain,
    "few_micro_batches": few_micro_batches,
    "delay_gain": delay_gain,
    "more_stashes": more_stashes,
    "table_1": table_1,
}
"""For each id of the file the function that computes it."""
