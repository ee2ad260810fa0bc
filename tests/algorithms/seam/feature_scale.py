"""A node of an installed package with a parameter for each feature, by which what attention adds is scaled."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import meshweave as mw
from meshweave.algorithms.block.functions import over_rows, small
from meshweave.algorithms.block.nodes.call import CallRecord
from meshweave.describe.model.layer import LayerGraph
from meshweave.describe.model.model_file import model_table, transformer_from
from meshweave.describe.model.nodes import Features, LayerNode, NodeWeight
from meshweave.execute.numpy import run_numpy


@dataclass(frozen=True)
class FeatureScale(LayerNode):
    """The product of each feature with a number of its own."""

    features: Features

    @property
    def makes(self) -> Features:
        """Return the features."""
        return self.features

    @property
    def parameters(self) -> tuple[NodeWeight, ...]:
        """Return the numbers (1, features)."""
        return (NodeWeight("FS", (Features("", 1), self.features), "norm"),)


class FeatureScaleRecord(CallRecord[FeatureScale]):
    """Its functions, which are given the features of a rank."""

    node_type = FeatureScale
    fn = "feature_scale"

    def calls(self, node: FeatureScale, is_exact: bool) -> tuple[Callable[..., Any], ...]:
        """Return the product and its gradients."""
        kept = small if is_exact else (lambda x: x)
        return (
            lambda x, by: kept(x * by[0]),
            lambda dy, x, by: kept(dy * by[0]),
            lambda dy, x, so_far: so_far + over_rows(kept(dy * x))[None],
        )


RECORD = FeatureScaleRecord()


def scaled(graph: LayerGraph) -> LayerGraph:
    """Return a layer with the node after the product that follows attention."""
    middle = next(number for number, node in enumerate(graph.nodes) if node.is_sum)
    add = graph.nodes[middle]
    scale = FeatureScale("OS", add.ins[1:], "attention", add.makes)
    return LayerGraph(
        (*graph.nodes[:middle], scale, replace(add, ins=("X", "OS")), *graph.nodes[middle + 1 :])
    )


def run(strategy: str, mesh: tuple[int, ...]) -> None:
    """Prove a layer with the node, compare its run to the dense one, and read its model back from a table."""
    problem = mw.algorithms.BlockProblem(4, 3, 6, 6, 3, 2, 5, mesh, exact=True, vocabulary=5)
    problem, entry = replace(problem, graph=scaled(problem.layer)), mw.algorithm(strategy)
    program = entry.program(problem, next(entry.candidates(problem)))
    inputs, expected = entry.random_inputs(problem), entry.reference(problem, entry.random_inputs(problem))
    outputs = run_numpy(program, inputs, calls=entry.functions(problem)).outputs
    assert mw.validate(program).skipped == () and "DFS0" in outputs
    assert all((outputs[name] == value).all() for name, value in expected.items())
    model = mw.load_model("gpt3")
    own = replace(model, layers=((model.num_layers, scaled(model.layer)),))
    assert transformer_from(json.loads(json.dumps(model_table(own))), "plan") == own
