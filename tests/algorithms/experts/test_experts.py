"""Layers of experts: proved for all counts, and run in integers with tokens of any routing, each exactly once."""

from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave.algorithms.experts import ENTRIES, ExpertsProblem, Routing, TokenSlices
from meshweave.algorithms.experts.host_functions import sum_hosts
from meshweave.algorithms.experts.reference import layer_reference
from meshweave.algorithms.experts.routing import within_capacity
from meshweave.algorithms.table import algorithm
from meshweave.base.errors import LayoutError
from meshweave.describe.layout.mesh import Mesh
from meshweave.execute.numpy import run_numpy
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program import parse, to_text
from meshweave.ir.work import traffic
from meshweave.lower import lower_one_sided
from sampling import examples

EXACT = {"dtype": "float64", "activation": "relu"}


def hosts(shape: tuple[int, int]) -> Mesh:
    return Mesh.of("ep", shape, ("host", "local"))


def problems() -> st.SearchStrategy[ExpertsProblem]:
    """Layers of up to eight ranks, of any routing, also with experts that get nothing."""

    def build(shape, own, tokens, top_k, kind, seed, capacity, part):
        num_experts = shape[0] * shape[1] * own
        weights = np.random.default_rng(seed).integers(0, 3, num_experts).astype(float)
        weights[seed % num_experts] = 1.0
        table = tuple(weights) if kind == "table" else ()
        return ExpertsProblem(
            hosts(shape), tokens, min(top_k, num_experts), num_experts, 2, 2, part=part, capacity=capacity,
            routing=Routing(kind, seed, 2.0, table), **EXACT,
        )  # fmt: skip

    shapes = st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2), (3, 2), (2, 4)])
    return st.builds(
        build, shapes, st.integers(1, 3), st.integers(1, 9), st.integers(1, 4),
        st.sampled_from(["balanced", "power", "table"]), st.integers(0, 99), st.none() | st.integers(1, 3),
        st.sampled_from(["layer", "training"]),
    )  # fmt: skip


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_programs_are_proved_for_all_counts(entry):
    for problem in entry.examples():
        for config in entry.candidates(problem):
            program = entry.counted_program(problem, config)
            assert parse(to_text(program)) == program
            notes = validate(program).skipped
            assert all("not declared" in note for note in notes), notes
            assert not any("activate" in note for note in notes)


@examples(20)
@given(problems(), st.data())
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_a_layer_equals_the_loop_over_experts_in_integers(entry, problem, data):
    config = data.draw(st.sampled_from(list(entry.candidates(problem))))
    program = entry.program(problem, config)
    inputs = entry.random_inputs(problem, data.draw(st.integers(0, 9)))
    expected = entry.reference(problem, inputs)
    seed = data.draw(st.sampled_from([None, 1]))
    outputs = run_numpy(program, inputs, seed=seed, calls=entry.functions(problem)).outputs
    for name, value in expected.items():
        np.testing.assert_array_equal(outputs[name], value)


@examples(20)
@given(problems())
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_a_dispatch_brings_every_token_to_each_of_its_experts_exactly_once(entry, problem):
    problem = replace(problem, part="dispatch")
    config = next(entry.candidates(problem))
    numbers = np.arange(problem.num_ranks * problem.tokens * 2.0).reshape(-1, 2)
    inputs = {"X": numbers, "Choices": problem.choices}
    program = entry.program(problem, config)
    rows = run_numpy(program, inputs, calls=entry.functions(problem)).outputs["Q0"][0]
    held = len(rows) // problem.num_ranks
    counts = problem.counts()["n0"]
    arrived = []
    for rank in range(problem.num_ranks):
        at = count(rank * held)
        for expert in range(rank * problem.local_experts, (rank + 1) * problem.local_experts):
            arrived += [(int(rows[next(at), 0]) // 2, expert) for _ in range(counts[expert].sum())]
    wanted = [(t, int(e)) for t, chosen in enumerate(problem.choices) for e in chosen if e >= 0]
    assert sorted(arrived) == sorted(wanted)
    assert len(wanted) == problem.choices.size - problem.num_dropped


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
@pytest.mark.parametrize("part", ["dispatch", "weighted_dispatch", "combine"])
def test_each_exchange_alone_equals_its_reference(entry, part):
    for problem in entry.examples():
        problem = replace(problem, part=part)
        if entry.refusal(problem):
            continue
        config = next(entry.candidates(problem))
        program, inputs = entry.program(problem, config), entry.random_inputs(problem)
        if part == "combine":
            shape = program.tensor_of["Z0"].shape
            inputs["Z0"] = np.random.default_rng(0).integers(-3, 4, shape).astype(problem.dtype)
        outputs = run_numpy(program, inputs, calls=entry.functions(problem)).outputs
        for name, value in entry.reference(problem, inputs).items():
            np.testing.assert_array_equal(outputs[name], value)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32"])
@pytest.mark.parametrize("part", ["layer", "dispatch"])
def test_other_dtypes_equal_their_reference(part, dtype):
    for entry in ENTRIES:
        problem = replace(next(entry.examples()), part=part, dtype=dtype)
        config, inputs = next(entry.candidates(problem)), entry.random_inputs(problem)
        outputs = run_numpy(entry.program(problem, config), inputs, calls=entry.functions(problem)).outputs
        for name, value in entry.reference(problem, inputs).items():
            np.testing.assert_array_equal(outputs[name], value)


def test_rows_that_overflow_stay_with_their_token():
    """A token that a host has no expert for gets nothing from the row of the token before it there."""
    rows, choices = np.array([[np.inf], [1.0], [2.0]]), np.array([[0], [1], [0]])
    np.testing.assert_array_equal(sum_hosts(rows, choices, 2, 1), [[np.inf], [2.0], [1.0]])


def test_puts_run_as_messages_too():
    entry = algorithm("experts_put")
    problem = list(entry.examples())[1]
    config, inputs = next(entry.candidates(problem)), entry.random_inputs(problem)
    lowered = lower_one_sided(entry.program(problem, config))
    outputs = run_numpy(lowered, inputs, calls=entry.functions(problem)).outputs
    for name, value in entry.reference(problem, inputs).items():
        np.testing.assert_array_equal(outputs[name], value)


def test_the_reference_gradients_are_those_of_the_reference():
    """Central differences of <dY, Y> in every input, with the smooth activation."""
    mesh = hosts((1, 2))
    problem = ExpertsProblem(mesh, 3, 2, 4, 3, 2, "float64", "training", routing=Routing("power", 1))
    draw = np.random.default_rng(0)
    inputs = {
        "X": draw.normal(size=(6, 3)), "Gates": draw.normal(size=(6, 2)), "W1": draw.normal(size=(4, 3, 4)),
        "W2": draw.normal(size=(4, 2, 3)), "dY": draw.normal(size=(6, 3)), "Choices": problem.choices,
    }  # fmt: skip
    made = layer_reference(problem, inputs)
    for name in ("X", "Gates", "W1", "W2"):
        along = draw.normal(size=inputs[name].shape)
        ends = [
            (
                layer_reference(problem, {**inputs, name: inputs[name] + step * along})["Y"] * inputs["dY"]
            ).sum()
            for step in (1e-6, -1e-6)
        ]
        assert (made[f"d{name}"] * along).sum() == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-6)


def test_over_hosts_a_token_crosses_a_nic_once_for_each_host_that_needs_it():
    entry, mesh = algorithm("experts_hierarchical"), hosts((2, 4))
    problem = ExpertsProblem(mesh, 32, 4, 16, 64, 2, routing=Routing("balanced", 3))
    config = next(entry.candidates(problem))
    program, needed = entry.program(problem, config), problem.counts()["m"]
    for rank in mesh.ranks:
        moved = traffic(program, rank)["ep.host"]
        other = 1 - rank // 4
        tokens = needed[other, rank]
        assert tokens <= problem.tokens
        row_bytes = 4 * (problem.hidden + 2 * problem.top_k)  # a token with its choices and gates
        received = needed[rank // 4, rank % 4 + 4 * other]
        assert moved == tokens * row_bytes + received * 4 * problem.hidden


def test_a_table_with_weights_of_fewer_experts_than_a_token_takes_is_refused():
    with pytest.raises(LayoutError, match="has 1 weights above 0, and a token takes 2 experts"):
        Routing("table", table=(3.0, 0.0, 0.0)).draw(8, 2, 3)


def test_routings_are_as_they_say():
    balanced = Routing("balanced", 1).draw(64, 4, 16)
    assert set(np.bincount(balanced.ravel(), minlength=16)) == {16}
    power = np.sort(np.bincount(Routing("power", 1, 1.5).draw(4096, 1, 16).ravel(), minlength=16))[::-1]
    assert power[0] / power[1] == pytest.approx(2**1.5, rel=0.15)
    assert (Routing("power", 1, 1.5).draw(64, 2, 16) == Routing("power", 1, 1.5).draw(64, 2, 16)).all()
    drawn = Routing("table", 0, table=(3.0, 1.0, 0.0, 0.0)).draw(4000, 1, 4)
    assert np.bincount(drawn.ravel(), minlength=4)[:2] == pytest.approx([3000, 1000], rel=0.1)
    for routing in (balanced, power):
        assert routing.min() >= 0
    for tokens in Routing("power", 3, 3.0).draw(100, 5, 6):
        assert len(set(tokens)) == 5


def test_an_exponent_may_be_a_whole_number():
    whole, real = (Routing("power", 3, exponent).draw(9, 2, 4) for exponent in (2, 2.0))
    np.testing.assert_array_equal(whole, real)


@pytest.mark.parametrize("given", [{"table": (1.0, np.nan), "kind": "table"}, {"exponent": np.inf}], ids=str)
def test_a_routing_has_finite_weights(given):
    with pytest.raises(LayoutError, match="must be finite"):
        Routing(**given)


def test_tokens_beyond_the_capacity_are_dropped_in_their_order_and_counted():
    choices = np.array([[0, 1], [0, 1], [0, 2], [0, 1]])
    kept = within_capacity(choices, 2, 4, 1)
    assert kept.tolist() == [[0, 1], [-1, -1], [0, 2], [-1, 1]]
    mesh = hosts((1, 2))
    problem = ExpertsProblem(mesh, 8, 2, 4, 2, 2, routing=Routing("power", 0, 2.0), capacity=2)
    dropless = replace(problem, capacity=None)
    assert problem.num_dropped == dropless.counts()["n0"].sum() - problem.counts()["n0"].sum() > 0
    assert problem.counts()["n0"].max() == 2 and dropless.num_dropped == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 6}, "6 experts are no multiple of 4 ranks"),
        ({"top_k": 9}, "a token takes 9 of 8 experts"),
        ({"capacity": 0}, "takes none"),
        ({"part": "route"}, "no part 'route'"),
        ({"tokens": 0}, "at least 1"),
    ],
)
def test_problems_that_do_not_fit_are_refused(change, message):
    arguments = {"tokens": 4, "top_k": 2, "num_experts": 8, "hidden": 4, "inner": 4}
    with pytest.raises(LayoutError, match=message):
        ExpertsProblem(hosts((2, 2)), **{**arguments, **change})


def test_hosts_are_needed_where_rows_go_by_hosts():
    problem = ExpertsProblem(Mesh.of("ep", (4,), ("x",)), 4, 2, 8, 4, 4)
    entry = algorithm("experts_hierarchical")
    with pytest.raises(LayoutError, match="hosts and their ranks"):
        entry.program(problem, next(entry.candidates(problem)))
    exchanged = replace(problem, mesh=hosts((2, 2)), part="combine")
    assert "no exchange of rows" in entry.refusal(exchanged)


def test_slices_are_candidates_only_where_each_has_tokens():
    entry = algorithm("experts_fused")
    problem = ExpertsProblem(hosts((2, 2)), 5, 2, 8, 4, 4)
    assert [*entry.candidates(problem)] == [TokenSlices(), TokenSlices(2, False), TokenSlices(2), *[
        TokenSlices(4, by) for by in (False, True) if 5 > 3 * 2
    ]]  # fmt: skip
    for number in (0, 4, 6):
        with pytest.raises(LayoutError, match=f"{number} slices of 5 tokens leave one empty"):
            entry.program(problem, TokenSlices(number))


@pytest.mark.parametrize("part", ["dispatch", "weighted_dispatch", "combine"])
def test_an_exchange_alone_is_not_cut_into_slices(part):
    """Its packed rows are one tensor: of slices each would have rows of its own."""
    problem = ExpertsProblem(hosts((2, 2)), 8, 2, 4, 3, 2, part=part, **EXACT)
    entry = algorithm("experts_fused")
    assert list(entry.candidates(problem)) == [TokenSlices()]
    with pytest.raises(LayoutError, match=f"a {part} alone is not cut into slices; give 1"):
        entry.program(problem, TokenSlices(2))


def test_a_capacity_holds_for_choices_in_any_memory_order():
    choices = np.zeros((6, 2), np.int64)
    choices[:, 1] = 1
    kept = within_capacity(choices, 2, 2, 1)
    assert (kept >= 0).sum() == 4
    np.testing.assert_array_equal(within_capacity(np.asfortranarray(choices), 2, 2, 1), kept)
