"""The state dict of a Llama: names, shapes, and which rows and columns a rank holds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from meshweave.base.errors import DescriptionError, LayoutError, UnsupportedError
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.model import load_model
from meshweave.describe.model.state_dict import Parameter, llama_parameters, server_layout, trainer_layout

TRAINER = Mesh.of("trainer", (4, 2), ("fsdp", "tp"))
SERVER = Mesh.of("server", (2, 2), ("replica", "tp"), 8)
ROWS, COLUMNS, WHOLE = (
    Parameter("rows", (16, 8), "rows"),
    Parameter("columns", (16, 8), "columns"),
    Parameter("whole", (16,), "whole"),
)


@pytest.mark.parametrize(
    ("name", "tensors", "parameters"),
    # Counts of the published weights: a norm has H parameters, of which a model has 2 for a layer and one more.
    [
        ("llama-2-7b", 291, 6_738_415_616),
        ("llama-2-70b", 723, 68_976_648_192),
        ("llama-3-8b", 291, 8_030_261_248),
    ],
)
def test_all_listed_published_models(name: str, tensors: int, parameters: int) -> None:
    listed = llama_parameters(load_model(name))
    assert len(listed) == len({parameter.name for parameter in listed}) == tensors
    assert sum(math.prod(parameter.shape) for parameter in listed) == parameters


def test_names_and_shapes() -> None:
    by_name = {parameter.name: parameter for parameter in llama_parameters(load_model("llama-3-8b"))}
    assert by_name["model.layers.31.self_attn.k_proj.weight"].shape == (1024, 4096)
    assert by_name["model.layers.0.mlp.down_proj.weight"] == Parameter(
        "model.layers.0.mlp.down_proj.weight", (4096, 14336), "columns"
    )
    assert by_name["model.norm.weight"].sharding == "whole" and by_name["lm_head.weight"].shape == (
        128256,
        4096,
    )


def test_what_is_not_a_llama() -> None:
    llama = load_model("llama-2-7b")
    assert len(llama_parameters(replace(llama, tied_embeddings=True))) == 290
    with pytest.raises(UnsupportedError, match="FFN is not gated"):
        llama_parameters(load_model("gpt3"))
    with pytest.raises(DescriptionError, match="vocab_size"):
        llama_parameters(replace(llama, vocab_size=None))


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v3", "gpt-oss-20b"])
def test_experts_are_not_left_out_of_a_state_dict(name: str) -> None:
    """Of Mixtral's 46.7 billion parameters 7.2 were moved, and of DeepSeek-V3's 671 billion 37.4."""
    with pytest.raises(UnsupportedError, match="it has experts; only the state dicts of Llama"):
        llama_parameters(load_model(name))


def test_a_trainer_shards_rows_of_what_tp_has_sharded() -> None:
    """Rank 3 is (1, 1): the second quarter of the second half."""
    assert trainer_layout(ROWS, TRAINER).intervals((16, 8), 3) == (((10, 12),), ((0, 8),))
    assert trainer_layout(COLUMNS, TRAINER).intervals((16, 8), 3) == (((4, 8),), ((4, 8),))
    assert trainer_layout(WHOLE, TRAINER).intervals((16,), 3) == (((4, 8),),)


def test_replicas_of_a_server_hold_the_same() -> None:
    for parameter, held in ((ROWS, (((8, 16),), ((0, 8),))), (COLUMNS, (((0, 16),), ((4, 8),)))):
        layout = server_layout(parameter, SERVER)
        assert layout.intervals((16, 8), 9) == layout.intervals((16, 8), 11) == held
    assert server_layout(WHOLE, SERVER).intervals((16,), 8) == (((0, 16),),)


def test_meshes_have_two_axes() -> None:
    line = Mesh.of("line", (4,), ("tp",))
    for layout in (trainer_layout, server_layout):
        with pytest.raises(LayoutError, match="two axes"):
            layout(ROWS, line)
