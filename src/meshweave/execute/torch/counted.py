"""A program whose numbers of rows are known only at run time, on one rank: bound at every run, for its counts.

Ranks agree on the program once. A run then needs the counts of all ranks on the host, which is one synchronisation
of device and host; views, messages and buffers follow from them alone. A caller that wants no synchronisation
makes every count its capacity, and binds `program.with_counts` of these once: some rows then hold nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshweave.execute.calls import Calls
from meshweave.execute.torch.bind import BoundProgram, bind
from meshweave.execute.torch.call_order import call_order
from meshweave.execute.torch.context import TorchContext
from meshweave.ir.program import Program
from meshweave.ir.program.counts import CountValues


class CountedProgram:
    """A program whose buffers have as many rows as tables of counts say; it is bound anew at each run.

    Args:
        program: a program with tables of counts, such as the rows that each rank sends to each expert.
        rank: the global rank of this process.
        calls: the functions that `call` ops name; see `execute.calls`.
        lowered: rewrites the program of given counts before it is bound, such as `lower.lower_one_sided`; None
            for no rewriting.
        options: further arguments of `bind`.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        *,
        context: TorchContext,
        calls: Calls | None = None,
        lowered: Callable[[Program], Program] | None = None,
        **options: Any,
    ) -> None:
        self.program, self.rank, self.context = program, rank, context
        self._calls, self._lowered, self._options = calls, lowered, options

    def run(self, tensors: Mapping[str, Tensor], counts: CountValues) -> BoundProgram:
        """Bind and run this rank's part for given counts, and return the bound program, which has the outputs.

        Args:
            counts: for each table of the program, by name, an integer array of the table's shape: numbers of rows;
                equal on all ranks and within the capacities of the program.
            tensors: this rank's tensors by buffer name: all inputs, and memory for outputs if wanted; aliased.

        Raises:
            ProgramError: a table has no counts, or counts over the capacities that the program declares.
            BindError: tensors or calls do not fit, here or on another rank; other ranks are in another call.
            RankLostError, DeadlineError: other ranks are missing or late.
            UnsupportedError: `bind` refuses it, as one-sided ops without `memory`; or an earlier run in this
                context failed.
        """
        plain = self.program.with_counts(counts)
        if self._lowered is not None:
            plain = self._lowered(plain)
        bound = bind(
            plain,
            self.rank,
            tensors,
            context=self.context,
            calls=self._calls,
            agreed=self.program,
            **self._options,
        )
        bound.run()
        return bound


def gathered(values: Tensor, context: TorchContext, ranks: tuple[int, ...], what: str) -> Tensor:
    """All-gather the 1-D tensor `values`, equally long on all ranks, as a CPU tensor of shape (ranks, values).

    Row i is of `ranks[i]`. Without a process group the result is (1, values), those of this rank. Collective among
    `ranks`. A rank that raises an error in place of this call, or is in another call, ends the others' wait.

    Args:
        what: completes "waiting for ..." in errors.

    Raises:
        BindError: another rank has raised an error in place of this call, or is in another one.
        RankLostError, DeadlineError: other ranks are missing or late.
    """
    if len(ranks) == 1 or not context.is_distributed:
        return values.cpu()[None]
    order, members = call_order(context), tuple(sorted(ranks))
    out = [torch.empty_like(values) for _ in ranks]
    others = [rank for rank in members if rank != context.rank]
    group = context.group_of(members)
    with order.sequence(members).bind(what), context.guard(what, others) as wait:
        try:
            work = dist.all_gather(out, values, group=group, async_op=True)
            work.wait(wait.timeout)
        except RuntimeError:
            order.explain_failure()
            raise
    by_rank = dict(zip(members, out, strict=True))
    return torch.stack([by_rank[rank] for rank in ranks]).cpu()
