"""The statements of a program as lines of Python: one op is one line, a loop is a loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshweave.execute.jax.op_lines import OpWriter
from meshweave.execute.jax.turns import Turn
from meshweave.ir.program.expressions import Index
from meshweave.ir.program.statements import On, Repeat, Statement, When


class StatementWriter(OpWriter):
    """Writes the body of a program: ops, loops, and blocks that only some ranks run."""

    def body(self, body: Sequence[Statement], turns: Sequence[Turn], active: str = "") -> None:
        """Append the lines of the statements `body` to `lines`.

        Args:
            turns: every iteration of the loops around the statements, with the ranks that run it; a single turn
                without loop indices where there is no loop.
            active: a Python expression that is true on the devices on which the statements take effect; "" for
                all devices.

        Raises:
            UnsupportedError: jax has no form for a statement.
            ProgramError: an expression has no value.
        """
        self.views.forget_pieces()
        for number, statement in enumerate(body):
            self._later = body[number + 1 :]
            if not any(turn.ranks for turn in turns):
                return
            match statement:
                case On(where=where):
                    self._on(statement, where, turns, active)
                case When():
                    self._when(statement, turns, active)
                case Repeat(var=var):
                    self._repeat(statement, var, turns, active)
                case _:
                    self._op(statement, turns, active)
        self.views.forget_pieces()

    def _on(self, block: On, where: str | tuple[int, ...], turns: Sequence[Turn], active: str) -> None:
        ranks = self.program.mesh_of[where].ranks if isinstance(where, str) else where
        inner = [turn.on(ranks) for turn in turns]
        if all(len(turn.ranks) == len(before.ranks) for turn, before in zip(inner, turns, strict=True)):
            self.body(block.body, inner, active)
            return
        listed = set(ranks)
        self.body(block.body, inner, self._condition(turns, lambda t, r: int(r in listed), None, active))

    def _when(self, block: When, turns: Sequence[Turn], active: str) -> None:
        inner = [turn.having(block.condition) for turn in turns]
        if all(len(turn.ranks) in (0, len(before.ranks)) for turn, before in zip(inner, turns, strict=True)):
            runs = [bool(turn.ranks) for turn in inner]
            condition = self.numbers.text(turns, lambda t, r: int(runs[t]), block.condition, static=True)
            if all(runs):
                self.body(block.body, inner, active)
            elif any(runs):
                self.line(f"if {condition}:")
                self._indented(block.body, inner, active)
            return
        held = [set(turn.ranks) for turn in inner]
        self.body(
            block.body, inner, self._condition(turns, lambda t, r: int(r in held[t]), block.condition, active)
        )

    def _condition(
        self, turns: Sequence[Turn], value: Callable[[int, int], int], index: Index | None, active: str
    ) -> str:
        """Return the condition that `value` is not 0 and that `active` holds, as a scalar of each device."""
        text = f"({self.numbers.text(turns, value, index)}) != 0"
        return f"({active}) & ({text})" if active else text

    def _repeat(self, block: Repeat, var: str, turns: Sequence[Turn], active: str) -> None:
        counts = [len(list(turn.repeated(var, block.count))) for turn in turns]
        count = self.numbers.text(turns, lambda t, r: counts[t], block.count, static=True)
        inner = [each for turn in turns for each in turn.repeated(var, block.count)]
        if not inner:
            return
        self.line(f"for {self.numbers.reserved(var)} in range({count}):")
        self._indented(block.body, inner, active)

    def _indented(self, body: Sequence[Statement], turns: Sequence[Turn], active: str) -> None:
        before = len(self.lines)
        self._depth += 1
        self.body(body, turns, active)
        if len(self.lines) == before:
            self.line("pass")
        self._depth -= 1
