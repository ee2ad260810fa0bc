"""Snippets of the documentation on the ranks of local processes."""

from __future__ import annotations

from typing import Any

from meshweave.nn import RankContext


def run_snippets(context: RankContext, payload: dict[str, Any]) -> None:
    """Run blocks of Python one after another, each in a namespace of its own. An error names the block."""
    for place, source in payload["snippets"]:
        try:
            exec(
                compile(source, place, "exec", dont_inherit=True),
                {"__name__": "snippet", "rank": context.rank},
            )
        except Exception as error:
            raise AssertionError(f"{place}: {type(error).__name__}: {error}") from error
