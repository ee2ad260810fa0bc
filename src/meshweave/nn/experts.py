"""Tokens to experts on other ranks and back: DeepEP's two calls, over any algorithm for experts.

    recv_x, handle = exchange.dispatch(x, choices)     # rows by local expert: handle.rows_per_expert
    y = exchange.combine(experts(recv_x), handle, gates)

Both are differentiable once. The gradient of a dispatch is a combine, that of a combine a dispatch of weighted
rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshweave.algorithms.experts.algorithm import ExpertsAlgorithm
from meshweave.algorithms.experts.direct import DirectAllToAll
from meshweave.algorithms.experts.functions import gate_gradient
from meshweave.algorithms.experts.problem import ExpertsProblem, Part
from meshweave.algorithms.experts.routing import cell_counts, within_capacity
from meshweave.algorithms.table import algorithm
from meshweave.base.errors import BindError, LayoutError, UnsupportedError, printable
from meshweave.describe.layout.mesh import Mesh
from meshweave.execute.torch.bind import BoundProgram
from meshweave.execute.torch.call_order import share_refusal
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.counted import CountedProgram, gathered
from meshweave.lower import lower_one_sided
from meshweave.nn.custom_ops import refuse_second_derivative
from meshweave.nn.dtensor import kind_text
from meshweave.nn.parallel.agreed import agree, difference
from meshweave.nn.products import DTYPES

_SIZES = ("tokens", "experts a token", "hidden", "dtype")
"""What ranks tell each other of a dispatch before their counts; tokens alone may differ."""


@dataclass(frozen=True)
class DispatchHandle:
    """What `ExpertExchange.combine` needs to know of one dispatch on this rank.

    Attributes:
        choices: the global expert numbers of each of this rank's tokens, (most tokens of any rank, top_k); -1 for
            none, for a choice beyond the capacity, and in the padding rows after `num_tokens`.
        counts: numpy array (experts, ranks): the number of rows that each global expert gets from each rank,
            within the capacity; ranks in the order of `ExpertExchange`'s `ranks`.
        rows_per_expert: the number of rows of each expert that this rank has, in ascending order of experts.
        num_dropped: how many choices of this rank's tokens were dropped as beyond the capacity.
        num_tokens: how many tokens this rank has.
        hidden: features of a token; rows to combine have as many.
        dtype: of the tokens, and of rows to combine.
    """

    choices: Tensor
    counts: Any
    rows_per_expert: tuple[int, ...]
    num_dropped: int
    num_tokens: int
    hidden: int
    dtype: torch.dtype


class ExpertExchange:
    """The ranks that have experts, and how rows go between them.

    Args:
        ranks: global ranks; those of rank i of n are experts i E / n to (i + 1) E / n, the last one excluded.
        num_experts: E, a multiple of the number of ranks.
        entry: the name of the algorithm in `ALGORITHMS`, one for experts.
        capacity: the most tokens that a rank sends to an expert in one dispatch; later ones are dropped. None
            drops none.
        context: process groups, deadline and liveness; None takes the default context of `device`.
        device: only chooses that default context.

    Raises:
        UnsupportedError: there is no such algorithm for experts, or it does not take these ranks.
        LayoutError: the experts are no multiple of the ranks, the capacity is below 1, or a rank repeats.
        BindError: this process is none of the ranks, or one of them is not there.
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
        _check_exchange(ranks, num_experts, capacity)
        self.entry, self.capacity, self.num_experts = chosen, capacity, num_experts
        self.mesh = Mesh("ep", (len(ranks),), ("x",), tuple(ranks))
        if (refusal := chosen.refusal(self._problem("dispatch", 1, 1, 1, "float32"))) is not None:
            raise UnsupportedError(f"'{entry}' does not exchange rows between {len(ranks)} ranks: {refusal}")
        self.rank = self.context.rank if self.context.rank is not None else ranks[0]
        if self.rank not in self.mesh:
            raise BindError(f"rank {self.rank} is none of the ranks {tuple(ranks)} that have experts")
        if max(ranks) >= self.context.num_ranks:
            raise BindError(f"there is no rank {max(ranks)}; there are {self.context.num_ranks} ranks")
        self._programs: dict[ExpertsProblem, CountedProgram] = {}
        self._is_agreed = False

    def dispatch(self, x: Tensor, choices: Tensor) -> tuple[Tensor, DispatchHandle]:
        """Return (rows, handle): `rows` (rows, hidden) of this rank's experts, by expert, source rank and token.

        Collective among the ranks. The host waits once, for the counts of all ranks.

        Args:
            x: this rank's tokens, (tokens, hidden).
            choices: the global expert numbers of each token, distinct integers (tokens, top_k); -1 for none.

        Raises:
            LayoutError: tokens and choices do not fit each other or this exchange, or ranks differ in hidden size,
                top_k or dtype, or in the arguments of the exchange.
            BindError: another rank refuses what it was given.
            RankLostError, DeadlineError: other ranks are missing or late.
        """
        with share_refusal(self.context, self.mesh.ranks, "dispatch to experts"):
            if not self._is_agreed:
                self._agree()
            handle = self._handle(x, _checked_choices(x, choices, self.num_experts))
            rows: Tensor = _DispatchRows.apply(x, self, handle)
        return rows, handle

    def combine(self, x: Tensor, handle: DispatchHandle, gates: Tensor | None = None) -> Tensor:
        """Return, for each of this rank's tokens, the sum of its experts' rows times gates: (tokens, hidden).

        Collective among the ranks. A token all of whose choices are -1 or dropped gets 0.

        Args:
            x: the experts' results for the rows of the dispatch, in the same order, (rows, hidden), of the same
                dtype.
            handle: the one that the dispatch returned.
            gates: the weight of each choice, (tokens, top_k), of the dtype of the tokens; None for 1. Weights of
                choices that are -1 or dropped do not count.

        Raises:
            LayoutError: rows or gates are not those of the dispatch.
            BindError: another rank refuses what it was given.
            RankLostError, DeadlineError: other ranks are missing or late.
        """
        with share_refusal(self.context, self.mesh.ranks, "combine of experts"):
            if not isinstance(handle, DispatchHandle):
                raise LayoutError(f"combine takes the handle that dispatch returned, not {kind_text(handle)}")
            wanted = sum(handle.rows_per_expert), handle.hidden
            _check_tensor("rows of experts", x, wanted, handle.dtype)
            if gates is None:
                gates = x.new_ones((handle.num_tokens, handle.choices.shape[1]))
            _check_tensor("gates", gates, (handle.num_tokens, handle.choices.shape[1]), handle.dtype)
            summed: Tensor = _CombineRows.apply(x, gates, self, handle)
        return summed

    # --- what both are made of ------------------------------------------------------------------------

    def _agree(self) -> None:
        """Make sure, once, that all ranks have the same exchange: messages of other ones would not fit.

        They form the group of their counts too, so that who refuses what it is given keeps none in that.
        """
        settings = {
            "ranks": str(self.mesh.ranks),
            "experts": str(self.num_experts),
            "algorithm": self.entry.name,
            "capacity": str(self.capacity),
        }
        agree(self.context, self.mesh.ranks, {"exchange of experts": settings}, "all to exchange tokens")
        if self.context.is_distributed:
            self.context.group_of(tuple(sorted(self.mesh.ranks)))
        self._is_agreed = True

    def _handle(self, x: Tensor, choices: NDArray[Any]) -> DispatchHandle:
        ranks, experts = self.mesh.ranks, self.num_experts
        kept = within_capacity(choices, 1, experts, self.capacity)
        own = cell_counts(kept[None], experts)[:, 0]
        sizes = [*kept.shape, x.shape[1], list(DTYPES).index(x.dtype)]
        said = torch.from_numpy(np.concatenate([sizes, own])).to(self.context.device)
        all_said = gathered(said, self.context, ranks, "the counts of all ranks").numpy()
        self._check_alike(all_said[:, : len(sizes)])
        counts = all_said[:, len(sizes) :].T
        mine = counts.reshape(len(ranks), -1, len(ranks))[ranks.index(self.rank)]
        padded = np.full((max(int(all_said[:, 0].max()), 1), kept.shape[1]), -1, np.int32)
        padded[: len(kept)] = kept
        dropped = int((choices >= 0).sum()) - int(own.sum())
        return DispatchHandle(
            torch.from_numpy(padded).to(x.device),
            counts,
            tuple(mine.sum(axis=1).tolist()),
            dropped,
            len(kept),
            x.shape[1],
            x.dtype,
        )

    def _check_alike(self, sizes: NDArray[Any]) -> None:
        """Raise LayoutError, on all ranks, where they give tokens of other sizes, but for how many there are."""
        if (sizes[:, 1:] == sizes[0, 1:]).all():
            return
        said = {
            rank: dict(zip(_SIZES[1:], [str(top_k), str(hidden), list(DTYPES.values())[dtype]], strict=True))
            for rank, (_, top_k, hidden, dtype) in zip(self.mesh.ranks, sizes.tolist(), strict=True)
        }
        raise LayoutError(difference("tokens of a dispatch", said))

    def _problem(self, part: Part, tokens: int, top_k: int, hidden: int, dtype: str) -> ExpertsProblem:
        return ExpertsProblem(
            self.mesh, tokens, top_k, self.num_experts, hidden, 1, dtype, part, capacity=self.capacity
        )

    def run(
        self, part: Part, handle: DispatchHandle, hidden: int, tensors: dict[str, Tensor]
    ) -> BoundProgram:
        """Run an exchange of rows among ranks; return the bound program, whose `outputs` have this rank's results.

        Collective. T is the greatest number of tokens of any rank, at least 1; R is the greatest number of rows
        that any rank has for its experts.

        Args:
            part: "dispatch": input "x" (T, hidden), output "q0" (1, R, hidden). "combine": inputs "z0" (1, R,
                hidden) and "gates" (T, top_k), output "y" (T, hidden). "weighted_dispatch", the backward pass of a
                combine: inputs "dy" (T, hidden) and "gates", output "q0".
            handle: the choices and the counts of rows, from `dispatch`.
            hidden: features of a row.
            tensors: the inputs of `part` by name, of one dtype, padded by `padded`, "z0" by `padded_rows`.

        Raises:
            BindError: another rank refuses what it was given.
            RankLostError, DeadlineError: other ranks are missing or late.
        """
        dtype = next(iter(tensors.values())).dtype
        tokens, top_k = handle.choices.shape
        problem = self._problem(part, tokens, top_k, hidden, DTYPES[dtype])
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
        with share_refusal(self.context, self.mesh.ranks, f"{part} of experts"):
            return program.run({**tensors, "choices": handle.choices}, {"n0": handle.counts})

    def padded(self, tokens: Tensor, handle: DispatchHandle) -> Tensor:
        """Return `tokens` (tokens, ...) of this rank, detached, with rows of zeros appended up to T rows.

        T is the greatest number of tokens of any rank in the dispatch of `handle`, at least 1. Gates (tokens,
        top_k) are padded likewise.
        """
        rows = handle.choices.shape[0]
        if tokens.shape[0] == rows:
            return tokens.detach().contiguous()
        out = tokens.new_zeros((rows, *tokens.shape[1:]))
        out[: tokens.shape[0]] = tokens.detach()
        return out

    def padded_rows(self, rows: Tensor, handle: DispatchHandle) -> Tensor:
        """Return `rows` (rows, features) of this rank's experts, detached, padded with zeros to (1, R, features).

        R is the greatest number of rows that any rank has for its experts, by `handle`. Nothing is communicated.
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
        refuse_second_derivative("dispatch to experts")
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
        refuse_second_derivative("combine of experts")
        exchange, handle = ctx.exchange, ctx.handle
        gates, b = ctx.saved_tensors
        arriving = exchange.padded(dy, handle)
        tensors = {"dy": arriving, "gates": gates}
        bound = exchange.run("weighted_dispatch", handle, dy.shape[1], tensors)
        dgates = gate_gradient(b, arriving, handle.choices)[: handle.num_tokens]
        return bound.outputs["q0"][0, : sum(handle.rows_per_expert)], dgates, None, None


# --- what is given -------------------------------------------------------------------------------------------


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_exchange(ranks: Sequence[int], num_experts: int, capacity: int | None) -> None:
    """Raise LayoutError where ranks cannot have such experts."""
    is_whole = isinstance(ranks, Sequence) and all(map(_is_whole, ranks))
    if not is_whole or not 0 < len(set(ranks)) == len(ranks) or min(ranks) < 0:
        raise LayoutError(f"ranks are different whole numbers from 0 on, not {printable(ranks)}")
    if not _is_whole(num_experts) or num_experts < 1 or num_experts % len(ranks):
        raise LayoutError(
            f"{printable(num_experts)} experts are no multiple of {len(ranks)} ranks, each of which has as many"
        )
    if capacity is not None and (not _is_whole(capacity) or capacity < 1):
        raise LayoutError(
            f"a capacity is a whole number of tokens from 1 on, or None, not {printable(capacity)}"
        )


def _check_tensor(what: str, value: Any, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Raise LayoutError where `value` is no plain tensor of this shape and dtype."""
    is_plain = isinstance(value, Tensor) and not hasattr(value, "device_mesh")
    if not is_plain or value.shape != shape or value.dtype != dtype:
        words = f"{shape} of {DTYPES[dtype]}"
        raise LayoutError(f"{what} are {kind_text(value)}; those of this dispatch are a tensor {words}")


def _checked_choices(x: Any, choices: Any, num_experts: int) -> NDArray[np.int64]:
    """Return the experts of tokens x on the host. Raises LayoutError where they do not fit, or are not there."""
    is_plain = isinstance(x, Tensor) and not hasattr(x, "device_mesh")
    if not is_plain or x.ndim != 2 or x.shape[1] < 1 or x.dtype not in DTYPES:
        raise LayoutError(
            f"tokens are {kind_text(x)}; they are a tensor (tokens, hidden) of this rank, of floats or integers"
        )
    if (
        not isinstance(choices, Tensor)
        or choices.shape[:-1] != x.shape[:1]
        or choices.is_floating_point()
        or choices.is_complex()
        or choices.dtype == torch.bool
    ):
        raise LayoutError(
            f"choices are {kind_text(choices)}; they are integers, the experts of each of {x.shape[0]} tokens, "
            "(tokens, top_k), -1 for none"
        )
    table: NDArray[np.int64] = choices.detach().to("cpu", torch.int64).numpy()
    if not 1 <= table.shape[1] <= num_experts:
        raise LayoutError(
            f"choices are {kind_text(choices)}: a token takes 1 to all of {num_experts} experts"
        )
    if table.size and (table.min() < -1 or table.max() >= num_experts):
        token, place = np.argwhere((table < -1) | (table >= num_experts))[0]
        raise LayoutError(
            f"token {token} takes expert {table[token, place]}; there are experts 0 to {num_experts - 1}, "
            "and -1 for none"
        )
    ordered = np.sort(table, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if twice.any():
        token, place = np.argwhere(twice)[0]
        raise LayoutError(
            f"token {token} takes expert {ordered[token, place]} twice; add up its gates instead"
        )
    return table
