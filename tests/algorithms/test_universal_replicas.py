"""Copies of C: what the slicing takes for certain is certain when a program runs on symbols, however lowered."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave.algorithms.universal import (
    Slicing,
    UniversalConfig,
    UniversalProblem,
    universal_configs,
    universal_program,
)
from meshweave.algorithms.universal.config import ScheduleKind
from meshweave.algorithms.universal.reduction import replicas_have_same_bits
from meshweave.cost.rates import RankRates
from meshweave.describe.layout import Layout, Partial, Placement, Replicate, Shard
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.cluster import load_cluster
from meshweave.ir.analysis.dataflow import analyse, untimed_order
from meshweave.ir.analysis.replicas import ReplicaAgreement, replica_agreements
from meshweave.ir.program import Program
from meshweave.lower import lower_one_sided, lower_to_shared_memory
from meshweave.tune.universal import tune_universal
from sampling import examples

KINDS: tuple[Placement, ...] = (Shard(0), Shard(1), Replicate(), Partial())
SHAPES = [(2, 2), (2, 3), (3, 2), (2, 1), (1, 3), (4, 1), (2, 4), (2, 2, 2)]
RATES = RankRates.of(load_cluster("local-cpu"))


def agreement(program: Program) -> ReplicaAgreement:
    flow = analyse(program)
    (agreed,) = replica_agreements(flow, untimed_order(flow))
    return agreed


@st.composite
def cases(draw: st.DrawFn) -> tuple[UniversalProblem, UniversalConfig]:
    """Products whose C often has copies, on meshes of one shape and of several, and any config of theirs."""
    shape = draw(st.sampled_from(SHAPES))
    count = math.prod(shape)
    axes = ("x", "y", "z")[: len(shape)]
    meshes = [Mesh.of("tp", shape, axes)]
    if draw(st.booleans()):
        meshes.append(Mesh("flat", (count,), ("w",), tuple(range(count))))
    if draw(st.booleans()):
        meshes.append(Mesh("mixed", shape[::-1], axes, tuple(draw(st.permutations(range(count))))))

    def layout(kinds: tuple[Placement, ...]) -> Layout:
        mesh = draw(st.sampled_from(meshes))
        return Layout(mesh, tuple(draw(st.sampled_from(kinds)) for _ in mesh.shape))

    a, b, c = layout(KINDS), layout(KINDS), layout((*KINDS, Replicate(), Replicate()))
    m, n, k = (draw(st.integers(1, 19)) for _ in range(3))
    orders = tuple(draw(st.sampled_from([None, (1, 0)])) for _ in range(3))
    dtype = draw(st.sampled_from(["float64", "float32", "bfloat16"]))
    problem = UniversalProblem(m, n, k, a, b, c, dtype, orders)  # type: ignore[arg-type]
    config = draw(st.sampled_from(list(universal_configs(problem))))
    return problem, replace(config, num_slices=draw(st.integers(1, 4)), prefetch=draw(st.integers(0, 2)))


@examples(40)
@given(cases())
def test_what_the_slicing_takes_for_certain_is_certain(
    case: tuple[UniversalProblem, UniversalConfig],
) -> None:
    problem, config = case
    if replicas_have_same_bits(Slicing(problem, config)):
        program = universal_program(problem, config)
        for version in (program, lower_one_sided(program), lower_to_shared_memory(program)):
            assert agreement(version).is_certain, str(agreement(version))


def tuned_programs(mesh: Mesh, sizes: tuple[int, int, int], step: int) -> Iterator[tuple[str, Program]]:
    """Yield what is tuned for every `step`-th choice of placements in which C has copies, by bytes and by time."""
    placed = list(itertools.product(KINDS, repeat=len(mesh.shape)))
    outs = [one for one in placed if Replicate() in one]
    choices = itertools.product(placed, placed, outs)
    for number, choice in enumerate(itertools.islice(choices, 0, None, step)):
        problem = UniversalProblem(*sizes, *(Layout(mesh, one) for one in choice))
        by_messages = number % 2 == 0
        tuned = tune_universal(problem, RATES, objective="bytes" if by_messages else "time")
        program = universal_program(problem, tuned.config)
        lowered = lower_one_sided(program) if by_messages else lower_to_shared_memory(program)
        yield f"{choice}, {tuned.config}", lowered


def check_tuned(mesh: Mesh, sizes: tuple[int, int, int], step: int) -> Counter[str]:
    kinds: Counter[str] = Counter()
    for case, program in tuned_programs(mesh, sizes, step):
        agreed = agreement(program)
        assert agreed.is_certain, f"{case}: {agreed}"
        kinds[agreed.kind] += 1
    return kinds


def test_what_is_tuned_has_copies_with_the_same_bits() -> None:
    kinds = check_tuned(Mesh.of("tp", (2, 2), ("row", "col")), (13, 11, 17), 193)
    assert kinds["copied"] and kinds["recomputed"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("shape", [(2, 2), (2, 1), (2, 3)], ids=str)
def test_all_that_is_tuned_has_copies_with_the_same_bits(shape: tuple[int, int]) -> None:
    check_tuned(Mesh.of("tp", shape, ("row", "col")), (13, 11, 17), 1 if math.prod(shape) < 6 else 7)


UNLIKE = [
    ("S0 S1", "R R", "S0 R"),
    ("R S1", "R R", "S0 R"),
    ("S1 S0", "R R", "R S0"),
    ("S0 R", "S0 S1", "R R"),
]
"""Placements for which ranks have different parts of what they recompute C from."""


@pytest.mark.parametrize("words", UNLIKE)
def test_ranks_that_have_different_parts_add_up_the_same_products(words: tuple[str, str, str]) -> None:
    known: dict[str, Placement] = {"S0": Shard(0), "S1": Shard(1), "R": Replicate()}
    mesh = Mesh.of("tp", (2, 2), ("row", "col"))
    a, b, c = (Layout(mesh, tuple(known[word] for word in listed.split())) for listed in words)
    problem = UniversalProblem(14, 6, 9, a, b, c)
    configs = [config for config in universal_configs(problem) if config.redundant_axes]
    assert configs and all(replicas_have_same_bits(Slicing(problem, config)) for config in configs)
    for config, slices in itertools.product(configs, (1, 3)):
        program = universal_program(problem, replace(config, num_slices=slices))
        assert agreement(lower_one_sided(program)).kind in ("recomputed", "copied")
        assert agreement(lower_to_shared_memory(program)).kind in ("recomputed", "copied")


@pytest.mark.parametrize("schedule", ["greedy", "cost-greedy", "exhaustive"])
def test_schedules_of_ranks_that_fetch_unlike_parts_are_not_taken_for_certain(schedule: ScheduleKind) -> None:
    """Ranks order products by what they fetch, so that each would add up its copy of C in its own order."""
    mesh = Mesh.of("tp", (2, 2), ("x", "y"))
    mixed = Mesh("mixed", (2, 2), ("x", "y"), (0, 2, 1, 3))
    kept, out = (Layout(mesh, (placement, Replicate())) for placement in (Shard(1), Replicate()))
    problem = UniversalProblem(17, 12, 19, Layout(mixed, (Shard(1), Shard(1))), kept, out)
    rates = RankRates.of(load_cluster("dgx-h100:4"))
    tuned = tune_universal(problem, rates, schedule=schedule)
    assert tuned.config.schedule == schedule
    assert agreement(universal_program(problem, tuned.config)).is_certain
    for config in universal_configs(problem):
        slicing = Slicing(problem, replace(config, schedule=schedule, rates=rates))
        if slicing.is_recomputed and replicas_have_same_bits(slicing):
            assert agreement(universal_program(problem, slicing.config)).is_certain


def test_ranks_that_fetch_nothing_compute_copies_of_c_on_their_own_by_any_schedule() -> None:
    whole = Layout(Mesh.of("tp", (4,), ("x",)), (Replicate(),))
    rates = RankRates.of(load_cluster("dgx-h100:4"))
    tuned = tune_universal(UniversalProblem(8, 8, 8, whole, whole, whole), rates, schedule="cost-greedy")
    assert tuned.config.redundant_axes == (0,) and tuned.moved_bytes == 0
