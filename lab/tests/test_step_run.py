"""Steps of training on real processes: losses, and the weights that Adam leaves, are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")

from meshweave.execute.ranks.launch import launch

HERE = {"PYTHONPATH": str(Path(__file__).parent)}
MODEL = {
    "name": "tiny", "num_layers": 4, "hidden": 16, "num_heads": 4, "num_kv_heads": 4, "head_dim": 4,
    "ffn_hidden": 32, "vocab_size": 12, "gated_ffn": False, "source": "", "tied_embeddings": False,
}  # fmt: skip
LLAMA = {**MODEL, "num_kv_heads": 2, "gated_ffn": True}
FEW = (
    {"data": 2, "tensor": 2, "strategy": "megatron_sp"},
    {"data": 2, "pipeline": 2, "zero": 3, "micro_batch": 2, "schedule": "zb-h1"},
)
MORE = (
    {"pipeline": 2, "tensor": 2, "strategy": "megatron"},
    {"tensor": [2, 2], "strategy": "meshslice_block", "micro_batch": 2},
    {"tensor": [2, 2], "strategy": "summa_block", "micro_batch": 2},
    {"tensor": [2, 2], "strategy": "atp"},
    {"data": 2, "pipeline": 2, "virtual_stages": 2},
    {"pipeline": 4, "schedule": "gpipe"},
    {"data": 4, "zero": 1},
    {"data": 2, "context": 2, "zero": 2, "recompute": "full"},
    {"data": 2, "pipeline": 2, "virtual_stages": 2, "schedule": "dualpipev", "zero": 1},
)


def _answers(model: dict[str, Any], cases: tuple[dict[str, Any], ...]) -> list[list[dict[str, Any]]]:
    payload = {"model": model, "batch": 8, "sequence": 4, "cluster": "dgx-a100:4", "cases": cases}
    return launch("step_run_rank_functions:run_steps", 4, payload, timeout_s=280, env=HERE)


def _check(ranks: list[list[dict[str, Any]]]) -> None:
    for of_case in zip(*ranks, strict=True):
        for losses, expected in zip(
            zip(*(rank["losses"] for rank in of_case), strict=True), of_case[0]["expected"], strict=True
        ):
            assert sum(losses) == pytest.approx(expected, rel=1e-5)
        first, second = of_case[0]["expected"]
        assert abs(second - first) > 0.01 * first  # the second step sees what the first one changed
        assert max(rank["difference"] for rank in of_case) < 1e-5


@pytest.mark.gloo
def test_steps_train_as_one_process_does() -> None:
    _check(_answers(MODEL, FEW))


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("model", [MODEL, LLAMA], ids=["gpt", "llama"])
def test_steps_of_every_strategy_and_schedule_do(model: dict[str, Any]) -> None:
    _check(_answers(model, (*FEW, *MORE)))
