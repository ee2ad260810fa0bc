"""Summaries of a simulated run: load of links by kind, the busiest links, mean parts of a rank's time."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from meshweave.simulate.result import PARTS, LinkUse, Simulation


@dataclass(frozen=True)
class LinkClass:
    """The links of one kind and direction that carried bytes.

    Attributes:
        name: the kind with its axis and direction, or its level.
        count: the number of these links.
        mean_utilisation, max_utilisation: over these links; shares (0 to 1) of what each could carry.
        carried_bytes: of all of them together.
    """

    name: str
    count: int
    mean_utilisation: float
    max_utilisation: float
    carried_bytes: int


def link_classes(run: Simulation) -> list[LinkClass]:
    """Return `Simulation.links` in groups of one kind and direction, the group with the busiest link first.

    Links of a torus are grouped by axis too, and those of a tree by level; all NICs of a kind are one group.
    """
    uses_of: dict[str, list[LinkUse]] = defaultdict(list)
    for use in run.links:
        kind, _, axis, direction = use.link
        if kind == "link" and direction:
            name = f"axis {axis}, {'forwards' if direction == 1 else 'backwards'}"
        else:
            name = f"{kind} level {axis}" if kind in ("up", "down", "direct") else kind
        uses_of[name].append(use)
    classes = [
        LinkClass(
            name,
            len(uses),
            sum(use.utilisation for use in uses) / len(uses),
            max(use.utilisation for use in uses),
            sum(use.carried_bytes for use in uses),
        )
        for name, uses in uses_of.items()
    ]
    return sorted(classes, key=lambda links: (-links.max_utilisation, links.name))


def busiest_links(run: Simulation, count: int) -> list[LinkUse]:
    """Return the `count` links with the largest utilisation, the largest first; equal ones by `LinkUse.link`."""
    return sorted(run.links, key=lambda use: (-use.utilisation, use.link))[:count]


def mean_parts(run: Simulation) -> dict[str, float]:
    """Return the seconds of each of `PARTS` ("compute_s", ...), averaged over all ranks."""
    rows = run.outputs["parts_ps"].reshape(-1, len(PARTS))
    mean = rows.mean(axis=0) if len(rows) else np.zeros(len(PARTS))
    return {name: float(value) / 1e12 for name, value in zip(PARTS, mean, strict=True)}
