"""Tokens to experts on other ranks and back: DeepEP's two calls, over any algorithm for experts.

    recv_x, handle = exchange.dispatch(x, choices)     # rows by local expert: handle.rows_per_expert
    y = exchange.combine(experts(recv_x), handle, gates)

Both are differentiable: the gradient of a dispatch is a combine, that of a combine a dispatch of weighted rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshweave.algorithms.experts.algorithm import ExpertsAlgorithm
from meshweave.algorithms.experts.direct import DirectAllToAll
from meshweave.algorithms.experts.functions import gate_gradient
from meshweave.algorithms.experts.problem import ExpertsProblem, Part
from meshweave.algorithms.experts.routing import cell_counts
from meshweave.algorithms.table import algorithm
from meshweave.base.errors import BindError, UnsupportedError
from meshweave.describe.layout.mesh import Mesh
from meshweave.execute.torch.bind import BoundProgram
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.counted import CountedProgram, gathered
from meshweave.lower import lower_one_sided
from meshweave.nn.products import DTYPES


@dataclass(frozen=True)
class DispatchHandle:
    """Where the rows of one dispatch came from, for `combine`.

    Attributes:
        choices: the experts of each own token, (tokens, top_k).
        counts: the rows of each expert and source, (experts, ranks).
        rows_per_expert: how many rows each expert of this rank has, in their order.
        num_dropped: the own pairs of a token and an expert that were dropped.
        num_tokens: the own tokens; `choices` may have more rows, that name no expert.
    """

    choices: Tensor
    counts: Any
    rows_per_expert: tuple[int, ...]
    num_dropped: int
    num_tokens: int


class ExpertExchange:
    """The ranks that have experts, and how rows go between them.

    Args:
        ranks: global ranks; those of rank i of n are experts i E / n to (i + 1) E / n.
        num_experts: E, a multiple of the ranks.
        entry: the algorithm, as in the table; one whose rows go from end to end.
        capacity: the most tokens of a rank for an expert; later ones are dropped. None drops none.

    Raises:
        UnsupportedError: there is no such algorithm for experts.
        BindError: this process is none of the ranks.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        num_experts: int,
        *,
        entry: str = DirectAllToAll.name,
        capacity: int | None = None,
        context: TorchContext | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.context = TorchContext.default(torch.device(device)) if context is None else context
        chosen = algorithm(entry)
        if not isinstance(chosen, ExpertsAlgorithm):
            raise UnsupportedError(f"'{entry}' is no algorithm for experts")
        self.entry, self.capacity, self.num_experts = chosen, capacity, num_experts
        self.mesh = Mesh("ep", (len(ranks),), ("x",), tuple(ranks))
        self.rank = self.context.rank if self.context.rank is not None else ranks[0]
        if self.rank not in self.mesh:
            raise BindError(f"rank {self.rank} is none of the ranks {tuple(ranks)} that have experts")
        self._programs: dict[ExpertsProblem, CountedProgram] = {}

    def dispatch(self, x: Tensor, choices: Tensor) -> tuple[Tensor, DispatchHandle]:
        """Return the rows of this rank's experts, (rows, hidden), by expert, source and token, and the handle.

        Collective among the ranks; it waits for the counts of all on the host, once.

        Args:
            x: the own tokens, (tokens, hidden).
            choices: their different experts, integers (tokens, top_k); -1 for none.
        """
        handle = self._handle(choices, x.shape[0])
        rows: Tensor = _DispatchRows.apply(x, self, handle)
        return rows, handle

    def combine(self, x: Tensor, handle: DispatchHandle, gates: Tensor | None = None) -> Tensor:
        """Return for each own token the sum of its rows, each times its gate, (tokens, hidden).

        Args:
            x: what experts made of the rows of the dispatch, in their order.
            gates: the weights of choices, (tokens, top_k); None for 1.
        """
        if gates is None:
            gates = x.new_ones((handle.num_tokens, handle.choices.shape[1]))
        summed: Tensor = _CombineRows.apply(x, gates, self, handle)
        return summed

    # --- what both are made of ------------------------------------------------------------------------

    def _handle(self, choices: Tensor, num_tokens: int) -> DispatchHandle:
        kept = choices.detach().to(torch.int32).clone()
        wanted = int((kept >= 0).sum())
        if self.capacity is not None:
            self._drop(kept)
        own = torch.from_numpy(cell_counts(kept[None].cpu().numpy(), self.num_experts)[:, 0])
        said = torch.cat([torch.tensor([num_tokens, kept.shape[1]]), own]).to(self.context.device)
        all_said = gathered(said, self.context, self.mesh.ranks).numpy()
        if (all_said[:, 1] != kept.shape[1]).any():
            raise BindError(f"ranks have {all_said[:, 1].tolist()} experts a token; it must be one number")
        counts = all_said[:, 2:].T
        place = self.mesh.ranks.index(self.rank)
        mine = counts.reshape(len(self.mesh.ranks), -1, len(self.mesh.ranks))[place]
        padded = kept.new_full((int(all_said[:, 0].max()), kept.shape[1]), -1)
        padded[:num_tokens] = kept
        dropped = wanted - int(own.sum())
        return DispatchHandle(padded, counts, tuple(mine.sum(axis=1).tolist()), dropped, num_tokens)

    def _drop(self, choices: Tensor) -> None:
        """Set choices beyond the capacity to -1, in the order of tokens."""
        flat = choices.view(-1)
        for expert in range(self.num_experts):
            flat[(flat == expert).nonzero()[self.capacity :, 0]] = -1

    def run(
        self, part: Part, handle: DispatchHandle, hidden: int, tensors: dict[str, Tensor]
    ) -> BoundProgram:
        """Run one of the exchanges; `tensors` are its inputs by buffer."""
        dtype = next(iter(tensors.values())).dtype
        tokens, top_k = handle.choices.shape
        problem = ExpertsProblem(
            self.mesh,
            max(tokens, 1),
            top_k,
            self.num_experts,
            hidden,
            1,
            DTYPES[dtype],
            part,
            capacity=self.capacity,
        )
        program = self._programs.get(problem)
        if program is None:
            config = next(self.entry.candidates(problem))
            program = self._programs[problem] = CountedProgram(
                self.entry.counted_program(problem, config),
                self.rank,
                context=self.context,
                calls=self.entry.functions(problem),
                lowered=lower_one_sided if self.entry.is_one_sided else None,
            )
        return program.run({**tensors, "choices": handle.choices}, {"n0": handle.counts})

    def padded(self, tokens: Tensor, handle: DispatchHandle) -> Tensor:
        """Return tokens with rows of zeros after them, as many as the rank with most tokens has."""
        rows = handle.choices.shape[0]
        if tokens.shape[0] == rows:
            return tokens.detach().contiguous()
        out = tokens.new_zeros((rows, *tokens.shape[1:]))
        out[: tokens.shape[0]] = tokens.detach()
        return out

    def padded_rows(self, rows: Tensor, handle: DispatchHandle) -> Tensor:
        """Return the rows (rows, features) of this rank's experts as a buffer (1, most, features), then zeros.

        `most` is the greatest number of rows that any rank has for its experts.
        """
        most = int(handle.counts.reshape(len(self.mesh.ranks), -1).sum(axis=1).max())
        out = rows.new_zeros((1, most, rows.shape[1]))
        out[0, : rows.shape[0]] = rows.detach()
        return out


class _DispatchRows(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: ExpertExchange, handle: DispatchHandle) -> Tensor:
        """Return the rows of this rank's experts (rows, features), of its tokens (tokens, features)."""
        ctx.exchange, ctx.handle = exchange, handle
        bound = exchange.run("dispatch", handle, x.shape[1], {"x": exchange.padded(x, handle)})
        return bound.outputs["q0"][0, : sum(handle.rows_per_expert)]

    @staticmethod
    def backward(ctx: Any, dq: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the tokens: the sum of those of their copies."""
        exchange, handle = ctx.exchange, ctx.handle
        gates = dq.new_ones(handle.choices.shape)
        rows = exchange.padded_rows(dq, handle)
        bound = exchange.run("combine", handle, dq.shape[1], {"z0": rows, "gates": gates})
        return bound.outputs["y"][: handle.num_tokens], None, None


class _CombineRows(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, z: Tensor, gates: Tensor, exchange: ExpertExchange, handle: DispatchHandle
    ) -> Tensor:
        """Return the sums of experts' results times gates (tokens, features), of rows (rows, features)."""
        weights = exchange.padded(gates, handle)
        rows = exchange.padded_rows(z, handle)
        bound = exchange.run("combine", handle, z.shape[1], {"z0": rows, "gates": weights})
        ctx.exchange, ctx.handle = exchange, handle
        ctx.save_for_backward(weights, bound.scratch["b0"])
        return bound.outputs["y"][: handle.num_tokens]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Return the gradients of the rows and of the gates."""
        exchange, handle = ctx.exchange, ctx.handle
        gates, b = ctx.saved_tensors
        arriving = exchange.padded(dy, handle)
        tensors = {"dy": arriving, "gates": gates}
        bound = exchange.run("weighted_dispatch", handle, dy.shape[1], tensors)
        dgates = gate_gradient(b, arriving, handle.choices)[: handle.num_tokens]
        return bound.outputs["q0"][0, : sum(handle.rows_per_expert)], dgates, None, None


def grouped_product(rows: Tensor, weights: Tensor, rows_per_group: Sequence[int]) -> Tensor:
    """Return the product of each group of rows with a matrix of its own, (rows, n), one group after another.

    It is one kernel where torch has one (`torch.nn.functional.grouped_mm`: floats of at most 32 bits, matrices
    whose rows are multiples of 16 bytes), else a product for each group.

    Args:
        rows: (rows, k).
        weights: (groups, k, n).
    """
    _, k, n = weights.shape
    is_aligned = k * rows.element_size() % 16 == 0 and n * rows.element_size() % 16 == 0
    if rows.shape[0] and is_aligned and rows.dtype in (torch.float32, torch.bfloat16, torch.float16):
        ends = torch.tensor(rows_per_group, device=rows.device).cumsum(0).to(torch.int32)
        product = torch.nn.functional.grouped_mm(rows.contiguous(), weights.contiguous(), offs=ends)
        if product.requires_grad:  # its gradient reads no expanded tensor
            product.register_hook(Tensor.contiguous)
        return product
    parts = zip(rows.split(list(rows_per_group)), weights, strict=True)
    return torch.cat([part @ matrix for part, matrix in parts])
