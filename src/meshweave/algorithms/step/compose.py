"""Compose a step: layers to stages, stages to a pipeline, and what data parallelism and the optimizer add.

    micro-batch of a stage = its layers, forward and backward with recomputation, and embedding or loss at the ends
    pipeline = the longest path through the actions of the schedule, with transfers between stages
    step = gathers of weights that the first forward parts wait for + pipeline + reductions of the last gradients
           that nothing hides + the optimizer, through memory

Ranks of a data, context or tensor group do the same work, so one is priced for all of them; pipeline ranks are
priced one by one.
"""

from __future__ import annotations

import math
from typing import Any, Unpack

from meshweave.algorithms.step.checks import check_step
from meshweave.algorithms.step.layers import call_s
from meshweave.algorithms.step.memory import (
    ShardedParameters,
    rank_parameters,
    tables_parameters,
    unsharded_update_bytes,
    update_bytes,
)
from meshweave.algorithms.step.options import ProblemOptions, StepOptions
from meshweave.algorithms.step.problem import Parallelism, StepProblem
from meshweave.algorithms.step.quantizing import cast_weight_bytes
from meshweave.algorithms.step.result import Step
from meshweave.algorithms.step.software_stack import SoftwareStack
from meshweave.algorithms.step.stack_checks import check_parallelism, check_problem
from meshweave.algorithms.step.stacks import default_stack, load_stack
from meshweave.algorithms.step.stage_layers import layer_costs, rank_layers
from meshweave.algorithms.step.stages import stages_of
from meshweave.algorithms.step.user_names import by_field
from meshweave.base.deprecated import renamed_keyword
from meshweave.base.errors import LayoutError, require_known
from meshweave.base.units import to_s
from meshweave.describe.machine.cluster import Cluster, described
from meshweave.describe.model import ModelSource, Transformer, load_model
from meshweave.ir.work import Compute


def step_of(problem: StepProblem, parallelism: Parallelism) -> Step:
    """Return the time and memory of one training step of a problem under a choice of parallelism.

    The problem caches prices, so a search uses one problem for all configurations.

    Raises:
        LayoutError: the degrees do not fit the chips, the batch, the model or the schedule.
        UnsupportedError: a strategy or schedule is unknown, or the machine cannot place its groups.
    """
    check_step(problem, parallelism)
    stages = stages_of(problem, parallelism)
    pipeline = stages.pipeline()
    update_s = update_times_s(problem, parallelism)
    ends = [
        (end_s + stages.reductions_s(rank, pipeline.ends_s) + each, each)
        for rank, (end_s, each) in enumerate(zip(pipeline.rank_ends_s, update_s, strict=True))
    ]
    end_s, optimizer_s = max(ends)
    makespan_s = pipeline.makespan_s
    return Step(
        problem,
        parallelism,
        end_s + problem.stack.step_s,
        stages,
        makespan_s,
        min(optimizer_s, end_s - makespan_s),
    )


def least_step_s(problem: StepProblem, parallelism: Parallelism) -> float:
    """Return a lower bound of a step's seconds, close to `step_of(...).time_s` and much cheaper to compute.

    Raises:
        LayoutError: the degrees do not fit the chips, the batch, the model or the schedule.
        UnsupportedError: a strategy or schedule is unknown, or the machine cannot place its groups.
    """
    check_step(problem, parallelism)
    stages = stages_of(problem, parallelism, shares=False)
    update_s = update_times_s(problem, parallelism)
    first = {stages.stages_of(rank)[0] for rank in range(parallelism.pipeline)}  # the others end long before
    ends_s = [0.0 if stage in first else -math.inf for stage in range(parallelism.num_stages)]
    after_s = (stages.reductions_s(rank, ends_s) + each for rank, each in enumerate(update_s))
    before_s = max(stages.gathered_s()[:1], default=0.0)
    return before_s + to_s(stages.least_pipeline_ps()) + min(after_s) + problem.stack.step_s


@renamed_keyword("seq", "sequence", "mw.step", product_dtype="precision")
def step(
    model: ModelSource | Transformer,
    cluster: str | Cluster,
    batch: int,
    sequence: int,
    **options: Unpack[StepOptions],
) -> Step:
    """Return the time and memory of one training step in one configuration.

    Args:
        model: a model, also one of transformers, a name of the catalog, or a file (`load_model`).
        cluster: a cluster, or a name of the catalog such as "dgx-a100:512", or a file.
        batch: sequences of a step, of all replicas together.
        sequence: tokens of a sequence.
        options: `tp`, `pp`, `dp`, `cp` and `vp` for the degrees tensor, pipeline, data, context and for virtual
            stages, `ep` and `etp` for ranks that share experts and each of them; other attributes of `Parallelism`
            and of `StepProblem` by their names; `stack` may be a name (`load_stack`), and is by default the
            library's own runtime, as in `mw.plan`. Without `dp` there are as many replicas as the chips allow.

    Raises:
        LayoutError: the degrees do not fit the chips, the batch, the model or the schedule, or an option is
            unknown or given by two names.
        UnsupportedError: the stack does not execute such a configuration, a strategy or schedule is unknown, or
            the machine cannot place its groups.
        DescriptionError: a model, cluster or stack is unknown, or an option of the problem is out of range.
    """
    for name in options:
        require_known(name, sorted(StepOptions.__annotations__), "a step has no option", LayoutError)
    of_problem: dict[str, Any] = {}
    degrees: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, list) and name != "order":
            raise LayoutError(f"{name} is {value}; a step has one value, of several mw.plan finds the best")
        if name in ProblemOptions.__annotations__:
            of_problem[name] = value
        else:
            degrees[name] = value
    model = model if isinstance(model, Transformer) else load_model(model)
    stack = of_problem.setdefault("stack", default_stack(model))
    of_problem["stack"] = stack if isinstance(stack, SoftwareStack) else load_stack(stack)
    problem = StepProblem(
        model,
        described(cluster),
        batch,
        sequence,
        **of_problem,
    )
    parallelism = with_defaults(problem, by_field(degrees))
    check_problem(problem)
    check_parallelism(problem.stack, parallelism)
    return step_of(problem, parallelism)


def with_defaults(problem: StepProblem, degrees: dict[str, Any]) -> Parallelism:
    """Return the `Parallelism` whose attributes are `degrees`, values by the attributes' names.

    Without "data" it has as many replicas as the chips of the cluster have room for, at least one.

    Raises:
        LayoutError: `Parallelism` refuses the values.
    """
    if "data" not in degrees:
        alone = {"zero_group": None, "expert": 1, "expert_tensor": 1}  # what replicas are shared by
        size = Parallelism(**{**degrees, **alone}).num_ranks
        degrees = {**degrees, "data": max(problem.cluster.num_chips // size, 1)}
    return Parallelism(**degrees)


def update_times_s(problem: StepProblem, parallelism: Parallelism) -> list[float]:
    """Return for each pipeline rank the seconds per step of the optimizer's update on one of its chips.

    Casts of the updated weights to low precision are included.
    """
    p, known, out = parallelism, problem.cache("optimizer"), []
    numbers = p.schedule, p.pipeline, p.virtual_stages
    layers = rank_layers(problem.model.num_layers, *numbers, layer_costs(problem))
    for rank, count in enumerate(rank_parameters(problem, parallelism, layers)):
        own = count.kept(parallelism, 1)
        tables = tables_parameters(problem, parallelism, rank) if problem.recipe else 0
        of_layers = ShardedParameters(count.others - tables, count.experts)
        moved = own * update_bytes(problem) + cast_weight_bytes(problem, p, of_layers)
        moved += (count.total - own) * unsharded_update_bytes(problem, p)
        if (own, moved) not in known:
            work = Compute("call", own, moved, dtype="float32", call="elementwise")
            known[own, moved] = call_s(problem, work)
        out.append(known[own, moved])
    return out
