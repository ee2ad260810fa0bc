"""Parallelised models compute what the models do: losses, logits and the gradients of all parameters."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")

from meshweave.algorithms.block import ENTRIES, BlockConfig, BlockProblem
from meshweave.execute.ranks.launch import launch
from meshweave.ir.work import traffic
from meshweave.lower import lower_small_sums

HERE = {"PYTHONPATH": str(Path(__file__).parent)}
ONE_AXIS = (
    "megatron", "megatron_sp", "data_parallel", "zero1", "zero2", "zero3", "all_to_all_heads", "ring_attention",
)  # fmt: skip
TWO_AXES = ("atp", "collective_block", "meshslice_block", "wang_block", "summa_block")
FEW: tuple[dict[str, Any], ...] = (
    {"model": "plain gpt", "strategy": "meshslice_block", "mesh": [2, 2]},
    {"model": "plain gpt", "strategy": "megatron", "mesh": [4], "options": {"is_tied": False}},
    {"model": "plain llama", "strategy": "atp", "mesh": [2, 2]},
    {"model": "plain llama", "strategy": "ring_attention", "mesh": [4], "check": True},
    {
        "model": "plain llama",
        "strategy": "megatron_sp",
        "mesh": [2, 2],
        "degrees": {"data": 2, "tensor": 2, "zero": 3},
        "options": {"kv_heads": 1},
    },
)
DEGREES = (
    {"data": 2, "context": 2},
    {"data": 2, "tensor": 2, "zero": 1},
    {"context": 2, "tensor": 2},
)
TOLERANCE = 1e-10


def _check(num_ranks: int, cases: tuple[dict[str, Any], ...], timeout_s: float = 100) -> None:
    ranks = launch(
        "parallel_rank_functions:compare", num_ranks, {"cases": cases}, timeout_s=timeout_s, env=HERE
    )
    for of_case in zip(*ranks, strict=True):
        for answer in filter(None, of_case):
            worst = max(answer["loss"], answer["logits"], answer["gradients"])
            assert worst < TOLERANCE, answer
            assert answer["names"], answer
    for case, of_case in zip(cases, zip(*ranks, strict=True), strict=True):
        if _is_block(case):
            moved = sum(answer["bytes"] for answer in of_case if answer)
            least, most = (own + _agreement_bytes(case) for own in _block_bytes(case))
            assert least <= moved <= most + _numbers_bytes(case), (least, moved, most, case)


def _is_block(case: dict[str, Any]) -> bool:
    """Return whether a model has nothing that no block has: positions in a table, a tied head, copies of heads."""
    options = case.get("options", {})
    if case["model"] == "plain gpt":  # whose positions cost nothing where each rank has all tokens
        return "is_tied" in options and case["strategy"] == "megatron"
    return case["model"] in ("plain llama", "llama") and "kv_heads" not in options and "degrees" not in case


def _block_bytes(case: dict[str, Any]) -> list[int]:
    """Return the bytes that all ranks move in the block's own program, forward and backward, ends included: with
    sums as rings, and with all small ones as gathers.
    """
    mesh = tuple(case["mesh"])
    options = case.get("options", {})
    batch, sequence = case.get("tokens", (4, 8))
    is_plain, is_gpt = case["model"].startswith("plain"), case["model"] == "plain gpt"
    hidden, heads = options.get("hidden_size", 16), options.get("num_attention_heads", 4)
    block = BlockProblem(
        batch, sequence, hidden, heads, options.get("num_key_value_heads", heads),
        options.get("head_dim", hidden // heads),
        20 if is_plain else 32, mesh if len(mesh) > 1 else (*mesh, 1),
        layers=1 if is_plain else 2, family="gpt" if is_gpt else "llama", biases=is_gpt,
        dtype="float64", vocabulary=24,
    )  # fmt: skip
    entry = next(each for each in ENTRIES if each.name == case["strategy"])
    config = BlockConfig(**case.get("config", {}))
    program = entry.program(block, config)
    return [
        sum(sum(traffic(each, rank).values()) for rank in each.ranks)
        for each in (program, lower_small_sums(program))
    ]


def _agreement_bytes(case: dict[str, Any]) -> int:
    """Return what ranks send to compare their tokens: an all-reduce of two numbers of 64 bits."""
    return 2 * 16 * (math.prod(case["mesh"]) - 1)


def _numbers_bytes(case: dict[str, Any]) -> int:
    """Return the most that numbers of calls take, one in each bucket that ranks gather or sum."""
    num_ranks, num_buckets = math.prod(case["mesh"]), 3 * 2 + 4
    return num_buckets * 8 * num_ranks * (num_ranks - 1)


def _meshes(strategy: str, num_ranks: int) -> list[list[int]]:
    if strategy in ONE_AXIS:
        return [[num_ranks]]
    if strategy == "25d_block":
        return [[num_ranks // 4, 2, 2]] if num_ranks % 4 == 0 else [[num_ranks // 2, 1, 2]]
    return [[2, num_ranks // 2]] if num_ranks > 2 else [[1, 2], [2, 1]]


@pytest.mark.gloo
def test_gradients_are_those_of_one_process() -> None:
    _check(4, FEW)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4, 6, 8])
@pytest.mark.parametrize("model", ["gpt2", "llama", "qwen2", "mistral"])
def test_gradients_are_those_of_transformers(model: str, num_ranks: int) -> None:
    pytest.importorskip("transformers")
    heads, groups = (12, 6) if num_ranks == 6 else (8, 8)
    if model == "gpt2":
        options: dict[str, Any] = {"n_head": heads, "n_embd": 2 * heads}
    else:
        options = {
            "num_attention_heads": heads, "num_key_value_heads": groups, "hidden_size": 2 * heads, "head_dim": 2,
        }  # fmt: skip
    cases = tuple(
        {
            "model": model,
            "strategy": name,
            "mesh": mesh,
            "options": options,
            "tokens": (math.lcm(num_ranks, 2), 8),
        }
        for name in (*ONE_AXIS, *TWO_AXES, "25d_block")
        for mesh in _meshes(name, num_ranks)
    )
    _check(num_ranks, cases, timeout_s=900)


@pytest.mark.gloo
@pytest.mark.slow
def test_heads_that_ranks_do_not_share_evenly() -> None:
    cases = tuple(
        {"model": model, "strategy": name, "mesh": mesh, "options": options, "tokens": (3, 6)}
        for model, options in (("plain gpt", {}), ("plain llama", {"kv_heads": 2}))
        for name in (*ONE_AXIS, *TWO_AXES)
        for mesh in ([[3]] if name in ONE_AXIS else [[1, 3], [3, 1]])
    )
    _check(3, cases, timeout_s=600)


@pytest.mark.gloo
@pytest.mark.slow
def test_degrees_of_several_kinds() -> None:
    cases = tuple(
        {"model": model, "strategy": "megatron", "mesh": mesh, "degrees": degrees}
        for model in ("plain gpt", "plain llama")
        for degrees, mesh in zip(DEGREES, ([2, 2, 1], [2, 2], [2, 2]), strict=True)
    )
    _check(4, cases, timeout_s=300)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_data_parallelism_around_rows_and_columns(zero: int) -> None:
    degrees = {"data": 2, "tensor": (2, 2), "zero": zero}
    case = {"model": "plain llama", "strategy": "collective_block", "mesh": [2, 2, 2], "degrees": degrees}
    _check(8, (case,), timeout_s=300)
