"""A step makes no more messages than torch's DDP and FSDP2 make, but for what these leave out."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")

from meshweave.execute.ranks.launch import launch

HERE = {"PYTHONPATH": str(Path(__file__).parent)}
BESIDE = {"data_parallel": 1, "zero2": 2, "zero3": 2}
"""The sum of the loss over ranks, and the comparison of what ranks give a call: DDP and FSDP2 have neither.

Where nothing travels before the loss, the two are one message.
"""
CASES = [
    {"model": model, "strategy": strategy, "options": options}
    for model, options in (
        ("plain gpt", {}),
        ("plain llama", {"kv_heads": 2}),
        ("plain gpt", {"is_tied": False}),
        ("qwen3", {}),
    )
    for strategy in ("data_parallel", "zero2", "zero3")
]


@pytest.mark.gloo
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_messages_of_a_step_are_no_more_than_those_of_torch(num_ranks: int) -> None:
    ranks = launch("message_rank_functions:count_all", num_ranks, {"cases": CASES}, timeout_s=300, env=HERE)
    for case, *answers in zip(CASES, *ranks, strict=True):
        for answer in answers:
            ours, theirs = sum(answer["ours"].values()), sum(answer["theirs"].values())
            assert theirs > 0, answer
            assert ours <= theirs + BESIDE[case["strategy"]], (case, answer)
            assert answer["apart"] < 1e-5, (case, answer)
            assert answer["ours kinds"] == ["DTensor"], answer
        assert len({tuple(answer["copies"]) for answer in answers}) == 1, case


OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "AdamW": {"lr": 0.01, "amsgrad": True},
    "Adagrad": {"lr": 0.01},
    "RMSprop": {"lr": 0.01, "centered": True},
    "NAdam": {"lr": 0.01},
}


@pytest.mark.gloo
def test_optimizers_step_on_local_parts_as_on_dtensors() -> None:
    """Whoever looks at a step sees DTensors, and then they are stepped on: with the same bits."""
    for answer in launch(
        "message_rank_functions:step_optimizers", 2, {"optimizers": OPTIMIZERS}, timeout_s=300, env=HERE
    ):
        assert set(map(tuple, answer.values())) == {(5, 0.0)} and len(answer) == len(OPTIMIZERS), answer


def test_an_optimizer_that_mixes_elements_is_none_to_step_locally() -> None:
    import torch

    from meshweave.nn.parallel import local_steps

    weights = [torch.nn.Parameter(torch.ones(4, 6))]
    on_parts, on_whole = local_steps._step_on_parts, local_steps._step_on_whole
    assert local_steps._way(torch.optim.AdamW(weights, lr=1e-3)) is on_parts
    assert local_steps._way(torch.optim.SGD(weights, lr=1e-3, momentum=0.9, fused=True)) is on_parts
    assert local_steps._way(torch.optim.Adafactor(weights, lr=1e-3)) is on_whole
    assert local_steps._way(torch.optim.Muon(weights, lr=1e-3)) is on_whole
    assert local_steps._way(torch.optim.LBFGS(weights, lr=1e-3)) is None
