"""The override of torchtitan's linear layers, put into torchtitan's own configuration by torchtitan."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
pytest.importorskip("triton", reason="triton is not installed, which torchtitan imports")
overrides: Any = pytest.importorskip("torchtitan.config.override", reason="torchtitan is not installed")

import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Replicate, distribute_tensor  # noqa: E402

pytestmark = pytest.mark.slow

TARGET = "meshweave.nn.plugins.torchtitan.universal_linear_layers"


@pytest.fixture(scope="module")
def configs() -> tuple[Any, Any]:
    """Return torchtitan's small Llama, as it is and overridden."""
    from torchtitan.models.llama3 import model_registry

    plain = model_registry("debugmodel").model
    chosen = copy.deepcopy(plain)
    overrides.apply_overrides(overrides.OverrideConfig(imports=[TARGET]), chosen)
    return plain, chosen


def test_every_linear_layer_is_replaced_and_no_other(configs: tuple[Any, Any]) -> None:
    from torchtitan.models.common import Linear

    from meshweave.nn.plugins.torchtitan import UniversalLinear

    plain, chosen = configs
    before = {name: each for name, each, *_ in plain.traverse(Linear.Config)}
    after = {name: each for name, each, *_ in chosen.traverse(Linear.Config)}
    assert len(before) > 10 and before.keys() == after.keys()
    for name, config in before.items():
        replaced = after[name]
        expected = UniversalLinear.Config if type(config) is Linear.Config else type(config)
        assert type(replaced) is expected, name
        for field in ("in_features", "out_features", "bias"):
            assert getattr(replaced, field) == getattr(config, field), name


@pytest.fixture
def one_rank(tmp_path: Any) -> Iterator[Any]:
    """Return a mesh of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_layer_that_torchtitan_builds_multiplies(one_rank: Any) -> None:
    from torchtitan.models.common import Linear

    from meshweave.nn.plugins.torchtitan import UniversalLinear, universal_linear_layers

    config = Linear.Config(in_features=6, out_features=4, bias=True)
    layer = universal_linear_layers(config).build()
    assert isinstance(layer, UniversalLinear)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    x = torch.randn(2, 3, 6)
    expected = torch.nn.functional.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(layer(x), expected)
    for name, parameter in list(layer.named_parameters()):
        placed = distribute_tensor(parameter.detach(), one_rank, [Replicate()])
        setattr(layer, name, torch.nn.Parameter(placed))
    out = layer(distribute_tensor(x, one_rank, [Replicate()]))
    torch.testing.assert_close(out.full_tensor(), expected)
    out.sum().backward()
    assert layer.weight.grad is not None
