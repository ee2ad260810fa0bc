"""Read a module that XLA has scheduled: what runs in which order, and what lies between start and done.

The text of a compiled module (`compiled.as_text()`, with `is_scheduled=true`) lists the instructions of its entry
computation in the order in which one device issues them. Of those, three sorts matter here:

- products: fusions (or plain instructions) with a convolution or dot inside. XLA's compiler for TPUs says of each
  fusion how many cycles it is expected to take (`estimated_cycles`).
- synchronous collectives, beside which nothing runs.
- asynchronous collectives: a start and a done. What lies between them runs while bytes move. With asynchronous
  collective fusion the steps of a collective run inside the fusions of products between the two; such fusions
  carry the collective once more, under the same `chain_id`.

Nothing here imports JAX.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from meshweave.base.errors import UnsupportedError

Mode = Literal["synchronous", "asynchronous", "fused"]
"""How a collective runs: alone, between a start and a done, or in steps inside the products between the two."""

COLLECTIVES = {
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-reduce": "all_reduce",
    "all-to-all": "all_to_all",
    "collective-permute": "permute",
}
"""Our kind of each of XLA's collectives."""

_PRODUCTS = {"convolution", "dot"}
_ITEM_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128}
_ARRAY = re.compile(r"\b(pred|bf16|[suf]\d+(?:e\dm\d\w*)?|c64|c128)\[([\d,]*)\]")
_HEAD = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{$")
_LINE = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = (.*)$")
_CALLED = re.compile(r"(?:calls|to_apply|body|called_computations)=\{?%([\w.-]+)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_CHAIN = re.compile(r'chain_id="(\w+)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_LISTED_GROUP = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_IOTA_GROUPS = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)+)\}")


@dataclass(frozen=True)
class Instruction:
    """One instruction of a scheduled module.

    Attributes:
        shape: the text of its result's shape.
        operands: the names of its operands.
        rest: its attributes, as written.
    """

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    rest: str

    @property
    def called(self) -> tuple[str, ...]:
        """Return the names of the computations that it calls."""
        return tuple(_CALLED.findall(self.rest))

    @property
    def cycles(self) -> int:
        """Return the cycles that the compiler expects of it; 0 where it says nothing."""
        match = _CYCLES.search(self.rest)
        return int(match[1]) if match else 0


@dataclass(frozen=True)
class ModuleProduct:
    """A product in a schedule: its name and the cycles that the compiler expects of its fusion."""

    name: str
    cycles: int


@dataclass(frozen=True)
class ModuleCollective:
    """A collective in a schedule.

    Attributes:
        name: of its instruction, or of its start.
        kind: the kind of our op: "all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "permute".
        part_bytes: bytes that one member contributes (all-gather, permute, all-reduce), or receives
            (reduce-scatter).
        group: the partitions of one group, or sender and receiver of one message of a permute.
        products: those between start and done, in order; none of a synchronous collective.
    """

    name: str
    kind: str
    mode: Mode
    part_bytes: int
    group: tuple[int, ...]
    products: tuple[ModuleProduct, ...] = ()

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that one member sends around a ring."""
        if self.kind == "permute":
            return self.part_bytes
        count = len(self.group)
        if self.kind == "all_reduce":
            return 2 * (count - 1) * -(-self.part_bytes // count)
        return (count - 1) * self.part_bytes

    @property
    def cycles_between(self) -> int:
        """Return the cycles of the products between start and done."""
        return sum(product.cycles for product in self.products)

    def axis(self, axes: Sequence[tuple[str, int]]) -> str:
        """Return the mesh axis whose coordinate its members differ in, or "" where it is not one alone.

        Args:
            axes: (name, size) of each mesh axis; partitions are numbered row by row.
        """
        differing = set()
        for at, (name, size) in enumerate(axes):
            stride = math.prod(size for _, size in axes[at + 1 :])
            if len({member // stride % size for member in self.group}) > 1:
                differing.add(name)
        return differing.pop() if len(differing) == 1 else ""


@dataclass(frozen=True)
class Event:
    """One thing that the schedule does: `what` happens to a collective, or a product or other fusion runs.

    Attributes:
        collective: its position in `ScheduledModule.collectives`, or -1.
        cycles: the cycles of a product or of another fusion.
    """

    what: Literal["start", "done", "collective", "product", "other"]
    collective: int = -1
    cycles: int = 0


class ScheduledModule:
    """A scheduled module, read from its text. Loops of a known number of turns are written out.

    Raises:
        UnsupportedError: the text is no scheduled module, or a loop with collectives or products in it has no
            known number of turns.
    """

    def __init__(self, text: str) -> None:
        if "is_scheduled=true" not in text.partition("\n")[0]:
            raise UnsupportedError("this is not a scheduled module: its first line has no is_scheduled=true")
        self.computations: dict[str, list[Instruction]] = {}
        self._entry = ""
        current: list[Instruction] = []
        for line in text.splitlines():
            head = _HEAD.match(line)
            if head:
                current = self.computations[head[2]] = []
                self._entry = head[2] if head[1] else self._entry
            elif (match := _LINE.match(line)) is not None:
                current.append(_instruction(match[1], match[2]))

    def schedule(self, computation: str = "") -> Iterator[Instruction]:
        """Yield the instructions of a computation (default: the entry) in order, loops written out."""
        for instruction in self.computations[computation or self._entry]:
            if instruction.opcode == "while":
                yield from self._turns(instruction)
            elif instruction.opcode == "call":
                for called in instruction.called:
                    yield from self.schedule(called)
            else:
                yield instruction

    def _turns(self, loop: Instruction) -> Iterator[Instruction]:
        body = next((called for called in loop.called if called in self.computations), "")
        turn = list(self.schedule(body))
        trips = _TRIPS.search(loop.rest)
        if trips is None and any(self._inside(one, {*_PRODUCTS, *COLLECTIVES}) for one in turn):
            raise UnsupportedError(f"loop {loop.name} of the module has no known number of turns")
        for _ in range(int(trips[1]) if trips else 0):
            yield from turn

    def _inside(self, instruction: Instruction, opcodes: set[str]) -> Instruction | None:
        """Return the first instruction with one of these opcodes that this one is or calls."""
        if instruction.opcode.removesuffix("-start") in opcodes:
            return instruction
        for called in instruction.called:
            for inner in self.computations.get(called, ()):
                first = self._inside(inner, opcodes)
                if first is not None:
                    return first
        return None

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """Return what the schedule does, in order."""
        return self._read[0]

    @cached_property
    def collectives(self) -> tuple[ModuleCollective, ...]:
        """Return the collectives in the order in which they start."""
        return self._read[1]

    @cached_property
    def products(self) -> tuple[ModuleProduct, ...]:
        """Return the products in order."""
        return tuple(
            ModuleProduct(one.name, one.cycles) for one in self.schedule() if self._inside(one, _PRODUCTS)
        )

    @property
    def num_exposed_within(self) -> int:
        """Return how many collectives between the first product and the last have no product beside them.

        Those before the first product and after the last are the prologue and epilogue, which nothing can hide.
        """
        at = [number for number, event in enumerate(self.events) if event.what == "product"]
        if not at:
            return 0
        within = self.events[at[0] : at[-1]]
        started = {event.collective for event in within if event.what in ("start", "collective")}
        return sum(not self.collectives[number].products for number in started)

    @cached_property
    def _read(self) -> tuple[tuple[Event, ...], tuple[ModuleCollective, ...]]:
        reading = _Reading()
        for one in self.schedule():
            carried = self._inside(one, set(COLLECTIVES))
            is_product = self._inside(one, _PRODUCTS) is not None
            base = one.opcode if one.opcode != "fusion" else re.sub(r"[.\d]+$", "", one.name)
            if base.endswith("-done") and (one.opcode != "fusion" or carried is not None):
                reading.end(_key(one, carried))
            elif is_product:
                reading.product(ModuleProduct(one.name, one.cycles))
            elif carried is not None and base.endswith("-start"):
                mode: Mode = "fused" if one.opcode == "fusion" else "asynchronous"
                reading.start(_key(one, carried), self._collective(one.name, carried, mode))
            elif carried is not None:
                reading.collective(self._collective(one.name, carried, "synchronous"))
            elif one.cycles:
                reading.events.append(Event("other", cycles=one.cycles))
        return tuple(reading.events), tuple(reading.finished())

    def _collective(self, name: str, carried: Instruction, mode: Mode) -> ModuleCollective:
        opcode = carried.opcode.removesuffix("-start")
        kind, group = COLLECTIVES[opcode], _group(carried.rest)
        sizes = [_num_bytes(kind_, dims) for kind_, dims in _ARRAY.findall(carried.shape)]
        part = sizes[0] if sizes else 0
        if kind == "all_gather":
            # The shape of a start is (operand, result); that of a plain one is the result, of all members.
            part = (
                part if carried.opcode.endswith("-start") and len(sizes) > 1 else part // max(len(group), 1)
            )
        return ModuleCollective(name, kind, mode, part, group)


class _Reading:
    """The events and collectives of a schedule that have been read, and the collectives under way."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._collectives: list[ModuleCollective] = []
        self._products: dict[int, list[ModuleProduct]] = {}
        self._open: dict[str, int] = {}

    def start(self, key: str, collective: ModuleCollective) -> None:
        """Take in the start of an asynchronous collective, whose done has the same key."""
        self._open[key] = number = len(self._collectives)
        self._products[number] = []
        self._collectives.append(collective)
        self.events.append(Event("start", number))

    def end(self, key: str) -> None:
        """Take in the done of the collective that began under a key."""
        number = self._open.pop(key, None)
        if number is not None:
            self.events.append(Event("done", number))

    def collective(self, collective: ModuleCollective) -> None:
        """Take in a collective that nothing runs beside."""
        self.events.append(Event("collective", len(self._collectives)))
        self._collectives.append(collective)

    def product(self, product: ModuleProduct) -> None:
        """Take in a product, which runs beside all collectives under way."""
        for number in self._open.values():
            self._products[number].append(product)
        self.events.append(Event("product", cycles=product.cycles))

    def finished(self) -> Iterator[ModuleCollective]:
        """Yield the collectives in order of their starts, each with the products beside it."""
        for number, one in enumerate(self._collectives):
            products = tuple(self._products.get(number, ()))
            yield ModuleCollective(one.name, one.kind, one.mode, one.part_bytes, one.group, products)


def _key(one: Instruction, carried: Instruction | None) -> str:
    """Return what a start and its done have in common: the chain of a fused one, else the name of the start."""
    chain = _CHAIN.search(carried.rest) if carried is not None and one.opcode == "fusion" else None
    if chain is not None:
        return f"chain {chain[1]}"
    if one.opcode.endswith("-done"):
        return one.operands[0]
    return one.name.replace("-done", "-start")


def _instruction(name: str, text: str) -> Instruction:
    shape, rest = _split_shape(text)
    opcode, _, rest = rest.partition("(")
    inside, rest = _balanced("(" + rest)
    inside = re.sub(r"/\*.*?\*/", "", inside)
    return Instruction(name, opcode.strip(), shape, tuple(re.findall(r"%([\w.-]+)", inside)), rest)


def _split_shape(text: str) -> tuple[str, str]:
    if text.startswith("("):
        inside, rest = _balanced(text)
        return inside, rest.strip()
    shape, _, rest = text.partition(" ")
    return shape, rest


def _balanced(text: str) -> tuple[str, str]:
    """Return the text inside the parentheses that `text` begins with, and what follows them."""
    depth = 0
    for at, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if not depth:
            return text[1:at], text[at + 1 :]
    return text[1:], ""


def _num_bytes(kind: str, dims: str) -> int:
    bits = _ITEM_BITS.get(kind) or int(re.sub(r"^[a-z]+(\d+).*", r"\1", kind))
    return math.prod(int(size) for size in dims.split(",") if size) * bits // 8


def _group(rest: str) -> tuple[int, ...]:
    """Return the first group of a collective: sender and receiver of the first message of a permute."""
    pairs = _PAIRS.search(rest)
    if pairs:
        return tuple(int(x) for x in re.findall(r"\d+", pairs[1])[:2])
    listed = _LISTED_GROUP.search(rest)
    if listed:
        return tuple(int(x) for x in listed[1].split(","))
    iota = _IOTA_GROUPS.search(rest)
    if iota is None:
        return ()
    count, dims = int(iota[2]), [int(size) for size in iota[3].split(",")]
    order = [int(at) for at in iota[4].split(",")] if iota[4] else list(range(len(dims)))
    strides = [math.prod(dims[at + 1 :]) for at in range(len(dims))]
    return tuple(_element(number, dims, strides, order) for number in range(count))


def _element(number: int, dims: list[int], strides: list[int], order: list[int]) -> int:
    """Return element `number` of an iota of these dims that is transposed by `order` and flattened."""
    value = 0
    for at in reversed(order):
        number, coordinate = divmod(number, dims[at])
        value += coordinate * strides[at]
    return value
