"""Launches of ranks whose answers all workers of a test run share."""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshweave.execute.ranks.launch import launch


@dataclass(frozen=True)
class SharedLaunch:
    """Starts ranks once in a test run: workers share out the tests of a module, and each would start them anew.

    Attributes:
        folder: the run's own, where the answers lie.
    """

    folder: Path

    def __call__(self, target: str, num_ranks: int, payload: Mapping[str, Any], **options: Any) -> list[Any]:
        """Return the answers of `launch`. The first worker to ask runs it, others read its file.

        Raises as `launch` does, in each worker anew.
        """
        words = json.dumps([target, num_ranks, payload, options], sort_keys=True)
        answers = self.folder / f"{hashlib.sha256(words.encode()).hexdigest()}.json"
        with answers.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not answers.exists():
                answers.write_text(json.dumps(launch(target, num_ranks, dict(payload), **options)))
        made: list[Any] = json.loads(answers.read_text())
        return made
