"""Old names of keywords, which one version takes besides the new ones, with a warning that says these."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def renamed_keyword(
    old: str, new: str, of: str, **others: str
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Return a decorator that lets a function take its keyword `new` as `old` too; the warning names `of`.

    `others` are further old names, each with its new one.
    """
    names = {old: new, **others}

    def decorator(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @wraps(function)
        def called(*args: Parameters.args, **keywords: Parameters.kwargs) -> Result:
            for before in names.keys() & keywords.keys():
                warn_renamed(before, names[before], of)
                keywords[names[before]] = keywords.pop(before)
            return function(*args, **keywords)

        return called

    return decorator


def renamed_field(old: str, new: str, **others: str) -> Callable[[type[Result]], type[Result]]:
    """Return a decorator that lets a dataclass take and give its field `new` as `old` too; `others` likewise."""

    def decorator(cls: type[Result]) -> type[Result]:
        named: Any = cls
        named.__init__ = renamed_keyword(old, new, cls.__name__, **others)(named.__init__)
        for before, after in {old: new, **others}.items():
            setattr(cls, before, _field(cls.__name__, before, after))
        return cls

    return decorator


def _field(of: str, old: str, new: str) -> property:
    def field(self: object) -> object:
        warn_renamed(old, new, of)
        return getattr(self, new)

    return property(field, doc=f"Return `{new}`, whose name this was.")


def warn_renamed(old: str, new: str, of: str) -> None:
    """Warn the caller of the caller that `old` of something has another name."""
    warnings.warn(f"meshweave: {old} of {of} is {new} now", DeprecationWarning, stacklevel=3)
