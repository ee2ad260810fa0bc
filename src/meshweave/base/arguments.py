"""Arguments of public functions and classes, taken as their annotations say.

What an annotation means is what can be given: a number of numpy becomes one of Python, a list a tuple, and where a
cluster, model, plan, algorithm or stack is wanted, its name or file is loaded. All else is refused in one line,
instead of an AttributeError far inside. Callers within meshweave are checked by mypy, and not here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Set
from enum import Enum
from functools import wraps
from importlib import import_module
from inspect import Parameter, signature
from itertools import islice, repeat
from numbers import Integral, Real
from pathlib import Path
from types import FunctionType, NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from meshweave.base.errors import BindError, printable

_MOST_ITEMS = 1000
"""Items of a sequence or mapping that are looked at."""
_LOADERS = {
    "meshweave.describe.machine.cluster.Cluster": "meshweave.describe.machine.cluster:load_cluster",
    "meshweave.describe.model.transformer.Transformer": "meshweave.describe.model:load_model",
    "meshweave.tune.plan.Plan": "meshweave.tune.plan_file:load_plan",
    "meshweave.algorithms.contract.Algorithm": "meshweave.algorithms.table:algorithm",
    "meshweave.algorithms.step.software_stack.SoftwareStack": "meshweave.algorithms.step.stacks:load_stack",
}
"""What loads an instance of a class from its name or file."""
_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "text",
    NoneType: "None",
    Path: "a path",
    Hashable: "a value that is hashable",
}
_SHOWN = (str, bytes, Real, complex, Path, NoneType, list, tuple, dict, Set)
"""What errors quote; of other objects they say the class."""


class _Unfit(Exception):
    """A value is not what an annotation says."""


def at_the_door(value: Any, door: str) -> Any:
    """Return a public function that takes its arguments by their annotations, or a class whose constructors do.

    A class is changed in place. What takes tensors is left as it is: it has checks of its own, and may be traced.

    Args:
        value: a public name's value; anything but a function or class of meshweave is returned as it is.
        door: the module that has it as a public name.
    """
    if not str(getattr(value, "__module__", "")).startswith("meshweave"):
        return value
    if isinstance(value, FunctionType) or hasattr(value, "cache_info"):
        return _taking(value, f"{door}.{value.__name__}", 0, door)
    if isinstance(value, type) and not issubclass(value, Exception | Enum):
        name = f"{door}.{value.__name__}"
        for key, each in list(vars(value).items()):
            if key == "__init__" and isinstance(each, FunctionType):
                setattr(value, key, _taking(each, name, 1, each.__module__))
            elif key[0] != "_" and isinstance(each, classmethod):
                of = each.__func__
                setattr(value, key, classmethod(_taking(of, f"{name}.{key}", 1, of.__module__)))
    return value


def _taking(function: Any, name: str, num_bound: int, module: str) -> Callable[..., Any]:
    """Return a function that takes its arguments by their annotations, but for the first `num_bound`.

    Args:
        name: what errors call it.
        module: where pickle is to look it up.
    """
    annotations = " ".join(map(str, getattr(function, "__annotations__", {}).values()))
    if (num_bound == 0 and "Tensor" in annotations) or hasattr(function, "_parameters"):
        return function  # type: ignore[no-any-return]
    parameters: list[_Parameters] = []

    @wraps(function)
    def called(*args: Any, **keywords: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] == "meshweave":
            return function(*args, **keywords)
        if not parameters:
            parameters.append(_Parameters(function, name, num_bound))
        return function(*parameters[0].positional(args), **parameters[0].by_name(keywords))

    called.__module__ = module
    vars(called)["_parameters"] = parameters
    return called


class _Parameters:
    """What each parameter of a public function may be; the first `num_bound` (self, cls) Python gives itself."""

    def __init__(self, function: Any, name: str, num_bound: int) -> None:
        self.name, self.num_bound = name, num_bound
        space = vars(sys.modules[function.__module__])
        known = [
            (each.name, _resolved(each.annotation, space), each.kind)
            for each in list(signature(function).parameters.values())[num_bound:]
            if each.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        ]
        self.by_keyword = {key: wanted for key, wanted, _ in known}
        self.by_position = [
            (key, wanted) for key, wanted, kind in known if kind is not Parameter.KEYWORD_ONLY
        ]

    def positional(self, args: tuple[Any, ...]) -> list[Any]:
        """Return positional arguments as the function takes them. Raises BindError for one that does not fit."""
        given = args[self.num_bound :]
        own = [self._taken(value, *of) for value, of in zip(given, self.by_position, strict=False)]
        return [*args[: self.num_bound], *own, *given[len(own) :]]

    def by_name(self, keywords: dict[str, Any]) -> dict[str, Any]:
        """Return keyword arguments as the function takes them. Raises BindError for one that does not fit."""
        return {key: self._taken(each, key, self.by_keyword.get(key, Any)) for key, each in keywords.items()}

    def _taken(self, value: Any, parameter: str, wanted: Any) -> Any:
        try:
            return taken(value, wanted)
        except _Unfit:
            given = printable(repr(value)) if isinstance(value, _SHOWN) else _one(type(value).__name__)
            raise BindError(f"{self.name}: {parameter} is {given}; give {_words(wanted)}") from None


def _resolved(annotation: Any, space: dict[str, Any]) -> Any:
    """Return what an annotation means in a module; Any for names that only type checkers see."""
    try:
        return eval(annotation, dict(space)) if isinstance(annotation, str) else annotation
    except (NameError, TypeError, AttributeError):
        return Any


def taken(value: Any, wanted: Any) -> Any:
    """Return a value as an annotation says; of an annotation that says no class, the value itself.

    Raises _Unfit where it is none, and MeshweaveError where its name or file cannot be loaded.
    """
    origin, args = get_origin(wanted), get_args(wanted)
    if origin in (Annotated, Literal):  # functions have words of their own for names that they do not know
        return taken(value, args[0] if origin is Annotated else type(args[0]))
    if origin in (Union, UnionType):
        return _first_that_takes(value, args)
    kind = NoneType if wanted is None else origin or wanted
    if not isinstance(kind, type) or kind in (Any, Parameter.empty) or getattr(kind, "_is_protocol", False):
        return value
    if args and issubclass(kind, Mapping):
        items = islice(value.items() if isinstance(value, Mapping) else _refused(), _MOST_ITEMS)
        return (
            value if all(_fits(key, args[0]) and _fits(each, args[1]) for key, each in items) else _refused()
        )
    if args and kind.__module__ in ("builtins", "collections.abc") and issubclass(kind, Iterable):
        return _items(value, kind, args)
    return _instance(value, kind)


def _refused() -> Any:
    raise _Unfit


def _fits(value: Any, wanted: Any) -> bool:
    try:
        taken(value, wanted)
    except _Unfit:
        return False
    return True


def _first_that_takes(value: Any, choices: tuple[Any, ...]) -> Any:
    """Return the value as the first of several annotations takes it; one of whose class it is comes first."""
    exact = [choice for choice in choices if type(value) is (get_origin(choice) or choice)]
    for choice in (*exact, *choices):
        try:
            return taken(value, choice)
        except _Unfit:
            continue
    return _refused()


def _instance(value: Any, kind: Any) -> Any:
    """Return a value as one of a class: itself, a number of Python's, or what its name or file holds."""
    if kind in (int, float):
        if isinstance(value, bool) or not isinstance(value, Integral if kind is int else Real):
            return _refused()
        own: type = type(value)
        return value if own in (int, float) else kind(value)
    if kind is bool:
        return bool(value) if type(value).__name__ in ("bool", "bool_") else _refused()
    if kind is Hashable:
        return value if is_hashable(value) else _refused()
    if isinstance(value, kind):
        return value
    if isinstance(value, str) and kind is Path:
        return Path(value)
    if isinstance(value, str) and issubclass(kind, Enum) and value in [each.value for each in kind]:
        return kind(value)
    loader = _LOADERS.get(f"{kind.__module__}.{kind.__name__}", "") if isinstance(value, str | Path) else ""
    module, _, name = loader.partition(":")
    return getattr(import_module(module), name)(value) if loader else _refused()


def is_hashable(value: object) -> bool:
    """Return whether a value, with all that is in it, can be the key of a dict."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _items(value: Any, kind: type, args: tuple[Any, ...]) -> Any:
    """Return a sequence or set whose items are as annotated, as a tuple or list where one is wanted.

    A single text is one name where texts are wanted. What is iterated but once is left as it is.
    """
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        return (value,) if isinstance(value, str) and args[0] is str else _refused()
    if isinstance(value, Iterator) and kind in (Iterable, Iterator):
        return value
    if isinstance(value, Set):
        return value if issubclass(kind, Set) or kind in (Iterable, Collection) else _refused()
    items = value if isinstance(value, list | tuple) else tuple(value)
    is_of_size = kind is tuple and args[1:] != (...,)
    if is_of_size and len(items) != len(args):
        return _refused()
    own = [
        taken(*each)
        for each in zip(items, args if is_of_size else repeat(args[0], _MOST_ITEMS), strict=False)
    ]
    if isinstance(items, kind) and all(each is before for each, before in zip(own, items, strict=False)):
        return items
    made = (*own, *items[len(own) :])
    return list(made) if kind is list else made


def _words(wanted: Any) -> str:
    """Return what can be given, in words: "a Cluster, or its name or file", "a whole number or None"."""
    origin, args = get_origin(wanted), get_args(wanted)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(_words, args)))
    if origin in (Annotated, Literal):
        return _words(args[0]) if origin is Annotated else " or ".join(map(repr, args))
    kind = NoneType if wanted is None else origin or wanted
    if kind in _WORDS:
        return _WORDS[kind]
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return "a mapping"
    if kind is tuple and args[1:] != (...,):
        return f"{len(args)} values: {', '.join(map(_words, args))}"
    if isinstance(kind, type) and issubclass(kind, Iterable) and args:
        return f"a sequence, each {_words(args[0])}"
    name = getattr(kind, "__name__", str(kind))
    loads = f"{getattr(kind, '__module__', '')}.{name}" in _LOADERS
    return f"{_one(name)}{', or its name or file' if loads else ''}"


def _one(name: str) -> str:
    return f"{'an' if name[:1].lower() in 'aeio' else 'a'} {name}"
