"""The benchmark of whole blocks in a lab: its functions, its calibration, and what it says of its rows."""

from pathlib import Path

import numpy as np
import pytest

from meshweave.algorithms.block import BlockProblem
from meshweave.algorithms.block.folds import functions_of
from meshweave.cost.machine import mesh_machine
from meshweave.execute.numpy import run_numpy
from meshweave.simulate import simulate
from meshweave_lab import Lab

torch = pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.mark.parametrize("flat", [False, True], ids=["batch x sequence", "tokens"])
def test_fused_functions_are_those_of_the_block(flat):
    from block_lab_functions import FusedFunctions

    problem = BlockProblem(2, 5, 12, 3, 3, 4, 8, (1, 1), dtype="float64")
    fused, known = FusedFunctions(problem).table(), functions_of(problem)
    rng = np.random.default_rng(0)
    rows = (10,) if flat else (2, 5)
    x, dy = rng.standard_normal((2, *rows, 12))
    gain, qkv = rng.standard_normal((2, 12)), rng.standard_normal((*rows, 36))
    statistics = known["statistics"](x)
    sums = known["norm_grad_sums"](dy, x, statistics, gain)
    out, log_sums = known["attention"](qkv)
    cases = {
        "statistics": (x,),
        "normalize": (x, statistics, gain),
        "norm": (x, gain),
        "norm_grad_sums": (dy, x, statistics, gain),
        "normalize_grad": (dy, x, statistics, sums, gain),
        "normalize_weight_grad": (dy, x, statistics, gain),
        "norm_grad": (dy, x, gain),
        "norm_weight_grad": (dy, x, gain),
        "attention": (qkv,),
        "attention_grad": (dy, qkv, out, log_sums),
        "activation": (x,),
        "activation_grad": (dy, x),
    }
    assert cases.keys() == {name for name in known if name in vars(FusedFunctions)}
    for name, ins in cases.items():
        results = fused[name](*map(torch.from_numpy, ins))
        results = results if isinstance(results, list) else [results]
        expected = known[name](*ins)
        expected = expected if isinstance(expected, list) else [expected]
        for result, value in zip(results, expected, strict=True):
            np.testing.assert_allclose(result.numpy(), value, rtol=1e-12, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("name", ["two-groups-8", "bridged-pairs-8", "torus-2x4"])
def test_what_was_measured_is_what_the_calibrated_cluster_takes(name):
    """A cluster with constants is simulated to take them: an op of a few bytes, and one of many."""
    from block_lab import Constants, with_constants
    from block_lab_rank import ring_program

    known = Constants(goodput=0.5, step_s=2e-3, all_reduce_s=0.07)
    described = Lab.load(ROOT / "examples" / "labs" / f"{name}.toml").cluster()
    machine = mesh_machine(with_constants(described, known, 8), (8, 1), ("row", "col"), logical=True)
    flat = mesh_machine(described, (8, 1), ("row", "col"), logical=True)
    slowest = flat.rate("tp.row", "send_recv", shared=True)
    small, large = (
        simulate(ring_program("all_gather", 8, size), machine).duration_s for size in (4, 1 << 20)
    )
    assert small == pytest.approx(7 * known.step_s, rel=0.01)
    assert (large - small) * known.goodput * slowest == pytest.approx(7 * (1 << 20), rel=0.01)
    summed = simulate(ring_program("all_reduce", 8, 4), machine).duration_s
    assert summed == pytest.approx(known.all_reduce_s, rel=0.01)


@pytest.mark.parametrize("kind", ["all_gather", "all_reduce"])
def test_the_programs_of_the_calibration_are_what_they_say(kind):
    from block_lab_rank import ring_program

    program = ring_program(kind, 4, 12)
    x = np.arange(12, dtype=np.float32)
    outputs = run_numpy(program, {"X": x}).outputs
    np.testing.assert_array_equal(outputs["Y"], x if kind == "all_gather" else 4 * x)


def row(name, measured, planned):
    return {
        "name": name,
        "algorithm": name,
        "mesh": [8, 1],
        "estimated_s": planned,
        "simulated_s": planned,
    } | {"median_s": measured}


def test_only_pairs_that_are_apart_count_and_misses_are_named():
    from block_lab import verdicts

    rows = [row("fast", 1.0, 1.1), row("near", 1.07, 1.0), row("megatron", 2.0, 2.4), row("slow", 3.0, 2.2)]
    said = verdicts([*rows, {"name": "torch", "algorithm": "torch", "mesh": [8, 1], "median_s": 2.5}])
    assert said["pairs_apart"] == 5
    assert said["simulated_s"]["pairs_missed"] == [("megatron", "slow")]
    assert said["chosen"] == "near"
    gain = said["chosen_over"]["megatron"]
    assert gain["measured"] == pytest.approx(2.0 / 1.07) and gain["predicted"] == pytest.approx(2.4)
    assert said["chosen_over"]["torch"] == {"measured": pytest.approx(2.5 / 1.07)}


def test_a_result_that_is_no_number_is_wrong():
    from block_lab_rank import _error

    dense = {"Z": np.ones((2, 2)), "DX": np.ones((2, 2))}
    where = (np.arange(2), np.arange(2))
    right, wrong = np.ones((2, 2)), np.array([[1.0, np.nan], [1.0, 1.0]])
    assert _error({"Z": (right, where), "DX": (right, where)}, dense) == 0
    assert _error({"Z": (right, where), "DX": (wrong, where)}, dense) == np.inf


def test_a_gradient_of_a_pipeline_that_is_missing_is_wrong():
    from pipeline_lab_rank import _error

    stage = torch.nn.Linear(2, 2)
    expected = [torch.ones(2, 2), torch.ones(2)]
    stage.weight.grad = torch.ones(2, 2)
    assert _error(stage, expected) == np.inf
    stage.bias.grad = torch.full((2,), float("nan"))
    assert _error(stage, expected) == np.inf
    stage.bias.grad = torch.full((2,), 1.5)
    assert _error(stage, expected) == 0.5
