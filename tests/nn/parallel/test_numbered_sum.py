"""The numbers by which ranks notice that they are in different calls add up exactly, on any number of ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
from meshweave.nn.parallel.numbered_sum import summed_number, terms_of  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("count", [1, 255, 257, 512, 1000])
def test_the_sum_of_numbers_is_exact_in_any_order(dtype: torch.dtype, count: int) -> None:
    for run in (0, 7, 15, 65_520):
        bound: Any = SimpleNamespace(next_run=run)
        numbers = [summed_number(bound, dtype, count, place) for place in range(count)]
        (expected,) = {total for _, total in numbers}
        terms = [torch.tensor(own, dtype=dtype) for own, _ in numbers]
        one_by_one = torch.zeros((), dtype=dtype)
        for term in terms:
            one_by_one = one_by_one + term
        while len(terms) > 1:
            terms = [sum(terms[at : at + 2]) for at in range(0, len(terms), 2)]  # type: ignore[misc]
        assert float(one_by_one) == float(terms[0]) == expected > 0


def test_places_among_those_that_have_terms() -> None:
    strategy: Any = SimpleNamespace(mesh=SimpleNamespace(shape=(2, 3, 4)), coordinates=(1, 2, 3))
    assert [terms_of(strategy, axes) for axes in ((), (1,), (0, 2))] == [(1, 0), (3, 2), (8, 7)]
