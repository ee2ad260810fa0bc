"""A node of an installed package: a root-mean-square norm of what attention gives, group by group, with a gain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import meshweave as mw
from meshweave.algorithms.block.functions import over_rows, small
from meshweave.algorithms.block.nodes.call import CallRecord
from meshweave.describe.model.layer import LayerGraph
from meshweave.describe.model.nodes import Features, LayerNode, NodeWeight
from meshweave.execute.numpy import run_numpy


@dataclass(frozen=True)
class GroupNorm(LayerNode):
    """The norm of the features of each group of heads."""

    features: Features

    @property
    def makes(self) -> Features:
        """Return the features of all groups."""
        return self.features

    @property
    def parameters(self) -> tuple[NodeWeight, ...]:
        """Return the gain (1, features of a group)."""
        return (NodeWeight("GG", (Features("", 1), Features("", self.features.unit)), "norm"),)


class GroupNormRecord(CallRecord[GroupNorm]):
    """Its functions: of models, and of small integers that depend on the same elements."""

    node_type = GroupNorm
    fn = "group_norm"
    work = "norm"
    view = "groups_units"

    def calls(self, node: GroupNorm, is_exact: bool) -> tuple[Callable[..., Any], ...]:
        """Return the norm and its gradients."""
        width = node.features.unit

        def scaled(x: Any) -> tuple[Any, Any]:
            units = x.reshape(*x.shape[:-1], x.shape[-1] // width, width)
            if is_exact:
                return small(units + units.sum(-1)[..., None]), 1
            scale = ((units * units).sum(-1)[..., None] / width + 1e-5) ** -0.5
            return units * scale, scale

        def norm(x: Any, gain: Any) -> Any:
            out = scaled(x)[0] * gain[0]
            return (small(out) if is_exact else out).reshape(x.shape)

        def gradient(dy: Any, x: Any, gain: Any) -> Any:
            (units, scale), change = scaled(x), dy.reshape(*x.shape[:-1], -1, width) * gain[0]
            along = (change * units).sum(-1)[..., None]
            out = small(change + units * along) if is_exact else scale * (change - units * along / width)
            return out.reshape(x.shape)

        def weight_gradient(dy: Any, x: Any, so_far: Any) -> Any:
            return so_far + over_rows(dy.reshape(*x.shape[:-1], -1, width) * scaled(x)[0])[None]

        return norm, gradient, weight_gradient


RECORD = GroupNormRecord()


def run(strategy: str, mesh: tuple[int, ...]) -> None:
    """Prove a layer with the node after attention under a strategy, and compare its run to the dense one."""
    problem = mw.algorithms.BlockProblem(4, 3, 6, 6, 3, 2, 5, mesh, exact=True, vocabulary=5)
    before, core, linear, *after = problem.layer.nodes[1:]
    norm = GroupNorm("AN", ("A",), "attention", core.makes)
    nodes = problem.layer.nodes[0], before, core, norm, replace(linear, ins=("AN",)), *after
    problem, entry = replace(problem, graph=LayerGraph(nodes)), mw.algorithm(strategy)
    program = entry.program(problem, next(entry.candidates(problem)))
    inputs, expected = entry.random_inputs(problem), entry.reference(problem, entry.random_inputs(problem))
    outputs = run_numpy(program, inputs, calls=entry.functions(problem)).outputs
    assert mw.validate(program).skipped == () and "DGG0" in outputs
    assert all((outputs[name] == value).all() for name, value in expected.items())
