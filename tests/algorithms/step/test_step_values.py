"""The program of a step, run on numpy on all ranks: its gradients and its loss are those of one process."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshweave as mw
from meshweave.algorithms.block import BlockProblem
from meshweave.algorithms.block.end_equations import IDS_IN, IDS_OUT, LOSS, TARGETS, TOKENS_IN
from meshweave.algorithms.block.folds import functions_of
from meshweave.algorithms.block.megatron import Megatron
from meshweave.algorithms.block.reference import reference
from meshweave.algorithms.contract import Array, Arrays
from meshweave.algorithms.step import (
    Parallelism,
    SoftwareStack,
    Step,
    StepProblem,
    simulate_step,
    step_of,
)
from meshweave.algorithms.step.block_program import WrittenStep, write_step
from meshweave.algorithms.step.functions import StepFunctions, local_bucket
from meshweave.algorithms.step.write_units import block_of_piece
from meshweave.base.errors import MeshweaveError
from meshweave.describe.machine.cluster import load_cluster
from meshweave.execute.calls import CallTable
from meshweave.execute.numpy import numpy_dtype, poisoned
from meshweave.ir.analysis.dataflow import analyse, untimed_order
from meshweave.ir.analysis.interpret import Interpreter
from meshweave.ir.program.ops import Call
from sampling import examples

MODEL = mw.Transformer("tiny", 4, 16, 4, 4, 4, 32, 12, False, "", tied_embeddings=False)
BATCH, LENGTH, RATE = 8, 4, 0.125


@lru_cache(maxsize=1)
def whole() -> tuple[Arrays, Array, Array, Arrays]:
    """Return weights, tokens, targets, and what the whole model makes of them in one process."""
    draw = np.random.default_rng(0)
    block = BlockProblem.of(MODEL, mw.Workload(BATCH, LENGTH, "float32"), (1, 1), layers=MODEL.num_layers)
    block = replace(block, vocabulary=MODEL.vocab_size)
    weights = {}
    for name, value in Megatron().random_inputs(replace(block, batch=1), 0).items():
        if name not in ("X", "Z", TOKENS_IN, TARGETS, IDS_IN, IDS_OUT):
            weights[name] = (value if name.startswith("G") else 2 * value / np.sqrt(len(value))).astype("f4")
    tokens, targets = draw.integers(0, MODEL.vocab_size, (2, BATCH, LENGTH)).astype(np.float32)
    words = np.arange(MODEL.vocab_size, dtype=np.float32)
    given_ = {TOKENS_IN: tokens, TARGETS: targets, IDS_IN: words, IDS_OUT: words}
    return weights, tokens, targets, reference(block, {**weights, **given_})


class Ranks:
    """The calls of all ranks, on numpy arrays."""

    def __init__(self, step: Step, written: WrittenStep) -> None:
        _, tokens, targets, _ = whole()
        block = block_of_piece(step.problem, step.parallelism, "head", step.parallelism.data)
        self.of = {}
        for rank in written.program.ranks:
            self.of[rank] = StepFunctions(
                written.units, functions_of(block), written.mesh_of(rank), rank,
                lambda _, w, dw: w - RATE * dw, lambda size: np.zeros(size, np.float32),
            )  # fmt: skip
            self.of[rank].tokens, self.of[rank].targets = tokens, targets
        self.tables = {rank: CallTable(functions.table()) for rank, functions in self.of.items()}

    def matmul(self, a: Array, b: Array) -> Array:
        return np.asarray(np.matmul(a, b))

    def add(self, x: Array, y: Array) -> Array:
        return np.asarray(x + y)

    def reduce(self, op: str, terms: list[Array]) -> Array:
        return np.asarray(np.max(terms, 0) if op == "max" else np.sum(terms, 0, dtype=terms[0].dtype))

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Array:
        return np.zeros(shape, numpy_dtype(dtype))

    def read(self, block: Array) -> Array:
        return block

    write = read

    def call(self, op: Call, rank: int, ins: list[Array]) -> list[Array]:
        return list(self.tables[rank].bind(op)(*ins))


def check(stack: SoftwareStack | None = None, **degrees: Any) -> None:
    """Run the program of a step, and compare all buckets, what updates them, and the loss."""
    parallelism = Parallelism(**degrees)
    ranks = parallelism.num_ranks
    cluster = load_cluster(f"dgx-a100:{ranks}")
    problem = StepProblem(MODEL, cluster, BATCH, LENGTH, dtype="float32", stack=stack or SoftwareStack())
    step = step_of(problem, parallelism)
    written = write_step(step.stages)
    weights, _, _, expected = whole()
    flow = analyse(written.program)
    calls = Ranks(step, written)
    machine = Interpreter(flow, calls, poisoned)
    gradients = {name: expected[f"D{name}"].astype(np.float32) for name in weights}
    places = [
        (f"{stage}_{unit}", (written.units[unit], layers, place.mesh, place.replicas, written.settings, rank))
        for stage, place in written.stages.items()
        for unit, layers in place.layers.items()
        for rank in place.mesh.ranks
    ]

    def local(arrays: Arrays, of: tuple[Any, ...]) -> Array:
        return local_bucket(of[0], arrays, *of[1:])

    for name, of in places:
        machine.memory[of[-1], f"w{name}", 0][...] = local(weights, of)
    machine.run(list(untimed_order(flow, None)))
    scale = max(float(np.abs(each).max()) for each in gradients.values())
    for name, of in places:
        made = machine.memory[of[-1], f"dw{name}", 0]
        np.testing.assert_allclose(made, local(gradients, of), atol=3e-6 * scale)
        updated = local(weights, of) - RATE * made
        np.testing.assert_allclose(machine.memory[of[-1], f"new{name}", 0], updated, atol=1e-6)
    loss = sum(each.loss for each in calls.of.values()) / written.loss_copies
    assert loss == pytest.approx(float(expected[LOSS][0]), rel=1e-5)


CASES: list[dict[str, Any]] = [
    {"data": 2, "pipeline": 2, "zero": 3},
    {"pipeline": 2, "tensor": 2, "schedule": "zb-h1", "strategy": "megatron_sp"},
    {"data": 4, "zero": 2, "zero_group": 2, "stack": SoftwareStack(regathers=True)},
    {"data": 2, "tensor": 2, "zero": 3, "recompute": "full", "stack": SoftwareStack(overlap=0.5)},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_computes_what_one_process_does(case: dict[str, Any]) -> None:
    check(**case)


@st.composite
def steps(draw: st.DrawFn) -> dict[str, Any]:
    """Draw degrees of up to eight ranks, and how they share and wait."""
    schedule, stages = draw(
        st.sampled_from([("1f1b", 1), ("1f1b", 2), ("gpipe", 1), ("zb-h1", 1), ("zbv", 2), ("dualpipev", 2)])
    )
    sizes = draw(
        st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (4, 1, 1)])
    )
    order = draw(st.permutations(["tensor", "context", "data", "pipeline"]))
    overlap, each = draw(st.sampled_from([0.0, 0.4, 1.0])), draw(st.booleans())
    tensor: Any = sizes[1]
    strategy = draw(st.sampled_from(["megatron", "megatron_sp"]))
    if sizes == (1, 2, 1) and draw(st.booleans()):
        tensor, strategy = (2, 2), draw(st.sampled_from(["atp", "meshslice_block"]))
    return {
        "data": sizes[0],
        "context": sizes[2],
        "tensor": tensor,
        "strategy": strategy,
        "pipeline": 2 if sizes[0] < 4 else 1,
        "virtual_stages": stages if sizes[0] < 4 else 1,
        "schedule": schedule if sizes[0] < 4 else "1f1b",
        "zero": draw(st.integers(0, 3)),
        "recompute": draw(st.sampled_from(["none", "full"])),
        "order": tuple(order),
        "stack": SoftwareStack(
            overlap=overlap, regathers=each, waits_for_gathers=each, blocks_transfers=draw(st.booleans())
        ),
    }


@pytest.mark.slow
@examples(12)
@given(steps())
def test_drawn_steps_compute_what_one_process_does(case: dict[str, Any]) -> None:
    check(**case)


def test_what_has_no_program_is_said() -> None:
    step = mw.step("llama-2-7b", "dgx-h100:8", batch=8, sequence=512, precision="fp8-token", stack="ideal")
    with pytest.raises(MeshweaveError, match="products in bfloat16 alone"):
        simulate_step(step)
