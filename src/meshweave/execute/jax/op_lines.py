"""The ops of a program as lines of Python, one for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from meshweave.base.errors import ProgramError, UnsupportedError
from meshweave.execute.jax.devices import DeviceGroup, DeviceMesh, quoted
from meshweave.execute.jax.turns import Number, NumberTexts, Point, Turn
from meshweave.execute.jax.views import WIDER, HeldBuffer, Views, ViewUse
from meshweave.ir.analysis.shapes import part_sizes
from meshweave.ir.program import Program, ops
from meshweave.ir.program.statements import Statement
from meshweave.ir.program.views import View

_REDUCE = {"sum": "lax.psum", "max": "lax.pmax", "min": "lax.pmin"}
_INDENT = "    "


class OpWriter:
    """Writes the ops of a program as lines of Python that jax traces, one op a line.

    Attributes:
        in_order: whether the emitted code fixes an order. A collective then runs after the last matmul above it
            and the earlier communication of its lane since. A matmul runs after the last matmul above it, and
            after all communication between that matmul and the one before it.
        lines: the lines so far, without the indentation of the function.
        calls: the names of the functions that `call` ops so far run, as keys; each value is None.
    """

    def __init__(
        self,
        program: Program,
        devices: DeviceMesh,
        numbers: NumberTexts,
        views: Views,
        *,
        in_order: bool = False,
    ) -> None:
        self.in_order = in_order
        self.program, self.devices, self.numbers, self.views = program, devices, numbers, views
        self.lines: list[str] = []
        self.calls: dict[str, None] = {}
        self._depth = 0
        self._template: ops.Op | None = None
        self._turns: Sequence[Turn] = ()
        self._resolved: dict[tuple[int, int], Any] = {}
        self._active = ""
        self._later: Sequence[Statement] = ()

    def line(self, text: str) -> None:
        """Append a line of source to `lines`, indented for the loops and conditions that are open."""
        self.lines.append(_INDENT * self._depth + text)

    # --- ops ------------------------------------------------------------------------------------------

    def _op(self, op: ops.Op, turns: Sequence[Turn], active: str) -> None:
        turns = [turn for turn in turns if turn.ranks]
        self._template, self._turns, self._active = op, turns, active
        try:
            self._resolved = {
                (t, rank): self.program.resolved_ops.get(op, env, rank)
                for t, turn in enumerate(turns)
                for rank, env in turn.ranks.items()
            }
        except (ProgramError, UnsupportedError) as error:
            raise type(error)(f"{op.title}: {error}") from None
        self._write_resolved(op)

    def _write_resolved(self, op: ops.Op) -> None:
        """Write an op whose turns and numbers are known."""
        try:
            self._write_op(op)
        except (ProgramError, UnsupportedError) as error:
            raise type(error)(f"{op.title}: {error}") from None

    def _write_op(self, op: ops.Op) -> None:
        match op:
            case ops.Matmul():
                self._matmul(op)
            case ops.Copy(release=release):
                is_added = release is not None and release.update
                before = f"{self._read('out')} + " if is_added else ""
                self._store("out", f"{before}{self._read('src')}", self._dtype(op.src))
            case ops.Add():
                self._store("out", f"{self._read('out')} + {self._read('src')}", self._dtype(op.out))
            case ops.Zero():
                shape = ", ".join(str(size) for size in self._shape("out"))
                held = self.views.held[op.out.buffer]
                self._store("out", f"jnp.zeros(({shape},), {quoted(held.dtype)})", held.dtype)
            case ops.Call():
                self._call(op)
            case ops.DataCollective():
                self._collective(op)
            case _:
                raise UnsupportedError(f"jax has no form for {op.kind}")

    def _access(self, name: str, number: int | None = None) -> ViewUse:
        def chosen(op: Any) -> View:
            value = getattr(op, name)
            view: View = value if number is None else value[number]
            return view

        return ViewUse(
            chosen(self._template), self._turns, {at: chosen(op) for at, op in self._resolved.items()}
        )

    def _read(self, name: str, number: int | None = None, waits: str = "") -> str:
        return self.views.read(self._access(name, number), waits=waits)

    def _store(self, name: str, value: str, dtype: str, number: int | None = None) -> None:
        access = self._access(name, number)
        later = any(view == access.view for op in self._later if isinstance(op, ops.Op) for view in op.reads)
        for text in self.views.write(access, value, dtype, self._active, is_read_later=later):
            self.line(text)

    def _shape(self, name: str) -> list[str]:
        access = self._access(name)
        return [str(self.views.most(access, dim)) for dim in range(len(access.view.selectors))]

    def _dtype(self, view: View) -> str:
        return self.views.held[view.buffer].buffer.dtype

    def _values(self, name: str) -> list[int]:
        return [getattr(op, name) for op in self._resolved.values()]

    def _number(self, name: str) -> Number:
        """Return the text of a number of the op."""
        return self.numbers.text(
            self._turns, lambda t, r: getattr(self._resolved[t, r], name), getattr(self._template, name)
        )

    # --- compute --------------------------------------------------------------------------------------

    def _matmul(self, op: ops.Matmul) -> None:
        waits = "*arrived, last" if self.in_order else ""
        held = self.views.held[op.out.buffer]
        args = [self._operand("a", held, waits), self._operand("b", held)]
        if op.release is not None and op.release.update:
            args.append(self.views.read(self._access("out"), raw=True))
        elif any(self._values("accumulate")):
            args.append(self._onto(held))
        args += [f"{name}=True" for name in ("transpose_a", "transpose_b") if getattr(op, name)]
        dims = [len(view.selectors) for view in (op.a, op.b, op.out)]
        if min(dims[:2]) > 2 and dims[2] == 2:
            args.append("sum_batch=True")
        dtype = WIDER.get(held.buffer.dtype, held.buffer.dtype)
        self._store("out", f"product({', '.join(args)})", dtype)
        if self.in_order:
            self.line(f"last = {self.views.variable(self._access('out'))}")
            self.line("arrived, moved = moved.values(), {}")

    def _operand(self, name: str, out: HeldBuffer, waits: str = "") -> str:
        """Return the text of an operand of a product, in the dtype of the product's sums."""
        text = self._read(name, waits=waits)
        dtypes = self._dtype(getattr(self._template, name)), out.buffer.dtype
        own, summed = (WIDER.get(dtype, dtype) for dtype in dtypes)
        return text if own == summed else f"{text}.astype({quoted(summed)})"

    def _onto(self, held: HeldBuffer) -> str:
        """Return the text of what a product is added to, in the turns that accumulate."""
        sums = self._number("accumulate")
        if sums.traced:
            raise UnsupportedError("whether it accumulates depends on coordinates")
        before = held.needs_start
        text = self.views.read(self._access("out"), raw=True)
        first = next(iter(self._resolved.values())).accumulate
        held.needs_start = before or (not held.is_written and bool(first))
        return text if all(self._values("accumulate")) else f"{text} if {sums} else None"

    def _argument(self, number: int, turn: int, rank: int) -> int:
        value: int = self._resolved[turn, rank].args[number]
        return value

    def _call(self, op: ops.Call) -> None:
        """Write a call. Ranks with unequal shapes are classes, each of which calls with its own."""
        if op.stash or op.part == "free":
            raise UnsupportedError("jax has no form for stashes of calls")
        self.calls[op.fn] = None
        ins = [self._read("ins", number) for number in range(len(op.ins))]
        args = [str(self.numbers.text(self._turns, partial(self._argument, n), arg))
                for n, arg in enumerate(op.args)]  # fmt: skip
        shapes = {
            at: (tuple(view.shape for view in each.ins), tuple(view.shape for view in each.outs))
            for at, each in self._resolved.items()
        }
        classes = [
            tuple(dict.fromkeys(shapes[t, r] for r in turn.ranks)) for t, turn in enumerate(self._turns)
        ]
        variants = list(dict.fromkeys(classes))
        function = f"functions[{quoted(op.fn)}]"
        targets = [self.views.free_name(f"out_{number}") for number in range(len(op.outs))]
        if all(len({shapes[t, r] for r in turn.ranks}) <= 1 for t, turn in enumerate(self._turns)):
            value = f"called({', '.join([function, *ins, *args])})"
        elif args:
            raise UnsupportedError("ranks call it with unequal shapes, and it has arguments beside arrays")
        else:
            which = self.numbers.text(self._turns, lambda t, r: classes[t].index(shapes[t, r]))
            variant = self.numbers.text(self._turns, lambda t, r: variants.index(classes[t]), static=True)
            listed = repr(variants[0]) if len(variants) == 1 else f"{tuple(variants)!r}[{variant}]"
            value = f"call_in_class({', '.join([str(which), function, listed, *ins])})"
        if not targets:
            return
        self.line(f"({', '.join(targets)},) = {value}")
        for number, target in enumerate(targets):
            held = self.views.held[op.outs[number].buffer]
            self._store("outs", f"{target}.astype({quoted(held.dtype)})", held.dtype, number)

    # --- collectives ----------------------------------------------------------------------------------

    def _collective(self, op: Any) -> None:
        group = self._group(op)
        keywords = "" if group.groups is None else f", axis_index_groups={group.groups!r}"
        if group.size == 1:
            self._store("out", self._read("src"), self._dtype(op.src))
            return
        match op:
            case ops.AllGather():
                value = self._all_gather(op, group, keywords)
            case ops.ReduceScatter():
                value = self._reduce_scatter(op, group, keywords)
            case ops.AllReduce():
                value = self._reduce(op.op, self._sent(), group, keywords)
            case ops.Permute():
                value = self._permute(group)
            case ops.AllToAll():
                value = self._all_to_all(op, group, keywords)
            case ops.Broadcast():
                self._refuse_listed(group)
                at = self.numbers.coordinate(group.axes)
                value = f"broadcast({self._sent()}, {group.text}, {self._number('root')}, {at})"
            case _:
                assert isinstance(op, ops.Reduce)
                value = self._reduce(op.op, self._sent(), group, keywords)
                self._active = self._where_reduced()
        self._store("out", self._moved(op.lane, value), self._dtype(op.src))

    def _moved(self, lane: str, value: str) -> str:
        """Return the text of what a lane has moved; in order, it is kept under the lane's name first."""
        if not self.in_order:
            return value
        kept = f"moved[{quoted(lane)}]"
        self.line(f"{kept} = {value}")
        return kept

    def _group(self, op: Any) -> DeviceGroup:
        """Return the devices of a collective."""
        return self.devices.group(op.over)

    def _refuse_listed(self, group: DeviceGroup) -> None:
        if group.groups is not None:
            raise UnsupportedError("its groups are no axes of the mesh")

    def _reduce(self, how: str, value: str, group: DeviceGroup, keywords: str) -> str:
        if how in _REDUCE:
            return f"{_REDUCE[how]}({value}, {group.text}{keywords})"
        self._refuse_listed(group)
        return f"multiply_all({value}, {group.text})"

    def _where_reduced(self) -> str:
        """Return the condition under which a device stores what a reduce gives it: only roots do.

        "" where others have no elements to keep.
        """
        roots = {at: each.over[each.root] == at[1] for at, each in self._resolved.items()}
        if not any(each.out.num_elements for at, each in self._resolved.items() if not roots[at]):
            return self._active
        is_root = f"({self.numbers.text(self._turns, lambda t, r: int(roots[t, r]))}) != 0"
        return f"({self._active}) & ({is_root})" if self._active else is_root

    def _parts(self, text: str, field: str, view_name: str, dim: int, *, joins: bool) -> str:
        """Return the text of an array whose unequal parts are joined, or split into equal ones.

        Args:
            field: the field of the op that has the sizes of parts.
            view_name: the view that they make up.
        """
        count = len(next(iter(self._resolved.values())).over)
        sizes = {
            at: part_sizes(getattr(op, field), getattr(op, view_name).selectors[dim].size, count)
            for at, op in self._resolved.items()
        }
        by_turn: list[set[tuple[int, ...]]] = [set() for _ in self._turns]
        for (t, _), parts in sizes.items():
            by_turn[t].add(parts)
        if all(len({size for parts in of_turn for size in parts}) <= 1 for of_turn in by_turn):
            return text
        largest = [max((size for parts in of_turn for size in parts), default=0) for of_turn in by_turn]
        most = self.numbers.text(self._turns, lambda t, r: largest[t], static=True)
        columns = [self.numbers.text(self._turns, partial(_entry, sizes, p)) for p in range(count)]
        listed = f"({', '.join(map(str, columns))})"
        verb = "join" if joins else "split"
        if not any(column.traced for column in columns):
            return f"{verb}({text}, {dim}, {listed}, {most})"
        total = f", {self.views.most(self._access(view_name), dim)}" if joins else ""
        return f"{verb}_at({text}, {dim}, jnp.stack({listed}), {most}{total})"

    def _all_gather(self, op: ops.AllGather, group: DeviceGroup, keywords: str) -> str:
        """Return the text of a gather: along a later dim by a function, which says what a CPU wants."""
        if op.dim == 0 or keywords:
            text = f"lax.all_gather({self._sent()}, {group.text}, axis={op.dim}, tiled=True{keywords})"
        else:
            turned = ", turned=True" if op.out.buffer in self._read_transposed else ""
            text = f"gather({self._sent()}, {group.text}, {op.dim}{turned})"
        return self._parts(text, "sizes", "out", op.dim, joins=True)

    @cached_property
    def _read_transposed(self) -> set[str]:
        """Return the matrices that products read whole, and always as a first operand that they transpose."""
        products = [op for op in self.program.ops() if isinstance(op, ops.Matmul)]
        as_stored = {op.b.buffer for op in products} | {op.a.buffer for op in products if not op.transpose_a}
        turned = {op.a.buffer for op in products if op.transpose_a and len(op.a.selectors) == 2}
        return {name for name in turned - as_stored if self.views.held[name].is_value}

    def _reduce_scatter(self, op: ops.ReduceScatter, group: DeviceGroup, keywords: str) -> str:
        if op.op != "sum":
            raise UnsupportedError(f"jax has no reduce-scatter by {op.op}")
        text = self._parts(self._sent(), "sizes", "src", op.dim, joins=False)
        if op.dim == 0 or keywords:
            return f"lax.psum_scatter({text}, {group.text}, scatter_dimension={op.dim}, tiled=True{keywords})"
        return f"sum_scatter({text}, {group.text}, {op.dim}, {group.size})"

    def _all_to_all(self, op: ops.AllToAll, group: DeviceGroup, keywords: str) -> str:
        text = self._parts(self._sent(), "send_sizes", "src", op.split_dim, joins=False)
        dims = f"split_axis={op.split_dim}, concat_axis={op.concat_dim}"
        text = f"lax.all_to_all({text}, {group.text}, {dims}, tiled=True{keywords})"
        return self._parts(text, "recv_sizes", "out", op.concat_dim, joins=True)

    def _sent(self) -> str:
        """Return the text of what the op sends; in order, after the last product and what its lane sent since."""
        text = self._read("src")
        if not self.in_order or self._template is None:
            return text
        return f"after({text}, last, moved.get({quoted(self._template.lane)}))"

    def _permute(self, group: DeviceGroup) -> str:
        """Return the text of a ring step; members of different groups may go different distances."""
        shifts = {(t, r): op.shift % group.size for (t, r), op in self._resolved.items()}
        by_turn = [{shifts[t, r] for r in turn.ranks} for t, turn in enumerate(self._turns)]
        value = self._sent()
        if group.groups is None and all(len(of_turn) == 1 for of_turn in by_turn):
            by = self.numbers.text(self._turns, lambda t, r: shifts[t, r], static=True)
            if by.text == "0":
                return value
            return f"shift({value}, {group.text}, {group.size}, {by})"
        pairs = [self._pairs(t, shifts) for t in range(len(self._turns))]
        if any(listed != pairs[0] for listed in pairs):
            raise UnsupportedError(
                "the distances of a permute depend on coordinates and on the turn of a loop"
            )
        axes = tuple(axis for axis, size in self.devices.sizes.items() if size > 1)
        return f"lax.ppermute({value}, {quoted(axes)}, {pairs[0]!r})"

    def _pairs(self, turn: int, shifts: dict[tuple[int, int], int]) -> list[tuple[int, int]]:
        """Return (sender, receiver) of each message of a permute, as device numbers."""
        pairs = []
        for rank in self._turns[turn].ranks:
            members = self._resolved[turn, rank].over
            to = members[(members.index(rank) + shifts[turn, rank]) % len(members)]
            pairs.append((self.devices.number(rank), self.devices.number(to)))
        return pairs


def _entry(sizes: Mapping[Point, tuple[int, ...]], part: int, turn: int, rank: int) -> int:
    return sizes[turn, rank][part]
