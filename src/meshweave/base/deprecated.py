"""Former names of keywords and fields, accepted for one version with a DeprecationWarning."""

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
    """Return a decorator: the function also takes its keyword `new` by the former name `old`, with a warning.

    Where both are given the value of `old` counts: `dataclasses.replace` gives all fields by their new names.
    `of` names the function in the warning. `others` are further former names, each with its new one.
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
    """Return a decorator: a dataclass also has its field `new` by the former name `old`, with a warning.

    `old` is a keyword of the constructor and a read-only property. The warning names the class. `others` are
    further former names, each with its new one.
    """

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
    """Issue a DeprecationWarning at the line that called the caller: `old` of `of` is called `new` now."""
    warnings.warn(f"meshweave: {old} of {of} is {new} now", DeprecationWarning, stacklevel=3)
