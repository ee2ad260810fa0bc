"""Options of a verb as the fields of dataclasses: declared once, and given on as one value.

    @dataclass(frozen=True)
    class ShowOptions:
        mesh: Annotated[str, typer.Option(help="Mesh shape, ROWSxCOLS.")] = "2x2"
        rings: Annotated[int, typer.Option(help="Directions of rings.")] = 0

    @with_options
    def show(what: Annotated[str, typer.Argument(help="An algorithm.")], options: ShowOptions) -> None: ...

typer reads the signature of a function. `with_options` gives a verb the signature that it has with the fields in
place of the dataclasses; one dataclass may serve several verbs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Any, TypeVar, get_type_hints

from meshweave.base.errors import DescriptionError, printable

Result = TypeVar("Result")


def with_options(verb: Callable[..., Result]) -> Callable[..., Result]:
    """Return `verb` with a signature for typer: the fields of each dataclass parameter in place of the parameter.

    Its other parameters stay. All parameters become keyword-only.
    """
    hints = get_type_hints(verb, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(verb).parameters.values():
        if parameter.name in groups:
            parameters += _fields_as_parameters(groups[parameter.name])
        else:
            hinted = parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
            parameters.append(hinted)

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


def _fields_as_parameters(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    parameters = []
    for field in fields(group):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        parameters.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                annotation=hints[field.name],
                default=inspect.Parameter.empty if default is MISSING else default,
            )
        )
    return parameters


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
    hints = get_type_hints(type(options), include_extras=True)
    for field in fields(options):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if field.name in names and getattr(options, field.name) != default:
            declared = hints[field.name].__metadata__[0]
            names_of = (declared.default, *(declared.param_decls or ()), f"--{field.name.replace('_', '-')}")
            option = next(name for name in names_of if isinstance(name, str) and name.startswith("--"))
            raise DescriptionError(f"{option} changes nothing: {printable(what)} {why}; leave it out")
