"""Plan a training step: search, write the ranking as a `Plan`, and price it again with other links."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Unpack

from meshweave.algorithms.step import (
    Parallelism,
    SoftwareStack,
    Step,
    StepProblem,
    load_stack,
    step_of,
    with_defaults,
)
from meshweave.algorithms.step.ceiling import rate_ceiling
from meshweave.algorithms.step.options import PlanOptions, ProblemOptions
from meshweave.algorithms.step.space import SpaceOptions, StepSpace
from meshweave.algorithms.step.stack_checks import check_problem
from meshweave.algorithms.step.stacks import IDEAL, default_stack
from meshweave.algorithms.step.user_names import FIELDS_OF_SPACE, SHORT_NAMES, by_field
from meshweave.algorithms.table import SCHEDULES
from meshweave.base.deprecated import renamed_keyword
from meshweave.base.errors import (
    DescriptionError,
    MeshweaveError,
    UnsupportedError,
    require_count,
    require_known,
    require_number,
)
from meshweave.base.progress import Progress, no_progress
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.describe.machine.left_out import unmeasured_kernels
from meshweave.describe.machine.levels import link_levels
from meshweave.describe.model import ModelSource, Transformer, load_model
from meshweave.describe.scores import MARGIN
from meshweave.tune.plan import Plan
from meshweave.tune.plan_description import describe
from meshweave.tune.plan_records import SensitivityRecord, StepRecord, StepsRecord, degrees_of
from meshweave.tune.step_search.reasons import refusal_text
from meshweave.tune.step_search.search import NUM_EXACT, StepRanking, StepSearch

NOTE = (
    "Estimated without contention between kinds of traffic. Kernels, collectives and links are those of the "
    "cluster's description; what the software stack adds is that of `stack`."
)
_LOG = logging.getLogger(__name__)
_FIELDS_OF_OPTIONS = {plural: name for name, plural in FIELDS_OF_SPACE.items()}


@renamed_keyword("seq", "sequence", "mw.plan", product_dtype="precision")
def plan(
    model: ModelSource | Transformer,
    cluster: str | Path | Cluster,
    *,
    batch: int,
    sequence: int,
    memory_bytes: int | None = None,
    num_exact: int = NUM_EXACT,
    sensitivity: bool = False,
    margin: float = MARGIN,
    progress: Progress = no_progress,
    **options: Unpack[PlanOptions],
) -> Plan:
    """Return the fastest configurations of a training step of a model on a cluster, ranked.

    `mw.tune.plan_model` plans the products of one block instead.

    Args:
        model: a model, also one of transformers, a name of the catalog, or a file (`load_model`).
        cluster: a cluster, a name of the catalog with ":N" chips, or a file.
        batch: sequences of a step.
        sequence: tokens of a sequence.
        memory_bytes: the memory of a chip, of which `reserve` stays free; None for what its description says.
        num_exact: rows of the ranking that no other configuration is faster than.
        sensitivity: whether to price the ranking with links at twice and at half their rate, too.
        margin: the share of its time by which a strategy that no published run has must be faster than all that
            published runs have, to be chosen; 0 for what is the fastest by prediction.
        progress: called with the numbers of layouts looked at so far, and of all.
        options: what is fixed: `tp`, `pp`, `dp`, `cp`, `vp`, `ep`, `etp`, `strategy`, `zero`, `schedule`,
            `micro_batch`, `recompute` and `order`, each a value or a list of values to choose among; and
            attributes of `StepProblem`, such as `attention`, `reserve` or `stack`, which may be a name: by default
            that of the library's own runtime. Only what the stack executes is searched.

    Raises:
        DescriptionError: a name, size or option is wrong.
        UnsupportedError: a strategy or schedule is unknown, the stack does not execute what is fixed, nothing
            fits, or nothing can be laid out; the message says what would.
    """
    known = sorted(PlanOptions.__annotations__)
    for name in options:
        require_known(name, known, "a plan has no option", DescriptionError)
    of_problem: dict[str, Any] = {
        name: value for name, value in options.items() if name in ProblemOptions.__annotations__
    }
    for name, value in of_problem.items():
        if isinstance(value, list):
            raise DescriptionError(f"{name} is not searched; give one value")
    model = model if isinstance(model, Transformer) else load_model(model)
    stack = of_problem.setdefault("stack", default_stack(model))
    of_problem["stack"] = stack if isinstance(stack, SoftwareStack) else load_stack(stack)
    problem = StepProblem(
        model,
        cluster if isinstance(cluster, Cluster) else load_cluster(cluster),
        batch,
        sequence,
        **of_problem,
    )
    return plan_step(
        problem,
        space_options(
            {name: value for name, value in options.items() if name not in of_problem}, problem.stack
        ),
        memory_bytes=memory_bytes,
        num_exact=num_exact,
        sensitivity=sensitivity,
        margin=margin,
        progress=progress,
    )


def space_options(fixed: dict[str, Any], stack: SoftwareStack) -> SpaceOptions:
    """Return the options of a search for a stack.

    Args:
        fixed: a value, or a list of values, of each option of `plan` that is fixed, by name (`tp`, `zero`, ...).
        stack: what it executes is searched for all that is not fixed.

    Raises:
        UnsupportedError: a strategy or schedule is unknown, or the stack does not execute what is fixed.
        DescriptionError: a value is wrong.
        LayoutError: an option is given by two names.
    """
    chosen: dict[str, Any] = {}
    for field, value in by_field(fixed, {**SHORT_NAMES, **FIELDS_OF_SPACE}).items():
        values = tuple(value) if isinstance(value, list) else (value,)
        if field == "virtual_stages":
            values = tuple(require_count(each, field, DescriptionError) for each in values)
        if field == "virtual_stages" and "schedule" not in fixed and values != (1,):
            searched = (SCHEDULES[schedule] for schedule in SpaceOptions.of_stack(stack).schedules)
            fitting = (entry.name for entry in searched if any(map(entry.takes_stages, values)))
            chosen.setdefault("schedules", tuple(fitting))
        chosen[field] = values
    return SpaceOptions.of_stack(stack, **chosen)


def plan_step(
    problem: StepProblem,
    options: SpaceOptions | None = None,
    *,
    memory_bytes: int | None = None,
    num_exact: int = NUM_EXACT,
    sensitivity: bool = False,
    margin: float = MARGIN,
    progress: Progress = no_progress,
) -> Plan:
    """Return the plan of a step problem.

    Args:
        options: what is searched; None for all that the problem's stack executes.
        memory_bytes: the memory of a chip, of which `reserve` stays free; None for what its description says.
        num_exact: rows of the ranking that no other configuration is faster than.
        sensitivity: whether to price the ranking with links at twice and at half their rate, too.
        margin: the share of its time (0 to below 1) by which a strategy that no published run has must be faster
            than all that published runs have, to be chosen.
        progress: called with the numbers of layouts looked at so far, and of all.

    Raises:
        DescriptionError: a size or option is wrong.
        UnsupportedError: the stack does not execute the precision, or a model with experts; or nothing fits or
            can be laid out, and the message says what would.
    """
    share = f"a share of the time from 0 to below 1, such as {MARGIN}"
    margin = require_number(margin, 0.0, "margin", share, DescriptionError)
    if margin >= 1:
        raise DescriptionError(f"margin is {margin}; give {share}")
    num_exact = require_count(num_exact, "num_exact", DescriptionError)
    if memory_bytes is None:
        memory_bytes = problem.cluster.chip.memory_bytes
    memory_bytes = int(require_number(memory_bytes, 0.0, "memory_bytes", "bytes", DescriptionError))
    limit = problem.usable_bytes(memory_bytes)
    check_problem(problem)
    space = StepSpace(problem, options)
    _LOG.info("searching %s on %d chips", problem.model.name, problem.cluster.num_chips)
    ranking = StepSearch(space, limit, num_exact, progress, margin).ranking()
    of = ranking.count
    _LOG.info("priced %d of %d layouts, %d over memory", of.priced, of.nodes, of.over_memory)
    if not ranking.rows:
        raise UnsupportedError(refusal_text(ranking))
    model, cluster = problem.model, problem.cluster
    return Plan(
        kind="step",
        model=model.name,
        cluster=cluster.name,
        num_chips=cluster.num_chips,
        batch=problem.batch,
        sequence=problem.sequence,
        dtype=problem.dtype,
        steps=_steps_record(
            problem,
            ranking,
            memory_bytes - limit,
            margin if ranking.is_published_first else 0.0,
            link_sensitivity(ranking) if sensitivity else (),
        ),
        note=NOTE,
        not_priced=model.not_priced_at(problem.sequence),
        description=describe(model, cluster, problem),
        unmeasured=unmeasured_kernels(cluster.chip, problem.dtype),
    )


def _steps_record(
    problem: StepProblem,
    ranking: StepRanking,
    reserve_bytes: int,
    margin: float,
    sensitivity: tuple[SensitivityRecord, ...],
) -> StepsRecord:
    count, ceiling = ranking.count, rate_ceiling(problem)
    steps = [row.step for row in (*ranking.rows, *ranking.front)]
    return StepsRecord(
        memory_limit_bytes=ranking.memory_bytes,
        reserve_bytes=reserve_bytes,
        ranked=tuple(step_record(row.step) for row in ranking.rows),
        front=tuple(step_record(row.step) for row in ranking.front),
        pairs="causal",
        ceiling=ceiling.share,
        above_ceiling=ceiling.reason(max(step.hfu for step in steps)),
        **_defaults(ranking.space),
        stack=problem.stack.name,
        precision="" if problem.recipe is None else problem.recipe.name,
        priced_as=problem.precision_reading,
        attention_as=problem.attention_reading,
        ideal=_ideal(ranking),
        searched={
            "nodes": count.nodes,
            "priced": count.priced,
            "over_memory": count.over_memory,
            "refused": count.refused,
        },
        overlap=problem.overlap,
        margin=margin,
        is_complete=ranking.is_complete,
        num_exact=ranking.num_exact if ranking.is_complete else 0,
        sensitivity=sensitivity,
    )


def _defaults(space: StepSpace) -> dict[str, Any]:
    """Return the record of the step that `mw.step` gives with what the space fixes, or why it is refused."""
    fixed = {}
    for name, values in vars(space.options).items():
        field = _FIELDS_OF_OPTIONS.get(name, name)
        if values is not None and len(values) == 1:
            fixed[field] = values[0]
    try:
        return {"defaults": step_record(step_of(space.problem, with_defaults(space.problem, fixed)))}
    except MeshweaveError as error:
        return {"defaults_refused": str(error)}


def _ideal(ranking: StepRanking) -> StepRecord | None:
    """Return the record of the best configuration without what its stack adds; None where there is no stack."""
    problem = ranking.space.problem
    if problem.stack == load_stack(IDEAL):
        return None
    alone = replace(problem, stack=problem.stack.kernels_alone)
    return step_record(step_of(alone, ranking.rows[0].parallelism))


def step_record(step: Step) -> StepRecord:
    """Return the record of a step, as plan files hold it."""
    peak = asdict(step.memory.peak)
    return StepRecord(
        degrees=degrees_of(step.parallelism),
        step_s=step.time_s,
        parts_s={
            name: max(float(value), 0.0)
            for name, value in asdict(step.parts).items()
            if name != "host" or step.problem.host is not None
        },
        memory_bytes=step.memory.total,
        memory_parts=peak,
        tokens_per_s_per_chip=step.tokens_per_second_per_chip,
        mfu=step.mfu,
        hfu=step.hfu,
        mfu_all_pairs=step.mfu_all_pairs,
    )


def parallelism_of(record: StepRecord) -> Parallelism:
    """Return the configuration in the record of a step."""
    return Parallelism(**dict(record.degrees))


def link_sensitivity(ranking: StepRanking) -> tuple[SensitivityRecord, ...]:
    """Return records of what a ranking would be with links at twice and at half their rate.

    There are two for each level of links (`link_levels`), outermost first, the double rate before the half. The
    ranked configurations are priced again with that rate; nothing is searched.
    """
    problem = ranking.space.problem
    records = []
    for name, with_rate in link_levels(problem.cluster):
        for factor, words in ((2.0, "twice as fast"), (0.5, "half as fast")):
            changed = replace(problem, cluster=with_rate(factor))
            times = [step_of(changed, row.parallelism).time_s for row in ranking.rows]
            best = min(range(len(times)), key=times.__getitem__)
            records.append(
                SensitivityRecord(change=f"{name} {words}", same_s=times[0], best_s=times[best], best=best)
            )
    return tuple(records)
