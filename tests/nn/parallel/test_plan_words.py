"""Plans in words that say no strategy or no sizes: one line, with what would be right."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from meshweave.algorithms.table import STRATEGIES
from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.nn.parallel.plans import resolve


@pytest.mark.parametrize("words", ["ddp:4", "ddp", "foo:2", "fsdp2:1"])
def test_what_is_no_strategy_names_those_that_there_are(words: str) -> None:
    with pytest.raises(UnsupportedError, match=f"there is no strategy '{words.partition(':')[0]}'") as error:
        resolve(words, None, None)
    assert all(name in str(error.value) for name in STRATEGIES) or "did you mean" in str(error.value)


@pytest.mark.parametrize(
    "words", ["megatron", "megatron:", "megatron:x", "megatron:0", "atp:2x", "atp:2x-2", "atp:x2"]
)
def test_what_is_no_size_is_refused_with_the_form(words: str) -> None:
    with pytest.raises(LayoutError, match=r"sizes as in '(megatron|atp):4' or 'atp:2x2'"):
        resolve(words, None, None)
