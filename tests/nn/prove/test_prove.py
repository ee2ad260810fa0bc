"""Faults that are seeded into parallelised models are found and named; right models are said to be equal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")

import torch

from meshweave.execute.ranks.launch import launch
from meshweave.nn.prove.differences import Compared
from meshweave.nn.prove.shards import LocalTensor

PARALLEL = Path(__file__).parents[1] / "parallel"
HERE = {"PYTHONPATH": f"{Path(__file__).parent}:{PARALLEL}"}


def _said(what: str, num_ranks: int, **payload: Any) -> list[dict[str, str]]:
    return launch(f"proof_rank_functions:{what}", num_ranks, payload, timeout_s=500, env=HERE)


def _check_faults(num_ranks: int, which: str) -> None:
    sys.path[:0] = [str(PARALLEL), str(Path(__file__).parent)]
    from more_faults import chosen

    ranks = _said("said_of_faults", num_ranks, chosen=which)
    for fault, words in chosen(which).items():
        first = ranks[0][fault.__name__]
        assert all(said[fault.__name__] == first for said in ranks), [said[fault.__name__] for said in ranks]
        for word in words:
            assert word in first, (fault.__name__, first)
        assert "Traceback" not in first


def test_nan_in_the_same_places_is_no_error_and_hides_none() -> None:
    nan = float("nan")

    def error(actual: list[float], wanted: list[float]) -> tuple[float, float]:
        both = LocalTensor(torch.tensor(actual)), torch.tensor(wanted)
        return Compared("x", *both).error()

    assert error([nan, 1.0], [nan, 1.0]) == (0.0, 0.0)
    assert error([nan, 1.0, 2.0], [nan, 1.0, 1.0])[0] > 0.5
    assert error([nan, 1.0], [1.0, 1.0])[0] == error([1.0, 1.0], [1.0, nan])[0] == float("inf")


def test_equal_numbers_beyond_norms_are_left_out() -> None:
    masked, other = torch.tensor([-1e38, 1.0, 2.0]), torch.tensor([-1e38, 1.0, 1.0])
    assert Compared("x", LocalTensor(masked), other).error()[0] == pytest.approx(2**-0.5)
    assert Compared("x", LocalTensor(masked), masked.clone()).error() == (0.0, 0.0)


@pytest.mark.gloo
def test_seeded_faults_are_named() -> None:
    _check_faults(2, "few")


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "which"), [(2, "first"), (4, "first"), (2, "others")])
def test_all_seeded_faults_are_named(num_ranks: int, which: str) -> None:
    if which == "others":
        pytest.importorskip("transformers")
    _check_faults(num_ranks, which)


@pytest.mark.gloo
def test_right_models_are_equal() -> None:
    for rank, said in enumerate(_said("said_of_right_models", 2, thorough=False)):
        assert all(text.startswith("equal") for text in said.values()), said
        assert f"on rank {rank} of 2; with others: give data_mesh=" in said["each alone"]
        assert "on rank" not in said["fsdp2"]


def test_names_are_told_without_wrappers() -> None:
    from meshweave.nn.prove.state import plain_name

    names = (
        "_orig_mod.module.up.weight",
        "module._orig_mod.up._checkpoint_wrapped_module.weight",
        "up.weight",
    )
    assert {plain_name(name) for name in names} == {"up.weight"}


@pytest.mark.gloo
@pytest.mark.slow
def test_24_right_models_are_equal() -> None:
    for said in _said("said_of_right_models", 4, thorough=True):
        assert len(said) >= 24
        assert all(text.startswith("equal") for text in said.values()), said
