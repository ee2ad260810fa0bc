"""What a training step is compared with: the whole model on whole arrays in numpy, one process, no program.

Loss and gradients are those of `algorithms.block.reference`; Adam updates the weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from meshweave.algorithms.block import BlockProblem
from meshweave.algorithms.block.end_equations import IDS_IN, IDS_OUT, LOSS, TARGETS, TOKENS_IN
from meshweave.algorithms.block.megatron import Megatron
from meshweave.algorithms.block.reference import reference
from meshweave.algorithms.contract import Array, Arrays
from meshweave.algorithms.step import StepProblem
from meshweave_lab.step_run import Adam

_NO_WEIGHTS = (TOKENS_IN, TARGETS, IDS_IN, IDS_OUT)


@dataclass(frozen=True)
class ReferenceSteps:
    """Some steps of training: the loss of each, summed over all tokens, and the weights after the last one."""

    losses: tuple[float, ...]
    weights: Arrays


def whole_model(problem: StepProblem) -> BlockProblem:
    """Return all layers of a step's model, embedding and head as one block: the whole batch on one rank."""
    model = problem.model
    block = BlockProblem.of(model, problem.workload, (1, 1), layers=model.num_layers)
    return replace(block, vocabulary=model.vocab_size or 0)


def random_weights(problem: StepProblem, seed: int = 0) -> Arrays:
    """Return float32 weights of a model by name, scaled so that products keep their operands' magnitude."""
    whole = replace(whole_model(problem), batch=1)
    inputs = Megatron().random_inputs(whole, seed)
    weights: dict[str, Array] = {}
    for name, value in inputs.items():
        if name in _NO_WEIGHTS:
            continue
        scale = 1.0 if name.startswith("G") else 2 / np.sqrt(value.shape[0])
        weights[name] = (value * scale).astype(np.float32)
        if name.startswith("G"):
            weights[name][0] += 1
    return weights


def random_batches(problem: StepProblem, count: int, seed: int = 0) -> list[tuple[Array, Array]]:
    """Return (tokens, targets) of each of `count` steps, random ids of shape (batch, sequence)."""
    draw = np.random.default_rng(seed)
    sizes = 2, problem.batch, problem.sequence
    batches = (draw.integers(0, problem.model.vocab_size or 1, sizes) for _ in range(count))
    return [(tokens, targets) for tokens, targets in batches]


def reference_steps(
    problem: StepProblem, weights: Arrays, batches: Iterable[tuple[Array, Array]], optimizer: Adam
) -> ReferenceSteps:
    """Return the losses and final weights of training one step on each of `batches`: (tokens, targets)."""
    whole = whole_model(problem)
    ids = np.arange(whole.vocabulary, dtype=np.float32)
    known = dict(weights)
    moments = {name: (np.zeros_like(value), np.zeros_like(value)) for name, value in weights.items()}
    losses = []
    for number, (tokens, targets) in enumerate(batches, 1):
        inputs = {TOKENS_IN: tokens.astype(np.float32), TARGETS: targets.astype(np.float32)}
        out = reference(whole, {**known, **inputs, IDS_IN: ids, IDS_OUT: ids})
        losses.append(float(out[LOSS][0]))
        for name, value in known.items():
            value, *both = optimizer.update(value, *moments[name], out[f"D{name}"], number)
            known[name], moments[name] = value, (both[0], both[1])
    return ReferenceSteps(tuple(losses), known)
