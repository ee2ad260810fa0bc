"""`parallelize` refuses models that have the modules of others and compute something else, and leaves them be."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")

from meshweave.execute.ranks.launch import launch

PARALLEL = Path(__file__).parents[1] / "parallel"
HERE = {"PYTHONPATH": f"{Path(__file__).parent}:{PARALLEL}"}
sys.path[:0] = [str(PARALLEL), str(Path(__file__).parent)]


@pytest.mark.gloo
def test_models_that_look_like_others_are_refused() -> None:
    from check_rank_functions import OTHERS

    ranks: list[dict[str, Any]] = launch("check_rank_functions:checked", 2, {}, timeout_s=300, env=HERE)
    for name, (_, words) in OTHERS.items():
        said = ranks[0][name]
        assert all(answer[name] == said for answer in ranks), name
        assert all(word in said for word in words), (name, said)
        assert "changed" not in said
    for rank, answer in enumerate(ranks):
        assert "1 kinds of layers" in answer["check=True"]
        assert "check=False" in answer["check=False"]
        assert answer["same random numbers"]
        unproved = [line for line in answer["logs"] if "unproved" in line]
        assert len(unproved) == (1 if rank == 0 else 0), answer["logs"]


@pytest.mark.gloo
def test_a_head_that_lies_otherwise_than_its_table_is_no_fault() -> None:
    """A product on two axes wants the head laid the other way round; its weight lies as the table that it is."""
    pytest.importorskip("transformers")
    payload = {"strategies": [("meshslice_block", [2, 2])], "models": ["Llama, fewer keys"]}
    ranks = launch("check_rank_functions:of_transformers", 4, payload, timeout_s=200, env=HERE)
    assert [list(said.values()) for said in ranks] == [[""]] * 4


@pytest.mark.gloo
@pytest.mark.slow
def test_models_of_transformers_are_exact_or_refused() -> None:
    pytest.importorskip("transformers")
    from check_rank_functions import TRANSFORMERS

    strategies = [
        ("megatron", [4]), ("zero3", [4]), ("ring_attention", [4]), ("atp", [2, 2]), ("meshslice_block", [2, 2]),
        ("25d_block", [1, 2, 2]),
    ]  # fmt: skip
    payload = {"strategies": strategies}
    ranks = launch("check_rank_functions:of_transformers", 4, payload, timeout_s=900, env=HERE)
    for said in ranks:
        for case, text in said.items():
            assert text == "" or text.startswith(("UnsupportedError", "LayoutError")), (case, text)
            if TRANSFORMERS[_model(case)][2] or ", megatron, " in case:
                assert text == "", (case, text)


def _model(case: str) -> str:
    return case.rpartition(", ")[0].rpartition(", ")[0]
