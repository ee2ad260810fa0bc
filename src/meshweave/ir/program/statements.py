"""The statements of a program's body, and the only functions that recurse over them.

A body is a tuple of statements: ops, and blocks (`On`, `Repeat`, `When`), each of which holds a body of its own.

- `walk` follows a body with a context that changes from block to block: the ranks that run a block, the
  indentation of its text, the values of loop indices.
- `statements_of`, `ops_of` and `bodies_of` list what a body holds, as written.
- `preorder` lists statements with the place where the block of each one ends.
- `rewrite` rebuilds a body with every op replaced by other statements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from meshweave.ir.program.expressions import Index
from meshweave.ir.program.ops import Op


@dataclass(frozen=True)
class On:
    """A block that runs on the ranks of a mesh, whose coordinates it may use, or on listed global ranks."""

    where: str | tuple[int, ...]
    body: tuple[Statement, ...]


@dataclass(frozen=True)
class Repeat:
    """A block that runs for `var` = 0 .. count - 1."""

    var: str
    count: Index
    body: tuple[Statement, ...]


@dataclass(frozen=True)
class When:
    """A block that runs where `condition` is not 0."""

    condition: Index
    body: tuple[Statement, ...]


Block = On | Repeat | When
Statement = Op | On | Repeat | When

Key = tuple[int, ...]
"""Position in the sequential reading: statement numbers and loop indices from the outside in."""

Context = TypeVar("Context")


def walk(
    body: Iterable[Statement],
    context: Context,
    enter: Callable[[Block, Key, Context], Iterable[tuple[Key, Context]]],
    key: Key = (),
) -> Iterator[tuple[Key, Statement, Context]]:
    """Yield (key, statement, context) for every statement, a block before its body.

    A key is a position: statement numbers and turns of loops, from the outside in. `enter(block, key, context)`
    returns a (key, context) for each time that the body of `block` is visited: none to skip it, one to visit it
    as written, one per turn to unroll a loop. `key` is put before all keys.
    """
    for number, statement in enumerate(body):
        here = (*key, number)
        yield here, statement, context
        if isinstance(statement, (On, Repeat, When)):
            for inner_key, inner_context in enter(statement, here, context):
                yield from walk(statement.body, inner_context, enter, inner_key)


def statements_of(body: Iterable[Statement]) -> Iterator[Statement]:
    """Yield every statement once, as written, a block before its body."""
    left = [iter(body)]
    while left:
        for statement in left[-1]:
            yield statement
            if isinstance(statement, (On, Repeat, When)):
                left.append(iter(statement.body))
                break
        else:
            left.pop()


def ops_of(body: Iterable[Statement]) -> Iterator[Op]:
    """Yield every op once, as written, also one in a loop."""
    return (statement for statement in statements_of(body) if isinstance(statement, Op))


def bodies_of(body: tuple[Statement, ...]) -> Iterator[tuple[Statement, ...]]:
    """Yield the body itself, then that of every block in it."""
    yield body
    for statement in statements_of(body):
        if isinstance(statement, (On, Repeat, When)):
            yield statement.body


def preorder(body: Iterable[Statement]) -> list[tuple[Statement, int]]:
    """Return (statement, index of the next statement outside of it) of every statement, a block before its body.

    A reader skips the body of a block by going on at that index. For an op it is the next index.
    """
    listed: list[tuple[Statement, int]] = []

    def append(statements: Iterable[Statement]) -> None:
        for statement in statements:
            index = len(listed)
            listed.append((statement, index + 1))
            if isinstance(statement, (On, Repeat, When)):
                append(statement.body)
                listed[index] = statement, len(listed)

    append(body)
    return listed


def rewrite(
    body: Iterable[Statement], replacement: Callable[[Op], Iterable[Statement]]
) -> tuple[Statement, ...]:
    """Return the body with each op replaced by `replacement(op)`, called in the order written; blocks stay."""
    rewritten: list[Statement] = []
    for statement in body:
        if isinstance(statement, (On, Repeat, When)):
            rewritten.append(replace(statement, body=rewrite(statement.body, replacement)))
        else:
            rewritten += replacement(statement)
    return tuple(rewritten)
