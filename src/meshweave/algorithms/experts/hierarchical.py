"""Dispatch in two steps: one copy of a token to each host that has experts of it, then inside the host.

As a chain of cross-mesh resharding sends one copy over each NIC and spreads it inside (AlpaComm), and as
DeepEP does: rank l of a host exchanges with rank l of the others, rows are fanned out to experts there, and go
to their ranks over the links of the host. Back, a host sums what its experts made of a token before it crosses
the NIC. With t tokens of b bytes a rank and p the mean number of other hosts that a token needs, a NIC carries
t p b each way, where direct exchange carries t b times the experts on other hosts.

Sources are counted by rank of the host first and then by host, so that what a gateway holds of one expert is a
run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshweave.algorithms.contract import Array
from meshweave.algorithms.experts.algorithm import UnchosenExperts
from meshweave.algorithms.experts.host_functions import host_functions
from meshweave.algorithms.experts.layer import LayerText, call_text, output_names, plain_tensors
from meshweave.algorithms.experts.pairwise import PairwiseExchange
from meshweave.algorithms.experts.problem import ExpertsProblem
from meshweave.algorithms.fused.product import NoChoice
from meshweave.ir.program.text import mesh_to_text

_EXPERTS, _SOURCES, _GATEWAY = "[S(0), S(0)]", "[SS(1, {local}), S(1)]", "[S(0), S(1)]"
_TENSORS = {
    # cells of table, features, layout, tensor that it equals
    "U": ("m", "hidden", _SOURCES, ""),
    "V": ("m", "hidden", _GATEWAY, "U"),
    "K": ("m", "choices", _SOURCES, ""),
    "KV": ("m", "choices", _GATEWAY, "K"),
    "GA": ("m", "gates", _SOURCES, ""),
    "GV": ("m", "gates", _GATEWAY, "GA"),
    "P0": ("n0", "hidden", _GATEWAY, ""),
    "Q0": ("n0", "hidden", _EXPERTS, "P0"),
    "H0": ("n0", "inner", _EXPERTS, ""),
    "A0": ("n0", "half", _EXPERTS, ""),
    "Z0": ("n0", "hidden", _EXPERTS, ""),
    "B0": ("n0", "hidden", _GATEWAY, "Z0"),
    "SV": ("m", "hidden", _GATEWAY, ""),
    "ST": ("m", "hidden", _SOURCES, "SV"),
}
_GRADIENTS = {
    "dST": ("m", "hidden", _SOURCES, ""),
    "dSV": ("m", "hidden", _GATEWAY, "dST"),
    "dGV": ("m", "gates", _GATEWAY, ""),
    "dGA": ("m", "gates", _SOURCES, "dGV"),
    "dB0": ("n0", "hidden", _GATEWAY, ""),
    "dZ0": ("n0", "hidden", _EXPERTS, "dB0"),
    "dA0": ("n0", "half", _EXPERTS, ""),
    "dH0": ("n0", "inner", _EXPERTS, ""),
    "dQ0": ("n0", "hidden", _EXPERTS, ""),
    "dP0": ("n0", "hidden", _GATEWAY, "dQ0"),
    "dV": ("m", "hidden", _GATEWAY, ""),
    "dU": ("m", "hidden", _SOURCES, "dV"),
}


@dataclass(frozen=True)
class HierarchicalText:
    """Writes the program text of a layer whose tokens go to hosts first, then to experts inside them."""

    problem: ExpertsProblem
    title: str

    @property
    def _products(self) -> LayerText:
        return LayerText(self.problem, self.title, PairwiseExchange())

    @property
    def _tensors(self) -> dict[str, tuple[str, str, str, str]]:
        if self.problem.part == "dispatch":
            return {name: _TENSORS[name] for name in ("U", "V", "K", "KV", "P0", "Q0")}
        return _TENSORS | (_GRADIENTS if self.problem.part == "training" else {})

    def text(self) -> str:
        """Return the program for any routing as text for `parse`; the row counts of `counts` are inputs of it."""
        problem = self.problem
        ranks, most, sent = problem.num_ranks, problem.most_rows, problem.tokens * problem.top_k
        mesh = replace(problem.mesh, name="ep", axes=("host", "local"))
        lines = [
            f'program("{self.title}")',
            f"ep = {mesh_to_text(mesh)}",
            f"n0 = counts({(problem.num_experts, ranks)}, {most}, {(0, sent)})",
            f"m = counts({(problem.hosts, ranks)}, {problem.tokens})",
        ]
        for name, (shape, dtype) in plain_tensors(problem).items():
            lines.append(f'{name} = tensor({shape}, "{dtype}")')
        lines += [*self._declared(), *self._meanings(), *self._buffers()]
        lines += [f"{name} = lane()" for name in ("compute", "nic", "go", "back")]
        body = [*self._dispatch()]
        if problem.part != "dispatch":
            body += self._combine()
        if problem.part == "training":
            body += self._backward()
        return "\n".join((*lines, "with ep:", *(f"    {line}" for line in body))) + "\n"

    def _declared(self) -> Iterator[str]:
        problem = self.problem
        features = {
            "hidden": problem.hidden,
            "inner": 2 * problem.inner,
            "half": problem.inner,
            "choices": problem.top_k,
            "gates": problem.top_k,
        }
        rows = {"m": problem.hosts, "n0": problem.num_experts}
        for name, (table, kind, _, _) in self._tensors.items():
            shape = (rows[table], problem.num_ranks, features[kind])
            dtype = "int32" if kind == "choices" else problem.dtype
            yield f'{name} = tensor({shape}, "{dtype}", counts={table})'

    def _meanings(self) -> Iterator[str]:
        for name, (_, _, _, src) in self._tensors.items():
            if src:
                yield f"computes({name}, same({src}))"
        if self.problem.part != "dispatch":
            yield from self._products.product_meanings(0)

    def _buffers(self) -> Iterator[str]:
        outputs = output_names(self.problem)
        for name in plain_tensors(self.problem):
            kind = "output" if name in outputs else "input"
            yield f"{name.lower()} = {kind}({name}, ep[S(0), S(0)])"
        for name, (_, _, layout, _) in self._tensors.items():
            kind = "output" if name == "Q0" and self.problem.part == "dispatch" else "temp"
            yield f"{name.lower()} = {kind}({name}, ep{layout.format(local=self.problem.local_ranks)})"

    # --- statements -----------------------------------------------------------------------------------

    @property
    def _per_host(self) -> int:
        return self.problem.num_experts // self.problem.hosts

    def _pack(self, out: str, src: str) -> str:
        return call_text("pack_hosts", out, src, "choices", args=(self.problem.hosts, self._per_host))

    def _sum(self, out: str, src: str) -> str:
        return call_text("sum_hosts", out, src, "choices", args=(self.problem.hosts, self._per_host))

    def _fan(self, name: str, out: str, *ins: str) -> str:
        return call_text(name, out, *ins, args=("ep.host", self._per_host))

    def _to_hosts(self, out: str, src: str) -> str:
        return f'all_to_all({out}, {src}, over="ep.host", split_dim=0, concat_dim=1, lane=nic)'

    def _from_hosts(self, out: str, src: str) -> str:
        return f'all_to_all({out}, {src}, over="ep.host", split_dim=1, concat_dim=0, lane=nic)'

    def _inside(self, out: str, src: str, lane: str) -> Iterator[str]:
        """Yield the exchange inside a host; "go": from gateways to the ranks of experts, "back": the reverse."""
        problem = self.problem
        own, hosts, local = problem.local_experts, problem.hosts, problem.local_ranks

        def received(buffer: str, position: str) -> str:
            first = f"{hosts} * {position}"
            return f"{buffer}[e:e + 1, {first}:{first} + {hosts}, :]"

        def fanned(buffer: str, position: str) -> str:
            first = f"{own} * {position} + e"
            return f"{buffer}[{first}:{first} + 1, :, :]"

        to, of = (received, fanned) if lane == "go" else (fanned, received)
        yield f"for e in range({own}):"
        yield f"    copy({to(out, 'ep.local')}, {of(src, 'ep.local')}, lane=compute)"
        if local > 1:
            source, target = f"((ep.local + {local - 1} - r) % {local})", f"((ep.local + 1 + r) % {local})"
            yield f"for r in range({local - 1}):"
            yield f"    for e in range({own}):"
            out_view, sent = to(out, source), of(src, target)
            yield f'        permute({out_view}, {sent}, over="ep.local", shift=r + 1, lane={lane})'

    def _dispatch(self) -> Iterator[str]:
        yield from (self._pack("u", "x"), self._pack("k", "choices"))
        yield from (self._to_hosts("kv", "k"), self._to_hosts("v", "u"))
        yield self._fan("fan_out", "p0", "v", "kv")
        yield from self._inside("q0", "p0", "go")

    def _combine(self) -> Iterator[str]:
        yield from (self._pack("ga", "gates"), self._to_hosts("gv", "ga"))
        yield from self._products.forward_products(0)
        yield from self._inside("b0", "z0", "back")
        yield self._fan("fan_in", "sv", "b0", "gv", "kv")
        yield self._from_hosts("st", "sv")
        yield self._sum("y", "st")

    def _backward(self) -> Iterator[str]:
        yield self._pack("dst", "dy")
        yield self._to_hosts("dsv", "dst")
        yield self._fan("fan_out_weighted", "db0", "dsv", "gv", "kv")
        yield self._fan("fan_gradient", "dgv", "b0", "dsv", "kv")
        yield from self._inside("dz0", "db0", "go")
        yield from self._products.backward_products(0)
        yield from self._inside("dp0", "dq0", "back")
        yield self._fan("fan_in_sum", "dv", "dp0", "kv")
        yield from (self._from_hosts("du", "dv"), self._from_hosts("dga", "dgv"))
        yield from (self._sum("dx", "du"), self._sum("dgates", "dga"))


class HierarchicalExperts(UnchosenExperts):
    """Sends one copy of a token over NICs to each host that has experts of it; there it goes to these experts."""

    name = "experts_hierarchical"
    title = "Experts by hosts"
    source = "Zhao et al., DeepSeek-V3, arXiv 2412.19437, section 3.2.2; Zhuang et al., AlpaComm, MLSys '23"

    def refusal(self, problem: ExpertsProblem) -> str | None:
        """Return why the algorithm cannot solve a problem; None if it can.

        It needs a mesh of two axes (hosts, ranks of a host), and a whole layer, its training or a dispatch alone.
        """
        if len(problem.mesh.shape) != 2:
            return "it takes a mesh of hosts and their ranks"
        if problem.part not in ("layer", "training", "dispatch"):
            return "it takes a layer or its dispatch: what a host sums is no exchange of rows"
        return None

    def text(self, problem: ExpertsProblem, config: NoChoice) -> str:
        """Return the program for any routing as text for `parse`; the row counts of `counts` are inputs of it."""
        return HierarchicalText(problem, self.title).text()

    def counts(
        self, problem: ExpertsProblem, config: NoChoice, choices: Array | None = None
    ) -> dict[str, Array]:
        """Return the tables of counts that the program needs, with source ranks in the order of `source_order`.

        "n0" is (experts, source ranks): the number of rows of a rank's tokens for an expert. "m" is (hosts, source
        ranks): the number of a rank's tokens that have an expert on a host.

        Args:
            choices: experts of each token, (ranks * tokens, top_k), -1 if dropped; None for the problem's own.
        """
        values = problem.counts_of(problem.choices if choices is None else choices)
        shape = (problem.hosts, problem.local_ranks)
        return {
            name: table.reshape(-1, *shape).transpose(0, 2, 1).reshape(table.shape)
            for name, table in values.items()
        }

    def source_order(self, problem: ExpertsProblem) -> list[int]:
        """Return the positions of all ranks on the mesh, ordered by their number on a host, then by host.

        2 hosts of 2 ranks -> [0, 2, 1, 3].
        """
        places = range(problem.num_ranks)
        return sorted(places, key=lambda place: (place % problem.local_ranks, place))

    def functions(self, problem: ExpertsProblem) -> Mapping[str, Callable[..., Any]]:
        """Return the functions that programs call, by name: those of all layers, and of exchanges by host."""
        return {**super().functions(problem), **host_functions()}
