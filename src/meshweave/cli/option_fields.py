"""Options of a verb as the fields of dataclasses: declared once, and given on as one value.

    @dataclass(frozen=True)
    class ShowOptions:
        mesh: str = option("2x2", "Mesh shape, ROWSxCOLS.")
        rings: int = option(0, "Directions of rings.", min=0, max=2)
        passes: str = option("all", "Passes to show.", "--pass")

    @with_options
    def show(what: Annotated[str, typer.Argument(help="An algorithm.")], options: ShowOptions) -> None: ...

typer reads the signature of a function. `with_options` gives a verb the signature that it has with the fields in
place of the dataclasses; one dataclass may serve several verbs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, field, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from meshweave.base.errors import DescriptionError, printable

Result = TypeVar("Result")
_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def with_options(verb: Callable[..., Result]) -> Callable[..., Result]:
    """Return `verb` with a signature for typer: the fields of each dataclass parameter in place of the parameter.

    Its other parameters stay. All parameters become keyword-only.
    """
    hints = get_type_hints(verb, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(verb).parameters.values():
        if parameter.name in groups:
            parameters += [
                parameter.replace(name=name, annotation=annotation, default=default, kind=_KEYWORD)
                for name, annotation, default in _annotated_fields(groups[parameter.name])
            ]
        else:
            parameters.append(parameter.replace(annotation=hints[parameter.name], kind=_KEYWORD))

    @wraps(verb)
    def called(**given: Any) -> Result:
        for name, group in groups.items():
            own = {field.name: given.pop(field.name) for field in fields(group) if field.name in given}
            given[name] = group(**own)
        return verb(**given)

    del called.__wrapped__  # what is called takes other arguments
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


def option(default: Any, help: str, *names: str, **settings: Any) -> Any:
    """Return a field of a dataclass that is an option, with its default and help text.

    Args:
        names: what it is called on the command line, such as "--pass"; by default `--` and the name of the field.
        settings: further arguments of `typer.Option`, such as `min`.
    """
    return field(default=default, metadata={"names": names, "settings": {"help": help, **settings}})


def _annotation(declared: Field[Any], hint: Any) -> Any:
    """Return what typer is told of a field: its type and its option."""
    if "settings" not in declared.metadata:
        return hint
    # Without a name of its own typer gives a flag a second one, --no-NAME.
    own = (f"--{declared.name.replace('_', '-')}",) if hint is bool else ()
    names = declared.metadata["names"] or own
    annotated: Any = Annotated
    return annotated[hint, typer.Option(*names, **declared.metadata["settings"])]


def _default(declared: Field[Any]) -> Any:
    if declared.default_factory is not MISSING:
        return declared.default_factory()
    return inspect.Parameter.empty if declared.default is MISSING else declared.default


def _annotated_fields(group: Any) -> list[tuple[str, Any, Any]]:
    """Return name, annotation for typer, and default of each field of a dataclass of options."""
    hints = get_type_hints(group, include_extras=True)
    return [(each.name, _annotation(each, hints[each.name]), _default(each)) for each in fields(group)]


def refuse_given(options: Any, names: tuple[str, ...], what: str, why: str) -> None:
    """Raise DescriptionError where one of the options `names` is given, because it would change nothing.

    An option counts as given where its value is not its default.

    Args:
        options: a dataclass of options, as for `with_options`.
        names: fields of `options`; other fields are not checked.
        what: the subject of the command, such as "plan.json".
        why: the predicate that says why the options change nothing, such as "is the plan of a step". The message
            is "--mesh changes nothing: plan.json is the plan of a step; leave it out".
    """
    for name, annotation, default in _annotated_fields(type(options)):
        if name in names and getattr(options, name) != default:
            declared = annotation.__metadata__[0]
            names_of = (declared.default, *(declared.param_decls or ()), f"--{name.replace('_', '-')}")
            given = next(each for each in names_of if isinstance(each, str) and each.startswith("--"))
            raise DescriptionError(f"{given} changes nothing: {printable(what)} {why}; leave it out")
