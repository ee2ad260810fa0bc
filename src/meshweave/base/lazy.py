"""Modules whose public names are imported at their first use: the front door and its namespaces.

    if TYPE_CHECKING:
        from meshweave.algorithms.contract import Gradient as Gradient

    __all__ = lazy_names(__name__)

Which names these are, and where each stands, is read from the imports that type checkers see.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping
from importlib import import_module
from types import ModuleType

TYPE_CHECKING = False  # what type checkers take for true; `typing` would be half of `import meshweave`
if TYPE_CHECKING:
    from typing import Any


class LazyModule(ModuleType):
    """A module that imports a public name at its first use.

    Python sets a submodule as an attribute of its package when it is imported. That does not hide a public name
    which is spelled the same: `meshweave.simulate` stays a function.
    """

    _homes: dict[str, str]
    _moved: dict[str, tuple[str, str]]
    _modules: tuple[str, ...]

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in self._homes and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        moved = vars(self).get("_moved", {}).get(name)
        if moved is not None:
            return _by_its_old_name(f"{self.__name__}.{name}", *moved)
        if name in vars(self).get("_modules", ()):
            return import_module(f"{self.__name__}.{name}")
        home = vars(self).get("_homes", {}).get(name)
        if home is None:
            raise AttributeError(f"module '{self.__name__}' has no attribute '{name}'")
        try:
            value = getattr(import_module(home), name)
        except ModuleNotFoundError as error:
            raise without_package(error, f"{self.__name__}.{name}") from error
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *self._homes, *self._modules})


def _by_its_old_name(old: str, module: str, name: str) -> Any:
    warnings.warn(f"{old} is {module}.{name} now", DeprecationWarning, stacklevel=3)
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        raise AttributeError(f"{old} is {module}.{name} now: {error}") from None


def without_package(error: ModuleNotFoundError, name: str) -> Exception:
    """Return the error to raise where the import of the public name `name` failed with `error`.

    It is an UnsupportedError that says how to install the missing package, or `error` itself where the
    package is installed.
    """
    from importlib.util import find_spec

    package = (error.name or "").partition(".")[0]
    if not package or find_spec(package) is not None:
        return error
    from importlib.metadata import PackageNotFoundError, requires
    from re import findall, match

    from meshweave.base.errors import UnsupportedError

    try:
        needed = requires("meshweave") or ()
    except PackageNotFoundError:
        needed = ()
    extras = [
        extra for of in needed if match(rf"{package}\b", of) for extra in findall(r"extra == .(\w+)", of)
    ]
    how = f"pip install 'meshweave[{extras[0]}]'" if extras else f"pip install {package}"
    return UnsupportedError(f"{name} needs {package}, which is not installed: {how}")


def lazy_names(
    module: str,
    homes: Mapping[str, str] | None = None,
    *,
    moved: Mapping[str, str] | None = None,
    modules: Iterable[str] = (),
) -> list[str]:
    """Let a module import public names at their first use; return them sorted, for its `__all__`.

    Args:
        module: its `__name__`.
        homes: the names in each module, as {"meshweave.ir.program": "Program parse"}; None for what the module's
            source imports under TYPE_CHECKING, each name as itself and on a line of its own.
        moved: names that stand elsewhere now, by the module there, as {"meshweave": "old=new same"}; for one
            version they are to be had here too, with a warning.
        modules: the modules below it that are imported at their first use too.
    """
    itself = sys.modules[module]
    if homes is None:
        places = _typed_imports(itself)
    else:
        places = {name: home for home, names in homes.items() for name in names.split()}
    vars(itself)["_homes"], vars(itself)["_modules"] = places, tuple(modules)
    vars(itself)["_moved"] = {
        name.partition("=")[0]: (to, name.partition("=")[2] or name)
        for to, names in (moved or {}).items()
        for name in names.split()
    }
    itself.__class__ = LazyModule
    return sorted(places)


def _typed_imports(module: ModuleType) -> dict[str, str]:
    """Return the module of each name that indented lines of a module's source import as itself."""
    loader: Any = module.__loader__
    source = loader.get_data(module.__file__).decode()
    lines = (line.split() for line in source.splitlines() if line.startswith("    from "))
    return {
        name: home for _, home, _, name, *rest in lines if rest == ["as", name] and home != module.__name__
    }


def imported_names(module: str) -> list[str]:
    """Return the public names that a module imports, sorted, for its `__all__`; modules are left out."""
    named = vars(sys.modules[module]).items()
    return sorted(name for name, value in named if name[0] != "_" and not isinstance(value, ModuleType))
