"""Methods that compute each result once for an object."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

Of = TypeVar("Of")
Given = ParamSpec("Given")
Result = TypeVar("Result")


def remembered(method: Callable[Concatenate[Of, Given], Result]) -> Callable[Concatenate[Of, Given], Result]:
    """Return a method that keeps its results with the object, by its arguments, which must be hashable.

    Arguments are given by position. `functools.cache` would hash the object at each call and keep it alive.
    """
    name = f"_results_of_{method.__name__}"

    @wraps(method)
    def called(of: Of, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        assert not kwargs, "arguments are given by position"
        results: dict[tuple[Any, ...], Result] = of.__dict__.setdefault(name, {})
        if args not in results:
            results[args] = method(of, *args, **kwargs)
        return results[args]

    return called
