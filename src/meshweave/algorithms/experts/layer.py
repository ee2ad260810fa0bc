"""Writes a layer of experts around an exchange: packed rows go to experts, grouped products, and rows come back.

A cell is the rows of one source rank for one expert. On `ep`, a mesh of one axis `x`, tensor P (experts,
sources, hidden) has the packed rows of each cell on their source, and Q the same rows on the rank of the expert:
a dispatch is a reshard of cells from S(1) to S(0), a combine the reverse. Table `n{i}` has the number of rows of
each cell in slice i, a part of each rank's tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from meshweave.algorithms.experts.problem import ExpertsProblem
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.program.text import mesh_to_text

_SPACES = "    "


class RowExchange(Protocol):
    """How an algorithm moves rows of tokens to experts and back, as lines of program text.

    A row is one token for one expert. A rank's packed rows are those of its tokens, ordered by expert, then token.
    """

    def dispatch(self, layer: LayerText, src: str, dst: str, tensor: str) -> Iterator[str]:
        """Yield the statements that move packed rows in buffer `src` to the ranks of their experts, into `dst`.

        `tensor` is the name of the tensor that buffer `dst` holds.
        """

    def combine(self, layer: LayerText, src: str, dst: str, tensor: str) -> Iterator[str]:
        """Yield the statements that move rows of experts in buffer `src` to the ranks of their tokens, into `dst`.

        `tensor` is the name of the tensor that buffer `src` holds.
        """

    def temps(self, layer: LayerText, tensor: str, use: str) -> Iterator[str]:
        """Yield the declarations of the buffers that an exchange needs besides its source and destination.

        `tensor` is the name of the tensor of rows on the ranks of experts; `use` is "dispatch" or "combine".
        """


def flat_mesh(problem: ExpertsProblem) -> Mesh:
    """Return the mesh "ep" of one axis "x" with all ranks of the problem."""
    return Mesh("ep", (problem.num_ranks,), ("x",), problem.mesh.ranks)


@dataclass(frozen=True)
class LayerText:
    """Writes the program text of a mixture-of-experts layer (`ir.program.parse`).

    A row is one token for one expert; the rank of the token is its source. Views have dims (experts, sources,
    features). In the text `ep.x` is a rank's position on the mesh, and `e` the loop index of a rank's experts.

    Attributes:
        title: the program's name.
        exchange: writes the moves of rows to experts and back.
        slices: number of slices of a rank's tokens, each dispatched, multiplied and combined on its own.
        by_source: whether experts multiply the rows of each source rank on their own; else all rows together.
    """

    problem: ExpertsProblem
    title: str
    exchange: RowExchange
    slices: int = 1
    by_source: bool = False

    # --- names ----------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Return the number of ranks of the layer."""
        return self.problem.num_ranks

    @property
    def own(self) -> int:
        """Return the number of experts that each rank has."""
        return self.problem.local_experts

    def peer(self, step: str) -> str:
        """Return, as an expression, the mesh position `step` places after this rank's, wrapping round at the end.

        `step` is an expression: "1 + r" -> "((ep.x + 1 + r) % 4)" on 4 ranks.
        """
        return f"((ep.x + {step}) % {self.count})"

    def packed(self, buffer: str, position: str) -> str:
        """Return as text the view of the packed rows in `buffer` for expert `e` of the rank at `position`.

        `position` is an expression for a mesh position.
        """
        first = f"{self.own} * {position} + e"
        return f"{buffer}[{first}:{first} + 1, :, :]"

    def received(self, buffer: str, position: str) -> str:
        """Return as text the view of the rows in `buffer` from the source at `position` for own expert `e`.

        `position` is an expression for a mesh position.
        """
        return f"{buffer}[e:e + 1, {position}:{position} + 1, :]"

    def slice_size(self, number: int) -> int:
        """Return the number of tokens in slice `number`, from 0, of a rank's tokens."""
        size = -(-self.problem.tokens // self.slices)
        return min(self.problem.tokens - number * size, size)

    def _tokens(self, buffer: str, number: int) -> str:
        if self.slices == 1:
            return buffer
        first = number * -(-self.problem.tokens // self.slices)
        return f"{buffer}[{first}:{first + self.slice_size(number)}, :]"

    # --- the program ----------------------------------------------------------------------------------

    def text(self) -> str:
        """Return the program for any routing as text for `parse`; the row counts of `counts` are inputs of it."""
        part = self.problem.part
        names = {
            "layer": (self._layer, "PQHAZB"),
            "training": (self._training, "PQHAZB"),
            "dispatch": (self._dispatch, "PQ"),
            "weighted_dispatch": (self._weighted_dispatch, "PQ"),
            "combine": (self._combine, "ZB"),
        }
        write, tensors = names[part]
        lines = [f'program("{self.title}")', f"ep = {mesh_to_text(flat_mesh(self.problem))}"]
        lines += self._counts()
        lines += [*self._plain_tensors(), *self._cell_tensors(tensors), *self._buffers(tensors)]
        lines += ["compute = lane()", "go = lane()", "back = lane()", "with ep:"]
        return "\n".join((*lines, *(_SPACES + line for line in write()))) + "\n"

    def _counts(self) -> Iterator[str]:
        problem = self.problem
        for number in range(self.slices):
            size = self.slice_size(number)
            most = min(problem.most_rows, size)
            shape = (problem.num_experts, problem.num_ranks)
            yield f"n{number} = counts({shape}, {most}, {(0, size * problem.top_k)})"

    def _plain_tensors(self) -> Iterator[str]:
        for name, (shape, dtype) in plain_tensors(self.problem).items():
            yield f'{name} = tensor({shape}, "{dtype}")'

    @property
    def _is_training(self) -> bool:
        return self.problem.part == "training"

    def _features(self, tensor: str) -> int:
        inner = self.problem.inner
        return {"H": 2 * inner, "A": inner}.get(tensor.lstrip("d"), self.problem.hidden)

    def _cell_tensors(self, names: str) -> Iterator[str]:
        problem = self.problem
        listed = [*names, *(f"d{name}" for name in names if self._is_training)]
        for number in range(self.slices):
            for name in listed:
                shape = (problem.num_experts, problem.num_ranks, self._features(name))
                yield f'{name}{number} = tensor({shape}, "{problem.dtype}", counts=n{number})'
            yield from self._terms(number)
            yield from self._meanings(names, number)
        if self._is_training and self.slices > 1:
            for name in ("dW1", "dW2"):
                yield f"computes({name}, add({', '.join(f'{name}_{i}' for i in range(self.slices))}))"

    def _terms(self, number: int) -> Iterator[str]:
        """Yield the tensors whose sum over slices a weight gradient is."""
        if self._is_training and self.slices > 1:
            for name in ("dW1", "dW2"):
                shape, dtype = plain_tensors(self.problem)[name]
                yield f'{name}_{number} = tensor({shape}, "{dtype}")'

    def _meanings(self, names: str, i: int) -> Iterator[str]:
        if "Q" in names:
            yield f"computes(Q{i}, same(P{i}))"
        if "B" in names:
            yield f"computes(B{i}, same(Z{i}))"
        if self._is_training:
            yield f"computes(dZ{i}, same(dB{i}))"
            yield f"computes(dP{i}, same(dQ{i}))"
        if "H" in names:
            yield from self.product_meanings(i)

    def product_meanings(self, i: int) -> Iterator[str]:
        """Yield as text the equations of the experts for the rows Q of slice `i`, a line each.

        They are H = Q W1, A = activate(H) and Z = A W2; for training also those of dA, dH and dQ, and of the
        slice's terms of dW1 and dW2.
        """
        yield f"computes(H{i}, product(Q{i}, W1))"
        yield f'computes(A{i}[e, s, :], call("activate", H{i}[e, s, :]))'
        yield f"computes(Z{i}, product(A{i}, W2))"
        if self._is_training:
            yield f"computes(dA{i}, product(dZ{i}, W2, transpose_b=True))"
            yield f'computes(dH{i}[e, s, :], call("activate_gradient", H{i}[e, s, :], dA{i}[e, s, :]))'
            yield f"computes(dQ{i}, product(dH{i}, W1, transpose_b=True))"
            for name, a, b in (("dW1", "Q", "dH"), ("dW2", "A", "dZ")):
                term = name if self.slices == 1 else f"{name}_{i}"
                yield f"computes({term}, product({a}{i}, {b}{i}, transpose_a=True))"

    def _buffers(self, names: str) -> Iterator[str]:
        outputs = output_names(self.problem)
        for name in plain_tensors(self.problem):
            kind = "output" if name in outputs else "input"
            yield f"{name.lower()} = {kind}({name}, ep[S(0)])"
        ends = {"dispatch": "Q", "weighted_dispatch": "Q", "combine": "Z"}.get(self.problem.part, "")
        for i in range(self.slices):
            for name in names:
                kind = "temp" if name != ends else "input" if name == "Z" else "output"
                placed = "ep[S(1)]" if name in "PB" else "ep[S(0)]"
                yield f"{name.lower()}{i} = {kind}({name}{i}, {placed})"
                if self._is_training:
                    yield f"d{name.lower()}{i} = temp(d{name}{i}, {placed})"
            if "Q" in names:
                yield from self.exchange.temps(self, f"Q{i}", "dispatch")
            if "B" in names:
                yield from self.exchange.temps(self, f"Z{i}", "combine")
            if self._is_training:
                yield from self.exchange.temps(self, f"dZ{i}", "dispatch")
                yield from self.exchange.temps(self, f"dQ{i}", "combine")

    def _each(self, write: object) -> Iterator[str]:
        for number in range(self.slices):
            yield from write(number)  # type: ignore[operator]

    def _dispatch(self) -> Iterator[str]:
        yield from self._each(lambda i: [self._pack(i)])
        yield from self._each(lambda i: self.exchange.dispatch(self, f"p{i}", f"q{i}", f"Q{i}"))

    def _weighted_dispatch(self) -> Iterator[str]:
        yield from self._each(lambda i: [self._pack_weighted(i, f"p{i}")])
        yield from self._each(lambda i: self.exchange.dispatch(self, f"p{i}", f"q{i}", f"Q{i}"))

    def _combine(self) -> Iterator[str]:
        yield from self._each(lambda i: self.exchange.combine(self, f"z{i}", f"b{i}", f"Z{i}"))
        yield from self._each(lambda i: [self._weigh(i)])

    def _layer(self) -> Iterator[str]:
        yield from self._dispatch()
        yield from self._each(self.forward_products)
        yield from self._combine()

    def _training(self) -> Iterator[str]:
        yield from self._layer()
        yield from self._each(lambda i: [self._pack_weighted(i, f"db{i}"), self._gate_gradient(i)])
        yield from self._each(lambda i: self.exchange.dispatch(self, f"db{i}", f"dz{i}", f"dZ{i}"))
        yield from self._each(self.backward_products)
        yield from self._each(lambda i: self.exchange.combine(self, f"dq{i}", f"dp{i}", f"dQ{i}"))
        yield from self._each(
            lambda i: [call_text("add_rows", self._tokens("dx", i), f"dp{i}", self._tokens("choices", i))]
        )

    # --- calls and products ---------------------------------------------------------------------------

    def _pack(self, i: int) -> str:
        return call_text("pack", f"p{i}", self._tokens("x", i), self._tokens("choices", i))

    def _pack_weighted(self, i: int, out: str) -> str:
        tokens = (self._tokens(name, i) for name in ("dy", "gates", "choices"))
        return call_text("pack_weighted", out, *tokens)

    def _weigh(self, i: int) -> str:
        tokens = (self._tokens(name, i) for name in ("gates", "choices"))
        return call_text("weigh", self._tokens("y", i), f"b{i}", *tokens)

    def _gate_gradient(self, i: int) -> str:
        tokens = (self._tokens(name, i) for name in ("dy", "choices"))
        return call_text("gate_gradient", self._tokens("dgates", i), f"b{i}", *tokens)

    def _rows(self) -> tuple[list[str], str]:
        """Return the loops over groups of rows that are multiplied together, and the selectors of such a group."""
        loops = [f"for e in range({self.own}):"]
        if not self.by_source:
            return loops, "[e:e + 1, :, :]"
        source = self.peer(f"{self.count} - r")
        return [f"for r in range({self.count}):", *loops], f"[e:e + 1, {source}:{source} + 1, :]"

    def _in_loops(self, *statements: str) -> Iterator[str]:
        loops, _ = self._rows()
        for depth, loop in enumerate(loops):
            yield _SPACES * depth + loop
        for statement in statements:
            yield _SPACES * len(loops) + statement

    def forward_products(self, i: int) -> Iterator[str]:
        """Yield as text the statements of experts forward on slice `i`: product, activation, product."""
        _, rows = self._rows()
        yield from self._in_loops(
            _product(f"h{i}{rows}", f"q{i}{rows}", "w1[e:e + 1, :, :]"),
            call_text("activate", f"a{i}{rows}", f"h{i}{rows}"),
            _product(f"z{i}{rows}", f"a{i}{rows}", "w2[e:e + 1, :, :]"),
        )

    def backward_products(self, i: int) -> Iterator[str]:
        """Yield as text the statements of experts backward on slice `i`.

        They compute the gradients of its rows, and add its terms to the gradients of weights.
        """
        _, rows = self._rows()
        yield from self._in_loops(
            _product(f"da{i}{rows}", f"dz{i}{rows}", "w2[e:e + 1, :, :]", "transpose_b"),
            call_text("activate_gradient", f"dh{i}{rows}", f"h{i}{rows}", f"da{i}{rows}"),
            _product(f"dq{i}{rows}", f"dh{i}{rows}", "w1[e:e + 1, :, :]", "transpose_b"),
        )
        expert, adds = "[e:e + 1, :, :]", ", accumulate=1" if i else ""
        yield f"for e in range({self.own}):"
        for weights, a, b in (("dw2", "a", "dz"), ("dw1", "q", "dh")):
            yield _SPACES + _product(
                f"{weights}{expert}", f"{a}{i}{expert}", f"{b}{i}{expert}", "transpose_a", adds
            )


def call_text(name: str, out: str, *ins: str, args: tuple[int | str, ...] = ()) -> str:
    """Return the text of a `call` op that runs function `name` on views `ins` and writes the view `out`.

    `args` are further arguments of the function: integers, or expressions for integers. A name that begins with
    "activate" is marked as element-wise work. The op is in lane "compute".
    """
    tail = "," if len(ins) == 1 else ""
    more = ', work="elementwise"' if name.startswith("activate") else ""
    more += f", args=({', '.join(map(str, args))})" if args else ""
    return f'call(fn="{name}", outs=({out},), ins=({", ".join(ins)}{tail}){more}, lane=compute)'


def _product(out: str, a: str, b: str, flag: str = "", more: str = "") -> str:
    shown = f", {flag}=True" if flag else ""
    return f"matmul({out}, {a}, {b}{shown}{more}, lane=compute)"


def output_names(problem: ExpertsProblem) -> tuple[str, ...]:
    """Return the names of the output tensors of what `problem.part` asks for; packed rows are left out."""
    gradients = ("dX", "dGates", "dW1", "dW2")
    return {"layer": ("Y",), "training": ("Y", *gradients), "combine": ("Y",)}.get(problem.part, ())


def plain_tensors(problem: ExpertsProblem) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return {name: (global shape, dtype)} of the input and output tensors of what `problem.part` asks for.

    Tensors of packed rows are left out.
    """
    rows = problem.num_ranks * problem.tokens
    tokens, gates = ((rows, problem.hidden), problem.dtype), ((rows, problem.top_k), problem.dtype)
    experts, hidden, inner = problem.num_experts, problem.hidden, problem.inner
    weights = {
        "W1": ((experts, hidden, 2 * inner), problem.dtype),
        "W2": ((experts, inner, hidden), problem.dtype),
    }
    choices = {"Choices": ((rows, problem.top_k), "int32")}
    match problem.part:
        case "dispatch":
            return {"X": tokens, **choices}
        case "weighted_dispatch":
            return {"dY": tokens, "Gates": gates, **choices}
        case "combine":
            return {"Gates": gates, **choices, "Y": tokens}
    forward = {"X": tokens, **choices, "Gates": gates, **weights, "Y": tokens}
    if problem.part == "layer":
        return forward
    gradients = {f"d{name}": forward[name] for name in ("X", "Gates", "W1", "W2")}
    return {**forward, "dY": tokens, **gradients}
