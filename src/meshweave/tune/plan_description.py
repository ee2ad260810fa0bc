"""What a plan was made for: its model, cluster and settings, whole, so that a plan file needs no other file."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from meshweave.algorithms.step.problem import StepProblem
from meshweave.algorithms.step.software_stack import SoftwareStack, UnfusedKernels
from meshweave.algorithms.step.stack_runs import StackRuns
from meshweave.algorithms.step.stacks import IDEAL, load_stack, stack_names
from meshweave.base.errors import DescriptionError, LayoutError, MeshweaveError, did_you_mean, printable
from meshweave.describe.catalog import clusters, models
from meshweave.describe.machine.cluster import Cluster, cluster_from, load_cluster
from meshweave.describe.machine.cluster_table import cluster_table
from meshweave.describe.machine.host import HostRates
from meshweave.describe.model import Transformer, load_model
from meshweave.describe.model.model_file import model_table, transformer_from
from meshweave.tune.plan import Plan
from meshweave.tune.plan_records import DescriptionRecord

_OF_THE_PLAN = ("model", "cluster", "batch", "sequence", "dtype", "overlap")
"""Fields of `StepProblem` that have places of their own in a plan."""


def describe(model: Transformer, cluster: Cluster, problem: StepProblem | None = None) -> DescriptionRecord:
    """Return the description that a plan file holds: model, cluster, and the settings of a step's problem.

    Args:
        problem: of a plan of a step; None for a plan of products, which has no settings.
    """
    settings = {} if problem is None else _settings(problem)
    return DescriptionRecord(model=model_table(model), cluster=cluster_table(cluster), settings=settings)


def _settings(problem: StepProblem) -> dict[str, Any]:
    """Return the settings of a problem that are not those it has by default; a stack by its name if it has one."""
    default = StepProblem(problem.model, problem.cluster, 1, 1, problem.dtype)
    names = (item.name for item in fields(StepProblem) if item.name not in _OF_THE_PLAN)
    settings = {
        name: getattr(problem, name) for name in names if getattr(problem, name) != getattr(default, name)
    }
    stack = settings.get("stack")
    if isinstance(stack, SoftwareStack):
        is_named = stack.name in stack_names() and load_stack(stack.name) == stack
        settings["stack"] = stack.name if is_named else json.loads(json.dumps(asdict(stack)))
    return settings


def planned_model(plan: Plan) -> Transformer:
    """Return the model of a plan: its own, or that of the catalog where the file is older than descriptions.

    Raises:
        DescriptionError: the description is wrong, or the catalog has no such model.
    """
    if plan.description is not None:
        return transformer_from(plan.description.model, "description.model")
    if plan.model not in models():
        raise DescriptionError(
            f"this plan is of an older format, without its model, and the catalog has no {plan.model}; "
            "plan it anew"
        )
    return load_model(plan.model)


def planned_cluster(plan: Plan) -> Cluster:
    """Return the cluster of a plan: its own, or that of the catalog where the file is older than descriptions.

    Raises:
        DescriptionError: the description is wrong, or the catalog has no such cluster.
    """
    if plan.description is not None:
        return cluster_from(plan.description.cluster, "description.cluster")
    if plan.cluster not in clusters():
        raise DescriptionError(
            f"this plan is of an older format, without its cluster, and the catalog has no {plan.cluster}; "
            "plan it anew, or give --cluster FILE"
        )
    return load_cluster(f"{plan.cluster}:{plan.num_chips}")


def planned_problem(plan: Plan, cluster: Cluster | None = None) -> StepProblem:
    """Return the problem of the plan of a step, on its own cluster or on `cluster`.

    Raises:
        DescriptionError: it is a plan of products, the description is wrong, or the catalog has no such model or
            cluster.
    """
    settings = dict(plan.description.settings) if plan.description else {}
    if "product_dtype" in settings:  # as files of before have it
        settings["precision"] = settings.pop("product_dtype")
    known = [item.name for item in fields(StepProblem) if item.name not in _OF_THE_PLAN]
    for name in settings:
        if name not in known:
            hint = did_you_mean(name, known)
            raise DescriptionError(
                f"description.settings.{name}: unknown key{hint}; known: {', '.join(known)}"
            )
    if "stack" in settings:
        settings["stack"] = planned_stack(plan)
    model, machine = planned_model(plan), cluster or planned_cluster(plan)
    return _made(model, machine, plan, settings)


def _made(model: Transformer, cluster: Cluster, plan: Plan, settings: dict[str, Any]) -> StepProblem:
    try:
        return StepProblem(
            model, cluster, plan.batch, plan.sequence, plan.dtype, overlap=plan.step.overlap, **settings
        )
    except (TypeError, ValueError) as error:
        raise DescriptionError(f"description.settings: {error}") from None


def planned_stack(plan: Plan) -> SoftwareStack:
    """Return the software stack that a plan is priced for; "ideal" where its description names none.

    Raises:
        DescriptionError: no stack has its name, or the table of its attributes is wrong.
    """
    given = plan.description.settings.get("stack", IDEAL) if plan.description else IDEAL
    if isinstance(given, str):
        return load_stack(given)
    try:
        table: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
        for key in ("forward", "backward"):
            table[key] = UnfusedKernels(**table.get(key, {}))
        if table.get("host") is not None:
            table["host"] = HostRates(**table["host"])
        if "routed_hosts" in table:
            table["routed_hosts"] = tuple((chip, HostRates(**rates)) for chip, rates in table["routed_hosts"])
        if "attention_shares" in table:
            table["attention_shares"] = tuple(map(tuple, table["attention_shares"]))
        for key in {"copies", "biased_experts"} & table.keys():
            table[key] = tuple(UnfusedKernels(**each) for each in table[key])
        if "runs" in table:
            runs: dict[str, Any] = {
                k: tuple(v) if isinstance(v, list) else v for k, v in table["runs"].items()
            }
            table["runs"] = StackRuns(**runs)
        return SoftwareStack(**table)
    except (TypeError, AttributeError) as error:
        raise DescriptionError(
            f"description.settings.stack: {error}; give a name, or its attributes"
        ) from None


def catalog_differences(plan: Plan) -> tuple[str, ...]:
    """Return a sentence if the plan's model is not the catalog's of its name, and one if its cluster is not.

    () for a plan of an older format, which has no description.
    """
    if plan.description is None:
        return ()
    sentences = []
    if plan.model in models() and model_table(load_model(plan.model)) != plan.description.model:
        sentences.append(
            f"the plan's model {plan.model} is not the catalog's of that name: the plan's is taken"
        )
    if plan.cluster in clusters() and not _is_catalog_cluster(plan):
        sentences.append(
            f"the plan's cluster {plan.cluster} is not the catalog's of that name: the plan's is taken"
        )
    return tuple(sentences)


def _is_catalog_cluster(plan: Plan) -> bool:
    try:
        return load_cluster(plan.cluster).with_chips(plan.num_chips) == planned_cluster(plan)
    except (DescriptionError, LayoutError):
        return False


def check_description(plan: Plan, file: str | Path) -> None:
    """Raise DescriptionError if the description of a plan is wrong, or is not of that plan.

    A plan without one passes. `file` is where the plan was read from, for the error.
    """
    if plan.description is None:
        return
    try:
        model, cluster = planned_model(plan), planned_cluster(plan)
        if plan.kind == "step":
            planned_problem(plan, cluster)
    except MeshweaveError as error:
        raise DescriptionError(f"{printable(file)}: {error}") from None
    for key, own, given in (
        ("model.name", plan.model, model.name),
        ("cluster.name", plan.cluster, cluster.name),
        ("cluster: its chips", str(plan.num_chips), str(cluster.num_chips)),
    ):
        if own != given:
            raise DescriptionError(f"{printable(file)}: description.{key}: {given} is not the plan's {own}")
