"""The relations of `algorithms.contract` for every entry of the table. A new entry gets these tests for free."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshweave.algorithms.contract import Algorithm, Array, Gradient, Within, is_accurate
from meshweave.algorithms.reshard.problem import ReshardProblem
from meshweave.algorithms.table import ALGORITHMS, algorithm, algorithms_for
from meshweave.base.errors import UnsupportedError
from meshweave.cost.machine import Machine
from meshweave.describe.layout import Layout
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.execute.numpy import run_numpy
from meshweave.ir.analysis.lifetimes import peak_bytes
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program.parse import parse
from meshweave.ir.program.text import to_text
from meshweave.ir.work import traffic
from meshweave.simulate.reference import simulate
from sampling import examples

MOST_CANDIDATES = 3 if settings().max_examples <= 100 else 8
"""Of an example's candidates the first, the last and some between are taken."""


def spread(items: list[Any], count: int = MOST_CANDIDATES) -> list[Any]:
    return (
        items if len(items) <= count else [items[i * (len(items) - 1) // (count - 1)] for i in range(count)]
    )


CASES = [
    pytest.param(entry, problem, config, id=f"{name}-{number}-{config}")
    for name, entry in ALGORITHMS.items()
    for number, problem in enumerate(entry.examples())
    for config in spread(list(entry.candidates(problem)))
]
PROBLEMS = [
    pytest.param(entry, problem, id=f"{name}-{number}")
    for name, entry in ALGORITHMS.items()
    for number, problem in enumerate(entry.examples())
]
Entry = Algorithm[Any, Any]


def solution(
    entry: Entry, problem: Any, inputs: dict[str, Array], seed: int | None = None
) -> dict[str, Array]:
    program = entry.program(problem, next(entry.candidates(problem)))
    return run_numpy(program, inputs, seed=seed, calls=entry.functions(problem)).outputs


@pytest.mark.parametrize("name", ALGORITHMS)
def test_entries_describe_themselves(name: str) -> None:
    entry = ALGORITHMS[name]
    assert entry.name == name and entry.title and entry.source
    assert algorithm(name) is entry
    examples = list(entry.examples())
    assert examples and all(isinstance(problem, entry.problem_type) for problem in examples)
    for problem in examples:
        assert entry.refusal(problem) is None and algorithms_for(problem)[name] is entry
        assert hash(problem) == hash(replace(problem))


@pytest.mark.parametrize(("entry", "problem", "config"), CASES)
def test_program_is_sound_and_computes_the_reference_in_any_order(
    entry: Entry, problem: Any, config: Any
) -> None:
    program = entry.program(problem, config)
    assert program == entry.program(problem, config)
    assert parse(to_text(program)) == program
    validation = validate(program)
    assert all(skipped.startswith("deadlocks of ready-first lanes") for skipped in validation.skipped)
    assert all(agreement.is_certain for agreement in validation.replicas), validation.replicas_text
    inputs = entry.random_inputs(problem)
    expected = entry.reference(problem, inputs)
    assert expected
    for seed in (None, 1):
        outputs = run_numpy(program, inputs, seed=seed, calls=entry.functions(problem)).outputs
        assert set(outputs) == set(expected)
        for tensor, value in expected.items():
            np.testing.assert_array_equal(outputs[tensor], value)


@pytest.mark.parametrize(("entry", "problem", "config"), CASES)
def test_closed_forms_equal_what_the_program_does(entry: Entry, problem: Any, config: Any) -> None:
    program = entry.program(problem, config)
    for rank in program.ranks:
        assert entry.traffic(problem, config, rank) == traffic(program, rank)
    assert is_accurate(entry.memory_accuracy, entry.peak_bytes(problem, config), peak_bytes(program, 0))


@pytest.mark.parametrize(("entry", "problem"), PROBLEMS)
def test_placements_are_those_of_the_buffers(entry: Entry, problem: Any) -> None:
    """Meshes may be renamed by a program."""
    program = entry.program(problem, next(entry.candidates(problem)))
    buffers = [buffer for buffer in program.buffers if buffer.kind in ("input", "output")]
    placements = entry.placements(problem)
    assert set(placements) == {buffer.tensor for buffer in buffers}
    for buffer in buffers:
        assert buffer.layout is not None and buffer.tensor is not None
        assert unnamed(buffer.layout) == unnamed(placements[buffer.tensor])


def unnamed(layout: Layout) -> Layout:
    return replace(layout, mesh=replace(layout.mesh, name="mesh"))


def pod_for(ranks: tuple[int, ...]) -> Cluster:
    """A torus on which nothing is shared, with products priced by FLOPs alone."""
    pod = load_cluster(f"tpu-v4-pod:{max(max(ranks) + 1, 4)}")
    return replace(pod, chip=replace(pod.chip, gemm_tile=None))


def require_accurate_time(entry: Entry, problem: Any, config: Any) -> None:
    program = entry.program(problem, config)
    machine = Machine.of(pod_for(program.ranks), program)
    estimated = entry.estimate(problem, config, machine).total_s
    simulated = simulate(program, machine, contention=False).duration_s
    num_ops = max(len(ops) for ops in program.ops_by_rank.values())
    rounding = 1e-12 * (simulated if entry.estimate_accuracy == "exact" else num_ops)
    assert is_accurate(entry.estimate_accuracy, estimated, simulated, rounding), (estimated, simulated)


@pytest.mark.parametrize(("entry", "problem", "config"), CASES)
def test_estimate_is_the_uncontended_simulation(entry: Entry, problem: Any, config: Any) -> None:
    if not isinstance(entry.estimate_accuracy, Within):
        require_accurate_time(entry, problem, config)


GENERATED = [
    pytest.param(entry, id=name)
    for name, entry in ALGORITHMS.items()
    if isinstance(entry.estimate_accuracy, Within)
]


@examples(20)
@given(st.data())
@pytest.mark.parametrize("entry", GENERATED)
def test_an_estimate_within_a_share_is_so_for_problems_of_any_size(entry: Entry, data: st.DataObject) -> None:
    """Examples grown by one factor, laid out for the machine on which they are simulated."""
    problem = grown(
        data.draw(st.sampled_from(list(entry.examples()))), data.draw(st.sampled_from([1, 7, 64, 512]))
    )
    ranks = entry.program(problem, next(entry.candidates(problem))).ranks
    require_accurate_time(
        entry, problem, data.draw(st.sampled_from(list(entry.candidates(problem, pod_for(ranks)))))
    )


def grown(problem: Any, times: int) -> Any:
    """Return a product or a reshard whose matrices have so many times the rows and columns."""
    if isinstance(problem, ReshardProblem):
        moves = (replace(move, shape=tuple(times * size for size in move.shape)) for move in problem.moves)
        return ReshardProblem(tuple(moves))
    return replace(problem, m=times * problem.m, n=times * problem.n, k=times * problem.k)


@examples(10)
@given(st.data())
@pytest.mark.parametrize(("entry", "problem"), PROBLEMS)
def test_gradients_are_the_adjoint_of_the_program(entry: Entry, problem: Any, data: st.DataObject) -> None:
    """<dy, f(x + e) - f(x)> == <gradient, e> for every input x alone: f is linear in each."""
    gradients = entry.gradients(problem)
    if not gradients:
        return
    inputs = entry.random_inputs(problem, data.draw(st.integers(0, 999)))
    outputs = entry.reference(problem, inputs)
    draw = np.random.default_rng(data.draw(st.integers(0, 999)))
    arriving = {
        name: draw.integers(-3, 4, value.shape).astype(value.dtype) for name, value in outputs.items()
    }
    for gradient in gradients:
        change = draw.integers(-3, 4, inputs[gradient.wrt].shape).astype(inputs[gradient.wrt].dtype)
        moved = entry.reference(problem, {**inputs, gradient.wrt: inputs[gradient.wrt] + change})
        along = sum((arriving[name] * (moved[name] - outputs[name])).sum() for name in outputs)
        assert (gradient_of(entry, gradient, inputs, arriving) * change).sum() == along


def gradient_of(
    entry: Entry, gradient: Gradient[Any], inputs: dict[str, Array], arriving: dict[str, Array]
) -> Array:
    taken = {}
    for name, source in gradient.operands.items():
        value = arriving.get(source, inputs.get(source))
        assert value is not None
        taken[name] = value.T if name in gradient.transposed else value
    assert entry.refusal(gradient.problem) is None
    result = solution(entry, gradient.problem, taken)[gradient.output]
    return result.T if gradient.output in gradient.transposed else result


def test_products_and_reshards_are_differentiable() -> None:
    with_gradients = {
        name
        for name, entry in ALGORITHMS.items()
        if any(entry.gradients(problem) for problem in entry.examples())
    }
    assert with_gradients >= {
        "meshslice",
        "collective",
        "wang",
        "summa",
        "tp1d",
        "fsdp",
        "universal",
        "dtensor",
    }
    assert with_gradients >= {name for name in ALGORITHMS if name.startswith("reshard_")}


def test_an_unknown_name_is_a_user_error() -> None:
    with pytest.raises(UnsupportedError, match=r"no algorithm 'meshslise' .did you mean 'meshslice'"):
        algorithm("meshslise")
