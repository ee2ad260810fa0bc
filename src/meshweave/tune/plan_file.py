"""Read a plan from its JSON file, and check that it does not contradict itself."""

from __future__ import annotations

import math
from pathlib import Path

from meshweave.algorithms.matmul2d.common.passes import PASSES, pass_rule
from meshweave.describe import files
from meshweave.tune.plan import LayerPlan, Plan
from meshweave.tune.plan_description import check_description


def load_plan(path: Path) -> Plan:
    """Return the plan in a JSON file.

    Raises:
        DescriptionError: the file cannot be read, is no plan, or contradicts itself; the message names file and
            key.
    """
    plan = files.check_table(Plan, files.parse_table(files.read_text(path), path, "json"), path)
    _check_kind(plan, path)
    if plan.kind == "step":
        _check_steps(plan, path)
        check_description(plan, path)
        return plan
    names = [layer.name for layer in plan.best.layers]
    for i, candidate in enumerate(plan.candidates):
        at = f"candidates.{i}"
        if any(other.algorithm == candidate.algorithm for other in plan.candidates[:i]):
            files.fail(path, f"{at}.algorithm", f"{candidate.algorithm} is listed twice; give each once")
        if math.prod(candidate.mesh_shape) != plan.num_chips:
            shape = "x".join(map(str, candidate.mesh_shape))
            files.fail(
                path, f"{at}.mesh_shape", f"{shape} is not a mesh of the {plan.num_chips} chips planned"
            )
        if [layer.name for layer in candidate.layers] != names or len(set(names)) != len(names):
            files.fail(path, f"{at}.layers", "give the same layers for each candidate, each once")
        for j, layer in enumerate(candidate.layers):
            _check_layer(layer, path, f"{at}.layers.{j}")
    check_description(plan, path)
    return plan


def _check_kind(plan: Plan, path: Path) -> None:
    if plan.format == "meshweave-plan-1" and plan.kind != "products":
        files.fail(path, "format", "plans of a step are of format meshweave-plan-2 or -3")
    if (plan.format == "meshweave-plan-3") != (plan.description is not None):
        has = "has no" if plan.description is None else "has a"
        files.fail(
            path, "description", f"{plan.format} {has} description; format meshweave-plan-3 alone has one"
        )
    wanted, other = ("steps", "candidates") if plan.kind == "step" else ("candidates", "steps")
    if not getattr(plan, wanted):
        files.fail(path, wanted, f"a plan of kind '{plan.kind}' has at least one of them")
    if getattr(plan, other):
        files.fail(path, other, f"a plan of kind '{plan.kind}' has none")


def _check_steps(plan: Plan, path: Path) -> None:
    for key in ("ranked", "front"):
        for i, record in enumerate(getattr(plan.step, key)):
            if record.degrees.num_chips != plan.num_chips:
                files.fail(
                    path,
                    f"steps.{key}.{i}.degrees",
                    f"they make {record.degrees.num_chips} chips, not the {plan.num_chips} planned",
                )
    times = [record.step_s for record in plan.step.ranked]
    slowest_first = times[1] * (1 + plan.step.margin) if len(times) > 1 else times[0]
    if times[1:] != sorted(times[1:]) or times[0] > slowest_first:
        files.fail(path, "steps.ranked", "list the fastest first")
    for i, record in enumerate(plan.step.sensitivity):
        if record.best >= len(times):
            files.fail(path, f"steps.sensitivity.{i}.best", f"give a position from 0 to {len(times) - 1}")


def _check_layer(layer: LayerPlan, path: Path, at: str) -> None:
    if tuple(item.name for item in layer.passes) != PASSES:
        files.fail(path, f"{at}.passes", f"give exactly {', '.join(PASSES)}")
    size = {"t": layer.tokens, "i": layer.in_features, "o": layer.out_features}
    for number, item in enumerate(layer.passes):
        rule = pass_rule(layer.stationary, item.name, layer.transposed)
        m, n, k = (size[letter] for letter in rule.sizes)
        if (item.m, item.n, item.k) != (m, n, k):
            given = f"{item.m} x {item.n} x {item.k}"
            files.fail(path, f"{at}.passes.{number}", f"M x N x K is {given}; this layer has {m} x {n} x {k}")
