"""Old names of keywords, which one version takes besides the new ones, with a warning that says these."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def renamed_keyword(
    old: str, new: str, of: str
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Return a decorator that lets a function take its keyword `new` as `old` too; the warning names `of`."""

    def decorator(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @wraps(function)
        def called(*args: Parameters.args, **keywords: Parameters.kwargs) -> Result:
            if old in keywords:
                warn_renamed(old, new, of)
                keywords[new] = keywords.pop(old)
            return function(*args, **keywords)

        return called

    return decorator


def renamed_field(old: str, new: str) -> Callable[[type[Result]], type[Result]]:
    """Return a decorator that lets a dataclass take and give its field `new` as `old` too."""

    def decorator(cls: type[Result]) -> type[Result]:
        def field(self: object) -> object:
            warn_renamed(old, new, cls.__name__)
            return getattr(self, new)

        named: Any = cls
        named.__init__ = renamed_keyword(old, new, cls.__name__)(named.__init__)
        setattr(cls, old, property(field, doc=f"Return `{new}`, whose name this was."))
        return cls

    return decorator


def warn_renamed(old: str, new: str, of: str) -> None:
    """Warn the caller of the caller that `old` of something has another name."""
    warnings.warn(f"meshweave: {old} of {of} is {new} now", DeprecationWarning, stacklevel=3)
