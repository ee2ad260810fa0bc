"""A step's program, run on integers, is a dense step of the whole model: all its kinds of parallelism."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from meshweave.algorithms.step import Parallelism, StepProblem
from meshweave.algorithms.step.algorithm import TRAINING_STEP
from meshweave.execute.calls import of_rank
from meshweave.execute.numpy import run_numpy
from sampling import mostly_slow

PROBLEMS = tuple(TRAINING_STEP.examples())


def one_of_each_kind(problem: StepProblem) -> list[Parallelism]:
    """One candidate for each ZeRO level, schedule and number of stages, with others of what it leaves open."""
    kinds = defaultdict(list)
    for choice in TRAINING_STEP.candidates(problem):
        kinds[choice.zero, choice.schedule, choice.virtual_stages].append(choice)
    return [
        choices[(2 * len(choices) // 3 + number) % len(choices)]
        for number, choices in enumerate(kinds.values())
    ]


CHOICES = [(problem, choice) for problem in PROBLEMS for choice in one_of_each_kind(problem)]
WITH_CONTEXT = [
    Parallelism(data=2, context=2, micro_batch=2, zero=1),
    Parallelism(data=2, context=2, micro_batch=2, zero=3, order=("context", "pipeline", "tensor", "data")),
    Parallelism(data=2, context=2, zero=2, order=("data", "context", "tensor", "pipeline")),
    Parallelism(context=2, tensor=2),
]
"""Sequences of the examples are too short for a plan to share them."""


def require_dense(problem: StepProblem, choice: Parallelism) -> None:
    entry, weights = TRAINING_STEP, TRAINING_STEP.random_inputs(problem, 3)
    expected = entry.reference(problem, weights)
    operands, calls = entry.operands(problem, choice, weights), entry.calls(problem, choice)
    run = run_numpy(entry.program(problem, choice), operands, seed=5, calls=calls)
    results = entry.results(problem, choice, run.outputs)
    assert set(results) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(results[name], value, name)


@pytest.mark.parametrize("number", mostly_slow(range(len(CHOICES)), 8))
def test_a_step_is_a_dense_step(number: int) -> None:
    require_dense(*CHOICES[number])


@pytest.mark.parametrize("choice", WITH_CONTEXT)
def test_ranks_that_share_sequences_compute_a_dense_step(choice: Parallelism) -> None:
    require_dense(PROBLEMS[1], choice)


def test_integers_show_a_sum_that_is_left_out() -> None:
    """Gradients of one replica are not those of the batch."""
    problem, choice = PROBLEMS[0], Parallelism(data=4)
    weights = TRAINING_STEP.random_inputs(problem)
    expected = TRAINING_STEP.reference(problem, weights)
    calls = dict(TRAINING_STEP.calls(problem, choice))
    accumulate = calls["accumulate_layer"]
    calls["accumulate_layer"] = of_rank(lambda *given: 2 * accumulate(*given) - given[-1])
    operands = TRAINING_STEP.operands(problem, choice, weights)
    outputs = run_numpy(TRAINING_STEP.program(problem, choice), operands, calls=calls).outputs
    results = TRAINING_STEP.results(problem, choice, outputs)
    assert any((results[name] != value).any() for name, value in expected.items())
