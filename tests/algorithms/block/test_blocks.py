"""Every strategy computes the block of a single rank, forward and backward, exactly where numbers allow it."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from meshweave.algorithms.block import ENTRIES, BlockAlgorithm, BlockConfig, BlockProblem
from meshweave.algorithms.block.folds import functions_of
from meshweave.algorithms.block.roles import IDLE, product
from meshweave.algorithms.block.two_d import IncludedProducts
from meshweave.algorithms.table import algorithm
from meshweave.base.errors import LayoutError, MeshweaveError
from meshweave.cost.machine import Machine
from meshweave.describe.layout.shapes import factorisations
from meshweave.describe.machine.cluster import load_cluster
from meshweave.describe.model.model_file import load_model
from meshweave.describe.model.workload import Workload
from meshweave.estimate import estimate, estimate_skeleton
from meshweave.execute.numpy import run_numpy
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program import Program
from meshweave.ir.program.meanings import Product
from meshweave.ir.program.ops import Call
from meshweave.ir.skeleton import skeleton_of
from meshweave.ir.work import Compute, traffic
from plain_simulator.reference import simulate
from sampling import mostly_slow

GPT = BlockProblem(4, 2, 6, 3, 3, 2, 7, dtype="float64", biases=True)
LLAMA = BlockProblem(4, 3, 5, 6, 3, 3, 5, dtype="float64", family="llama", vocabulary=7)
"""Three groups of heads for up to eight ranks, and widths that nothing divides."""


def meshes(entry: BlockAlgorithm, num_ranks: int) -> list[tuple[int, ...]]:
    """Return the meshes of so many ranks that a strategy has; of three axes those with some depth."""
    shapes = factorisations(num_ranks, len(entry.roles))
    return [
        shape
        for shape in shapes
        if entry.refusal(replace(GPT, mesh_shape=shape)) is None and (len(shape) == 2 or shape[0] > 1)
    ]


CASES = [
    (entry.name, replace(shape, mesh_shape=mesh, layers=layers))
    for number, entry in enumerate(ENTRIES)
    for layers in (1, 2)
    for num_ranks in (2, 4, 6, 8)
    for mesh in meshes(entry, num_ranks)
    for shape in (GPT, LLAMA)
]


def check_block(name: str, problem: BlockProblem) -> None:
    """Prove every config, and compare real functions to a relative 1e-12 and functions of integers exactly."""
    entry = algorithm(name)
    for config in (next(entry.candidates(problem)), list(entry.candidates(problem))[-1]):
        program = entry.program(problem, config)
        assert validate(program).skipped == ()
        for is_exact in (False, True):
            stated = replace(problem, exact=is_exact)
            inputs = entry.random_inputs(stated, seed=1)
            expected = entry.reference(stated, inputs)
            outputs = run_numpy(program, inputs, calls=entry.functions(stated)).outputs
            assert set(outputs) == set(expected)
            for tensor, value in expected.items():
                bound = 0 if is_exact else 1e-12 * np.abs(value).max()
                assert np.abs(outputs[tensor] - value).max() <= bound, (tensor, config)


@pytest.mark.parametrize("case", mostly_slow(CASES, 8), ids=str)
def test_a_strategy_computes_the_block_of_a_single_rank(case: tuple[str, BlockProblem]) -> None:
    check_block(*case)


@pytest.mark.slow
@pytest.mark.parametrize("name", [entry.name for entry in ENTRIES])
@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
def test_a_strategy_computes_four_layers(name: str, shape: BlockProblem) -> None:
    for mesh in meshes(algorithm(name), 4):
        check_block(name, replace(shape, mesh_shape=mesh, layers=4))


def test_a_single_rank_needs_no_communication_and_computes_the_reference() -> None:
    problem = replace(LLAMA, mesh_shape=(1, 1), layers=2)
    for entry in ENTRIES:
        alone = replace(problem, mesh_shape=(1,) * len(entry.roles))
        assert traffic(entry.program(alone, BlockConfig()), 0) == {}
    check_block("megatron", problem)


def test_norms_of_rows_far_from_0() -> None:
    """Whole rows are as in double precision; in two steps a variance is off by some digits, but not below 0."""
    functions = functions_of(replace(GPT, dtype="float32"))
    x = (1000 + 0.01 * np.random.default_rng(0).standard_normal((64, GPT.hidden))).astype(np.float32)
    gain = np.stack((np.ones(GPT.hidden), np.zeros(GPT.hidden))).astype(np.float32)
    wide = functions["norm"](x.astype(np.float64), gain)
    assert functions["norm"](x, gain) == pytest.approx(wide, abs=1e-2)
    grads = [functions["norm_grad"](wide.astype(dtype), x.astype(dtype), gain + 1) for dtype in ("f4", "f8")]
    assert grads[0] == pytest.approx(grads[1], abs=1e-2 * np.abs(grads[1]).max())
    assert np.isfinite(functions["normalize"](x, functions["statistics"](x), gain)).all()


@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
def test_the_reference_is_the_derivative_that_torch_finds(shape: BlockProblem) -> None:
    torch = pytest.importorskip("torch")
    problem = replace(shape, mesh_shape=(1, 1), layers=2)
    entry = algorithm("megatron")
    inputs = entry.random_inputs(problem)
    expected = entry.reference(problem, inputs)
    functions = functions_of(problem)
    fixed = {"DZ", "TOKENS", "TARGETS", "IDS_IN", "IDS_OUT"}
    known = {name: torch.tensor(value, requires_grad=name not in fixed) for name, value in inputs.items()}
    x = known["E"][known["TOKENS"].long()] if problem.vocabulary else known["X"]
    for layer in range(problem.layers):
        of_qkv, of_o, of_1, of_2 = (known.get(f"B{name}{layer}", 0) for name in ("QKV", "O", "1_", "2_"))
        heads, _ = functions["attention"](
            functions["norm"](x, known[f"GA{layer}"]) @ known[f"WQKV{layer}"] + of_qkv
        )
        x = x + heads @ known[f"WO{layer}"] + of_o
        inner = functions["norm"](x, known[f"GF{layer}"]) @ known[f"W1_{layer}"] + of_1
        x = x + functions["activation"](inner) @ known[f"W2_{layer}"] + of_2
    if problem.vocabulary:
        logits = functions["norm"](x, known["GN"]) @ known["WV"]
        targets = known["TARGETS"].long().flatten()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
        loss.backward()
        np.testing.assert_allclose(loss.detach().numpy(), expected.pop("LOSS")[0], rtol=1e-12)
    else:
        x.backward(known["DZ"])
        np.testing.assert_allclose(x.detach().numpy(), expected.pop("Z"), rtol=1e-12, atol=1e-12)
    for name, value in expected.items():
        np.testing.assert_allclose(known[name[1:]].grad.numpy(), value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_functions_of_integers_depend_on_every_element_of_what_they_read(
    family: Literal["gpt", "llama"],
) -> None:
    """A block that does not depend on an input would not show that the input was moved to the wrong place."""
    problem = BlockProblem(1, 2, 3, 2, 1, 1, 2, (1, 1), family=family, exact=True, biases=family == "gpt")
    entry = algorithm("megatron")
    base = [entry.random_inputs(problem, seed) for seed in range(8)]
    before = [entry.reference(problem, inputs) for inputs in base]

    def changes(number: int, name: str, at: tuple[int, ...]) -> bool:
        moved = {**base[number], name: base[number][name].copy()}
        moved[name][at] += 1
        after = entry.reference(problem, moved)
        return any((after[key] != before[number][key]).any() for key in after)

    for name, value in base[0].items():
        for at in np.ndindex(value.shape):
            assert any(changes(number, name, at) for number in range(len(base))), (name, at)


# --- traffic and time -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [(8, 1), (4, 2), (2, 4), (1, 8)])
@pytest.mark.parametrize("layers", [1, 2])
def test_traffic_of_atp_is_equation_2_and_the_statistics_of_norms(mesh: tuple[int, int], layers: int) -> None:
    d1, d2 = mesh
    problem = BlockProblem(2, 8, 32, 8, 8, 4, 128, mesh, layers)
    program = algorithm("atp").program(problem, BlockConfig(1, "all_reduce"))
    residual = 4 * problem.batch * problem.sequence * problem.hidden
    statistics = 4 * problem.batch * problem.sequence * 2
    over_rows = 4 * residual // d2 * 2 * (d1 - 1) // d1
    over_columns = (14 * residual // d1 + 4 * statistics) * 2 * (d2 - 1) // d2
    expected = {"tp.row": layers * over_rows, "tp.col": layers * over_columns}
    assert traffic(program, 0) == {axis: moved for axis, moved in expected.items() if moved}


def test_a_reduce_scatter_before_attention_saves_an_eighth_and_more_of_the_columns() -> None:
    """Of 14 residuals over columns, the sums of 3 and 1 that only scatter attention need half."""
    problem = BlockProblem(2, 8, 32, 8, 8, 4, 128, (4, 2))
    moved = [
        algorithm("atp").traffic(problem, BlockConfig(1, scatter), 0)["tp.col"]
        for scatter in ("reduce_scatter", "all_reduce")
    ]
    residual = 4 * problem.batch * problem.sequence * problem.hidden
    assert moved[1] - moved[0] == 2 * residual // 4


def test_sequence_parallelism_moves_one_more_gather_per_half_than_all_reduces() -> None:
    """What is gathered for products of weight gradients comes on top: one of four sums, by half."""
    problem = BlockProblem(2, 8, 32, 8, 8, 4, 128, (4, 1))
    plain, sharded = (
        traffic(algorithm(name).program(problem, BlockConfig()), 0)["tp.row"]
        for name in ("megatron", "megatron_sp")
    )
    residual = 4 * problem.batch * problem.sequence * problem.hidden
    of_norms = 2 * 3 * 2 * 2 * problem.hidden * 4 // 4
    assert plain == 4 * residual * 2 * 3 // 4
    assert sharded == plain + 2 * residual * 3 // 4 + of_norms


def test_zero_3_gathers_each_weight_twice_and_zero_2_once() -> None:
    problem = BlockProblem(4, 8, 32, 8, 8, 4, 128, (4, 1), layers=2)
    moved = {
        name: traffic(algorithm(name).program(problem, BlockConfig()), 0)["tp.row"]
        for name in ("data_parallel", "zero1", "zero2", "zero3")
    }
    part = 2 * 12 * 32 * 32 * 4 * 3 // 4
    assert moved["zero1"] == moved["zero2"] == moved["data_parallel"]
    assert moved["zero3"] == moved["zero2"] + part


@pytest.mark.parametrize("mesh", [(2, 2, 2), (2, 1, 2), (4, 2, 2), (2, 4, 1)])
def test_traffic_of_25d_is_that_of_three_products_a_weight_and_one_sum_over_depth(
    mesh: tuple[int, int, int],
) -> None:
    """Of each product, tokens move along columns and a weight along rows (Wang et al., section 3).

    Beside the weights there are the statistics of norms, summed along columns, and the gradients of gains.
    """
    depth, rows, columns = mesh
    problem = BlockProblem(8, 8, 32, 8, 8, 4, 128, mesh, 2)
    tokens, h = problem.batch * problem.sequence // (depth * rows), problem.hidden
    weights = [(h, 3 * h), (h, h), (h, 4 * h), (4 * h, h)]
    along_columns = sum(3 * tokens * k for k, _ in weights) * 4 * (columns - 1) // columns
    along_columns += 4 * tokens * 2 * 4 * 2 * (columns - 1) // columns
    of_weights, of_gains = sum(k * n for k, n in weights) // columns * 4, 2 * 2 * h // columns * 4
    along_rows = 3 * of_weights * (rows - 1) // rows + 2 * of_gains * (rows - 1) // rows
    along_depth = 2 * (of_weights // rows + of_gains) * (depth - 1) // depth
    expected = {"tp.depth": along_depth, "tp.row": along_rows, "tp.col": along_columns}
    moved = algorithm("25d_block").traffic(problem, BlockConfig(), 0)
    assert moved == {axis: 2 * count for axis, count in expected.items() if count}


@pytest.mark.parametrize("ranks", [4, 100])
def test_attention_is_priced_over_the_pairs_that_attend(ranks: int) -> None:
    """4 width + 5 FLOPs a pair forward, 10 width + 10 backward; in a ring every rank is priced as the last."""
    problem = BlockProblem(2, 8 * ranks, 8, ranks, ranks, 1, 8, (ranks, 1))
    per_pair, queries = 4 + 5 + 10 + 10, 2 * problem.sequence
    for masked, keys in ((True, 8 * ranks), (False, 4 * ranks + 1)):
        stated = replace(problem, counts_masked=masked)
        in_ring = 8 * ranks if masked else 8 * ranks - 8 + 5
        for name, pairs in (
            ("megatron", queries * keys),
            ("ring_attention", queries // ranks * ranks * in_ring),
        ):
            entry = algorithm(name)
            assert isinstance(entry, BlockAlgorithm)
            (phase,) = entry.skeleton(stated, BlockConfig()).phases
            works = ((task.work, task.times) for task in phase.tasks)
            flops = (
                work.flops * times
                for work, times in works
                if isinstance(work, Compute) and work.call == "attention"
            )
            assert sum(flops) == pairs * per_pair, name


SHAPES_512 = [(512, 1), (128, 4), (32, 16), (2, 256), (8, 8, 8)]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_every_strategy_has_an_estimate_for_gpt_3_on_512_ranks(entry: BlockAlgorithm) -> None:
    cluster = load_cluster("tpu-v4-pod:512")
    for mesh in SHAPES_512:
        problem = BlockProblem.of(load_model("gpt3"), Workload(512, 2048), mesh)
        if entry.refusal(problem) is None:
            program = entry.program(problem, BlockConfig())
            assert entry.estimate(problem, BlockConfig(), Machine.of(cluster, program)).total_s > 0


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
@pytest.mark.parametrize("layers", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_skeleton_takes_the_time_of_the_one_that_is_read_off_the_program(
    entry: BlockAlgorithm, layers: int
) -> None:
    """Slices and turns of uneven shards are largest on different ranks; a skeleton has the largest of each.

    Panels of a gradient are complete on one rank after another. Rank 0 may sum its own over depth at once; a
    skeleton waits for the last, as the slowest rank does.
    """
    cluster = load_cluster("tpu-v4-pod:6")
    for mesh in meshes(entry, 6):
        problem = BlockProblem(
            7, 128, 520, 12, 6, 64, 1000, mesh, layers, dtype="bfloat16", vocabulary=2000, biases=True
        )
        if isinstance(entry, IncludedProducts):
            problem = replace(problem, batch=6)
        for config in entry.candidates(problem):
            program = entry.program(problem, config)
            machine = Machine.of(cluster, program)
            known, read = (
                entry.estimate(problem, config, machine),
                estimate_skeleton(skeleton_of(program), machine),
            )
            slack = 1.05 if "depth" in problem.mesh.axes else 1.02
            if program.includes or entry.name == "ring_attention":
                assert read.total_s * (1 - 1e-9) <= known.total_s <= read.total_s * slack
            else:
                assert known == read


def test_a_slot_of_gathered_weights_is_filled_after_the_product_that_reads_it() -> None:
    """Weights of three layers take turns in two slots."""
    check_block("zero3", replace(GPT, mesh_shape=(2, 1), layers=3, training=False))


def exposed_s(problem: BlockProblem, name: str, chunks: int) -> float:
    entry = algorithm(name)
    program = entry.program(problem, BlockConfig(chunks))
    machine = Machine.of(load_cluster(f"tpu-v4-pod:{len(program.ranks)}"), program)
    parts = estimate(program, machine)
    return parts.total_s - parts.compute_s - parts.copy_s


@pytest.mark.parametrize(("name", "mesh"), [("atp", (2, 2)), ("megatron", (4, 1)), ("megatron_sp", (4, 1))])
def test_chunks_hide_communication(name: str, mesh: tuple[int, int]) -> None:
    problem = BlockProblem(4, 2048, 4096, 32, 32, 128, 16384, mesh, dtype="bfloat16")
    whole, halves = exposed_s(problem, name, 1), exposed_s(problem, name, 2)
    assert 0 < halves < 0.8 * whole


def test_the_reduction_of_an_input_gradient_runs_beside_the_product_of_a_weight_gradient() -> None:
    problem = BlockProblem(2, 512, 1024, 8, 8, 128, 4096, (4, 1), dtype="bfloat16")
    program = algorithm("megatron").program(problem, BlockConfig())
    spans = simulate(program, Machine.of(load_cluster("tpu-v4-pod:4"), program), contention=False).spans
    own = [span for span in spans if span.rank == 0]
    last = [span for span in own if span.kind == "all_reduce"][-1]
    assert any(
        span.kind == "matmul" and span.start_ps <= last.start_ps and span.end_ps > last.start_ps
        for span in own
    )


def test_weights_are_gathered_beside_the_products_of_the_layer_before() -> None:
    problem = BlockProblem(64, 2048, 2048, 16, 16, 128, 8192, (4, 1), 4, dtype="bfloat16")
    program = algorithm("zero3").program(problem, BlockConfig())
    machine = Machine.of(load_cluster("tpu-v4-pod:4"), program)
    parts = estimate(program, machine)
    assert parts.total_s < parts.compute_s + parts.copy_s + parts.communication_s / 5


def test_calls_name_their_work() -> None:
    for entry in ENTRIES:
        program = entry.program(next(entry.examples()), BlockConfig())
        calls = [op for op in program.ops() if isinstance(op, Call)]
        assert calls and all(op.work and op.shape for op in calls)
        products = sum(isinstance(meaning, Product) for meaning in program.computes)
        assert products == 12


def test_memory_of_weights_falls_with_the_stages_of_zero() -> None:
    problem = BlockProblem(8, 16, 64, 8, 8, 8, 256, (8, 1), layers=4)
    peaks = [
        algorithm(name).peak_bytes(problem, BlockConfig())
        for name in ("data_parallel", "zero1", "zero2", "zero3")
    ]
    assert peaks == sorted(peaks, reverse=True) and peaks[0] > 1.9 * peaks[-1]


# --- refusals -------------------------------------------------------------------------------------------


def test_problems_that_make_no_sense_are_refused() -> None:
    for changes in (
        {"batch": 0},
        {"kv_heads": 2},
        {"family": "bert"},
        {"dtype": "float31"},
        {"mesh_shape": (0, 1)},
    ):
        with pytest.raises(MeshweaveError):
            replace(GPT, **changes)
    for name, config, text in (
        (
            "atp",
            BlockConfig(slices=2),
            "atp: slices is 2; only strategies of 2D products have slices, give 0",
        ),
        ("meshslice_block", BlockConfig(slices=-1), "slices is -1"),
        ("meshslice_block", BlockConfig(2, slices=2), "chunks is 2; give 1 to 1"),
        ("collective_block", BlockConfig(scatter="all_reduce"), "scatter is 'all_reduce'"),
    ):
        for write in (algorithm(name).program, algorithm(name).skeleton):
            with pytest.raises(LayoutError, match=text):
                write(GPT, config)
    for mesh in ((2, 2), (2, 1, 1, 1)):
        with pytest.raises(LayoutError, match="mesh"):
            algorithm("25d_block").program(replace(GPT, mesh_shape=mesh), BlockConfig())
    with pytest.raises(LayoutError, match=r"has 2 mesh axes; give a mesh of \(rows, columns\)"):
        algorithm("atp").program(replace(GPT, mesh_shape=(2, 2, 1)), BlockConfig())
    with pytest.raises(LayoutError, match="one mesh axis"):
        algorithm("megatron").program(replace(GPT, mesh_shape=(2, 2)), BlockConfig())
    with pytest.raises(LayoutError, match="atp: chunks is 5; give 1 to 4 for this problem"):
        algorithm("atp").program(GPT, BlockConfig(5))


def test_chunks_are_as_many_as_a_config_says() -> None:
    """5 sequences in at most 4 chunks are 2, 2 and 1: that is the candidate of 3 chunks."""
    for name in ("atp", "megatron_sp"):
        entry = algorithm(name)
        for batch, counts in ((1, [1]), (2, [1, 2]), (3, [1, 2]), (5, [1, 2, 3]), (8, [1, 2, 4])):
            problem = replace(GPT, batch=batch, mesh_shape=(2, 1))
            assert [config.chunks for config in entry.candidates(problem)] == counts
        three, four = (
            entry.program(replace(GPT, batch=5, mesh_shape=(2, 1)), BlockConfig(count)) for count in (3, 4)
        )
        assert three.body == four.body


def test_products_of_operands_that_do_not_fit_are_refused() -> None:
    assert product(("hidden", ""), ("hidden", "inner"), ("hidden",)) == ("partial", "inner")
    with pytest.raises(LayoutError, match="give both the same"):
        product(("hidden",), ("",), ("hidden",))
    with pytest.raises(LayoutError, match="let it replicate one operand"):
        product(("batch",), ("inner",), ("hidden",))


# --- processes ------------------------------------------------------------------------------------------


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("num_ranks", "step"),
    [(2, 14), *(pytest.param(count, 1, marks=pytest.mark.slow) for count in (2, 4))],
)
def test_blocks_over_gloo(num_ranks: int, step: int) -> None:
    """By default every fourteenth strategy runs."""
    from meshweave.execute.ranks.launch import launch

    blocks = []
    for number, entry in enumerate(ENTRIES[::step]):
        shape = replace((GPT, LLAMA)[number % 2], mesh_shape=meshes(entry, num_ranks)[number % 2 - 1])
        blocks.append((entry.name, asdict(shape), min(2, entry.max_chunks(shape))))
    half = replace(LLAMA, mesh_shape=(num_ranks, 1), dtype="bfloat16", head_dim=4)
    blocks.append(("megatron_sp", asdict(half), 1))
    env = {"PYTHONPATH": str(Path(__file__).parent)}
    errors = launch("block_ranks:relative_errors", num_ranks, {"blocks": blocks}, timeout_s=120.0, env=env)
    for (name, fields, _), *of_ranks in zip(blocks, *errors, strict=True):
        assert max(of_ranks) <= (0.1 if fields["dtype"] == "bfloat16" else 1e-12), name  # one rank: 0.024


def test_idle_axes_are_those_of_one_rank() -> None:
    atp = algorithm("atp")
    assert isinstance(atp, BlockAlgorithm)
    assert atp.roles_of(replace(GPT, mesh_shape=(4, 1))).axes[1] is IDLE
    one, other = (
        algorithm(name).program(replace(GPT, mesh_shape=(4, 1)), BlockConfig())
        for name in ("atp", "megatron")
    )
    assert isinstance(one, Program) and replace(one, name="") == replace(other, name="")
