"""Predict published training runs, and how far predictions are off: by row, by source, and over all sources."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from meshweave.algorithms.step import Parallelism, SoftwareStack, Step, memory_of, step_of
from meshweave.base.errors import MeshweaveError
from meshweave.base.progress import Progress, no_progress
from meshweave_studies.training_runs.cases import RunCase, case_of
from meshweave_studies.training_runs.figures import published_bytes, published_seconds
from meshweave_studies.training_runs.models import NoPredictionError
from meshweave_studies.training_runs.rows import PublishedRun
from meshweave_studies.training_runs.split import is_fitted_run

TIME_GOAL, ROW_GOAL, ROWS_GOAL, MEMORY_GOAL = 0.08, 0.20, 0.90, 0.08
LOW_TIME_GOAL, LOW_ROWS_GOAL = 0.10, 0.80
"""Goals: the median over sources of each one's median error; a row's error, and the share of rows within it.

Those of rows below 16 bits are the two `LOW` ones.
"""


@dataclass(frozen=True)
class ScoredRun:
    """A row beside its prediction.

    Attributes:
        published, predicted: the figure in the unit of `metric`; predicted is None where there is a `reason`.
        published_gb, predicted_gb: memory of a chip in GB of 1e9, where the row states it.
        counts: whether the row counts; False for the second figure of a run that counts elsewhere.
        fitted: whether constants were fitted on the run's family.
        choice: the parallelism of the prediction, in short.
        parts: seconds of the predicted step by part.
        chip, num_chips: those of the predicted cluster.
        stack: the software stack of the prediction.
        precision: the recipe of products below 16 bits; "" where they run in 16. Such rows are scored apart.
        experts: whether the model routes tokens to experts.
        mfu: utilization (0 to 1) that the published figure is, by the FLOPs and the pairs of tokens of a plan.
    """

    line: int
    source: str
    model: str
    chips: str
    metric: str
    published: float
    predicted: float | None = None
    published_gb: float | None = None
    predicted_gb: float | None = None
    counts: bool = True
    reason: str = ""
    fitted: bool = False
    choice: str = ""
    parts: tuple[tuple[str, float], ...] = ()
    chip: str = ""
    num_chips: int = 0
    stack: str = ""
    precision: str = ""
    experts: bool = False
    mfu: float = 0.0

    @property
    def error(self) -> float | None:
        """Return the relative error of the figure."""
        return None if self.predicted is None else self.predicted / self.published - 1

    @property
    def memory_error(self) -> float | None:
        """Return the relative error of the memory."""
        if self.predicted_gb is None or self.published_gb is None:
            return None
        return self.predicted_gb / self.published_gb - 1

    def to_json(self) -> dict[str, Any]:
        """Return the row as plain values."""
        errors = {"error": _rounded(self.error), "memory_error": _rounded(self.memory_error)}
        return {**asdict(self), "parts": dict(self.parts), **errors}


@dataclass(frozen=True)
class SourceScore:
    """The errors of a source's rows; None where none of them could be predicted.

    Attributes:
        predicted: the number of rows that are predicted and count.
        median, worst: of the absolute relative errors; `bias` is the median of the signed ones.
        num_within: the number of rows with an error of at most `ROW_GOAL`.
    """

    source: str
    rows: int
    predicted: int
    median: float | None = None
    worst: float | None = None
    num_within: int = 0
    bias: float | None = None
    memory_rows: int = 0
    memory_median: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the score as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Summary:
    """The score over all sources.

    Attributes:
        sources: the number of sources with predictions.
        rows: the number of rows that are predicted and count.
        median: the median over sources of their median errors; `memory_median` that of memory.
        within: the share of these rows with an error of at most `ROW_GOAL`.
    """

    sources: int
    rows: int
    median: float | None
    within: float | None
    memory_rows: int
    memory_median: float | None

    def to_json(self) -> dict[str, Any]:
        """Return the score as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Prediction:
    """The predicted step of a run.

    Attributes:
        step: at the choice of parallelism that was taken.
        seconds, num_bytes: of a step, and of a chip's memory, with the run's share of recomputed layers.
    """

    step: Step
    seconds: float
    num_bytes: int


def predict(case: RunCase) -> Prediction:
    """Return the predicted step of a run: of open choices the fastest that fits in memory, else the fastest.

    Raises:
        NoPredictionError: none of them can be laid out.
    """
    steps, reason = [], ""
    for choice in case.choices:
        try:
            steps.append(step_of(case.problem, choice))
        except MeshweaveError as error:
            reason = reason or str(error)
    if not steps:
        raise NoPredictionError(reason)
    step = min(steps, key=lambda step: (len(steps) > 1 and not step.fits(), step.time_s))
    return prediction_of(case, step)


def prediction_of(case: RunCase, step: Step) -> Prediction:
    """Return the prediction of a run by one of its steps, with the run's share of recomputed layers."""
    share, seconds = case.recomputed_share, step.time_s
    if share < 1:
        kept = step_of(case.problem, replace(step.parallelism, recompute="none"))
        seconds = share * seconds + (1 - share) * kept.time_s
    return Prediction(step, seconds, run_bytes(case, step.parallelism))


def run_bytes(case: RunCase, parallelism: Parallelism) -> int:
    """Return the memory of a chip at one of a run's choices, of the rank whose memory its source prints."""
    memory = memory_of(case.problem, parallelism, case.kept)
    return memory.ranks[0].total if case.stack.memory_of_first_rank else memory.total


def score_run(
    run: PublishedRun, constants: SoftwareStack | None = None, *, experts: bool = False
) -> tuple[ScoredRun, RunCase | None]:
    """Return (row beside its prediction, its case); (row with a reason, None) where it cannot be predicted."""
    scored = ScoredRun(run.line, run.source, run.model, run.chips, run.metric, run.value)
    try:
        case = case_of(run, constants, experts=experts)
        prediction = predict(case)
        published_s = published_seconds(case, prediction.step)
    except NoPredictionError as error:
        return replace(scored, reason=str(error)), None
    step, seconds = prediction.step, prediction.seconds
    is_time = run.metric.lower() == "step time s"
    predicted = run.value * (seconds / published_s if is_time else published_s / seconds)
    num_bytes = published_bytes(case)
    if num_bytes is not None:
        scored = replace(scored, published_gb=num_bytes / 1e9, predicted_gb=prediction.num_bytes / 1e9)
    p = step.parallelism
    choice = (
        f"dp {p.data} pp {p.pipeline} cp {p.context} tp {p.tensor_size} vp {p.virtual_stages} "
        f"mbs {p.micro_batch} zero {p.zero} {p.strategy} {p.schedule} recompute {p.recompute}"
    )
    fitted = is_fitted_run(run, case.problem.model)
    parts = tuple((name, round(seconds, 6)) for name, seconds in asdict(step.parts).items())
    cluster = case.problem.cluster
    scored = replace(
        scored,
        chip=cluster.chip.name,
        num_chips=cluster.num_chips,
        stack=case.problem.stack.name,
        precision=case.problem.precision or "",
        experts=case.problem.model.is_routed,
        mfu=step.mfu * step.time_s / published_s,
    )
    return replace(scored, predicted=predicted, choice=choice, parts=parts, fitted=fitted), case


def score_runs(
    runs: Sequence[PublishedRun],
    constants: Callable[[PublishedRun], SoftwareStack | None] = lambda run: None,
    progress: Progress = no_progress,
    *,
    experts: bool = False,
) -> list[ScoredRun]:
    """Return all rows beside their predictions. Of rows of one figure in several sources the first source counts.

    Args:
        constants: returns those of the stack of a run; None for those that ship with the package.
        experts: whether runs of models with experts are predicted.
    """
    out, first = [], dict[tuple[object, ...], str]()
    for number, run in enumerate(runs):
        scored, case = score_run(run, constants(run), experts=experts)
        if case is not None and first.setdefault(_figure_key(run, case), run.source) != run.source:
            scored = replace(scored, counts=False)
        out.append(scored)
        progress(number + 1, len(runs))
    return out


def _figure_key(run: PublishedRun, case: RunCase) -> tuple[object, ...]:
    """Return what makes two rows one figure: with experts its value too, since releases measure anew."""
    return (*case.key, run.metric, run.value) if case.problem.model.is_routed else case.key


def source_scores(rows: Sequence[ScoredRun]) -> list[SourceScore]:
    """Return the errors by source, in the order of the rows."""
    return [
        _source_score(source, [row for row in rows if row.source == source])
        for source in dict.fromkeys(row.source for row in rows)
    ]


def _source_score(source: str, rows: Sequence[ScoredRun]) -> SourceScore:
    errors = [row.error for row in rows if row.error is not None and row.counts]
    memory = [abs(row.memory_error) for row in rows if row.memory_error is not None and row.counts]
    if not errors:
        return SourceScore(source, len(rows), 0)
    sizes = [abs(error) for error in errors]
    return SourceScore(
        source,
        len(rows),
        len(errors),
        median(sizes),
        max(sizes),
        sum(size <= ROW_GOAL for size in sizes),
        median(errors),
        len(memory),
        median(memory) if memory else None,
    )


def summary_of(rows: Sequence[ScoredRun]) -> Summary:
    """Return the score over all sources."""
    scores = [score for score in source_scores(rows) if score.median is not None]
    predicted = sum(score.predicted for score in scores)
    memory = [score.memory_median for score in scores if score.memory_median is not None]
    return Summary(
        len(scores),
        predicted,
        median(score.median or 0.0 for score in scores) if scores else None,
        sum(score.num_within for score in scores) / predicted if predicted else None,
        sum(score.memory_rows for score in scores),
        median(memory) if memory else None,
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
