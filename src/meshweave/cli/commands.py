"""The verbs of the command line: those of the wheel, and those that installed packages add.

An entry point of the group `meshweave.commands` is a function, which becomes a verb, or a `typer.Typer` of more.
Those of `meshweave.commands.tune` join `meshweave tune`. Entry points are read where a verb is none of the
wheel's, and for help and completion.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from meshweave.base.installed import offered, offered_names


class Verbs(TyperGroup):
    """A click group: the verbs that were added to it, and after them those that installed packages offer."""

    group = "meshweave.commands"
    """The group of entry points under which an installed package offers verbs."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the verb `cmd_name` as a click command; None where neither the wheel nor a package has it.

        Raises UnsupportedError where it is a verb of a package of this repository that is not installed, where
        two packages offer it, or where it cannot be loaded.
        """
        if cmd_name not in self.commands:
            verb = offered(self.group, cmd_name)
            if verb is None:
                self.list_commands(ctx)  # so that the nearest name is looked for among all verbs
            else:
                self.commands[cmd_name] = _command(cmd_name, verb)
        return self.commands.get(cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all verbs, those of the wheel first; load those of installed packages.

        Raises UnsupportedError where two packages offer one, or one cannot be loaded.
        """
        for name in offered_names(self.group):
            if name not in self.commands:
                self.commands[name] = _command(name, offered(self.group, name))
        return list(self.commands)


def _command(name: str, verb: Any) -> Any:
    app = typer.Typer(rich_markup_mode=None)
    if isinstance(verb, typer.Typer):
        app.add_typer(verb, name=name)
    else:
        app.command(name=name)(verb)
    return typer.main.get_group(app).commands[name]
