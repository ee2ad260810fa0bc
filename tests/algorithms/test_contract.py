"""The relations of `algorithms.contract` for every entry of the table. A new entry gets these tests for free."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshweave.algorithms.contract import Algorithm, Array, Gradient, Within, is_accurate
from meshweave.algorithms.reshard.problem import ReshardProblem
from meshweave.algorithms.step import SoftwareStack, StepProblem
from meshweave.algorithms.table import ALGORITHMS, algorithm, algorithms_for
from meshweave.algorithms.universal import UniversalProblem
from meshweave.base.errors import UnsupportedError
from meshweave.describe.layout import Layout
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.execute.numpy import run_numpy
from meshweave.ir.analysis.lifetimes import peak_bytes
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program import Program
from meshweave.ir.program.parse import parse
from meshweave.ir.program.text import to_text
from meshweave.ir.work import traffic
from plain_simulator.reference import simulate
from sampling import examples

MOST_CANDIDATES = 2 if settings().max_examples <= 100 else 8
"""Of an example's candidates the first, the last and, in the slow suite, some between are taken."""


def spread(items: list[Any], count: int = MOST_CANDIDATES) -> list[Any]:
    return (
        items if len(items) <= count else [items[i * (len(items) - 1) // (count - 1)] for i in range(count)]
    )


CASES = [
    pytest.param((entry, problem, config), id=f"{name}-{number}-{config}")
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


@dataclass(frozen=True)
class Written:
    """A config of a problem with its program, which several tests look at in turn: it is analysed once."""

    entry: Entry
    problem: Any
    config: Any
    program: Program


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Written:
    """A config and its program; the tests of one that has closed forms alone are skipped."""
    entry, problem, config = request.param
    try:
        return Written(entry, problem, config, entry.program(problem, config))
    except UnsupportedError as error:
        pytest.skip(f"no program: {error}")


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


def test_program_is_sound_and_computes_the_reference_in_any_order(case: Written) -> None:
    entry, problem, config, program = case.entry, case.problem, case.config, case.program
    assert program == entry.program(problem, config)
    assert parse(to_text(program)) == program
    if entry.is_proved:
        validation = validate(program)
        assert all(skipped.startswith("deadlocks of ready-first lanes") for skipped in validation.skipped)
        assert all(agreement.is_certain for agreement in validation.replicas), validation.replicas_text
    inputs = entry.random_inputs(problem)
    expected = entry.reference(problem, inputs)
    assert expected
    operands, calls = entry.operands(problem, config, inputs), entry.calls(problem, config)
    for seed in (None, 1):
        outputs = entry.results(problem, config, run_numpy(program, operands, seed=seed, calls=calls).outputs)
        assert set(outputs) == set(expected)
        for tensor, value in expected.items():
            np.testing.assert_array_equal(outputs[tensor], value)


def test_closed_forms_equal_what_the_program_does(case: Written) -> None:
    entry, problem, config, program = case.entry, case.problem, case.config, case.program
    for rank in program.ranks:
        assert entry.traffic(problem, config, rank) == traffic(program, rank)
    if entry.memory_accuracy is not None:
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


def require_accurate_time(entry: Entry, problem: Any, config: Any, program: Program) -> None:
    machine = entry.machine(problem, config, pod_for(program.ranks))
    estimated = entry.estimate(problem, config, machine).total_s
    simulated = simulate(program, machine, contention=False).duration_s + entry.outside_s(problem, config)
    num_ops = max(len(ops) for ops in program.ops_by_rank.values())
    rounding = 1e-12 * (simulated if entry.estimate_accuracy == "exact" else num_ops)
    assert is_accurate(entry.estimate_accuracy, estimated, simulated, rounding), (estimated, simulated)


def test_estimate_is_the_uncontended_simulation(case: Written) -> None:
    if not isinstance(case.entry.estimate_accuracy, Within):
        require_accurate_time(case.entry, case.problem, case.config, case.program)


GENERATED = [
    pytest.param(entry, id=name)
    for name, entry in ALGORITHMS.items()
    if isinstance(entry.estimate_accuracy, Within)
]


@examples(20)
@given(st.data())
@pytest.mark.parametrize("entry", GENERATED)
def test_an_estimate_within_a_share_is_so_for_problems_of_any_size(entry: Entry, data: st.DataObject) -> None:
    """Laid out for the machine on which they are simulated."""
    example = data.draw(st.sampled_from(list(entry.examples())))
    problem = data.draw(_GROWN[entry.problem_type](example))
    ranks = {rank for placed in entry.placements(problem).values() for rank in placed.mesh.ranks}
    candidates = list(entry.candidates(problem, pod_for(tuple(ranks))))
    first = data.draw(st.integers(0, len(candidates) - 1))
    order = candidates[first:] + candidates[:first]
    config = next(each for each in order if has_program(entry, problem, each))
    require_accurate_time(entry, problem, config, entry.program(problem, config))


def has_program(entry: Entry, problem: Any, config: Any) -> bool:
    try:
        entry.program(problem, config)
    except UnsupportedError:
        return False
    return True


def grown_products(example: Any) -> st.SearchStrategy[Any]:
    """A product whose matrices have so many times the rows and columns."""
    sizes = (example.m, example.n, example.k)
    return st.sampled_from([1, 7, 64, 512]).map(
        lambda times: replace(
            example, **{name: times * size for name, size in zip("mnk", sizes, strict=True)}
        )
    )


def grown_reshards(example: Any) -> st.SearchStrategy[Any]:
    """A reshard of tensors that have so many times the size in every dim."""
    return st.sampled_from([1, 7, 64, 512]).map(
        lambda times: ReshardProblem(
            tuple(replace(move, shape=tuple(times * size for size in move.shape)) for move in example.moves)
        )
    )


def grown_steps(example: Any) -> st.SearchStrategy[Any]:
    """A step whose layers take longer than the latency of a link."""

    def grown(hidden: int, gated: bool, vocabulary: int, overlap: int, seq: int) -> Any:
        model = replace(
            example.model,
            hidden=hidden,
            head_dim=hidden // example.model.num_heads,
            ffn_hidden=4 * hidden,
            gated_ffn=gated,
            vocab_size=vocabulary,
        )
        return replace(example, model=model, sequence=seq, stack=SoftwareStack(overlap=overlap))

    sizes = (
        st.sampled_from(each) for each in ((512, 2048), (True, False), (2048, 32000), (0, 1), (512, 2048))
    )
    return st.builds(grown, *sizes)


_GROWN = {UniversalProblem: grown_products, ReshardProblem: grown_reshards, StepProblem: grown_steps}


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
