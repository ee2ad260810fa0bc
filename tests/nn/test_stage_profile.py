"""Profiles of stages: what the meta device predicts is what a stage makes, computes and keeps."""

from __future__ import annotations

import gc
import json
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from meshweave.base.errors import LayoutError, RankLostError  # noqa: E402
from meshweave.describe.layout.mesh import Mesh  # noqa: E402
from meshweave.nn.pipelining import stage_problem  # noqa: E402
from meshweave.nn.pipelining.profile import StageProfile, profile_stage  # noqa: E402
from meshweave.nn.pipelining.saved_memory import SavedMemory  # noqa: E402
from meshweave.nn.pipelining.stage_functions import StageFunctions, StageShape, TensorKind  # noqa: E402
from meshweave.nn.pipelining.stage_problem import PipelineData, StagePlaces, profile_all  # noqa: E402

KIND = TensorKind((4, 8), torch.float64)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).double()


def test_what_is_kept_is_as_predicted_and_nothing_at_the_end() -> None:
    """Of several micro-batches in flight, split and whole."""
    module = layers()
    profile = profile_stage(module, 1, [KIND], [0], [2])
    memory, token = SavedMemory(), torch.zeros(1)
    functions = StageFunctions(
        module, StageShape(1, 4, (KIND,), (KIND,), (0,), (2,)), None, {2}, memory=memory
    )
    after_forward, after_input_grad = profile.kept_bytes
    stashes = [{} for _ in range(3)]
    for number, stash in enumerate(stashes):
        functions.forward(stash, torch.randn(4, 8, dtype=torch.float64), token, number)
        assert memory.bytes == (number + 1) * after_forward
    grad = torch.ones(4, 8, dtype=torch.float64)
    functions.input_grad(stashes[0], grad, token, 0)
    assert memory.bytes == 2 * after_forward + after_input_grad
    functions.backward(stashes[2], grad, token, token, 2)
    assert memory.bytes == after_forward + after_input_grad
    functions.input_grad(stashes[1], grad, token, 1)
    for number in (0, 1):
        functions.weight_grad(stashes[number], token, number)
    gc.collect()
    assert memory.bytes == 0
    assert memory.peak_bytes == max(3 * after_forward, 2 * after_forward + after_input_grad)


def test_flops_are_those_of_the_products() -> None:
    forward = 2 * 4 * (8 * 16 + 16 * 8)
    assert profile_stage(layers(), 1, [KIND], [0], [2]).flops == (forward, forward, forward)
    # The first stage makes no gradient of its inputs: the first product has one gradient, the second two.
    assert profile_stage(layers(), 0, [KIND], [], [1]).flops == (forward, 0, forward + forward // 2)


class Split(nn.Module):
    """Two products of a feed-forward part whose inner features four ranks share, by DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.mesh = init_device_mesh("cpu", (4,))
        self.up = nn.Parameter(distribute_tensor(torch.randn(64, 32), self.mesh, [Shard(0)]))
        self.down = nn.Parameter(distribute_tensor(torch.randn(32, 64), self.mesh, [Shard(1)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        made = nn.functional.linear(nn.functional.linear(own, self.up).relu(), self.down)
        return made.redistribute(self.mesh, [Replicate()]).to_local()


def test_of_dtensors_the_part_of_a_rank_is_counted() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        kind = TensorKind((8, 32), torch.float32)
        profile = profile_stage(Split(), 1, [kind], [0], [2])
    finally:
        dist.destroy_process_group()
    whole, inner, weights = 8 * 32 * 4, 8 * 16 * 4, 2 * 16 * 32 * 4
    assert profile.bytes == weights + 2 * whole  # and input and result
    assert profile.kept_bytes[0] == whole + inner + whole


def test_ranks_with_uneven_shards_have_one_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    def exchange(context: Any, ranks: Any, words: str, what: str, topic: str) -> dict[int, str]:
        more = json.loads(words)
        more["kept_bytes"][1] += 8
        return {0: words, 1: json.dumps(more)}

    monkeypatch.setattr(stage_problem, "exchange", exchange)
    places = StagePlaces((Mesh("pair", (2,), ("tp",), (0, 1)),), ("dp",), ())
    data = PipelineData((KIND,), KIND)
    (profile,), rows = profile_all(
        None, places, {0: layers()}, data, nn.functional.mse_loss, trains=True, outputs={}
    )
    own = profile_stage(layers(), 0, [KIND], [], [], nn.functional.mse_loss, KIND)
    assert rows == 4 and profile.kept_bytes == (own.kept_bytes[0], own.kept_bytes[1] + 8)


def test_a_stage_that_changes_in_place_what_arrives_is_told_what_instead() -> None:
    """What arrives is a leaf, which torch lets nobody change."""
    for module in (nn.ReLU(inplace=True), nn.Sequential(nn.Hardtanh(inplace=True), nn.Linear(8, 8).double())):
        with pytest.raises(
            LayoutError, match="changes in place what arrives: let its first operation make a new"
        ):
            profile_stage(module, 1, [KIND], [0], [2])
    profile_stage(nn.Sequential(nn.Linear(8, 8).double(), nn.ReLU(inplace=True)), 1, [KIND], [0], [2])


def test_a_profile_comes_back_from_json() -> None:
    profile = profile_stage(layers(), 3, [KIND], [2], [], nn.functional.mse_loss, KIND)
    assert StageProfile.from_json(profile.to_json()) == profile


def test_a_parameter_that_a_split_backward_misses_is_named() -> None:
    class Aside(nn.Module):
        """Returns beside its result something that depends on no input."""

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.free = nn.Linear(8, 8).double(), nn.Parameter(torch.ones(4, 8).double())

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.linear(x), self.free * 2

    assert profile_stage(Aside(), 1, [KIND], [0], [2, 3]).missed_gradient == "free"
    assert profile_stage(layers(), 1, [KIND], [0], [2]).missed_gradient == ""


@pytest.mark.parametrize(
    ("inputs", "targets", "words"),
    [
        (
            [TensorKind((4, 9), torch.float64)],
            [2],
            "stage 1 does not run on what stage 0 makes, float64 (4, 9)",
        ),
        ([KIND], [2, 3], "stage 1 returns 1 tensors, and goes on to stages 2, 3"),
    ],
)
def test_what_does_not_fit_is_one_line(inputs, targets, words) -> None:
    with pytest.raises(LayoutError) as caught:
        profile_stage(layers(), 1, inputs, [0], targets)
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)


class _Lost(torch.autograd.Function):
    """Finds in its backward that a rank is lost."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        raise RankLostError("rank 3 stopped answering", (3,))


@pytest.mark.parametrize("whole", [{0}, set()])
def test_an_error_of_a_backward_stays_what_it_was(whole: set[int]) -> None:
    """torch's functions of stages wrap it."""

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _Lost.apply(self.linear(x))

    functions = StageFunctions(Stage(), StageShape(1, 4, (KIND,), (KIND,), (0,), (2,)), None, whole)
    stash: dict[str, object] = {}
    functions.forward(stash, torch.randn(4, 8, dtype=torch.float64), torch.zeros(1), 0)
    with pytest.raises(RankLostError) as lost:
        functions.input_grad(stash, torch.ones(4, 8, dtype=torch.float64), torch.zeros(1), 0)
    assert lost.value.missing == (3,)
