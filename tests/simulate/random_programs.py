"""Random programs and random machines. Every program has partners and shapes that fit; it may still deadlock."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from typing import Any

from meshweave.base.errors import LayoutError
from meshweave.cost.libraries import SIZED_KINDS
from meshweave.cost.machine import Machine
from meshweave.describe.machine.chip import Chip
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.host import HostRates
from meshweave.describe.machine.kernels import (
    TILE_MENUS,
    AttentionConstants,
    ChipKernels,
    CollectiveConstants,
    ProductConstants,
    ProductTable,
)
from meshweave.describe.machine.links import COMM_KINDS, CommConstants, NetworkAxis
from meshweave.describe.machine.network import (
    FullMeshNetwork,
    HostsNetwork,
    Network,
    RingNetwork,
    SwitchNetwork,
    TorusNetwork,
)
from meshweave.describe.machine.tree import TreeLevel, TreeNetwork
from meshweave.ir.program import Program
from meshweave.ir.program.call_dims import CALL_DIMS
from meshweave.ir.program.parse import parse

SHAPES = ((1,), (2,), (3,), (5,), (1, 4), (2, 2), (3, 2), (2, 3), (4, 1), (2, 1, 3), (2, 2, 2))
ROWS, COLS = 6, 8


# --- programs -------------------------------------------------------------------------------------------


@dataclass
class _Mesh:
    name: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def axes(self) -> str:
        return "xyz"[: len(self.shape)]

    def overs(self) -> list[tuple[str, int, str]]:
        """Each axis and the whole mesh: its name, how many members, and which of them this rank is."""
        place = "0"
        for axis, size in zip(self.axes, self.shape, strict=True):
            place = f"({place} * {size} + {self.name}.{axis})"
        whole = (self.name, math.prod(self.shape), place)
        each = zip(self.axes, self.shape, strict=True)
        return [whole] + [(f"{self.name}.{axis}", size, f"{self.name}.{axis}") for axis, size in each]


@dataclass
class _Writer:
    draw: random.Random
    lanes: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    depth: int = 0
    loop: str = ""

    def write(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    def lane(self) -> str:
        return f"lane={self.draw.choice(self.lanes)}"

    def span(self, extent: int, size: int = 0) -> str:
        size = size or self.draw.randint(0 if self.draw.random() < 0.1 else 1, extent)
        start = self.draw.randint(0, extent - size)
        return f"{start}:{start + size}"

    def box(self, mesh: _Mesh, names: str = "st", selectors: str = "") -> str:
        """A view of a scratch buffer; its slot may depend on the turn."""
        slot = self.draw.choice(["", "(1)", "(2)"] + [f"({self.loop} % 3)"] * bool(self.loop))
        return f"{mesh.name}_{self.draw.choice(names)}{slot}[{selectors or self.selectors()}]"

    def selectors(self) -> str:
        cols = self.span(COLS)
        if self.draw.random() < 0.2:
            first, block, stride = self.draw.randint(-3, 2), self.draw.randint(1, 3), self.draw.randint(2, 5)
            cols = f"blocked({first}, {block}, {stride}, 0, {self.draw.randint(1, COLS)})"
        return f"{self.span(ROWS)}, {cols}"

    def number(self, low: int, high: int) -> str:
        value = self.draw.randint(low, high)
        return f"{value} + {self.loop}" if self.loop and self.draw.random() < 0.3 else str(value)

    # --- ops ----------------------------------------------------------------------------------------------

    def local(self, mesh: _Mesh) -> None:
        same = self.selectors()
        out, src = self.box(mesh, "stro", same), self.box(mesh, "stro", same)
        kinds = ["copy", "add", "zero", "matmul", "matmul", "batch", "call", "call", "uneven"]
        match self.draw.choice(kinds):
            case "zero":
                self.write(f"zero({out}, {self.lane()})")
            case "matmul":
                m, n, k = (self.draw.randint(0 if self.draw.random() < 0.1 else 1, ROWS) for _ in range(3))
                a, b = (f"{k}, :{m}", f"{n}, :{k}"), (f"{m}, :{k}", f"{k}, :{n}")
                transpose = self.draw.random() < 0.3
                left, right = a if transpose else b
                out = self.box(mesh, "r", f":{m}, :{n}")
                accumulate = self.draw.choice(
                    ["", ", accumulate=1"] + [f", accumulate={self.loop} > 0"] * bool(self.loop)
                )
                extra = ", transpose_a=True, transpose_b=True" if transpose else ""
                views = f"{out}, {self.box(mesh, 's', ':' + left)}, {self.box(mesh, 't', ':' + right)}"
                self.write(f"matmul({views}{extra}{accumulate}, {self.lane()})")
            case "batch":
                self.batch(mesh)
            case "call":
                flops, size = (self.draw.choice([0, self.draw.randint(1, 10**6)]) for _ in range(2))
                work = self.work() if self.draw.random() < 0.5 else ""
                stash = ""
                if self.draw.random() < 0.4:
                    part = self.draw.choice(["forward", "input_grad", "weight_grad"])
                    stash = f', stash="{self.draw.choice("pq")}", part="{part}", args=({self.number(0, 2)},)'
                self.write(
                    f'call(fn="f", outs=({out},), ins=({src},), flops={flops}, bytes={size}{stash}{work}, '
                    f"{self.lane()})"
                )
            case "uneven":
                self.write(f"zero({mesh.name}_u, {self.lane()})")
            case kind:
                self.write(f"{kind}({out}, {src}, {self.lane()})")

    def batch(self, mesh: _Mesh) -> None:
        """A product with batch dims, of one matrix for the whole batch, or summed over the batch."""
        m, n, k = (self.draw.randint(0 if self.draw.random() < 0.1 else 1, 4) for _ in range(3))
        batch, slot = f":{self.draw.randint(1, 2)}, :{self.draw.randint(1, 3)}, ", self.number(0, 1)
        a, b = f"{mesh.name}_batch({slot})[{batch}:{m}, :{k}]", f"{mesh.name}_batch(2)[{batch}:{k}, :{n}]"
        out = f"{mesh.name}_product[{batch}:{m}, :{n}]"
        match self.draw.choice(["all", "left", "right", "sum"]):
            case "left":
                b = f"{mesh.name}_t[:{k}, :{n}]"
            case "right":
                a = f"{mesh.name}_s[:{m}, :{k}]"
            case "sum":
                out = f"{mesh.name}_r[:{m}, :{n}]"
        self.write(f"matmul({out}, {a}, {b}, {self.lane()})")

    def work(self) -> str:
        """The kind, shape and dtype of a call."""
        kind = self.draw.choice(sorted(CALL_DIMS))
        sizes = ", ".join(self.number(0, 5) for _ in CALL_DIMS[kind])
        shape = f", shape=({sizes},)" if self.draw.random() < 0.8 else ""
        dtype = self.draw.choice(["", ', dtype="bfloat16"', ', dtype="float64"'])
        return f', work="{kind}"{shape}{dtype}'

    def collective(self, mesh: _Mesh) -> None:
        if self.draw.random() < 0.15 and len(mesh.ranks) > 1:
            listed = self.draw.sample(mesh.ranks, self.draw.randint(1, len(mesh.ranks)))
            self.write(f"with ranks({', '.join(map(str, sorted(listed)))}):")
            self.depth += 1
            self._collective(mesh, f"({', '.join(map(str, listed))},)", len(listed), None)
            self.depth -= 1
        else:
            over, count, place = self.draw.choice(mesh.overs())
            self._collective(mesh, f'"{over}"', count, place)

    def _collective(self, mesh: _Mesh, over: str, count: int, place: str | None) -> None:
        kinds = [
            "all_gather",
            "reduce_scatter",
            "all_reduce",
            "broadcast",
            "reduce",
            "all_to_all",
            "permute",
            "fence",
            "exchange",
        ]
        kind = self.draw.choice(kinds)
        tail = f"over={over}, {self.lane()}"
        rows, same = self.span(ROWS), self.selectors()
        wide, narrow = f"{mesh.name}_g({self.draw.randint(0, 1)})", self.box(mesh, "st", "{}")
        uneven = place is not None and self.draw.random() < 0.4
        by, step = self.draw.randint(1, 4), self.draw.randint(0, 3)
        match kind:
            case "fence":
                self.write(f"fence({tail})")
            case "exchange":
                ends = f"outs=({self.box(mesh, 't', same)},), ins=({self.box(mesh, 's', same)},)"
                sizes = f"num_ranks={count}, part_bytes={self.draw.randint(0, 4096)}"
                terms = f'carries="{self.draw.choice(["all_gather", "reduce_scatter"])}", {sizes}'
                if self.draw.random() < 0.6:
                    library = self.draw.choice(["all_to_all", "deepep", "trtllm_one_sided"])
                    terms = (
                        f'carries="{self.draw.choice(["dispatch", "combine"])}", {sizes}, tokens={by * 8}, '
                    )
                    terms += f'experts={8 * count}, chosen=2, load=1.25, library="{library}"'
                self.write(f"exchange({ends}, {terms}, {tail})")
            case "permute":
                views = f"{self.box(mesh, 's', same)}, {self.box(mesh, 't', same)}"
                self.write(f"permute({views}, shift={self.number(-3, 9)}, {tail})")
            case "all_reduce" | "broadcast" | "reduce":
                views = f"{self.box(mesh, 's', same)}, {self.box(mesh, 't', same)}"
                extra = ""
                if kind != "all_reduce":
                    root = f"({self.number(0, 9)}) % {count}"
                    extra = f", root={root}, packets={self.number(1, 4)}"
                self.write(f"{kind}({views}{extra}, {tail})")
            case "all_gather" | "reduce_scatter":
                sizes, mine = [by] * count, str(by)
                extra = ""
                if uneven:
                    sizes = [member * step % (by + 1) for member in range(count)]
                    mine = f"{place} * {step} % {by + 1}"
                    extra = f", sizes=peer * {step} % {by + 1}"
                    if self.draw.random() < 0.5:
                        extra = f", sizes=({', '.join(map(str, sizes))},)"
                whole, part = f"{wide}[{rows}, :{sum(sizes)}]", narrow.format(f"{rows}, :{mine}")
                views = f"{whole}, {part}" if kind == "all_gather" else f"{part}, {whole}"
                self.write(f"{kind}({views}, dim=1{extra}, {tail})")
            case "all_to_all":
                out, src = f"{mesh.name}_g(0)[{rows}, :{{}}]", f"{mesh.name}_g(1)[{rows}, :{{}}]"
                extra, sent, taken = "", str(count * by), str(count * by)
                if uneven:
                    send = f"({place} * {step} + {{}} * 2) % {by + 1}"
                    recv = f"({{}} * {step} + {place} * 2) % {by + 1}"
                    sent, taken = (" + ".join(x.format(i) for i in range(count)) for x in (send, recv))
                    extra = f", send_sizes={send.format('peer')}, recv_sizes={recv.format('peer')}"
                views = f"{out.format(taken)}, {src.format(sent)}"
                self.write(f"all_to_all({views}, split_dim=1, concat_dim=1{extra}, {tail})")

    def on(self, rank: int, line: str) -> None:
        self.write(f"with ranks({rank}):")
        self.write(f"    {line}")

    def messages(self, mesh: _Mesh) -> None:
        """A few sends, then their recvs: in few or narrow lanes they may wait for each other."""
        recvs = []
        lane = self.lane()
        for _ in range(self.draw.randint(1, 3)):
            source, target = self.draw.sample(mesh.ranks, 2)
            same, tag = self.selectors(), self.number(0, 1)
            self.on(source, f"send({self.box(mesh, 'st', same)}, peer={target}, tag={tag}, {lane})")
            update = self.draw.choice(["", ", update=True"])
            recvs.append(
                (target, f"recv({self.box(mesh, 'st', same)}, peer={source}, tag={tag}{update}, {lane})")
            )
        for target, recv in recvs:
            self.on(target, recv)

    def one_sided(self, mesh: _Mesh) -> None:
        for _ in range(self.draw.randint(1, 3)):
            me, other = self.draw.choice(mesh.ranks), self.draw.choice(mesh.ranks)
            same = self.selectors()
            near, far = self.box(mesh, "st", same), f"at({other}, {self.box(mesh, 'ro', same)})"
            release = f"release=release(update={self.draw.random() < 0.5}), {self.lane()}"
            m, n = self.draw.randint(1, ROWS), self.draw.randint(1, ROWS)
            target, left, right = (
                self.box(mesh, *one) for one in (("r", f":{m}, :{n}"), ("s", f":{m}, :3"), ("t", f":3, :{n}"))
            )
            lines = [
                f"get({near}, {far}, {self.lane()})",
                f"put({far}, {near}, {self.lane()})",
                f"accumulate({far}, {near}, {self.lane()})",
                f"put({far}, {near}, {release})",
                f"copy({far}, {near}, {release})",
                f"matmul(at({other}, {target}), {left}, {right}, {release})",
            ]
            self.on(me, self.draw.choice(lines))
        if self.draw.random() < 0.5:
            self.write(f'fence(over="{mesh.name}", {self.lane()})')

    # --- statements ---------------------------------------------------------------------------------------

    def statements(self, mesh: _Mesh, count: int) -> None:
        for _ in range(count):
            kind = self.draw.random()
            if kind < 0.3:
                self.local(mesh)
            elif kind < 0.65:
                self.collective(mesh)
            elif kind < 0.75 and len(mesh.ranks) > 1:
                self.messages(mesh)
            elif kind < 0.82:
                self.one_sided(mesh)
            elif kind < 0.9 and not self.loop:
                self.loop = "i"
                self.block(mesh, f"for i in range({self.draw.randint(0, 3)}):", 2)
                self.loop = ""
            elif kind < 0.95:
                axis, size = self.draw.choice(list(zip(mesh.axes, mesh.shape, strict=True)))
                self.write(f"if {mesh.name}.{axis} % {size} == {self.draw.randint(0, size - 1)}:")
                self.depth += 1
                self.local(mesh)
                self.depth -= 1
            else:
                self.block(mesh, f"if {self.number(0, 1)}:", 1)

    def block(self, mesh: _Mesh, head: str, count: int) -> None:
        self.write(head)
        self.depth += 1
        self.local(mesh)
        self.statements(mesh, count)
        self.depth -= 1


def program_text(draw: random.Random, num_statements: int = 8) -> str:
    """A program on one or two meshes, which may share ranks."""
    shape = draw.choice(SHAPES)
    count = math.prod(shape)
    ranks = list(range(count)) if draw.random() < 0.5 else draw.sample(range(count + 2), count)
    meshes = [_Mesh("a", shape, tuple(ranks))]
    if draw.random() < 0.4:
        other = draw.choice(SHAPES[:6])
        pool = range(max(ranks) + math.prod(other) + 1)
        meshes.append(_Mesh("b", other, tuple(draw.sample(pool, math.prod(other)))))
    scale = draw.choice([1, 1, 13, 1009])
    dtype = draw.choice(["float32", "bfloat16", "float64"])
    writer = _Writer(draw)
    writer.write('program("random")')
    writer.write('X = tensor((17, 13), "float32")')
    for mesh in meshes:
        name, axes = mesh.name, ", ".join(f'"{axis}"' for axis in mesh.axes)
        writer.write(f"{name} = mesh({(*mesh.shape,)}, ({axes},), ranks={mesh.ranks})")
        order = draw.choice(["", "", ", order=(1, 0)"])
        for buffer in "stro":
            writer.write(
                f'{name}_{buffer} = scratch(({ROWS * scale}, {COLS}), "{dtype}", on={name}, slots=3{order})'
            )
        writer.write(f'{name}_batch = scratch((2, 3, 4, 4), "{dtype}", on={name}, slots=4)')
        writer.write(f'{name}_product = scratch((2, 3, 4, 4), "{dtype}", on={name})')
        writer.write(
            f'{name}_g = scratch(({ROWS * scale}, {8 * math.prod(mesh.shape)}), "{dtype}", on={name}, slots=2)'
        )
        if draw.random() < 0.5:
            writer.write(f'{name}_u = scratch((3 + {name}.x % 2, 5), "float32", on={name})')
        else:
            writer.write(f"{name}_u = temp(X, {name}[{', '.join(['S(0)', 'S(1)', 'R'][: len(mesh.shape)])}])")
    for number in range(draw.randint(1, 4)):
        order, width = draw.choice(["fifo", "ready"]), draw.choice([1, 1, 2, 5])
        writer.lanes.append(f"lane{number}")
        writer.write(f'lane{number} = lane(order="{order}", width={width})')
    for _ in range(draw.randint(1, 3)):
        mesh = draw.choice(meshes)
        writer.write(f"with {mesh.name}:")
        writer.depth += 1
        writer.local(mesh)
        writer.statements(mesh, draw.randint(1, num_statements))
        writer.depth -= 1
    return "\n".join(writer.lines) + "\n"


def random_program(draw: random.Random, num_statements: int = 8) -> Program:
    return parse(program_text(draw, num_statements))


# --- machines -------------------------------------------------------------------------------------------

RATES = (10007, 99991, 1_000_003, 15_485_863, 1_000_000_007, 49_999_999_967)


def _seconds(draw: random.Random) -> float:
    return draw.choice([0.0, 0.0, 1e-6, 1.7e-5, draw.random() * 1e-3])


def _axis(draw: random.Random) -> NetworkAxis:
    rates = draw.sample(RATES, 2)
    constants = tuple(
        (
            kind,
            CommConstants(
                max(draw.choice(rates) * draw.choice([1, 1, 2, 0.37]), 1), _seconds(draw), _seconds(draw)
            ),
        )
        for kind in COMM_KINDS
        if draw.random() < 0.3
    )
    return NetworkAxis("n", rates[0], _seconds(draw), draw.choice([1, 2]), constants, _seconds(draw))


def _network(draw: random.Random, chips: int) -> Network:
    """A network of at least so many chips."""
    match draw.choice(["torus", "fixed", "ring", "switch", "hosts", "tree", "full_mesh"]):
        case "torus":
            return TorusNetwork(tuple(_axis(draw) for _ in range(draw.randint(1, 3))), None, chips, True)
        case "fixed":
            width = draw.randint(1, 3)
            shape = (width, -(-chips // width))
            return TorusNetwork((_axis(draw), _axis(draw)), shape, math.prod(shape))
        case "ring":
            return RingNetwork(_axis(draw), chips)
        case "switch":
            return SwitchNetwork(replace(_axis(draw), num_directions=1), chips)
        case "hosts":
            per_host = draw.randint(1, 4)
            intra = replace(_axis(draw), num_directions=1)
            return HostsNetwork(-(-chips // per_host), per_host, intra, draw.randint(1, 3), _axis(draw))
        case "full_mesh":
            per_package = draw.randint(1, 3)
            return FullMeshNetwork(-(-chips // per_package), per_package, _axis(draw), _axis(draw))
    fanout = draw.randint(1, 3)
    bridges = [_axis(draw) if draw.random() < 0.3 else None for _ in range(2)]
    levels = (
        TreeLevel(fanout, _axis(draw), draw.randint(1, 2), bridges[0]),
        TreeLevel(-(-chips // fanout), _axis(draw), 1, bridges[1]),
    )
    return TreeNetwork(levels)


def _collective(draw: random.Random) -> CollectiveConstants:
    times, rates = [_seconds(draw) for _ in range(4)], [draw.choice(RATES) for _ in range(2)]
    power = draw.choice([0.0, 0.5, 1.0])
    return CollectiveConstants(times[0], times[1], rates[0], times[2], times[3], rates[1], 1e-9, power)


def random_kernels(draw: random.Random) -> ChipKernels:
    """Constants of products and attention in some dtypes, of element-wise calls, maybe a table of products."""
    rates = [1e9 * draw.randint(1, 100) for _ in range(3)]
    own = random.Random(str(rates))
    tiles = draw.choice(sorted(TILE_MENUS))
    products = ProductConstants(tiles, draw.randint(1, 9), rates[0], rates[1], _seconds(draw), 1e-9, rates[2])
    attention = AttentionConstants(
        draw.randint(1, 9), draw.choice([1, 3, 64]), rates[0], 1e-9, 1e-9, rates[2]
    )
    table = ProductTable(((1, 1, 1, 1e-6), (8, 3, 5, 2e-6), (4, 64, 2, 1e-5)), "random")
    dtypes = draw.sample(["float32", "bfloat16", "float64"], 2)
    return ChipKernels(
        "c",
        "a test",
        tuple((dtype, products) for dtype in dtypes),
        tuple((dtype, attention) for dtype in dtypes[:1]),
        elementwise=(1e-9, rates[0]) if draw.random() < 0.5 else None,
        tables=((dtypes[1], table),) if draw.random() < 0.5 else (),
        collectives=tuple((kind, _collective(own)) for kind in SIZED_KINDS if own.random() < 0.7),
        switch_reduces=own.random() < 0.5,
    )


def random_cluster(draw: random.Random, chips: int) -> Cluster:
    tile = draw.choice([None, (1, 1, 1), (3, 5, 2), (128, 128, 128)])
    rate, share = draw.choice(RATES), draw.choice([0.0, 0.0, 0.2, 1.0])
    peaks = (("float32", 1e12),)
    chip = Chip("c", peaks, draw.choice(RATES) * 7, 1 << 30, rate, _seconds(draw), "", tile, share)
    if draw.random() < 0.4:
        least = chip.effective_flops_per_s // 1000 + 1  # FLOPs of the engine's own rate fit in 64 bits
        by_dtype = tuple((dtype, max(draw.choice(RATES), least)) for dtype in ("bfloat16", "float64"))
        kinds = draw.sample(sorted(CALL_DIMS), 2)
        by_call = tuple((kind, max(draw.choice(RATES) // 3, least)) for kind in kinds)
        chip = replace(chip, dtype_flops_per_s=by_dtype, call_flops_per_s=by_call)
    if tile is None and draw.random() < 0.5:
        chip = replace(chip, kernels=random_kernels(draw))
    if draw.random() < 0.4:
        chip = replace(chip, pack_launch_s=_seconds(draw), pack_bytes_per_s=draw.choice(RATES))
    room = draw.choice([0, 0, 200, 1 << 16, 1 << 40])
    network = _network(draw, chips)
    host = _host(draw) if draw.random() < 0.4 else None
    return Cluster("random", chip, network, "a test", host, send_buffer_bytes=room)


def _host(draw: random.Random) -> HostRates:
    return HostRates(_seconds(draw), _seconds(draw), _seconds(draw), waits=draw.random() < 0.5)


def random_machine(draw: random.Random, program: Program, cluster: Cluster | None = None) -> Machine | None:
    """The program on a random cluster, its meshes carried by the network or not; None where it carries none."""
    cluster = cluster or random_cluster(draw, max(program.ranks) + 1 + draw.choice([0, 0, 1]))
    placement: Any = None
    if draw.random() < 0.2:
        placement = tuple(draw.sample(range(cluster.num_chips), cluster.num_chips))
    machine = Machine(cluster, program.meshes, draw.random() < 0.5, placement)
    for one in (machine, replace(machine, logical=True)):
        try:
            for name in (
                name
                for mesh in program.meshes
                for name in (mesh.name, *(f"{mesh.name}.{x}" for x in mesh.axes))
            ):
                one.axis(name)
            one.weighted_link_rate(("link", 0, 0, 1)) if isinstance(cluster.network, TorusNetwork) else None
            return one
        except LayoutError:
            continue
    return None
