"""How many examples Hypothesis draws, and whether it draws anew: a number per test, scaled by one profile.

`ci` (the default) draws 15 % of the numbers that the tests give, and the same examples in every run: a test that
begins to fail does so because of the change. `random` draws as many, anew in every run, to explore:
`pytest tests/ir --hypothesis-profile random`. `slow` (`make slow`) draws three times as many, anew. `sanitize`
(`.ci/sanitize`) draws a quarter, the same in every run, for instrumented code takes several times as long. None
has deadlines.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

_PERCENT = {"ci": 15, "random": 15, "slow": 300, "sanitize": 25}
_DRAWN_ANEW = ("random", "slow")


def register_profiles() -> None:
    """Make the profiles known and load `ci`; `--hypothesis-profile` loads another."""
    for name, percent in _PERCENT.items():
        settings.register_profile(
            name,
            max_examples=percent,
            deadline=None,
            derandomize=name not in _DRAWN_ANEW,
            print_blob=True,
        )
    settings.load_profile("ci")


def mostly_slow(values: Iterable[Any], keep: int) -> list[Any]:
    """Return all values as parameters: `keep` of them, evenly spread, run by default, the rest under `slow`."""
    everything = list(values)
    kept = {index * len(everything) // keep for index in range(keep)}
    return [
        value if index in kept else pytest.param(value, marks=pytest.mark.slow)
        for index, value in enumerate(everything)
    ]


def scaled(number: int) -> int:
    """Return a number of cases, more or fewer by the profile in force."""
    return max(1, number * settings().max_examples // 100)


def examples(number: int, **options: Any) -> settings:
    """Return settings that draw `number` examples, more or fewer by the profile in force, with no deadline."""
    return settings(max_examples=scaled(number), deadline=None, **options)
