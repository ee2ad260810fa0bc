"""On which kind of device a plan makes its mesh: that of the model."""

import pytest

torch = pytest.importorskip("torch")
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from meshweave.nn.parallel.plans import device_type_of  # noqa: E402


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_mesh_of_a_plan_is_on_the_kind_of_device_of_the_model(kind: str) -> None:
    with FakeTensorMode():  # tensors of a device that is not there
        parameter = torch.nn.Parameter(torch.empty(2, device=kind))
        assert device_type_of(torch.nn.ParameterList([parameter])) == kind


def test_a_model_on_the_meta_device_goes_where_its_ranks_are() -> None:
    assert device_type_of(torch.nn.Linear(2, 2, device="meta")) == "cpu"
