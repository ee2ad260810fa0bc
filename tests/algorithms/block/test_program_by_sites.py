"""A block by sites is one program for estimates, simulations and runs: nothing of a site runs beside another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from meshweave.algorithms.block import ENTRIES, BlockAlgorithm, BlockConfig, BlockProblem
from meshweave.algorithms.block.roles import BATCH, RING
from meshweave.algorithms.block.split import split_backward
from meshweave.algorithms.block.two_d import IncludedProducts
from meshweave.algorithms.block.writer import COMPUTE, NEXT_SITE
from meshweave.algorithms.step.strategies import StrategyAround
from meshweave.base.errors import LayoutError
from meshweave.cost.calls import with_counts
from meshweave.cost.machine import Machine
from meshweave.describe.machine.cluster import load_cluster
from meshweave.estimate import estimate, estimate_skeleton, skeleton_ps
from meshweave.execute.numpy import run_numpy
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program import Program
from meshweave.ir.program.parse import parse
from meshweave.ir.program.text import to_text
from meshweave.ir.skeleton import Skeleton, skeleton_of
from meshweave.ir.work import Compute, Work, traffic
from plain_simulator.reference import simulate
from sampling import mostly_slow

AROUND = [
    StrategyAround(entry, roles)
    for entry in ENTRIES
    if entry.name in ("megatron_sp", "atp")
    for roles in ((RING,), (BATCH, RING))
]
STRATEGIES = [*ENTRIES, *AROUND]
EVEN = BlockProblem(8, 4, 16, 4, 4, 2, 24, dtype="float32")
"""A layer whose sizes the meshes below divide."""


def shape_of(entry: BlockAlgorithm, problem: BlockProblem = EVEN) -> tuple[int, ...]:
    """Return a mesh of four ranks or more that a strategy has."""
    shapes = {2: ((2, 2), (4, 1)), 3: ((2, 2, 2), (2, 2, 1)), 4: ((2, 2, 2, 1), (2, 2, 2, 2))}
    fitting = (shape for shape in shapes[len(entry.roles)] if not refused(entry, problem, shape))
    return next(fitting)


def refused(entry: BlockAlgorithm, problem: BlockProblem, shape: tuple[int, ...]) -> bool:
    return entry.refusal(replace(problem, mesh_shape=shape)) is not None


def configs(entry: BlockAlgorithm, problem: BlockProblem) -> Iterator[BlockConfig]:
    """Yield the first and the last candidate of a problem, by sites."""
    candidates = list(entry.candidates(problem))
    for config in dict.fromkeys((candidates[0], candidates[-1])):
        yield replace(config, overlap="sites")


def machine_of(program: Program) -> Machine:
    """Return a torus with the meshes of a program, of up to four axes."""
    return Machine.of(load_cluster(f"tpu-v4-pod:{len(program.ranks)}"), program, logical=True)


def is_gate(work: Work) -> bool:
    """Return whether a task only waits."""
    return isinstance(work, Compute) and work.kind == "call" and not work.call and not work.flops


def duration(work: Work) -> int:
    """Return some picoseconds that differ between works; none for what only waits."""
    return 0 if is_gate(work) else 1 + sum(map(ord, repr(counted(work)))) % 97


def counted(work: Work) -> Work:
    """Return work with the FLOPs that a call of its shape has."""
    return with_counts(work) if isinstance(work, Compute) else work


def works(skeleton: Skeleton) -> Counter[Work]:
    """Count the works of a skeleton that do something."""
    known: Counter[Work] = Counter()
    for count, task in skeleton.counted_tasks():
        if not is_gate(task.work):
            known[counted(task.work)] += count
    return known


@pytest.mark.parametrize("entry", mostly_slow(STRATEGIES, 6), ids=lambda entry: entry.title)
def test_a_program_by_sites_computes_the_reference_in_any_order(entry: BlockAlgorithm) -> None:
    for problem in entry.examples() if entry in ENTRIES else (replace(EVEN, exact=True),):
        stated = replace(problem, mesh_shape=shape_of(entry)) if entry in AROUND else problem
        for config in configs(entry, stated):
            program = entry.program(stated, config)
            assert validate(program).skipped == ()
            assert parse(to_text(program)) == program
            inputs = entry.random_inputs(stated, seed=1)
            expected = entry.reference(stated, inputs)
            for seed in (None, 1, 2):
                outputs = run_numpy(program, inputs, seed=seed, calls=entry.functions(stated)).outputs
                assert set(outputs) == set(expected)
                for tensor, value in expected.items():
                    np.testing.assert_array_equal(outputs[tensor], value)


CASES = list(product(STRATEGIES, (1, 2)))


@pytest.mark.parametrize("case", mostly_slow(CASES, 11), ids=lambda case: f"{case[0].title}, {case[1]}")
def test_program_and_skeleton_by_sites_are_one(case: tuple[BlockAlgorithm, int]) -> None:
    """Ops, bytes, and the time by any duration of ops; of included products the time of the slowest rank."""
    entry, layers = case
    problem = replace(EVEN, mesh_shape=shape_of(entry), layers=layers, biases=layers == 2)
    problem = replace(problem, vocabulary=16 if layers == 2 else 0)
    for config in configs(entry, problem):
        program, skeleton = entry.program(problem, config), entry.skeleton(problem, config)
        machine = machine_of(program)
        estimated = entry.estimate(problem, config, machine)
        simulated = simulate(program, machine, contention=False).duration_s
        assert estimated.total_s == pytest.approx(simulated, rel=1e-6)
        if isinstance(entry, IncludedProducts):
            continue
        read = skeleton_of(program)
        assert works(skeleton) == works(read)
        assert estimated == estimate_skeleton(read, machine)
        assert skeleton_ps(skeleton, duration) == skeleton_ps(read, duration)


@pytest.mark.parametrize("entry", mostly_slow(STRATEGIES, 6), ids=lambda entry: entry.title)
def test_by_sites_the_same_bytes_move_and_no_less_time_passes(entry: BlockAlgorithm) -> None:
    problem = replace(EVEN, mesh_shape=shape_of(entry))
    for config in configs(entry, problem):
        by_sites, whole = (
            entry.program(problem, each) for each in (config, replace(config, overlap="layers"))
        )
        for rank in (0, by_sites.ranks[-1]):
            assert traffic(by_sites, rank) == traffic(whole, rank)
        machine = machine_of(whole)
        assert estimate(by_sites, machine).total_s >= estimate(whole, machine).total_s * (1 - 1e-9)


@pytest.mark.parametrize("name", ["megatron_sp", "zero3", "collective_block", "meshslice_block"])
def test_nothing_of_a_site_runs_beside_another(name: str) -> None:
    """Whoever waits for the site before ends when all before it have ended, and before all after it begin."""
    entry = next(each for each in ENTRIES if each.name == name)
    problem = replace(EVEN, mesh_shape=shape_of(entry), batch=8)
    config = list(configs(entry, problem))[-1]
    program = entry.program(problem, config)
    machine = machine_of(program)
    spans = [span for span in simulate(program, machine, contention=False).spans if span.rank == 0]
    ends = {span.end_ps for span in spans if "next site" in span.label and span.lane == COMPUTE}
    assert len(ends) > 4
    for end_ps in ends:
        assert all(span.end_ps <= end_ps or span.start_ps >= end_ps for span in spans)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", ["megatron_sp", "atp", "collective_block", "summa_block"])
def test_parts_by_sites_are_proved(name: str, recompute: str) -> None:
    """What they keep is what parts of whole layers keep."""
    entry = next(each for each in ENTRIES if each.name == name)
    problem = replace(EVEN, mesh_shape=shape_of(entry), exact=True)
    config = BlockConfig(overlap="sites")
    parts = entry.parts(problem, config, recompute=recompute)
    whole = entry.parts(problem, BlockConfig(), recompute=recompute)
    assert set(parts.kept) == set(whole.kept)
    assert parts.sums == whole.sums
    for program in (parts.forward, parts.backward):
        assert validate(program).skipped == ()
        assert any(getattr(op, "fn", "") == NEXT_SITE for op in program.ops())


@pytest.mark.parametrize("name", ["megatron_sp", "collective_block"])
def test_backward_parts_by_sites_are_proved_in_two(name: str) -> None:
    """What the second one is given is what that of whole layers is given."""
    entry = next(each for each in ENTRIES if each.name == name)
    problem = replace(EVEN, mesh_shape=shape_of(entry), exact=True, biases=True)
    split, whole = (
        split_backward(entry.parts(problem, BlockConfig(overlap=each))) for each in ("sites", "layers")
    )
    assert set(split.passed) == set(whole.passed)
    assert split.input_grad is not None and whole.input_grad is not None
    assert validate(split.input_grad).skipped == validate(whole.input_grad).skipped
    assert validate(split.weight_grad).skipped == validate(whole.weight_grad).skipped


@pytest.mark.parametrize("piece", ["embedding", "head"])
def test_ends_by_sites_are_proved(piece: str) -> None:
    for entry in ENTRIES:
        if entry.name in ("megatron_sp", "collective_block"):
            problem = replace(EVEN, mesh_shape=shape_of(entry), exact=True, vocabulary=16)
            parts = entry.parts(problem, BlockConfig(overlap="sites"), piece=piece)  # type: ignore[arg-type]
            for program in (parts.forward, parts.backward):
                assert validate(program).skipped == ()


@pytest.mark.parametrize("word", ["scatter", "overlap"])
def test_words_that_a_config_does_not_know_are_refused(word: str) -> None:
    with pytest.raises(LayoutError, match=f"block: unknown {word} 'all-reduce'"):
        BlockConfig(**{word: "all-reduce"})  # type: ignore[arg-type]
