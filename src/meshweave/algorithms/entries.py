"""Tables of algorithms by name: this package's entries family by family, then those of installed packages.

A table is filled at its first lookup, never while a module is imported: a family may look up entries of another,
and the module of an installed package may import all of meshweave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from threading import RLock
from typing import Any, Generic, TypeVar

from meshweave.algorithms.contract import Algorithm
from meshweave.base.errors import UnsupportedError, did_you_mean
from meshweave.base.installed import all_offered, offered

ENTRY_POINTS = "meshweave.algorithms"
"""The group of entry points under which an installed package offers algorithms of its own."""

_FAMILIES = (
    "matmul2d",
    "universal.algorithm",
    "fused",
    "experts",
    "reshard.algorithm",
    "pipeline",
    "block",
    "step.algorithm",
)
"""The modules that list the entries of a family in `ENTRIES`, in the order of the table."""

AnyEntry = TypeVar("AnyEntry")
AlgorithmT = TypeVar("AlgorithmT", bound=Algorithm[Any, Any])


class AlgorithmTable(Mapping[str, AlgorithmT], Generic[AlgorithmT]):
    """A read-only mapping from names to algorithms: all that there are, or those of one base class.

    Args:
        what: what an algorithm of this table is called in an error, such as "schedule".
        base: "module:Class", the class of which the algorithms are instances; the module is one in
            `meshweave.algorithms`, as in "block:BlockAlgorithm".
    """

    def __init__(self, what: str, base: str) -> None:
        self.what, self._base = what, base
        self._entries: dict[str, AlgorithmT] | None = None

    @property
    def entries(self) -> dict[str, AlgorithmT]:
        """Return the algorithms by name; the first call imports their modules.

        Raises:
            UnsupportedError: an entry point of an installed package cannot be loaded or is no `Algorithm`, or
                two algorithms have the same name.
        """
        if self._entries is None:
            module, _, name = self._base.partition(":")
            base = getattr(import_module(f"meshweave.algorithms.{module}"), name)
            self._entries = {name: entry for name, entry in _all_entries().items() if isinstance(entry, base)}
        return self._entries

    def named(self, name: str) -> AlgorithmT:
        """Return the algorithm called `name`.

        Raises:
            UnsupportedError: there is no such algorithm, or the table cannot be filled (`entries`). The message
                names the package of this repository that offers the algorithm and is not installed, or similar
                names, or all names.
        """
        if name not in self.entries:
            offered(ENTRY_POINTS, name)
            known = did_you_mean(name, self) or f"; there are {', '.join(sorted(self))}"
            raise UnsupportedError(f"there is no {self.what} '{name}'{known}")
        return self.entries[name]

    def __getitem__(self, name: str) -> AlgorithmT:
        return self.entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


_LOADING = RLock()


def _all_entries() -> dict[str, Algorithm[Any, Any]]:
    with _LOADING:  # a second thread waits for the first to read the table, and does not read it again
        return _load()


@cache
def _load() -> dict[str, Algorithm[Any, Any]]:
    """Return the entries of all families, then those of installed packages.

    Raises:
        UnsupportedError: two entries have the same name, or an entry point cannot be loaded.
    """
    families = (import_module(f"meshweave.algorithms.{family}").ENTRIES for family in _FAMILIES)
    entries: dict[str, Algorithm[Any, Any]] = {}
    for entry in (*(entry for family in families for entry in family), *installed(ENTRY_POINTS, Algorithm)):
        if entry.name in entries:
            raise UnsupportedError(
                f"two algorithms are called '{entry.name}'; one of them needs another name"
            )
        entries[entry.name] = entry
    return entries


def installed(group: str, base: Callable[..., AnyEntry]) -> Iterator[AnyEntry]:
    """Yield the objects that installed Python packages offer under a group of entry points.

    Args:
        group: the name of the group in the packages' metadata, such as "meshweave.algorithms".
        base: the class of which each object must be an instance.

    Raises:
        UnsupportedError: an object cannot be loaded, or is no instance of `base`.
    """
    for label, value in all_offered(group):
        if not isinstance(value, base):  # type: ignore[arg-type]
            raise UnsupportedError(f"entry point {label} is not an instance of {base.__name__}")
        yield value
