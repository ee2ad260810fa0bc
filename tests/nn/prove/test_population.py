"""Models of plain torch that differ where reduced copies do not: computed as on one process, or refused for it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))

import torch
from population import POPULATION, Gpt, checked
from torch.overrides import TorchFunctionMode

from meshweave.execute.ranks.launch import launch
from meshweave.nn.parallel.known import recognised
from meshweave.nn.prove.reduced import reduced
from meshweave.nn.prove.whole_model import _CallRecorder
from sampling import mostly_slow

HERE = {"PYTHONPATH": ":".join(sys.path[:2])}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", mostly_slow(POPULATION, 10))
def test_a_copy_with_all_layers_differs_where_the_model_does(name: str) -> None:
    make, words = POPULATION[name]
    said = checked(make())
    assert said == "" if not words else words in said and "\n" not in said, said


@pytest.mark.gloo
@pytest.mark.parametrize(
    "names",
    [
        ("a loss alone", "a mask that is kept", "a counter"),
        pytest.param(tuple(POPULATION), marks=pytest.mark.slow),
    ],
    ids=["few", "all"],
)
def test_models_are_exact_or_refused_for_what_they_do(names: tuple[str, ...]) -> None:
    for answers in launch("population:tried", 2, {"names": names}, timeout_s=400, env=HERE):
        for name in names:
            said, words = answers[name], POPULATION[name][1]
            assert said == "" if not words else words in said and "\n" not in said, (name, said)


@pytest.mark.gloo
def test_dropout_that_is_set_later_is_refused() -> None:
    for said in launch("population:annealed", 2, {}, timeout_s=100, env=HERE):
        assert "was set to 0.25 after parallelize, which has read 0.5" in said["after attention"]
        assert said["of attention"].startswith(
            "dropout of attention weights in transformer.h.1 was set to 0 "
        )
        assert said["of the embedding"].startswith("transformer.drop was set to 0 after parallelize")
        assert said["mode of a layer's"].startswith(
            "dropout in transformer.h.1 is off by train() or eval() of"
        )
        assert said["mode of the embedding's"].startswith(
            "transformer.drop is off by train() or eval() of its own"
        )
        assert said["none"] == "True"


def test_a_copy_in_single_precision_is_cast_as_the_model_does() -> None:
    """Where double precision does not fit into memory; what a model casts to float32 then stays that."""
    model = Gpt(lambda layer, number, x, first: layer(x.float())).bfloat16()
    assert checked(model, torch.float32) == ""


def test_rows_are_shortened_to_what_a_model_takes() -> None:
    """Nothing says that there are 32 positions."""
    assert "sees 26 tokens of 32" in checked(POPULATION["a window"][0](), longest=512)


def test_a_model_that_fails_in_a_copy_is_refused_in_a_sentence() -> None:
    said = checked(Gpt(lambda layer, number, x, first: layer(x) if number < 5 else layer.lacking))
    assert "Gpt does not run in a copy with all layers" in said and "lacking" in said


class _Sizes(TorchFunctionMode):  # type: ignore[misc]
    """Notes the smaller dim of each matrix that a linear layer multiplies by."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            self.sizes += [min(each.shape) for each in args[1:2]]
        return func(*args, **(kwargs or {}))


def test_a_copy_with_all_layers_multiplies_by_thin_matrices() -> None:
    """Its products take a share of the time, and are those of its weights."""
    model = Gpt()
    _, names = recognised(model)
    options = {"words": 8, "sequence": 8, "binds": (), "device": torch.device("cpu"), "dtype": torch.float64}
    copied, tokens = reduced(model, names, range(6), **options, shares=True).eval(), torch.arange(8)[None]
    whole = copied(tokens)
    with _Sizes() as seen, _CallRecorder("cpu"):
        assert torch.allclose(copied(tokens), whole, rtol=1e-9, atol=1e-9)
        named = torch.nn.functional.linear(whole, weight=copied.transformer.h[0].mlp.c_fc.weight[:, :8])
        assert named.shape[-1] == copied.transformer.h[0].mlp.c_fc.out_features
    assert len(seen.sizes) >= 2 * 4 * 6
    assert max(seen.sizes) <= 8


def test_layers_of_several_kinds_share_weights_and_masks() -> None:
    """A copy with all layers takes the memory of one, though layers differ in attributes."""
    model = Gpt()
    for number, layer in enumerate(model.transformer.h):
        layer.scale = 0.5**number
        layer.attn.register_buffer("mask", torch.ones(32, 32).tril() * (number < 5))
    _, names = recognised(model)
    options = {"words": 8, "sequence": 8, "binds": (), "device": torch.device("cpu"), "dtype": torch.float64}
    layers = reduced(model, names, range(6), **options, shares=True).transformer.h
    assert len({id(parameter) for parameter in layers.parameters()}) == len(list(layers[0].parameters()))
    assert len({id(layer.attn.mask) for layer in layers}) == 2
    assert not layers[5].attn.mask.any()
