"""A program as the source of one Pallas kernel: products, and ring steps as remote DMA with semaphores.

The kernel is the program op by op, in the order of `tpu.interleave`. A `permute` starts a remote copy into the
buffer of its receiver. A later op waits for it exactly where the program's derived edges say so: for what
arrives, if it touches that; for what leaves, if it overwrites that. Where what a permute fills was used before,
its receiver first tells the sender that it is free. Nothing else orders the kernel, so a race that TPU interpret
mode finds in it would be one that the proof of the program missed.

All operands lie in the chip's vector memory, so shards are small. Shards are even, and copies of slices have the
same blocks on all ranks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from meshweave.base.errors import UnsupportedError
from meshweave.describe.layout import Shard
from meshweave.execute.jax.devices import DeviceMesh, quoted
from meshweave.ir.analysis.dataflow import Dataflow, analyse
from meshweave.ir.program import Buffer, On, Program
from meshweave.ir.program.expressions import Index, Var, evaluate, names_in, substitute
from meshweave.ir.program.ops import Add, Copy, Matmul, Op, Permute, Zero
from meshweave.ir.program.views import Range, View, selector_intervals
from meshweave_studies.tpu.interleave import interleave

ENTRY = "on_mesh"
"""The function of the source that returns the jitted function of whole tensors."""

_HEAD = '''"""The program {name} as a Pallas kernel: on_mesh(mesh), on a mesh {mesh}.

Written by meshweave. The lines of kernel are the ops of the program, and what they wait for.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec as P


def product(a: Array, b: Array, dtype: Any, transpose_a: bool = False, transpose_b: bool = False) -> Array:
    """Return a (M, K) @ b (K, N), summed in `dtype`; a stored (K, M), b stored (N, K) where transposed."""
    dims = ((0 if transpose_a else 1,), (1 if transpose_b else 0,))
    return lax.dot_general(a, b, (dims, ((), ())), preferred_element_type=dtype)

'''


def pallas_source(program: Program) -> str:
    """Return the source of a module whose `on_mesh(mesh, interpret=False)` returns the jitted function.

    It takes whole input tensors, in the order in which the program declares them, and returns whole outputs.

    Raises:
        UnsupportedError: the program has ops other than products, copies, sums and ring steps along mesh axes, or
            its shards are uneven.
    """
    return _PallasWriter(interleave(program)).source()


class _PallasWriter:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.devices = DeviceMesh(program)
        self.flow: Dataflow = analyse(program)
        (block,) = program.body
        assert isinstance(block, On)
        self.ops: list[Op] = [op for op in block.body if isinstance(op, Op)]
        self.numbers = {
            i: n for n, i in enumerate(i for i, op in enumerate(self.ops) if isinstance(op, Permute))
        }
        self.lines: list[str] = []
        self.waits: set[tuple[int, str]] = set()
        self.shapes = {buffer.name: self._shape(buffer) for buffer in program.buffers}

    def _of_kind(self, *kinds: str) -> list[Buffer]:
        return [buffer for buffer in self.program.buffers if buffer.kind in kinds]

    def _shape(self, buffer: Buffer) -> tuple[int, ...]:
        shapes = set(self.program.local_shapes(buffer.name))
        if len(shapes) != 1:
            raise UnsupportedError(f"shards of buffer {buffer.name} are uneven; a kernel needs equal ones")
        return shapes.pop()

    # --- the kernel -----------------------------------------------------------------------------------

    def source(self) -> str:
        """Return the whole module."""
        for index in range(len(self.ops)):
            self._op(index)
        for index in self.numbers:
            self._wait(index, "send")
            self._wait(index, "recv")
        names = [
            buffer.name
            for kind in (("input",), ("output",), ("scratch", "temp"))
            for buffer in self._of_kind(*kind)
        ]
        axes = [f"{axis} = lax.axis_index({quoted(axis)})" for axis in self.devices.axes]
        body = [*axes, *self._entrance(), *self.lines]
        mesh = ", ".join(f"{axis}={size}" for axis, size in self.devices.sizes.items())
        parameters = ", ".join(f"{name}: Any" for name in [*names, "sent", "received", "free"])
        kernel = f"def kernel({parameters}) -> None:\n"
        kernel += (
            '    """Run the program on one device; buffers are references, the last three semaphores."""\n'
        )
        kernel += "".join(f"    {line}\n" for line in body)
        return _HEAD.format(name=self.program.name, mesh=mesh) + "\n" + kernel + "\n\n" + self._entry()

    def _entrance(self) -> list[str]:
        """Return the lines in which a device and its neighbours wait for each other to enter the kernel."""
        neighbours: dict[str, None] = {}
        for op in self.ops:
            if isinstance(op, Permute):
                for sign in (1, -1):
                    neighbours[self._device(op, sign)] = None
        if not neighbours:
            return []
        lines = ["entered = pltpu.get_barrier_semaphore()"]
        lines += [
            f"pl.semaphore_signal(entered, device_id={device}, device_id_type=pl.DeviceIdType.MESH)"
            for device in neighbours
        ]
        return [*lines, f"pl.semaphore_wait(entered, {len(neighbours)})"]

    def _device(self, op: Permute, sign: int = 1) -> str:
        """Return the coordinates of the device to which a permute sends, or with -1 from which it receives."""
        axis = self._axis(op)
        size, shift = self.devices.sizes[axis], self._shift(op) * sign
        moved = f"({axis} + {shift % size}) % {size}"
        return f"({', '.join(moved if name == axis else name for name in self.devices.axes)},)"

    def _axis(self, op: Permute) -> str:
        axes = self.devices.axes_of(op.over) if isinstance(op.over, str) else None
        if axes is None or len(axes) != 1:
            raise UnsupportedError(f"{op.title} runs over {op.over}, which is no axis of the mesh")
        return axes[0]

    def _shift(self, op: Permute) -> int:
        if not isinstance(op.shift, int):
            raise UnsupportedError(f"{op.title} goes a distance that depends on coordinates")
        return op.shift

    def _op(self, index: int) -> None:
        op = self.ops[index]
        self._wait_for_edges(index)
        match op:
            case Matmul(release=None):
                self._matmul(index, op)
            case Copy(release=None):
                for out, src in zip(self._boxes(index, op.out), self._boxes(index, op.src), strict=True):
                    self.lines.append(f"{out} = {src}")
            case Add():
                self.lines.append(f"{self._ref(op.out)} += {self._ref(op.src)}")
            case Zero():
                self.lines.append(f"{self._ref(op.out)} = jnp.zeros_like({self._ref(op.out)})")
            case Permute():
                self._permute(index, op)
            case _:
                raise UnsupportedError(f"a kernel has no form for {op.title}")

    def _matmul(self, index: int, op: Matmul) -> None:
        dtype = self.program.buffer_of[op.out.buffer].dtype
        args = [self._ref(op.a), self._ref(op.b), f"jnp.{dtype}"]
        args += [f"{name}=True" for name in ("transpose_a", "transpose_b") if getattr(op, name)]
        resolved = (self._resolved(index, rank) for rank in self.program.ranks)
        sums = {bool(one.accumulate) for one in resolved if isinstance(one, Matmul)}
        if len(sums) > 1:
            raise UnsupportedError(f"whether {op.title} accumulates depends on coordinates")
        self.lines.append(f"{self._ref(op.out)} {'+=' if sums.pop() else '='} product({', '.join(args)})")

    def _permute(self, index: int, op: Permute) -> None:
        axis, number = self._axis(op), self.numbers[index]
        size = self.devices.sizes[axis]
        name = next(name for name in self._variables(op) if name.endswith(f".{axis}"))
        at: Index = (Var(name) + self._shift(op) % size) % size
        out = View(
            op.out.buffer,
            tuple(
                Range(substitute(s.start, name, at), None if s.stop is None else substitute(s.stop, name, at))
                for s in op.out.selectors
                if isinstance(s, Range)
            ),
            substitute(op.out.slot, name, at),
        )
        if self._was_used(index):
            given = f"free.at[{number}]"
            to = f"device_id={self._device(op, -1)}, device_id_type=pl.DeviceIdType.MESH"
            self.lines.append(f"pl.semaphore_signal({given}, {to})")
            self.lines.append(f"pl.semaphore_wait({given}, 1)")
        self.lines += [
            f"move_{number} = pltpu.make_async_remote_copy(",
            f"    src_ref={self._ref(op.src, at=True)},",
            f"    dst_ref={self._ref(out, at=True)},",
            f"    send_sem=sent.at[{number}],",
            f"    recv_sem=received.at[{number}],",
            f"    device_id={self._device(op)},",
            "    device_id_type=pl.DeviceIdType.MESH,",
            f")  # {op.title}",
            f"move_{number}.start()",
        ]

    def _variables(self, op: Permute) -> list[str]:
        return [f"{mesh.name}.{axis}" for mesh in self.program.meshes for axis in mesh.axes]

    # --- waits ----------------------------------------------------------------------------------------

    def _resolved(self, index: int, rank: int) -> Op:
        return self.program.ops_by_rank[rank][index].op

    def _wait_for_edges(self, index: int) -> None:
        """Write the waits for permutes that an op must follow."""
        for rank in self.program.ranks:
            op = self._resolved(index, rank)
            for before in self.flow.predecessors[rank][index]:
                move = self._resolved(before, rank)
                if not isinstance(move, Permute):
                    continue
                if any(view.overlaps(move.out) for _, view in op.accesses()):
                    self._wait(before, "recv")
                if any(mode != "read" and view.overlaps(move.src) for mode, view in op.accesses()):
                    self._wait(before, "send")

    def _wait(self, index: int, what: str) -> None:
        if (index, what) not in self.waits:
            self.waits.add((index, what))
            self.lines.append(f"move_{self.numbers[index]}.wait_{what}()")

    def _was_used(self, index: int) -> bool:
        """Return whether an op before a permute touches what the permute fills, on any rank."""
        for rank in self.program.ranks:
            out = self._resolved(index, rank).writes[0]
            for before in range(index):
                if any(view.overlaps(out) for _, view in self._resolved(before, rank).accesses()):
                    return True
        return False

    # --- views ----------------------------------------------------------------------------------------

    def _ref(self, view: View, at: bool = False) -> str:
        """Return the text of a box in a buffer: its value, or with `at` the reference."""
        buffer = self.program.buffer_of[view.buffer]
        parts = [] if buffer.slots == 1 else [self._text(view.slot)]
        for dim, selector in enumerate(view.selectors):
            if not isinstance(selector, Range):
                raise UnsupportedError(f"a kernel has no form for {view}")
            parts.append(self._slice(view, dim, selector))
        text = ", ".join(parts) if any(part != ":" for part in parts) else "..."
        return f"{buffer.name}{'.at' if at else ''}[{text}]"

    def _slice(self, view: View, dim: int, selector: Range) -> str:
        whole = self.shapes[view.buffer][dim]
        stop: Index = whole if selector.stop is None else selector.stop
        envs = [self.program.environment(rank) for rank in self.program.ranks]
        sizes = {evaluate(stop, env) - evaluate(selector.start, env) for env in envs}
        if len(sizes) > 1:
            raise UnsupportedError(f"{view} has unequal sizes on different ranks")
        size = sizes.pop()
        if size == whole:
            return ":"
        start = self._text(selector.start)
        return f"{start}:{int(start) + size}" if start.isdigit() else f"pl.ds({start}, {size})"

    def _boxes(self, index: int, view: View) -> list[str]:
        """Return the boxes of which a view of blocks along one dim consists, each at one place on all ranks."""
        if all(isinstance(selector, Range) for selector in view.selectors):
            blocked = self._partner_blocks(index, view)
            if blocked is None:
                return [self._ref(view)]
            dim, widths = blocked
            begins = [sum(widths[:at]) for at in range(len(widths))]
            return [self._ref(self._within(view, dim, b, b + w)) for b, w in zip(begins, widths, strict=True)]
        dim, intervals = self._blocks(index, view)
        return [self._ref(self._cut(view, dim, Range(lo, hi))) for lo, hi in intervals]

    def _blocks(self, index: int, view: View) -> tuple[int, list[tuple[int, int]]]:
        dims = [dim for dim, selector in enumerate(view.selectors) if not isinstance(selector, Range)]
        op = self.ops[index]
        which = next(at for at, (_, other) in enumerate(op.accesses()) if other == view)
        listed = [
            selector_intervals(self._resolved(index, rank).accesses()[which][1].selectors[dims[0]])
            for rank in self.program.ranks
        ]
        if len(dims) > 1 or any(intervals != listed[0] for intervals in listed):
            raise UnsupportedError(f"the blocks of {view} differ from rank to rank")
        return dims[0], listed[0]

    def _partner_blocks(self, index: int, view: View) -> tuple[int, list[int]] | None:
        for _, other in self.ops[index].accesses():
            if other != view and not all(isinstance(selector, Range) for selector in other.selectors):
                dim, intervals = self._blocks(index, other)
                return dim, [hi - lo for lo, hi in intervals]
        return None

    def _within(self, view: View, dim: int, begin: int, end: int) -> View:
        selector = view.selectors[dim]
        assert isinstance(selector, Range)
        return self._cut(view, dim, Range(selector.start + begin, selector.start + end))

    def _cut(self, view: View, dim: int, selector: Range) -> View:
        selectors = list(view.selectors)
        selectors[dim] = selector
        return View(view.buffer, tuple(selectors), view.slot)

    def _text(self, index: Index) -> str:
        """Return an expression in mesh coordinates as text; tables and bounds of uneven shards have none."""
        text = str(index)
        for name in set(names_in(index)):
            axes = self.devices.axes_of_coordinate(name)
            if axes is not None and not axes:
                text = re.sub(rf"\b{re.escape(name)}\b", "0", text)
                continue
            if axes is None or len(axes) != 1:
                raise UnsupportedError(f"{name} is no coordinate of the mesh")
            text = re.sub(rf"\b{re.escape(name)}\b", axes[0], text)
        if re.search(r"[\[<>=]|min\(|max\(|\band\b|\bor\b", text):
            raise UnsupportedError(f"a kernel has no form for the number {index}")
        return text

    # --- whole tensors --------------------------------------------------------------------------------

    def _entry(self) -> str:
        inputs, outputs = self._of_kind("input"), self._of_kind("output")
        scratch = self._of_kind("scratch", "temp")
        count = max(len(self.numbers), 1)
        scratches = [self._memory(buffer) for buffer in scratch]
        scratches += [f"pltpu.SemaphoreType.{kind}(({count},))" for kind in ("DMA", "DMA", "REGULAR")]
        shapes = [f"jax.ShapeDtypeStruct({self.shapes[b.name]}, {quoted(b.dtype)})" for b in outputs]
        space = "pl.BlockSpec(memory_space=pltpu.VMEM)"
        parameters = ", ".join(f"{buffer.tensor}: Array" for buffer in inputs)
        arguments = ", ".join(str(buffer.tensor) for buffer in inputs)
        listed = "".join(f"            {text},\n" for text in scratches)
        return (
            f"def {ENTRY}(mesh: Mesh, interpret: Any = False) -> Any:\n"
            f'    """Return the jitted function of whole tensors; `interpret` is that of `pl.pallas_call`."""\n'
            f"    call = pl.pallas_call(\n        kernel,\n        out_shape=({', '.join(shapes)},),\n"
            f"        in_specs=[{space}] * {len(inputs)},\n        out_specs=({space},) * {len(outputs)},\n"
            f"        scratch_shapes=[\n{listed}        ],\n"
            f"        compiler_params=pltpu.CompilerParams(collective_id=0),\n"
            f"        interpret=interpret,\n    )\n"
            f"    local = jax.shard_map(\n        call,\n        mesh=mesh,\n"
            f"        in_specs=({', '.join(map(self._spec, inputs))},),\n"
            f"        out_specs=({', '.join(map(self._spec, outputs))},),\n        check_vma=False,\n    )\n\n"
            f"    @jax.jit\n    def whole({parameters}) -> Any:\n        return local({arguments})\n\n"
            f"    return whole\n"
        )

    def _memory(self, buffer: Buffer) -> str:
        shape: Sequence[int] = self.shapes[buffer.name]
        shape = (buffer.slots, *shape) if buffer.slots > 1 else shape
        return f"pltpu.VMEM({tuple(shape)}, jnp.{buffer.dtype})"

    def _spec(self, buffer: Buffer) -> str:
        layout = buffer.layout
        assert layout is not None
        dims: list[list[str]] = [[] for _ in self.shapes[buffer.name]]
        for axis, placement in zip(layout.mesh.axes, layout.placements, strict=True):
            if isinstance(placement, Shard):
                dims[placement.dim] += self.devices.axes_of(f"{layout.mesh.name}.{axis}") or ()
            elif layout.mesh.size(axis) > 1:
                raise UnsupportedError(f"a kernel has no form for layout {layout}")
        return f"P({', '.join('None' if not names else quoted(tuple(names)) for names in dims)})"
