"""A step makes no more messages than torch's DDP and FSDP2 make, but for what these leave out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
FEW = CASES[::5]
"""A strategy each, of different models."""


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [(2, FEW), *(pytest.param(count, CASES, marks=pytest.mark.slow) for count in (2, 4))],
    ids=["few", "two", "four"],
)
def test_messages_of_a_step_are_no_more_than_those_of_torch(
    num_ranks: int, cases: list[dict[str, Any]]
) -> None:
    ranks = launch("message_rank_functions:count_all", num_ranks, {"cases": cases}, timeout_s=300, env=HERE)
    for case, *answers in zip(cases, *ranks, strict=True):
        for answer in answers:
            ours, theirs = sum(answer["ours"].values()), sum(answer["theirs"].values())
            assert theirs > 0, answer
            assert ours <= theirs + BESIDE[case["strategy"]], (case, answer)
            assert answer["apart"] < 1e-5, (case, answer)
            assert answer["ours kinds"] == ["DTensor"], answer
        assert len({tuple(answer["copies"]) for answer in answers}) == 1, case


OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("AdamW", {"lr": 0.01, "amsgrad": True}),
    ("Adagrad", {"lr": 0.01}),
    ("RMSprop", {"lr": 0.01, "centered": True}),
    ("NAdam", {"lr": 0.01}),
]
"""The first three have one kernel for all parameters on a CPU."""


@pytest.mark.slow
@pytest.mark.gloo
def test_optimizers_step_on_local_parts_as_on_dtensors() -> None:
    """Whoever looks at a step sees DTensors, and then they are stepped on: the same bits by the same kernels.

    One kernel steps on all parameters where that is left open.
    """
    by_calls = [(name, {**options, "foreach": False}) for name, options in OPTIMIZERS]
    payload = {"optimizers": by_calls + OPTIMIZERS}
    for answers in launch("message_rank_functions:step_optimizers", 2, payload, timeout_s=300, env=HERE):
        assert answers[: len(by_calls)] == [[5, 0, 0.0]] * len(by_calls)
        left_open = answers[len(by_calls) :]
        # In the second step one parameter has no momentum yet; Adagrad's have states from the start.
        assert [by_kernel for _, by_kernel, _ in left_open] == [4, 4, 5, 0, 0]
        assert all(on_parts == 5 and apart < 1e-6 for on_parts, _, apart in left_open), answers


def test_one_kernel_takes_no_data_with_gaps_and_no_counts_in_double_precision() -> None:
    import torch

    from meshweave.nn.parallel import local_steps

    whole, count = torch.ones(4, 6), torch.tensor(1.0)
    assert local_steps._suit_kernel([(whole, whole, count, 3), (whole.double(), whole.double(), count, 3)])
    for other in (
        whole.t(),
        count.double(),
        whole.half(),
        whole.to_sparse(),
        torch.empty(4, 6, device="meta"),
    ):
        assert not local_steps._suit_kernel([(whole, whole, count), (whole, other, count)])
    for other in ((whole, whole), (whole, whole, None)):
        assert not local_steps._suit_kernel([(whole, whole, whole), other])
    assert local_steps._suit_kernel([(whole, whole, None)] * 2)
    left_open = {"lr": 0.1, "fused": None, "foreach": None}
    assert local_steps._leaves_open(left_open)
    for chosen in ({"foreach": True}, {"fused": False}, {"differentiable": True}, {"lr": torch.tensor(0.1)}):
        assert not local_steps._leaves_open(left_open | chosen)


def test_a_gradient_with_gaps_that_was_assigned_is_stepped_by_as_it_lies() -> None:
    import torch

    from meshweave.nn.parallel import local_steps

    weights = [torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    for weight in weights:
        weight.grad = torch.arange(16.0).view(4, 4).t()
    theirs, ours = (torch.optim.SGD([weight], lr=0.1) for weight in weights)
    theirs.step()
    local_steps._step_on_parts(ours, has_kernel=True)
    assert torch.equal(*weights)


def test_a_layer_that_was_compiled_and_then_wrapped_is_compiled() -> None:
    import torch
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    from meshweave.nn.parallel.model import is_compiled

    layer = torch.nn.Linear(2, 2)
    assert not is_compiled(layer) and not is_compiled(checkpoint_wrapper(layer))
    compiled = torch.compile(layer, backend="eager")
    assert is_compiled(compiled) and is_compiled(checkpoint_wrapper(compiled))
    layer.compile(backend="eager")
    assert is_compiled(layer)


def test_an_optimizer_that_mixes_elements_is_none_to_step_locally() -> None:
    import torch

    from meshweave.nn.parallel import local_steps

    weights = [torch.nn.Parameter(torch.ones(4, 6))]
    on_parts, on_whole = local_steps._step_on_parts, local_steps._step_on_whole
    kernels = {}
    for kind, options in (
        (torch.optim.AdamW, {}),
        (torch.optim.SGD, {"fused": True}),
        (torch.optim.NAdam, {}),
    ):
        step: Any = local_steps._way(kind(weights, lr=1e-3, **options))  # type: ignore[arg-type]
        assert step.func is on_parts
        kernels[kind.__name__] = step.keywords["has_kernel"]
    assert kernels == {"AdamW": True, "SGD": True, "NAdam": False}
    assert local_steps._way(torch.optim.Adafactor(weights, lr=1e-3)) is on_whole
    assert local_steps._way(torch.optim.Muon(weights, lr=1e-3)) is on_whole
    assert local_steps._way(torch.optim.LBFGS(weights, lr=1e-3)) is None
