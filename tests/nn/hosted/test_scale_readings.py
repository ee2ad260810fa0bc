"""What is read from the calls of a hosted model's modules."""

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")

import torch
from torch import Tensor, nn

from meshweave.base.errors import UnsupportedError
from meshweave.nn.hosted.readings import scale_of
from meshweave.nn.hosted.trace import ModuleCall

TABLE = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
TABLE[3] = 0.0  # as of a word that is padding
TOKENS = torch.tensor([[1, 3, 2], [5, 1, 6]])


def _scale(rows: Tensor) -> float:
    return scale_of(ModuleCall("wte", nn.Embedding(7, 4), None, made=rows), TABLE)


def test_an_embedding_has_one_factor():
    assert _scale(TABLE[TOKENS]) == 1.0
    assert _scale(2.5 * TABLE[TOKENS]) == pytest.approx(2.5)


@pytest.mark.parametrize(
    "rows",
    [
        nn.functional.normalize(TABLE[TOKENS], dim=-1),
        TABLE[TOKENS] * torch.tensor([1.0, 1.0, 1.5])[:, None],
        TABLE[TOKENS] + 0.1,
        torch.zeros(2, 3, 4),
    ],
    ids=["normalised", "by position", "shifted", "nothing"],
)
def test_other_embeddings_are_refused(rows: Tensor):
    with pytest.raises(UnsupportedError, match="more than rows of its table times one factor"):
        _scale(rows)
