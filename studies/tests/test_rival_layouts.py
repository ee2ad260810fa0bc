"""1D tensor parallelism and FSDP move what their authors move, whatever the sizes are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave.algorithms.matmul2d.common.passes import PASSES
from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.describe.machine.cluster import load_cluster
from meshweave.describe.model import load_model
from meshweave.describe.model.workload import Workload
from meshweave.tune.search import block_products, layer_dataflows, plan_model

LAYERS = load_model("megatron-nlg").fc_layers()
P, ITEM = 4, 2


def moved(name: str, tokens: int) -> list[int]:
    """Return the bytes that rank 0 moves in each product of a block."""
    entry = PRODUCTS_2D[name]
    flows = layer_dataflows(entry, LAYERS, tokens)
    problems = block_products(LAYERS, flows, tokens, (1, P), "bfloat16")
    return [sum(entry.traffic(p, next(entry.candidates(p)), 0).values()) for p in problems]


def ring_bytes(elements: int) -> int:
    """Return the bytes that a gather or a scatter of a matrix brings to each rank."""
    return (P - 1) * (elements // P) * ITEM


@given(st.integers(1, 64).map(lambda n: n * 512))
@pytest.mark.parametrize("name", ["tp1d", "fsdp"])
def test_what_travels_has_the_size_of_weights_or_activations(name: str, tokens: int) -> None:
    got = iter(moved(name, tokens))
    for number, layer in enumerate(LAYERS):
        weight = layer.in_features * layer.out_features
        column = number % 2 == 0
        narrow = tokens * (layer.in_features if column else layer.out_features)
        travels = weight if name == "fsdp" else narrow
        assert [next(got) for _ in PASSES] == [ring_bytes(travels)] * len(PASSES), layer.name


@pytest.mark.parametrize("name", ["tp1d", "fsdp"])
def test_which_operand_is_gathered_and_which_is_scattered(name: str) -> None:
    """Megatron's layers: column (gather X, scatter X', gather X), row (scatter Y, gather Y', gather Y'); FSDP
    gathers W twice and scatters its gradient."""
    entry = PRODUCTS_2D[name]
    problems = block_products(LAYERS, layer_dataflows(entry, LAYERS, 2048), 2048, (1, P), "bfloat16")
    scattered = [entry.moves[p.dataflow] == "c" for p in problems]  # type: ignore[attr-defined]
    column, row, fsdp = [False, True, False], [True, False, False], [False, False, True]
    assert scattered == (fsdp * 4 if name == "fsdp" else (column + row) * 2)


def test_plans_say_whose_layout_it_is() -> None:
    """Few tokens: phase 1 keeps W in place, which is not how FSDP or Megatron work."""
    plan = plan_model(
        load_model("megatron-nlg"),
        load_cluster("tpu-v4-pod:16"),
        Workload(1, 2048),
        ("meshslice", "tp1d", "fsdp"),
    )
    kept = {c.algorithm: [layer.stationary for layer in c.layers] for c in plan.candidates}
    assert kept == {"meshslice": ["w"] * 4, "tp1d": ["y", "x"] * 2, "fsdp": ["y"] * 4}
    assert "layout of FSDP" in plan.candidate("fsdp").layers[0].reason
    assert not any(layer.transposed for layer in plan.candidate("fsdp").layers)
