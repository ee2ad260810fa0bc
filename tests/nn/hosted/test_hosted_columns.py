"""Which columns heads read, and how ranks share them: on small functions, without ranks."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meshweave.algorithms.block.roles import Side
from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.describe.layout.mesh import Mesh
from meshweave.nn.hosted.anatomy import anatomy_of
from meshweave.nn.hosted.columns import HeadColumns, feature_parts, head_columns
from meshweave.nn.hosted.linears import attention_units, units_of
from meshweave.nn.hosted.readings import shifts_labels
from meshweave.nn.hosted.residual import _part_class
from meshweave.nn.parallel.strategy import LayerStrategy
from meshweave.nn.parallel.units import FeatureUnits
from meshweave.nn.prove.trail import _kept

HEADS, GROUPS, WIDTH, TOKENS = 4, 2, 3, 5


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2).flatten(2)


def _rows(features: int) -> Tensor:
    return torch.randn(2, TOKENS, features, dtype=torch.float64, requires_grad=True)


def test_queries_keys_and_values_apart() -> None:
    q, k, v = _rows(HEADS * WIDTH), _rows(GROUPS * WIDTH), _rows(GROUPS * WIDTH)
    columns = head_columns(_attention(q, k, v), {"q": q, "k": k, "v": v}, HEADS, "attention")
    assert (columns.heads, columns.groups, columns.width) == (HEADS, GROUPS, WIDTH)
    assert columns.of["k"] == ((0, 1, 2), (0, 1, 2), (3, 4, 5), (3, 4, 5))
    assert attention_units(columns, "q", GROUPS) == FeatureUnits(GROUPS)
    assert attention_units(columns, "k", HEADS) == FeatureUnits(HEADS, weight_count=GROUPS)


def test_side_by_side_with_equal_parts_and_with_fewer_keys() -> None:
    fused = _rows(3 * HEADS * WIDTH)
    columns = head_columns(_attention(*fused.chunk(3, -1)), {"qkv": fused}, HEADS, "attention")
    assert attention_units(columns, "qkv", HEADS) == FeatureUnits(HEADS, parts=3)
    fused = _rows((HEADS + 2 * GROUPS) * WIDTH)
    parts = fused.split([HEADS * WIDTH, GROUPS * WIDTH, GROUPS * WIDTH], -1)
    columns = head_columns(_attention(*parts), {"qkv": fused}, HEADS, "attention")
    table = attention_units(columns, "qkv", GROUPS).table
    assert table[0] == (*range(6), 12, 13, 14, 18, 19, 20)


def test_by_turns() -> None:
    fused = _rows(3 * HEADS * WIDTH)
    q, k, v = (x.flatten(2) for x in fused.unflatten(-1, (HEADS, 3, WIDTH)).unbind(3))
    columns = head_columns(_attention(q, k, v), {"qkv": fused}, HEADS, "attention")
    assert attention_units(columns, "qkv", HEADS) == FeatureUnits(HEADS)


def test_heads_that_share_keys_by_turns_are_refused() -> None:
    q, k = _rows(HEADS * WIDTH), _rows(GROUPS * WIDTH)
    order = torch.cat([k.unflatten(-1, (GROUPS, WIDTH))] * 2, 2).flatten(2)
    with pytest.raises(UnsupportedError, match="do not follow each other"):
        head_columns(_attention(q, order, order), {"q": q, "k": k}, HEADS, "attention")


def test_features_of_a_gate() -> None:
    both = _rows(16)
    gate, up = both.chunk(2, -1)
    assert feature_parts(gate.sigmoid() * up, {"both": both}, "down") == {"both": (2, 1)}
    turns = both[..., 0::2].sigmoid() * both[..., 1::2]
    assert feature_parts(turns, {"both": both}, "down") == {"both": (1, 2)}
    assert feature_parts(both.relu(), {"both": both}, "down") == {"both": (1, 1)}
    with pytest.raises(UnsupportedError, match="feature 0 reads columns"):
        feature_parts(both.softmax(-1), {"both": both}, "down")


def test_a_part_of_the_residual_has_the_shape_of_attention() -> None:
    part = torch.arange(24.0).view(2, 3, 4).as_subclass(_part_class((1, 4)))
    assert part.shape == (2, 12, 4) and part.size(1) == 12 and (part * 2 + 1).shape == (2, 12, 4)
    flat = part.reshape(-1, part.size(-1))
    assert flat.shape == (6, 4) and flat.view(part.shape).shape == (2, 12, 4)
    assert part.view(-1, 12, 4).shape == (2, 12, 4)
    assert part.as_subclass(torch.Tensor).shape == (2, 3, 4)


class _NormedEmbedding(torch.nn.Embedding):  # type: ignore[misc]
    def __init__(self, words: int, features: int) -> None:
        super().__init__(words, features)
        self.embed_norm = torch.nn.RMSNorm(features)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed_norm(super().forward(ids))


def test_a_proof_compares_a_part_of_the_residual_by_its_real_shape() -> None:
    """A difference was a RuntimeError of torch, of parts with the shape of attention."""
    kept = _kept(torch.ones(2, 3, 8).as_subclass(_part_class((1, 2))))
    assert type(kept) is Tensor and kept.shape == (2, 3, 8)


def test_a_loss_that_does_not_run_in_a_copy_is_refused_in_a_sentence() -> None:
    """As with the number of words of the whole model in it."""

    class OfTenWords(torch.nn.Module):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None, use_cache: bool = True) -> Any:
            logits = torch.nn.functional.one_hot(input_ids, 8).double()
            return SimpleNamespace(logits=logits, loss=logits.view(-1, 10).sum())

    with pytest.raises(
        UnsupportedError, match=r"OfTenWords does not run with labels.*shape '.-1, 10.' is invalid"
    ):
        shifts_labels(OfTenWords(), torch.zeros(2, 3, dtype=torch.int64))


def test_a_table_with_modules_beside_it_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    model.model.embed_tokens = _NormedEmbedding(32, 16)
    with pytest.raises(
        UnsupportedError, match=r"_NormedEmbedding has modules beside its weight \(embed_norm\)"
    ):
        anatomy_of(model, torch.device("cpu"))


@given(st.integers(1, 12), st.integers(1, 4), st.sampled_from([(1,), (2,), (3,), (4,), (2, 2), (2, 3)]))
def test_every_rank_has_heads_or_all_refuse(groups: int, per_group: int, shape: tuple[int, ...]) -> None:
    """Six heads on four ranks were dealt out as two, two, two and none, and the fourth rank divided by zero."""
    mesh = Mesh("ranks", shape, tuple("ab"[: len(shape)]), tuple(range(math.prod(shape))))
    dims = ("inner",) * len(shape)
    strategy: Any = SimpleNamespace(mesh=mesh, roles=SimpleNamespace(core=lambda _: dims))
    strategy.span = lambda *given: LayerStrategy.span(strategy, *given)
    columns = HeadColumns(groups * per_group, groups, WIDTH, {}, {})
    try:
        units = units_of(columns, strategy, "attention")
    except LayoutError as error:
        ranks = math.prod(shape)
        assert -(-groups // ranks) * (ranks - 1) >= groups or len(shape) > 1
        assert f"attention has {columns.heads} heads in {groups} groups, which {ranks} ranks" in str(error)
        return
    spans = [strategy.span(Side("inner", units), dims, mesh.coords(rank)) for rank in mesh.ranks]
    assert all(first < end for first, end in spans) and columns.heads % units == 0
    assert sum(end - first for first, end in spans) == units
