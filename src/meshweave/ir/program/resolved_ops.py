"""Resolved ops shared between ranks and turns: an op of a template is resolved once for all of them that give
it the same values.

An op reads few names and few shapes of buffers. Where these are equal, ranks and turns get the very same
object, so that later analyses can know it by identity. Ops that are equal but for the group of a collective
have the same *form*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from meshweave.base.errors import ProgramError
from meshweave.ir.program.expressions import Expr, names_in
from meshweave.ir.program.include import Include
from meshweave.ir.program.ops import Collective, Op, Over
from meshweave.ir.program.views import View

Shape = tuple[int, ...]
Resolve = Callable[[Op, Mapping[str, int], int], Op]


@dataclass(frozen=True)
class _Reads:
    """What an op depends on: names of its expressions, buffers whose shapes its views need, and its group."""

    names: tuple[str, ...]
    buffers: tuple[str, ...]
    over: Over | None


class ResolvedOps:
    """A cache of resolved ops: ranks and turns of loops for which an op is the same share one object.

    A resolved op has integers in place of the expressions of an op as written.

    Args:
        resolve: returns an op with plain integers, for (op, values of names, rank).
        shape: returns the local shape of a buffer, for (name, rank).
        group: returns the ranks that `over` means for a rank.
    """

    def __init__(
        self,
        resolve: Resolve,
        shape: Callable[[str, int], Shape],
        group: Callable[[Over, int], tuple[int, ...]],
    ) -> None:
        self._resolve, self._shape, self._group = resolve, shape, group
        self._reads: dict[int, tuple[Op, _Reads | None]] = {}
        self._first: dict[int, tuple[Op, Mapping[str, int], int, Op]] = {}
        self._known: dict[tuple[Any, ...], dict[tuple[int, ...] | None, Op]] = {}
        self._groups: dict[tuple[Over, int], tuple[int, ...]] = {}
        self._forms: dict[int, int] = {}

    def form(self, op: Op) -> int:
        """Return a number that resolved ops of one op as written share if only the ranks of their groups differ.

        It is negative, and no other op has it, for an op that ranks and turns do not share.
        """
        return self._forms.get(id(op), -1 - id(op))

    def get(self, op: Op, env: Mapping[str, int], rank: int) -> Op:
        """Return an op with plain integers in place of expressions, for `rank` and the values of names in `env`.

        Ranks and values that agree in all that the op depends on get one object, except for an include or an op
        with a remote view. Raises ProgramError where an expression has no value, or a view does not fit its
        buffer.
        """
        listed = self._reads.get(id(op))
        if listed is None:
            first = self._first.pop(id(op), None)
            if first is None:  # what an op reads matters only when it turns up again
                resolved = self._resolve(op, env, rank)
                self._first[id(op)] = (op, env, rank, resolved)
                return resolved
            listed = self._reads[id(op)] = (op, _reads_of(op))
            self._share(op, listed[1], *first[1:3], lambda *_: first[3])
        return self._share(op, listed[1], env, rank, self._resolve)

    def _share(self, op: Op, reads: _Reads | None, env: Mapping[str, int], rank: int, resolve: Resolve) -> Op:
        if reads is None:
            return resolve(op, env, rank)
        try:
            group = None if reads.over is None else self._members(reads.over, rank)
            shapes = [self._shape(name, rank) for name in reads.buffers]
        except ProgramError:
            return resolve(op, env, rank)  # which raises for the first field that does not fit
        count = 0 if group is None else len(group)
        key = (id(op), count, *map(env.get, reads.names), *shapes)
        alike = self._known.get(key)
        if alike is None:
            resolved = resolve(op, env, rank)
            self._known[key] = {group: resolved}
            self._forms[id(resolved)] = len(self._known)
            return resolved
        shared = alike.get(group)
        if shared is None:
            first = next(iter(alike.values()))
            assert isinstance(first, Collective) and group is not None
            shared = alike[group] = replace(first, over=group)
            self._forms[id(shared)] = self._forms[id(first)]
        return shared

    def _members(self, over: Over, rank: int) -> tuple[int, ...]:
        if not isinstance(over, str):
            return over
        members = self._groups.get((over, rank))
        if members is None:
            members = self._group(over, rank)
            self._groups.update(((over, member), members) for member in members)
        return members


def _reads_of(op: Op) -> _Reads | None:
    """Return what an op depends on; None for one that depends on more, such as the shape of a remote buffer."""
    views = list(_parts(op, View))
    if isinstance(op, Include) or any(view.rank is not None for view in views):
        return None
    names = dict.fromkeys(name for part in _parts(op, Expr) for name in names_in(part) if name != "peer")
    over = op.over if isinstance(op, Collective) else None
    return _Reads(tuple(names), tuple(dict.fromkeys(view.buffer for view in views)), over)


def _parts(value: Any, kind: type[Any]) -> Iterator[Any]:
    """Yield the values of a kind in an op, in the order of its fields; those inside of one are not looked for."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _parts(item, kind)
    elif is_dataclass(value) and not isinstance(value, (Expr, type)):
        for item in fields(value):
            yield from _parts(getattr(value, item.name), kind)
