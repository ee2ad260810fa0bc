"""What Zero Bubble's table 4 says, computed here, row by row.

Qi, Wan, Huang, Lin: Zero Bubble Pipeline Parallelism (arXiv 2401.10241).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import combinations
from statistics import mean

from meshweave_studies.published import PaperRows, published_rows
from meshweave_studies.verdict import OurValue
from meshweave_studies.zero_bubble.models import MODELS
from meshweave_studies.zero_bubble.readings import READINGS
from meshweave_studies.zero_bubble.study import (
    INTERLEAVED,
    ONE_F_ONE_B,
    ZB_1P,
    ZB_2P,
    TrainingRun,
    ZeroBubbleStudy,
)

PAPER = "zero-bubble"
GAINS = {"zb_1p": ZB_1P, "zb_2p": ZB_2P, "interleaved": INTERLEAVED}
MEMORY = {"memory_1f1b": ONE_F_ONE_B, **{f"memory_{name}": schedule for name, schedule in GAINS.items()}}
MEMORY_READING = "flops"
"""The reading whose schedules give the memory rows."""
APART = 1.05
"""Two published memories that differ by less than this factor have no order."""


def parse_subject(subject: str) -> tuple[str, int]:
    """Return the model and the micro-batches of a subject such as "1.5B, 24"."""
    model, micro_batches = subject.split(", ")
    return model, int(micro_batches)


def gain(study: ZeroBubbleStudy, subject: str, *, schedule: str, reading: str) -> OurValue:
    """Return the throughput of a schedule over that of 1F1B (table 4)."""
    model, count = parse_subject(subject)
    return OurValue(study.gain(TrainingRun(model, schedule, count), reading))


def mean_error(study: ZeroBubbleStudy, subject: str, *, reading: str) -> OurValue:
    """Return the mean absolute relative difference of our gains from the published ones, in percent."""
    errors: dict[str, list[float]] = {}
    for row in published_rows(PAPER):
        for name, schedule in GAINS.items():
            if row.id == f"{name}_{reading}":
                for of, published in row.values.items():
                    ours = gain(study, of, schedule=schedule, reading=reading).value
                    assert ours is not None
                    errors.setdefault(schedule, []).append(100 * (ours / published - 1))
    every = [error for of_schedule in errors.values() for error in of_schedule]
    detail = ", ".join(f"{schedule} {mean(of):+.1f} on average" for schedule, of in errors.items())
    return OurValue(mean(map(abs, every)), f"{detail}; worst {max(every, key=abs):+.1f}")


def memory(study: ZeroBubbleStudy, subject: str, *, schedule: str) -> OurValue:
    """Return the peak memory of a GPU in GB (table 4), with as few micro-batches as the model has a row for."""
    run = TrainingRun(subject, schedule, fewest_micro_batches(subject))
    return OurValue(study.step(run, MEMORY_READING).peak_bytes / 1e9)


def fewest_micro_batches(model: str) -> int:
    """Return the fewest micro-batches of a model in table 4, three a GPU; the memory does not depend on more."""
    return 3 * MODELS[model].gpus


def memory_order(study: ZeroBubbleStudy, subject: str) -> OurValue:
    """Return how many pairs of schedules have their memory in another order than the published ones."""
    published = {row.id: row.values for row in published_rows(PAPER) if row.id in MEMORY}
    pairs, wrong = 0, []
    for first, second in combinations(MEMORY, 2):
        low, high = sorted((first, second), key=lambda name: published[name].get(subject, 0.0))
        if not published[low].get(subject) or published[high][subject] <= APART * published[low][subject]:
            continue
        pairs += 1
        below, above = (memory(study, subject, schedule=MEMORY[name]).value for name in (low, high))
        assert below is not None and above is not None
        if below >= above:
            wrong.append(f"{MEMORY[low]} and {MEMORY[high]}")
    return OurValue(len(wrong), f"of {pairs}" + (f": {', '.join(wrong)}" if wrong else ""))


def findings() -> tuple[str, ...]:
    """Return what to know of all rows."""
    return (
        "Readings: flops is FLOPs at one rate, kernels is products by the A100's constants with the rest as a "
        "roofline, profiled is the authors' own times of parts and transfers, quoted from memory.",
        "A step of 1F1B and 1F1B-I ends with a synchronous optimizer step; ZB-1p and ZB-2p validate after it, so "
        "that each GPU goes on alone.",
        "Shapes of the models, the profile and the rows of table 4 were not read verbatim.",
    )


OURS: dict[str, Callable[[ZeroBubbleStudy, str], OurValue]] = {
    **{
        f"{name}_{reading}": partial(gain, schedule=schedule, reading=reading)
        for name, schedule in GAINS.items()
        for reading in READINGS
    },
    **{f"mean_error_{reading}": partial(mean_error, reading=reading) for reading in READINGS},
    **{name: partial(memory, schedule=schedule) for name, schedule in MEMORY.items()},
    "memory_order": memory_order,
}
"""For each id of the file the function that computes it."""

rows = PaperRows(PAPER, OURS)
