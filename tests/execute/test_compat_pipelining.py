"""Each private name of torch's pipelining that meshweave uses is there and does what `compat_pipelining` says."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from meshweave.base.errors import UnsupportedError  # noqa: E402
from meshweave.execute.torch import compat, compat_pipelining  # noqa: E402


@pytest.mark.parametrize(
    ("module", "name", "call"),
    [
        ("_backward", "stage_backward", compat_pipelining.stage_backward),
        ("_backward", "stage_backward_input", compat_pipelining.stage_backward_input),
        ("_backward", "stage_backward_weight", compat_pipelining.stage_backward_weight),
        ("schedules", "_PipelineScheduleRuntime", lambda: compat_pipelining.pipeline_runtime([], 1)),
        (
            "schedules",
            "record_function",
            lambda: compat_pipelining.observe_pipeline_actions(contextlib.nullcontext).__enter__(),
        ),
    ],
)
def test_every_function_says_so_where_its_name_is_gone(monkeypatch, module, name, call) -> None:
    compat._private.cache_clear()
    monkeypatch.delattr(importlib.import_module(f"torch.distributed.pipelining.{module}"), name)
    try:
        with pytest.raises(UnsupportedError, match=rf"has no .*{name}"):
            call()
    finally:
        compat._private.cache_clear()


def test_a_runtime_without_csv_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="_load_csv"):
        compat_pipelining.load_pipeline_csv(object(), "schedule.csv", "compute_only")


def test_split_gradients_are_those_of_a_whole_backward() -> None:
    """What the three functions promise: gradients of inputs first, of parameters later, or all at once."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()
    x, grad = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    whole = x.clone().requires_grad_()
    (from_whole,) = compat_pipelining.stage_backward()((layers(whole),), (grad,), [whole])
    expected = [parameter.grad for parameter in layers.parameters()]
    layers.zero_grad()
    split = x.clone().requires_grad_()
    outputs = [layers(split)]
    made, groups = compat_pipelining.stage_backward_input()(outputs, [grad], [split], layers.parameters())
    assert torch.equal(made[0], from_whole)
    assert all(parameter.grad is None for parameter in layers.parameters())
    assert all("grads" in group for group in groups)
    assert outputs[0].grad_fn is None
    compat_pipelining.stage_backward_weight()(layers.parameters(), groups)
    assert all(torch.equal(p.grad, g) for p, g in zip(layers.parameters(), expected, strict=True))


def test_observed_actions_are_named_as_in_csv() -> None:
    seen: list[str] = []

    @contextlib.contextmanager
    def watch(action: str) -> Iterator[None]:
        seen.append(action)
        yield

    schedules = importlib.import_module("torch.distributed.pipelining.schedules")
    before = schedules.record_function
    with (
        compat_pipelining.observe_pipeline_actions(watch),
        schedules.record_function(schedules._get_profiler_function_name(schedules._Action.from_str("2F0"))),
    ):
        pass
    assert seen == ["2F0"]
    assert schedules.record_function is before


def test_storages_and_views() -> None:
    one = torch.empty(4, device="meta")
    assert compat_pipelining.storage_key(one) == compat_pipelining.storage_key(one[1:])
    assert compat_pipelining.storage_key(one) != compat_pipelining.storage_key(torch.empty(4, device="meta"))
    leaf = torch.ones(4, requires_grad=True)
    assert compat_pipelining.is_view((leaf * 2)[1:])
    assert not compat_pipelining.is_view(leaf * 2)
