"""Layers as graphs write what they wrote as code: the same ops in the same order with the same bytes."""

from __future__ import annotations

import json

import pytest
from block_digests import GOLDEN, cases, digest

from sampling import mostly_slow

SAVED = json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("name", mostly_slow(list(SAVED), 6))
def test_a_block_is_written_as_it_was(name: str) -> None:
    assert digest(*cases()[name]) == SAVED[name]
