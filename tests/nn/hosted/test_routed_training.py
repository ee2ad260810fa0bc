"""Routed models of transformers on several ranks: losses and gradients are those of one process."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from torch import nn

from meshweave.base.errors import UnsupportedError
from meshweave.execute.ranks.launch import launch
from meshweave.nn.hosted.experts import HostedExperts, choice_digits
from meshweave.nn.hosted.inputs import HostedArguments
from meshweave.nn.hosted.own_modules import OwnModule
from meshweave.nn.hosted.routers import auxiliary_loss

HERE = Path(__file__).parent
PATHS = {"PYTHONPATH": os.pathsep.join((str(HERE), str(HERE.parent / "parallel")))}
FOUR = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
WIDE, NARROW = 1e-12, 1e-5
Case = tuple[str, str, dict[str, Any], dict[str, Any]]
LAYOUTS: dict[int, tuple[dict[str, Any], ...]] = {
    2: (
        {"data": 2, "expert": 2},
        {"tensor": 2, "expert": 2},
        {"tensor": 2, "expert_tensor": 2, "strategy": "megatron"},
        {"tensor": 2, "zero": 0},
    ),
    4: (
        {"data": 4, "expert": 2, "zero": 3},
        {"data": 2, "tensor": 2, "expert": 4},
        {"data": 2, "tensor": 2, "expert": 2, "expert_tensor": 2},
        {"data": 2, "tensor": 2, "expert": 2, "strategy": "megatron", "zero": 1},
    ),
    8: (
        {"data": 4, "tensor": 2, "expert": 4},
        {"data": 4, "tensor": 2, "expert": 2, "expert_tensor": 2, "zero": 3},
        {"data": 8, "expert": 2, "expert_tensor": 2, "zero": 3},
        {"data": 8, "expert": 2, "expert_tensor": 2},
    ),
}


def _answers(cases: list[Case], num_ranks: int, folder: Path) -> list[Any]:
    payload = {"cases": cases, "folder": str(folder)}
    ranks = launch("routed_rank_functions:tried", num_ranks, payload, timeout_s=900, env=PATHS)
    return list(next(iter(ranks)))


def _check(cases: list[Case], answers: list[Any]) -> None:
    for case, answer in zip(cases, answers, strict=True):
        bound = NARROW if case[3].get("dtype") == "float32" else WIDE
        assert isinstance(answer, dict), (case, answer)
        assert all(off < bound for off in answer.values()), (case, answer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("num_ranks", [2, 5, 16])
def test_numbers_of_unlike_choices_differ_and_add_up_exactly(dtype: torch.dtype, num_ranks: int) -> None:
    choices = torch.tensor([*itertools.permutations(range(5), 2)])
    digits = choice_digits(choices, dtype, num_ranks)
    assert len(set(map(tuple, digits.tolist()))) == len(choices)
    total = torch.zeros_like(digits)
    for _ in range(num_ranks):
        total += digits
    assert torch.equal(total.double(), num_ranks * digits.double())


@pytest.mark.parametrize("kind", [OwnModule, HostedExperts])
def test_settings_of_routers_and_experts_are_read_and_set(kind: type[Any]) -> None:
    own = nn.Module()
    own.top_k = 2
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    made.take_settings(own)
    assert hasattr(made, "top_k") and made.top_k == 2
    made.top_k, made.other = 1, 3
    assert own.top_k == 1 and not hasattr(own, "other")


def test_an_auxiliary_loss_is_that_of_the_configuration_and_of_recorded_logits() -> None:
    module: Any = nn.Module()
    module.config = SimpleNamespace(output_router_logits=True)
    arguments = HostedArguments(module, True, SimpleNamespace(roles=None))  # type: ignore[arg-type]
    taken = [arguments.takes("output_router_logits", value, torch.zeros(1, 1)) for value in (True, False)]
    assert taken == [True, False] and "config" in arguments.why_not("output_router_logits")
    nothing = SimpleNamespace(aux_loss=0, router_logits=())  # of logits that nothing has recorded
    with pytest.raises(UnsupportedError, match="auxiliary loss"):
        auxiliary_loss(module, nothing, 4)


SHARDED, SPREAD, CUT, _ = LAYOUTS[4]
EACH_KIND: list[Case] = [
    *(("compared", kind, layout, {"clip": 0.01}) for kind, layout in zip(FOUR, LAYOUTS[4], strict=True)),
    ("compared", "mixtral", SPREAD, {"routing": "ties"}),
]
MORE_OF_KINDS: list[Case] = [
    ("compared", "qwen3_moe", SHARDED, {"shape": (7, 12)}),
    ("compared", "qwen3_moe", SPREAD, {"dtype": "float32"}),
    ("compared", "mixtral", CUT, {"changes": {"output_router_logits": True}}),
    ("compared", "deepseek_v3", SPREAD, {"check": True}),
]


@pytest.mark.gloo
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "cases", [EACH_KIND, pytest.param(MORE_OF_KINDS, marks=pytest.mark.slow)], ids=["kinds", "more"]
)
def test_losses_and_gradients_are_those_of_one_process(cases: list[Case], tmp_path: Path) -> None:
    """Of each architecture in another layout, of ties of all tokens, unequal shares, and grouped products.

    A batch that leaves a rank without rows is refused, also where experts cut the ranks of data in two.
    """
    few: Case = ("compared", "mixtral", SHARDED, {"shape": (5, 12)})
    *answers, of_few = _answers([*cases, few], 4, tmp_path)
    _check(cases, answers)
    assert "batch 5 is not shared out to 4 ranks" in of_few, of_few


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_all_architectures_in_all_layouts(num_ranks: int, tmp_path: Path) -> None:
    cases: list[Case] = []
    for layout in LAYOUTS[num_ranks]:
        shape = {"shape": (16, 12)} if layout.get("data", 1) > 4 else {}
        for kind in FOUR:
            for options in ({"clip": 0.01}, {"routing": "ties"}, {"dtype": "float32"}):
                cases.append(("compared", kind, layout, {**options, **shape}))
    _check(cases, _answers(cases, num_ranks, tmp_path))


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_stages_whose_ranks_share_experts(tmp_path: Path) -> None:
    layouts: tuple[dict[str, Any], ...] = (
        {"tensor": 2, "expert": 2},
        {"tensor": 2, "expert_tensor": 2, "strategy": "megatron"},
    )
    cases: list[Case] = [("piped", kind, {"data": 1, **layout}, {}) for layout in layouts for kind in FOUR]
    for case, answer in zip(cases, _answers(cases, 4, tmp_path), strict=True):
        assert isinstance(answer, float) and answer < WIDE, (case, answer)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_ranks_export_the_bits_and_go_on_in_other_layouts(tmp_path: Path) -> None:
    sharded, _, shared, _ = LAYOUTS[4]
    exports: list[Case] = [("exported", kind, layout, {}) for layout in (sharded, shared) for kind in FOUR]
    resumes: list[Case] = [("resumed", kind, sharded, {"then": shared}) for kind in FOUR]
    resumes += [("resumed", kind, shared, {"then": sharded}) for kind in FOUR]
    answers = _answers([*exports, *resumes], 4, tmp_path)
    for case, answer in zip(exports, answers, strict=False):
        assert answer == {"names": True, "bits": True}, (case, answer)
    for case, answer in zip(resumes, answers[len(exports) :], strict=True):
        assert isinstance(answer, float) and answer < WIDE, (case, answer)


@pytest.mark.gloo
@pytest.mark.timeout(600)
def test_files_checkpoints_recomputation_and_refusals(tmp_path: Path) -> None:
    spread: dict[str, Any] = {"data": 2, "expert": 2}
    shared: dict[str, Any] = {"tensor": 2, "expert_tensor": 2}
    cases: list[Case] = [
        ("exported", "mixtral", spread, {}),
        ("exported", "gpt_oss", shared, {}),
        ("resumed", "qwen3_moe", spread, {"then": shared}),
        ("recomputed", "mixtral", {**spread, "recompute": "full"}, {}),
        ("piped", "mixtral", {"data": 1}, {}),
        ("local_experts", "gpt_oss", spread, {}),
        ("compared", "mixtral", {"tensor": (1, 2), "strategy": "atp", "expert": 2}, {}),
        ("compared", "qwen3", spread, {}),
        ("compared", "llama", spread, {}),
        ("compared", "mixtral", spread, {"changes": {"router_jitter_noise": 0.1}}),
        ("piped", "mixtral", {"data": 1}, {"frozen": "embed_tokens"}),
    ]
    answers = _answers(cases, 2, tmp_path)
    for answer in answers[:2]:
        assert answer == {"names": True, "bits": True}, answer
    assert answers[2] < WIDE, answers[2]
    assert answers[3] < NARROW, answers[3]
    assert answers[4] < WIDE, answers[4]
    assert all("2 of 4 experts from 0 on" in said for said in answers[5]), answers[5]
    assert "a router reads whole rows of the residual" in answers[6], answers[6]
    assert "jitter_noise=0.1, noise that each rank" in answers[9], answers[9]
    for answer in answers[7:9]:
        assert "has no experts" in answer, answer
    assert answers[10] < WIDE, answers[10]
