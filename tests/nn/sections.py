"""Many checks in one launch of ranks, for starting processes is what takes time.

A section is a function that gets a check and tells it what is wrong.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any, TypeVar

import torch.distributed as dist

from meshweave.base.errors import MeshweaveError
from meshweave.execute.ranks.job import RankContext
from meshweave.execute.torch.context import TorchContext

Made = TypeVar("Made", bound="Findings")
Case = TypeVar("Case")


class Findings:
    """Collects what is wrong. `thorough` sections take all their cases."""

    def __init__(self, context: TorchContext, thorough: bool = False) -> None:
        self.context = context
        self.thorough = thorough
        self.wrong: list[str] = []

    def some(self, cases: Iterable[Case], every: int) -> list[Case]:
        """Return all cases where the checks are thorough, else every so-manieth."""
        return list(cases)[:: 1 if self.thorough else every]

    def that(self, case: str, is_so: bool) -> None:
        if not is_so:
            self.wrong.append(case)

    def refused(self, case: str, kind: str, words: str, call: Any) -> None:
        """The call raises an error of that kind in one line that has these words."""
        try:
            call()
        except MeshweaveError as error:
            said = f"{type(error).__name__}: {error}"
            self.that(f"{case}: {said}", type(error).__name__ == kind and words in said and "\n" not in said)
        else:
            self.wrong.append(f"{case}: no error")


def run(
    context: RankContext, payload: Mapping[str, Any], make: Callable[[TorchContext, bool], Made], home: str
) -> dict[str, list[str]]:
    """What is wrong in each of the payload's sections, "module:function", or "function" of module `home`."""
    shared = TorchContext(liveness=context.liveness, deadline_s=30)
    found = {}
    for name in payload["sections"]:
        module, _, function = name.rpartition(":")
        check = make(shared, payload["thorough"])
        try:
            getattr(import_module(module or home), function)(check)
        except Exception:
            check.wrong.append(traceback.format_exc())
        found[name] = check.wrong
    dist.barrier()  # a rank that leaves takes its connections along, with what others have yet to read
    shared.close()
    return found


def launched(
    start: Callable[..., list[Any]], target: str, sections: Mapping[str, str], env: Mapping[str, str]
) -> list[dict[str, list[str]]]:
    """What four ranks say in function `target`, which calls `run`; `start` is a launch, or a shared one."""
    from hypothesis import settings  # here: ranks import this module, and would need half a second for it

    answers: list[dict[str, list[str]]] = start(
        target,
        4,
        {"sections": list(sections.values()), "thorough": settings().max_examples > 100},
        timeout_s=250,
        env=dict(env),
    )
    return answers
