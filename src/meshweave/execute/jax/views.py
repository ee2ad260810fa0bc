"""Text that reads and writes views: what an op takes from an array of its device, and how its result is stored.

Arrays have the largest shape of all ranks, and are zero past a rank's own size: whole tensors are cut into shards
so, an op on such values gives such a value, and nothing is stored past a rank's own size (results of calls are
masked). So zeros are all that a product or a collective takes from there.

A part is read as a slice where all ranks read equally many elements at positions that fit, as periods of blocks
where these fill the dim, and by a list of positions otherwise. Where ranks read unequal numbers, the rest is zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshweave.base.errors import UnsupportedError
from meshweave.execute.jax.devices import quoted
from meshweave.execute.jax.turns import Number, NumberTexts, Point, Turn
from meshweave.execute.jax.variables import Parts, part_number
from meshweave.ir.program import Buffer, Program
from meshweave.ir.program.views import Blocked, Range, View, selector_bounds

WIDER = {"bfloat16": "float32", "float16": "float32"}
"""The dtype in which sums of halves are kept."""


@dataclass(frozen=True)
class ViewUse:
    """One view of an op, and what it is in each turn (iteration of the loops around the op) on each rank.

    Attributes:
        view: the view as the program writes it, with expressions of loop indices and coordinates.
        turns: the turns in which the op runs.
        at: the view with numbers for each (index into `turns`, global rank).
    """

    view: View
    turns: Sequence[Turn]
    at: Mapping[Point, View]

    def most(self, dim: int, turn: int) -> int:
        """Return the view's largest size along `dim`, in elements, over the ranks that run the op in `turn`."""
        return max((self.at[turn, rank].selectors[dim].size for rank in self.turns[turn].ranks), default=0)

    def is_even(self, dim: int) -> bool:
        """Return whether in each turn all ranks have views of one size along `dim`; turns may differ in size."""
        return all(
            len({self.at[t, rank].selectors[dim].size for rank in turn.ranks}) <= 1
            for t, turn in enumerate(self.turns)
        )

    def is_same(self, other: ViewUse) -> bool:
        """Return whether another view has the same elements as this one in every turn on every rank."""
        return self.at == other.at

    def overlaps(self, other: ViewUse) -> bool:
        """Return whether the other view may share elements with this one in some turn on some rank.

        Also return True where this view is used on a rank in a turn in which the other is not.
        """
        return any(at not in other.at or view.overlaps(other.at[at]) for at, view in self.at.items())


@dataclass
class HeldBuffer:
    """The variable of the emitted function that holds a buffer.

    Attributes:
        name: the name of the variable.
        shape: for each dim the largest size on any rank, in elements.
        dtype: the dtype of the variable: float32 where sums in float16 or bfloat16 are kept.
        needs_start: whether the variable must have a value before the first op.
        is_written: whether an op above has written the buffer.
        is_value: whether each view read is the one last written, so that the variable is just that value.
        parts: (dim, (start, stop) of each part) where the variable is a list of parts; None where it is one array.
        is_uneven: whether the buffer's shape differs between ranks.
        pieces: further variables that hold what was last written to a view, with that view.
        in_turn: whether each turn of a rolled loop has a variable of its own, in place of slots.
    """

    buffer: Buffer
    name: str
    shape: tuple[int, ...]
    dtype: str
    needs_start: bool = False
    is_written: bool = False
    is_value: bool = False
    parts: Parts | None = None
    is_uneven: bool = False
    pieces: dict[str, ViewUse] = field(default_factory=dict)
    in_turn: bool = False


@dataclass
class Views:
    """Writes Python text that reads and writes a program's views; `held` has the variables by buffer name."""

    program: Program
    numbers: NumberTexts
    held: dict[str, HeldBuffer] = field(default_factory=dict)

    def declare(self, buffer: Buffer, name: str, *, sums: bool, is_value: bool) -> None:
        """Add a buffer of the program to `held`, with the Python variable `name`.

        Args:
            sums: whether ops add to the buffer; a bfloat16 or float16 buffer is then held in float32.
            is_value: whether each view read is the one last written (`HeldBuffer.is_value`).
        """
        shapes = self.program.local_shapes(buffer.name)
        shape = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
        dtype = WIDER.get(buffer.dtype, buffer.dtype) if sums else buffer.dtype
        self.held[buffer.name] = HeldBuffer(
            buffer, name, shape, dtype, is_value=is_value, is_uneven=len(set(shapes)) > 1
        )

    def forget_pieces(self) -> None:
        """Forget `HeldBuffer.pieces` of all buffers: such variables are of one block of statements only."""
        for held in self.held.values():
            held.pieces = {}

    def variable(self, access: ViewUse) -> str:
        """Return the Python text of the array that a view lies in; the view itself is still to be cut from it.

        It is the variable of the view's buffer (`x`), or of the view's slot where there are several (`x[1]`).
        Of a buffer that is a list of parts (`HeldBuffer.parts`) it is the part that the view selects (`x[2]`), or
        the first part where the view is not exactly one part.

        Raises:
            UnsupportedError: the view is memory of another rank, its slot depends on coordinates or on the
                index of a rolled loop, or its part on that index.
        """
        if access.view.rank is not None:
            raise UnsupportedError(f"{access.view} is memory of another rank, which jax does not address")
        return f"{self._slot(access)}{self._part_index(access)}"

    def _part_index(self, access: ViewUse) -> str:
        """Return the index of the part that a view is, of a buffer that is a list of parts."""
        parts = self.held[access.view.buffer].parts
        if parts is None:
            return ""
        numbers = {point: part_number(view, parts) for point, view in access.at.items()}
        return f"[{self.numbers.text(access.turns, lambda t, r: numbers[t, r] or 0, static=True)}]"

    def _slot(self, access: ViewUse) -> str:
        """Return the text of the array, or list of parts, of a view's slot."""
        held = self.held[access.view.buffer]
        if held.buffer.slots == 1 or held.in_turn:
            return held.name
        slot = self.numbers.text(access.turns, lambda t, r: _int(access.at[t, r].slot), access.view.slot)
        if slot.traced:
            raise UnsupportedError(f"{access.view}: the slot depends on coordinates")
        return f"{held.name}[{slot}]"

    # --- what a dim of a view is ----------------------------------------------------------------------

    def _local(self, access: ViewUse, dim: int) -> Number:
        """Return the size of a dim of the buffer on each rank."""
        name = access.view.buffer
        return self.numbers.text(access.turns, lambda t, r: self.program.local_shape(name, r)[dim])

    def _is_whole(self, access: ViewUse, dim: int) -> bool:
        """Return whether every rank has the whole of its dim, and if only some ranks run the op, of the array."""
        name = access.view.buffer
        held, everyone = self.held[name], len(self.program.ranks)
        for t, turn in enumerate(access.turns):
            is_short = len(turn.ranks) < everyone and access.most(dim, t) < held.shape[dim]
            if is_short and not held.is_value:
                return False
        return all(
            selector_bounds(view.selectors[dim]) == (0, self.program.local_shape(name, point[1])[dim])
            and not isinstance(view.selectors[dim], Blocked)
            for point, view in access.at.items()
        )

    def _fits(self, access: ViewUse, dim: int) -> bool:
        """Return whether a range of the most elements from each rank's start is within the array."""
        extent = self.held[access.view.buffer].shape[dim]
        return all(
            isinstance(view.selectors[dim], Range)
            and selector_bounds(view.selectors[dim])[0] + access.most(dim, point[0]) <= extent
            for point, view in access.at.items()
        )

    def _are_periods(self, access: ViewUse, dim: int) -> bool:
        """Return whether all ranks read one and the same block of each period, and periods fill the array."""
        extent = self.held[access.view.buffer].shape[dim]
        for t, turn in enumerate(access.turns):
            selectors = {access.at[t, rank].selectors[dim] for rank in turn.ranks}
            for selector in selectors:
                if len(selectors) > 1 or not isinstance(selector, Blocked):
                    return False
                first, block, stride = _int(selector.first), _int(selector.block), _int(selector.stride)
                if (
                    selector_bounds(selector) != (0, extent)
                    or extent % stride
                    or not 0 <= first <= stride - block
                ):
                    return False
        return True

    def _part(self, access: ViewUse, dim: int, part: str) -> Number:
        """Return a number of a dim's selector: start, stop, first, block or stride."""
        written = access.view.selectors[dim]
        index = getattr(written, part, None)
        neutral = {"first": 0, "block": 1, "stride": 1}

        def value(t: int, rank: int) -> int:
            return _int(getattr(access.at[t, rank].selectors[dim], part, neutral.get(part)))

        return self.numbers.text(access.turns, value, index)

    def most(self, access: ViewUse, dim: int) -> Number:
        """Return the text of a view's largest size along `dim` over all ranks in a turn: a Python integer.

        Raises UnsupportedError where that size changes in a rolled loop.
        """
        return self.numbers.text(access.turns, lambda t, r: access.most(dim, t), static=True)

    def _positions(self, access: ViewUse, dim: int) -> str:
        """Return the list of positions of a dim's selector."""
        extent, most = self.held[access.view.buffer].shape[dim], self.most(access, dim)
        start, stop = self._part(access, dim, "start"), self._part(access, dim, "stop")
        if all(isinstance(view.selectors[dim], Range) for view in access.at.values()):
            return f"span({start}, {stop}, {most}, {extent})"
        first, block, stride = (self._part(access, dim, part) for part in ("first", "block", "stride"))
        return f"dealt({first}, {block}, {stride}, {start}, {stop}, {most}, {extent})"

    def _size(self, access: ViewUse, dim: int) -> Number:
        return self.numbers.text(access.turns, lambda t, r: access.at[t, r].selectors[dim].size)

    # --- reading --------------------------------------------------------------------------------------

    def read(self, access: ViewUse, *, raw: bool = False, waits: str = "") -> str:
        """Return Python text of an expression for a view's elements, padded with zeros to the largest rank's size.

        Args:
            raw: do not zero what lies past a rank's own size, and keep the variable's dtype.
            waits: expressions, joined by commas, that must be computed before the array is used; "" for none.
                The slice is taken after that wait, so that XLA can fuse it with the op that reads it.

        Raises UnsupportedError for memory of another rank, or a slot that depends on coordinates.
        """
        held = self.held[access.view.buffer]
        piece = next((n for n, written in held.pieces.items() if written.is_same(access)), None)
        if piece is None:
            held.needs_start |= not held.is_written
        text = piece or self._array(access)
        text = f"after({text}, {waits})" if waits else text
        if piece is None and held.parts is None and not held.is_value:
            text = self._cut(text, access)
            for dim in range(len(held.shape)):
                text = self._read_dim(text, access, dim, filled=not raw)
        if held.dtype != held.buffer.dtype and not raw:
            text = f"{text}.astype({quoted(held.buffer.dtype)})"
        return text

    def _array(self, access: ViewUse) -> str:
        """Return the text of the array of a view, or of all of its parts where it is none of them."""
        parts, text = self.held[access.view.buffer].parts, self.variable(access)
        if parts is None or all(part_number(view, parts) is not None for view in access.at.values()):
            return text
        return f"jnp.concatenate({self._slot(access)}, axis={parts[0]})"

    def _cut(self, text: str, access: ViewUse) -> str:
        """Return the text of an array with the static slices that a view takes of it."""
        cut: list[str] = []
        for dim, extent in enumerate(self.held[access.view.buffer].shape):
            if self._is_whole(access, dim):
                cut.append(":")
            elif self._fits(access, dim) and not self._part(access, dim, "start").traced:
                most = self.most(access, dim)
                start = self._part(access, dim, "start")
                if most.text == str(extent):
                    cut.append(":")
                else:
                    even = access.is_even(dim)
                    stop = self._part(access, dim, "stop") if even else f"{start} + {most}"
                    cut.append(f"{'' if start.text == '0' else start}:{stop}")
            else:
                cut.append(":")
        while cut and cut[-1] == ":":
            cut.pop()
        return f"{text}[{', '.join(cut)}]" if cut else text

    def _read_dim(self, text: str, access: ViewUse, dim: int, *, filled: bool) -> str:
        """Return the text of one dim read from `text`, in which static slices are taken already."""
        keep = not access.is_even(dim) and filled
        if self._is_whole(access, dim):
            return text  # what lies past a rank's own size is zero in every array
        if self._fits(access, dim):
            start = self._part(access, dim, "start")
            if start.traced:
                text = f"lax.dynamic_slice_in_dim({text}, {start}, {self.most(access, dim)}, axis={dim})"
            if keep:
                text = f"keep({text}, {dim}, 0, {self._size(access, dim)})"
            return text
        if self._are_periods(access, dim):
            first, block, stride = (self._part(access, dim, part) for part in ("first", "block", "stride"))
            return f"blocks({text}, {dim}, {first}, {block}, {stride})"
        return f"take({text}, {dim}, {self._positions(access, dim)})"

    # --- writing --------------------------------------------------------------------------------------

    def write(
        self, access: ViewUse, value: str, dtype: str, active: str = "", *, is_read_later: bool = False
    ) -> list[str]:
        """Return lines of Python that store `value`, an expression of dtype `dtype`, in a view.

        Args:
            active: a Python condition; a device on which it is false keeps its old elements. "" stores on all
                devices.
            is_read_later: whether a later op reads exactly this view; the value is then also kept in a variable
                of its own.

        Raises UnsupportedError for memory of another rank, or a slot that depends on coordinates.
        """
        held = self.held[access.view.buffer]
        before = {n: written for n, written in held.pieces.items() if not written.overlaps(access)}
        value = value if dtype == held.dtype else f"{value}.astype({quoted(held.dtype)})"
        target = self.variable(access)
        dims = range(len(held.shape))
        parts = [dim for dim in dims if not self._is_whole(access, dim)]
        held.pieces = before
        lines: list[str] = []
        covers = all(
            access.is_even(dim) and self.most(access, dim).text == str(held.shape[dim]) for dim in parts
        )
        if held.is_value or held.parts is not None or covers:
            new = value
        else:
            held.needs_start |= not held.is_written or held.buffer.slots > 1
            if is_read_later and not active:
                piece = self._piece(access)
                lines.append(f"{piece} = {value}")
                value = piece
            new = self._stored(access, target, value, parts)
        if active:
            held.needs_start |= not held.is_written or held.buffer.slots > 1
            new = f"jnp.where({active}, {new}, {target})"
        held.is_written = True
        return [*lines, f"{target} = {new}"]

    def _piece(self, access: ViewUse) -> str:
        """Return the name of a new piece: of one that is not live, or that the op reads for the last time."""
        held = self.held[access.view.buffer]
        number = 0
        while f"{held.name}_{number}" in held.pieces:
            number += 1
        name = self.free_name(f"{held.name}_{number}")
        held.pieces[name] = access
        return name

    def free_name(self, name: str) -> str:
        """Return `name`, with underscores appended until no buffer, loop index or coordinate has that name."""
        taken = {held.name for held in self.held.values()}
        while name in taken or self.numbers.has(name):
            name += "_"
        return name

    def _stored(self, access: ViewUse, target: str, value: str, parts: list[int]) -> str:
        """Return the array `target` with `value` in a view that is not the whole of `parts`."""
        held = self.held[access.view.buffer]
        fits = all(self._fits(access, dim) and access.is_even(dim) for dim in parts)
        if fits:
            starts = [
                self._part(access, dim, "start") if dim in parts else Number("0", False)
                for dim in range(len(held.shape))
            ]
            if not any(start.traced for start in starts):
                cut = [
                    f"{start}:{self._part(access, dim, 'stop')}" if dim in parts else ":"
                    for dim, start in enumerate(starts)
                ]
                return f"{target}.at[{', '.join(cut)}].set({value})"
            return f"place({target}, {value}, {', '.join(map(str, starts))})"
        if len(parts) == 1 and self._are_periods(access, parts[0]):
            names = ("first", "block", "stride")
            first, block, stride = (self._part(access, parts[0], part) for part in names)
            return f"put_blocks({target}, {parts[0]}, {first}, {block}, {stride}, {value})"
        positions = [
            self._positions(access, dim) if dim in parts else "None" for dim in range(len(held.shape))
        ]
        return f"put({target}, ({', '.join(positions)},), {value})"


def _int(value: object) -> int:
    assert isinstance(value, int), "a view is not resolved"
    return value
