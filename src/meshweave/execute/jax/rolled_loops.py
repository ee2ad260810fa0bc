"""Loops of a program as `lax.fori_loop`: short to compile, and without overlap from one turn to the next.

The first turn stands before the loop. So arrays that are carried from turn to turn exist, and a sum is begun. What
a turn writes before it reads it, and nothing reads after it, is a variable of the turn: slots fall away.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from meshweave.base.errors import UnsupportedError
from meshweave.execute.jax.statements import StatementWriter
from meshweave.execute.jax.turns import Turn
from meshweave.ir.program.ops import READ
from meshweave.ir.program.statements import Repeat, ops_of

Loops = Literal["unrolled", "rolled"]

FEWEST_TURNS = 3
"""A loop of fewer turns stays unrolled."""


@dataclass(frozen=True)
class _Saved:
    """What a loop that cannot be rolled leaves as it was."""

    num_lines: int
    held: dict[str, tuple[bool, bool]]


class RolledLoopWriter(StatementWriter):
    """Writes outermost loops whose iterations differ in numbers alone as `lax.fori_loop`.

    Other loops, those of fewer than `FEWEST_TURNS` iterations, and all loops with `in_order` are Python loops.
    """

    def _repeat(self, block: Repeat, var: str, turns: Sequence[Turn], active: str) -> None:
        inner = [each for turn in turns for each in turn.repeated(var, block.count)]
        is_outermost = self._depth == 0 and len(turns) == 1 and not active
        if not is_outermost or self.in_order or len(inner) < FEWEST_TURNS:
            super()._repeat(block, var, turns, active)
            return
        saved = self._save()
        try:
            self._roll(block, var, inner)
        except UnsupportedError:
            self._restore(saved)
            super()._repeat(block, var, turns, active)
        finally:
            self.numbers.rolled = None
            for held in self.views.held.values():
                held.in_turn = False

    def _save(self) -> _Saved:
        held = {name: (each.needs_start, each.is_written) for name, each in self.views.held.items()}
        return _Saved(len(self.lines), held)

    def _restore(self, saved: _Saved) -> None:
        del self.lines[saved.num_lines :]
        self._depth = 0
        for name, (needs_start, is_written) in saved.held.items():
            held = self.views.held[name]
            held.needs_start, held.is_written, held.pieces = needs_start, is_written, {}

    def _roll(self, block: Repeat, var: str, turns: Sequence[Turn]) -> None:
        """Write the first turn, then the others as a loop. Raises UnsupportedError where turns differ in more."""
        begin, index = len(self.lines), self.numbers.reserved(var)
        self.body(block.body, turns[:1])
        if index in _names("\n".join(self.lines[begin:])):
            self.lines.insert(begin, f"{index} = 0")
        begin = len(self.lines)
        self.numbers.rolled = var
        for name in self._of_a_turn(block):
            self.views.held[name].in_turn = True
        self._depth = 1
        self.body(block.body, turns[1:])
        self._depth = 0
        inside = self.lines[begin:]
        del self.lines[begin:]
        carried = self._carried(inside)
        state = f"({', '.join(carried)},)"
        function = self.views.free_name(f"turn_{var}")
        arrays = "tuple[Array, ...]"
        self.line(f"def {function}({index}: Array, carried: {arrays}) -> {arrays}:")
        self.lines += [f"    {state} = carried", *inside, f"    return {state}"]
        self.line(f"{state} = lax.fori_loop(1, {len(turns)}, {function}, {state})")

    def _of_a_turn(self, block: Repeat) -> set[str]:
        """Return the buffers that each turn writes, in one slot, before it reads them, and nothing else uses."""
        inside = list(ops_of(block.body))
        names: set[str] = set()
        slots: dict[str, set[object]] = {}
        for op in inside:
            for mode, view in op.accesses():
                slots.setdefault(view.buffer, set()).add(view.slot)
                if mode != READ and view.buffer not in names and len(slots[view.buffer]) == 1:
                    names.add(view.buffer)
                elif view.buffer not in names:
                    slots[view.buffer].add(None)
        chosen = {id(op) for op in inside}
        outside = (op for op in self.program.ops() if id(op) not in chosen)
        used = {view.buffer for op in outside for _, view in op.accesses()}
        return {name for name in names - used if self.views.held[name].is_value and len(slots[name]) == 1}

    def _carried(self, inside: Sequence[str]) -> list[str]:
        """Return the variables that go from turn to turn. Raises UnsupportedError where a turn writes a list."""
        text = "\n".join(line.removeprefix("    ") for line in inside)
        stored = [
            node for node in ast.walk(ast.parse(text)) if isinstance(getattr(node, "ctx", None), ast.Store)
        ]
        if any(isinstance(node, ast.Subscript) for node in stored):
            raise UnsupportedError("a turn writes slots or parts")
        names = dict.fromkeys(node.id for node in stored if isinstance(node, ast.Name))
        arrays = {held.name for held in self.views.held.values() if not held.in_turn}
        carried = [name for name in names if name in arrays]
        if not carried:
            raise UnsupportedError("turns leave nothing")
        return carried


def _names(text: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
