"""What other installed packages offer by entry points, among them the lab and the studies of this repository."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from meshweave.base.errors import UnsupportedError

OFFERED: dict[str, dict[str, tuple[str, ...]]] = {
    "meshweave-lab": {"meshweave.commands": ("lab", "bench"), "meshweave.calibration": ("lab",)},
    "meshweave-studies": {
        "meshweave.algorithms": ("cosma", "dtensor"),
        "meshweave.commands": ("reproduce", "compile", "simulate-gpu"),
        "meshweave.calibration": ("tpu",),
        "meshweave.reshard_orders": ("exact",),
        "meshweave.issue_rules": ("greedy", "cost-greedy", "exhaustive"),
        "meshweave.commands.tune": ("block", "layouts", "schedule", "mesh"),
    },
}
"""The packages of this repository beside the wheel, and what each offers, by group of entry points."""


def offered(group: str, name: str) -> Any | None:
    """Return the object that an installed package offers under the entry point `name` of `group`, or None.

    Raises:
        UnsupportedError: two packages offer the name, it cannot be loaded, or the package of this repository
            that offers it is not installed.
    """
    points = list(entry_points(group=group, name=name))
    if len(points) > 1:
        both = " and ".join(sorted(point.value for point in points))
        raise UnsupportedError(f"'{name}' of {group} is offered by {both}; uninstall one of them")
    if points:
        return load(points[0])
    for package, groups in OFFERED.items():
        if name in groups.get(group, ()):
            raise UnsupportedError(
                f"'{name}' is of the package {package}, which is not installed: {how_to_install(package)}"
            )
    return None


def offered_by_ours(group: str, name: str) -> Any:
    """Return what a package of this repository offers (`OFFERED`). Raises UnsupportedError as `offered` does."""
    given = offered(group, name)
    assert given is not None, f"{name} of {group} is in the table"
    return given


def offered_names(group: str) -> tuple[str, ...]:
    """Return the names that installed packages offer in a group of entry points.

    First come those of this repository's packages, in the order of `OFFERED`, then others, sorted.
    """
    names = {point.name for point in entry_points(group=group)}
    ours = [name for groups in OFFERED.values() for name in groups.get(group, ()) if name in names]
    return (*ours, *sorted(names.difference(ours)))


def all_offered(group: str) -> Iterator[tuple[str, Any]]:
    """Yield each entry point of a group as text, "name = module:attribute", and the object that it names.

    Raises UnsupportedError where one cannot be loaded.
    """
    for point in entry_points(group=group):
        yield f"{point.name} = {point.value}", load(point)


def load(point: EntryPoint) -> Any:
    """Import and return the object that an entry point names. Raises UnsupportedError where that fails."""
    try:
        return point.load()
    except Exception as error:
        raise UnsupportedError(
            f"entry point {point.name} = {point.value} cannot be loaded: {error}"
        ) from error


def how_to_install(package: str) -> str:
    """Return in words how to install a package of this repository, such as "meshweave-lab", from a checkout."""
    return f"pip install ./{package.removeprefix('meshweave-')} in the repository of meshweave"
