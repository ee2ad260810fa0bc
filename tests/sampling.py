"""How many examples Hypothesis draws: a number per test, scaled by one profile.

`ci` (the default) draws half of the numbers that the tests give, `slow` (`make slow`) three times as many,
`sanitize` a quarter, for instrumented code takes several times as long. None has deadlines, and all draw anew in
every run.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings

_PERCENT = {"ci": 50, "slow": 300, "sanitize": 25}


def register_profiles() -> None:
    """Make the profiles known and load `ci`; `--hypothesis-profile` loads another."""
    for name, percent in _PERCENT.items():
        settings.register_profile(
            name, max_examples=percent, deadline=None, derandomize=False, print_blob=True
        )
    settings.load_profile("ci")


def examples(number: int, **options: Any) -> settings:
    """Return settings that draw `number` examples, more or fewer by the profile in force, with no deadline."""
    scaled = max(1, number * settings().max_examples // 100)
    return settings(max_examples=scaled, deadline=None, **options)
