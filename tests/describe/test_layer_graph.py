"""A graph of a layer is checked when it is made, in one line, and its folds are those of its nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshweave.base.errors import DescriptionError
from meshweave.describe.model.dense import DenseForm, dense_layer
from meshweave.describe.model.layer import LayerGraph
from meshweave.describe.model.nodes import Attention, EdgeSum, Features, Linear

LAYER = dense_layer(8, 4, 2, 4, 12, DenseForm(gated=True, norm="rms"))


@pytest.mark.parametrize(
    ("number", "change", "words"),
    [
        (1, {"out": "NA"}, "NA is made twice"),
        (2, {"ins": ("Q",)}, "A reads Q before it is made"),
        (3, {"operand": Features("heads", 3, 4)}, "O reads A as 3 heads of 4, and it has 2 heads of 8"),
        (4, {"ins": ("X",)}, "O is never read"),
        (3, {"ins": ("A", "X")}, "O reads 2 edges; give Linear 1"),
        (0, {"ins": ()}, "NA reads 0 edges; give Norm 1"),
        (6, {"weight": "WQKV"}, "two weights are called WQKV"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(number: int, change: dict[str, object], words: str) -> None:
    nodes = list(LAYER.nodes)
    nodes[number] = replace(nodes[number], **change)  # type: ignore[arg-type]
    with pytest.raises(DescriptionError, match=words) as caught:
        LayerGraph(tuple(nodes))
    assert "\n" not in str(caught.value)
    with pytest.raises(DescriptionError, match="no node"):
        LayerGraph(())


def test_weights_and_what_is_kept_are_sums_over_nodes() -> None:
    sizes = [node.operand.size * node.result.size for node in LAYER.nodes if isinstance(node, Linear)]
    assert LAYER.num_weights == sum(sizes) == 8 * (16 + 2 * 8) + 16 * 8 + 8 * 24 + 12 * 8
    assert LAYER.kept_edges == ("X", "NA", "QKV", "A", "M", "NF", "Y", "H")
    assert LAYER.sum_of_term == {"O": "M", "F": "Z"} and not LAYER.jointly_reduced
    (attention,) = (node for node in LAYER.nodes if isinstance(node, Attention))
    for window in (1, 3, 5, 9):
        pairs = sum(min(query + 1, window) for query in range(7))
        assert replace(attention, window=window).num_pairs(7) == pairs


def test_terms_of_a_sum_meet_where_no_bias_is_between() -> None:
    options = {"gated": True, "norm": "rms", "parallel": True}
    beside = dense_layer(8, 4, 2, 4, 12, DenseForm(**options))  # type: ignore[arg-type]
    assert (
        beside.jointly_reduced == {"O", "F"} and sum(isinstance(node, EdgeSum) for node in beside.nodes) == 1
    )
    assert not dense_layer(8, 4, 2, 4, 12, DenseForm(**options, biases=("out",))).jointly_reduced  # type: ignore[arg-type]
    assert not dense_layer(8, 4, 2, 4, 12, DenseForm(**options, post_norms=True)).jointly_reduced  # type: ignore[arg-type]
