"""What ranks do in tests of training steps: run steps of each configuration and compare with one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from meshweave.algorithms.step import Parallelism, StepProblem, step_of
from meshweave.describe.machine.cluster import load_cluster
from meshweave.describe.model import Transformer
from meshweave.execute.ranks.job import RankContext
from meshweave_lab.step_reference import random_batches, random_weights, reference_steps
from meshweave_lab.step_run import Adam, StepRun

ADAM = Adam(lr=0.01, eps=0.05)
"""Gradients that are nearly zero do not decide by their rounding which way a weight moves."""


def run_steps(context: RankContext, payload: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Run two steps of each configuration from the same weights.

    `payload`: model (fields of `Transformer`), batch, sequence, cluster, cases (options of `Parallelism`). Returns
    for each the sums of the loss of this rank, those expected of all ranks, and the largest difference of a
    weight.
    """
    torch.set_num_threads(1)
    model = Transformer(**payload["model"])
    cluster = load_cluster(payload["cluster"])
    problem = StepProblem(model, cluster, payload["batch"], payload["sequence"], dtype="float32")
    weights, batches = random_weights(problem), random_batches(problem, 2)
    expected = reference_steps(problem, weights, batches, ADAM)
    out = []
    for options in payload["cases"]:
        if "tensor" in options and isinstance(options["tensor"], list):
            options = {**options, "tensor": tuple(options["tensor"])}
        step = step_of(problem, Parallelism(**options))
        run = StepRun(step, weights, optimizer=ADAM, liveness=context.liveness)
        losses = [run.run(tokens, targets) for tokens, targets in batches]
        out.append(
            {
                "losses": losses,
                "expected": expected.losses,
                "difference": run.worst_difference(expected.weights),
            }
        )
        weights_lost = {name: np.full_like(value, np.nan) for name, value in expected.weights.items()}
        assert run.worst_difference(weights_lost) == float("inf")  # what is no number is no match
        run.close()
    return out
