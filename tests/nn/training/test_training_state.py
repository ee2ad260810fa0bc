"""What a TrainingState names, and what it brings back."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
from torch import nn  # noqa: E402
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: E402

from meshweave.base.errors import CheckpointError, LayoutError  # noqa: E402
from meshweave.execute.ranks.launch import launch  # noqa: E402
from meshweave.nn.training.checkpoints import Checkpoints  # noqa: E402
from meshweave.nn.training.state import TrainingState  # noqa: E402
from meshweave.nn.weights.slots import plain_name  # noqa: E402

HERE = {"PYTHONPATH": str(Path(__file__).parent)}


def state_of(*modules: nn.Module, places: Any = None, is_named: bool = False) -> TrainingState:
    """Return the state of a training of modules by AdamW."""
    given = [
        each
        for module in modules
        for each in (module.named_parameters() if is_named else module.parameters())
    ]
    return TrainingState(modules, torch.optim.AdamW(given, lr=0.1), rank=0, places=places)


def saved(state: TrainingState, folder: Path) -> Checkpoints:
    """Save a state at step 1."""
    checkpoints = Checkpoints(folder)
    state.save(checkpoints, 1)
    checkpoints.wait()
    return checkpoints


@pytest.mark.parametrize("places", [(1, 2), {"tensor": (2, 2)}, [1], None])
def test_equal_places_have_the_random_states_that_were_saved(places: Any, tmp_path: Path) -> None:
    checkpoints = saved(state_of(nn.Linear(2, 2), places=places), tmp_path)
    wanted = torch.rand(3)
    state_of(nn.Linear(2, 2), places=places).load(checkpoints, 1)
    assert torch.equal(torch.rand(3), wanted)


def test_generators_are_seeded_anew_from_a_large_seed(tmp_path: Path) -> None:
    checkpoints = saved(state_of(nn.Linear(2, 2), places=1), tmp_path)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    TrainingState([model], optimizer, rank=0, places=2, seed=1 << 40).load(checkpoints, 1)


def test_generators_of_a_device_are_saved_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device = SimpleNamespace(state=torch.arange(16, dtype=torch.uint8))
    device.get_rng_state = lambda: device.state.clone()
    device.set_rng_state = lambda given: setattr(device, "state", given.clone())
    monkeypatch.setattr(torch, "get_device_module", lambda kind: {"fake": device}[kind])
    state = state_of(nn.Linear(2, 2))
    checkpoints = saved(state, tmp_path / "without")
    parameter = type("Parameter", (), {"device": SimpleNamespace(type="fake")})()
    monkeypatch.setattr(state, "_names", {parameter: "weight"})
    state.load(checkpoints, 1)  # it has no such state, as earlier ones
    checkpoints = saved(state, tmp_path / "with")
    wanted, device.state = device.state, torch.zeros(16, dtype=torch.uint8)
    state.load(checkpoints, 1)
    assert torch.equal(device.state, wanted)


class Counting(nn.Linear):
    """A layer with a state of its own."""

    count = 5

    def get_extra_state(self) -> torch.Tensor:
        """Return the count."""
        return torch.tensor(self.count)

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Take a count, which is not negative."""
        if state < 0:
            raise ValueError("a negative count")
        self.count = int(state)


def test_what_modules_make_for_their_state_is_given_back(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Counting(2, 2))
    checkpoints = saved(state_of(model), tmp_path / "good")
    model[1].count = 7
    state_of(model).load(checkpoints, 1)
    assert model[1].count == 5
    model[1].count = -1
    checkpoints = saved(state_of(model), tmp_path / "bad")
    with pytest.raises(
        CheckpointError, match=r"a state that a module does not take \(ValueError: a negative count"
    ):
        state_of(model).load(checkpoints, 1)


def test_two_modules_with_a_buffer_of_one_name_are_refused() -> None:
    stages = [nn.Module(), nn.Module()]
    for number, stage in enumerate(stages):
        stage.register_parameter(f"w{number}", nn.Parameter(torch.ones(2)))
        stage.register_buffer("angles", torch.ones(1), persistent=False)
    state_of(*stages)
    for stage in stages:
        stage.register_buffer("count", torch.ones(1))
    with pytest.raises(LayoutError, match="two modules have a tensor 'count'"):
        state_of(*stages)


def model_of(is_wrapped: bool, is_compiled: bool) -> Any:
    """Return two layers, the second of which torch wraps, or compiles."""
    layer: Any = nn.Linear(3, 3)
    if is_compiled:
        layer = torch.compile(layer, backend="eager")
    if is_wrapped:
        layer = checkpoint_wrapper(layer)
    return nn.Sequential(nn.Linear(3, 3), layer)


def stepped(model: Any, state: TrainingState) -> None:
    """Train a step."""
    model(torch.ones(1, 3)).sum().backward()
    state._optimizer.step()
    state._optimizer.zero_grad()


@pytest.mark.parametrize("there", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("here", [(False, False), (True, True)])
def test_names_are_those_without_wrappers(
    there: tuple[bool, bool], here: tuple[bool, bool], tmp_path: Path
) -> None:
    model, other = model_of(*there), model_of(*here)
    state, others = state_of(model), state_of(other)
    stepped(model, state)
    checkpoints = saved(state, tmp_path)
    names = set(checkpoints.manifest(1).tensors)
    assert {"model.1.weight", "optimizer.1.weight.exp_avg"} <= names and all(
        plain_name(n) == n for n in names
    )
    others.load(checkpoints, 1)
    stepped(model, state)
    stepped(other, others)
    for own, wanted in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(own, wanted)


def test_names_of_wrappers_in_earlier_checkpoints_are_found(tmp_path: Path) -> None:
    model = model_of(True, False)
    state = state_of(model)
    stepped(model, state)
    manifest = saved(state, tmp_path / "now").manifest(1)
    tensors = {
        name: torch.full(each.shape, 2, dtype=getattr(torch, each.dtype))
        for name, each in manifest.tensors.items()
    }
    tensors["random.0"] = torch.get_rng_state()
    earlier = Checkpoints(tmp_path / "earlier")
    wrapped = {name.replace(".1.", ".1._checkpoint_wrapped_module.") if "optimizer" in name else name: each
               for name, each in tensors.items()}  # fmt: skip
    earlier.save(1, wrapped, manifest.notes)
    earlier.wait()
    state.load(earlier, 1)
    assert all(bool((each == 2).all()) for kept in state._optimizer.state.values() for each in kept.values())


def test_names_that_an_optimizer_has_of_parameters_stay_its_own(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    checkpoints = saved(state_of(model, is_named=True), tmp_path)
    assert "param_names" not in checkpoints.notes(1)["training"]["groups"][0]
    earlier = Checkpoints(tmp_path / "earlier")
    notes = checkpoints.notes(1)
    notes["training"]["groups"][0]["param_names"] = ["others"]
    tensors = {f"model.{name}": each for name, each in model.state_dict().items()}
    earlier.save(1, {**tensors, "random.0": torch.get_rng_state()}, notes)
    earlier.wait()
    state = state_of(model, is_named=True)
    state.load(earlier, 1)
    assert state._optimizer.param_groups[0]["param_names"] == ["weight", "bias"]


def grouped(model: nn.Module, *groups: tuple[str, float]) -> TrainingState:
    """Return the state of a training by AdamW of groups: names of parameters, and their rate."""
    own = dict(model.named_parameters())
    given = [{"params": [own[name] for name in names.split()], "lr": lr} for names, lr in groups]
    return TrainingState([model], torch.optim.AdamW(given), rank=0)


def test_groups_of_an_optimizer_are_found_by_the_names_of_their_parameters(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    checkpoints = saved(grouped(model, ("0.weight", 0.1), ("0.bias 1.bias", 0.2)), tmp_path)
    state = grouped(model, ("1.bias 0.bias", 7.0), ("0.weight", 8.0))
    state.load(checkpoints, 1)
    assert [group["lr"] for group in state._optimizer.param_groups] == [0.2, 0.1]
    state = grouped(model, ("1.weight", 7.0), ("0.bias", 8.0))  # the first is new
    state.load(checkpoints, 1)
    assert [group["lr"] for group in state._optimizer.param_groups] == [7.0, 0.2]
    other = grouped(model, ("0.weight 0.bias", 7.0), ("1.bias", 8.0))
    with pytest.raises(
        CheckpointError, match=r"has '0.bias' and '0.weight' in groups .* with different settings"
    ):
        other.load(checkpoints, 1)
    assert [group["lr"] for group in other._optimizer.param_groups] == [7.0, 8.0]


def test_groups_of_earlier_checkpoints_have_the_order_of_those_here(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    notes = saved(grouped(model, ("weight", 0.1), ("bias", 0.2)), tmp_path / "now").notes(1)
    del notes["training"]["members"]
    earlier = Checkpoints(tmp_path / "earlier")
    tensors = {f"model.{name}": each for name, each in model.state_dict().items()}
    earlier.save(1, {**tensors, "random.0": torch.get_rng_state()}, notes)
    state = grouped(model, ("weight", 7.0), ("bias", 8.0))
    state.load(earlier, 1)
    assert [group["lr"] for group in state._optimizer.param_groups] == [0.1, 0.2]


def test_a_later_checkpoint_of_a_lower_step_is_not_passed_over_in_silence(tmp_path: Path) -> None:
    checkpoints, value = Checkpoints(tmp_path, keep=9), {"x": torch.ones(2)}
    for step in (10, 20):
        checkpoints.save(step, value)
    checkpoints.load(10, value)
    checkpoints.save(11, value)
    assert checkpoints.latest() == 11
    (tmp_path / "step-00000011" / "rank-00000.bin").write_bytes(b"")
    with pytest.warns(UserWarning, match="step 11 .* is not whole: .*; step 20 is taken"):
        assert checkpoints.latest() == 20


def test_views_that_are_conjugated_or_negated_are_filled(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    values = {"c": torch.randn(3, dtype=torch.complex64), "n": torch.randn(3)}
    checkpoints.save(1, values)
    checkpoints.wait()
    views = {"c": torch.zeros(3, dtype=torch.complex64).conj(), "n": torch._neg_view(torch.zeros(3))}
    checkpoints.load(1, views)
    assert all(torch.equal(view, values[name]) for name, view in views.items())


@pytest.mark.gloo
def test_a_resumption_on_more_ranks_and_a_value_of_some_ranks(tmp_path: Path) -> None:
    torch.manual_seed(7)
    checkpoints = saved(state_of(nn.Linear(2, 2), places=1), tmp_path / "one")
    before = torch.rand(1).item()
    answers = launch(
        "training_state_rank_functions:on_more_ranks", 2, {"folder": str(tmp_path)}, timeout_s=180, env=HERE
    )
    drawn = [each["drawn"] for each in answers]
    assert drawn[0] == drawn[1] != before
    assert [each["value"] for each in answers] == [3.0, 3.0]
    assert [each["again"] for each in answers] == [True, True]
    assert [each["fused"] for each in answers] == [[True, True]] * 2
    words = (
        "cannot be saved: 'weight' has other values on rank 1 than on rank 0: parameters of different stages"
    )
    assert all(words in each["stages"] for each in answers), answers
    assert checkpoints.latest() == 1


def test_hooks_on_steps_do_not_see_that_a_state_is_loaded(tmp_path: Path) -> None:
    """As one that averages weights, or counts steps: loading makes states by a step of its own."""
    model = nn.Linear(2, 2)
    state = state_of(model)
    model(torch.ones(1, 2)).sum().backward()
    state._optimizer.step()
    checkpoints, others, seen = saved(state, tmp_path), state_of(model), list[int]()
    handles = [
        others._optimizer.register_step_pre_hook(lambda *_: seen.append(0)),
        others._optimizer.register_step_post_hook(lambda *_: seen.append(1)),
        register_optimizer_step_post_hook(lambda *_: seen.append(2)),
    ]
    others.load(checkpoints, 1)
    assert others._optimizer.state and not seen
    others._optimizer.step()
    assert seen == [0, 1, 2]
    handles[2].remove()


def test_a_module_may_have_layouts_of_its_own(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.layouts = ["wide", "narrow"]
    assert saved(state_of(model), tmp_path).latest() == 1
