"""Published runs that are the best of a sweep of their authors, beside the best that a search finds in that sweep.

nanotron's benchmark summary has for each model and number of hosts the fastest of thousands of configurations
(scripts/scaling_benchmarks.py): data, tensor and pipeline degrees and micro-batches that are powers of two, ZeRO-0
and 1, 1F1B, nothing recomputed, sequence parallelism, at least as many micro-batches as pipeline ranks but one.
The search has the same choices. If a plan can be trusted, the published configuration has nearly the figure, by
our prediction, of the best one of them. The figure is the MFU by which the sweep was ordered, and not the seconds:
it counts a table that two stages share twice (`figures.embedding_flops`), so layouts of a model differ in FLOPs.

The results (bench_final2_mfu2.csv, in eyao600/Rapid-LLM validation_scripts/huggingface_data) have the pipeline's
code before and after it was mended (column "after_pp_fix"), 25 times as fast: 8.86B on 8 hosts, dp 4 tp 1 pp 16,
has 201 and 4,976 tokens a second and chip. On 64 hosts layouts with pipeline ranks ran before that (jobs up to
14023...; one after it, dp 128 tp 2 pp 2 of 3.57B, has 4.6 %), in the tenth of the rows that was read. So on
more than 32 hosts none is in the sweep.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshweave.algorithms.step.problem import DEGREES
from meshweave.base.errors import MeshweaveError
from meshweave.base.progress import Progress, no_progress
from meshweave.tune.step_search import SpaceOptions, plan_step
from meshweave_studies.markdown import markdown_table
from meshweave_studies.training_runs.cases import RunCase, case_of
from meshweave_studies.training_runs.figures import embedding_flops, model_flops
from meshweave_studies.training_runs.models import NoPredictionError
from meshweave_studies.training_runs.rows import PublishedRun
from meshweave_studies.training_runs.score import predict

CELL_GOAL = 0.05
CELLS_GOAL = 14 / 18
"""Goals: how much slower than the best a published configuration may be predicted, and in what share of cells."""
_SOURCES = ("nanotron docs/benchmark_summary",)
"""Words of sources that print the best of a sweep."""
_MOST_TENSOR = 32
_MOST_HOSTS_OF_PIPELINES, _CHIPS_PER_HOST = 32, 8


@dataclass(frozen=True)
class SweepCell:
    """A published best beside the search's in the same sweep.

    Attributes:
        published, best: the configurations in short.
        published_s, best_s: predicted seconds of their steps.
        work: FLOPs of the best's step over those of the published one's, as the source counts them.
        fits: whether the published configuration fits in memory, by prediction.
        reason: why there is no best; then `best_s` is None.
    """

    line: int
    source: str
    model: str
    chips: str
    published: str
    published_s: float
    fits: bool
    best: str = ""
    best_s: float | None = None
    work: float = 1.0
    reason: str = ""

    @property
    def slower(self) -> float | None:
        """Return by how much the best's figure is above the published configuration's, 0 where it is not."""
        return None if self.best_s is None else max(self.work * self.published_s / self.best_s - 1, 0.0)

    @property
    def holds(self) -> bool:
        """Return whether the published configuration is within the goal of the best."""
        return self.slower is not None and self.slower <= CELL_GOAL

    def to_json(self) -> dict[str, Any]:
        """Return the cell as plain values."""
        slower = None if self.slower is None else round(self.slower, 4)
        return {**asdict(self), "slower": slower, "holds": self.holds}


def sweep_cells(runs: Sequence[PublishedRun], progress: Progress = no_progress) -> list[SweepCell]:
    """Return the cells of all runs that are the best of a sweep and can be predicted."""
    own = [run for run in runs if any(word in run.source for word in _SOURCES)]
    cells = []
    for number, run in enumerate(own):
        with suppress(NoPredictionError):  # the table of runs has the reason
            cells.append(_cell(case_of(run)))
        progress(number + 1, len(own))
    return cells


def sweep_options(num_chips: int, batch: int) -> tuple[SpaceOptions, ...]:
    """Return what a sweep on so many chips chooses among: without pipeline ranks, and with them if it ran such."""
    powers = tuple(2**power for power in range(num_chips.bit_length()))
    options = SpaceOptions(
        data=powers,
        pipeline=(1,),
        context=(1,),
        tensor=tuple(power for power in powers if power <= _MOST_TENSOR),
        strategies=("megatron_sp",),
        zero=(0, 1),
        schedules=("1f1b",),
        virtual_stages=(1,),
        micro_batches=tuple(2**power for power in range(batch.bit_length())),
        recompute=("none",),
        orders=(DEGREES,),
    )
    if num_chips == 1 or num_chips > _MOST_HOSTS_OF_PIPELINES * _CHIPS_PER_HOST:
        return (options,)
    return options, replace(options, pipeline=powers[1:])


def _cell(case: RunCase) -> SweepCell:
    run, problem = case.run, case.problem
    step = predict(case).step
    p = step.parallelism
    cell = SweepCell(
        run.line,
        run.source,
        problem.model.name,
        run.chips,
        _in_short(p.data, p.pipeline, p.tensor_size, p.micro_batch, p.zero),
        step.time_s,
        step.fits(),
    )
    best, work, reason, flops = None, 1.0, "no configuration", model_flops(case, step)
    for options in sweep_options(problem.cluster.num_chips, problem.batch):
        try:
            plan = plan_step(problem, options, num_exact=1)
        except MeshweaveError as error:
            reason = str(error).splitlines()[0]
            continue
        assert plan.steps is not None
        for record in plan.steps.ranked:
            d = record.degrees
            if problem.batch // (d.data * d.micro_batch) < d.pipeline - 1:
                continue
            own = 1 + (embedding_flops(case, d.pipeline) - embedding_flops(case, p.pipeline)) / flops
            if best is None or record.step_s / own < best.step_s / work:
                best, work = record, own
            break
    if best is None:
        return replace(cell, reason=reason)
    d = best.degrees
    tensor = d.tensor if isinstance(d.tensor, int) else d.tensor[0] * d.tensor[1]
    best_words = _in_short(d.data, d.pipeline, tensor, d.micro_batch, d.zero)
    return replace(cell, best=best_words, best_s=best.step_s, work=work)


def _in_short(data: int, pipeline: int, tensor: int, micro_batch: int, zero: int) -> str:
    return f"dp {data} pp {pipeline} tp {tensor} mbs {micro_batch} zero {zero}"


def cells_line(cells: Sequence[SweepCell]) -> str:
    """Return in how many cells the published best is near the predicted one, in a line."""
    holding = sum(cell.holds for cell in cells)
    return (
        f"the published best is within {CELL_GOAL:.0%} of the predicted best of its sweep in {holding} of "
        f"{len(cells)} cells (goal {CELLS_GOAL * len(cells):.0f})"
    )


def cells_table(cells: Sequence[SweepCell]) -> str:
    """Return the cells as a Markdown table."""
    lines = []
    for cell in cells:
        published = cell.published if cell.fits else f"{cell.published} (does not fit)"
        slower = "-" if cell.slower is None else f"{cell.slower:.1%}"
        lines.append((str(cell.line), cell.model, cell.chips, published, cell.best or cell.reason, slower))
    head = ("line", "model", "chips", "published best", "predicted best", "published is slower by")
    return markdown_table(head, "rllllr", lines)
