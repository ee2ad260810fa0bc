"""Actions of a pipeline: what each pipeline rank does to which stage and micro-batch, in which order.

A model is cut into stages, 0 to S - 1. A pipeline rank, which is one chip or a mesh of chips, holds one stage or
more. A schedule lists the actions of each pipeline rank in the order in which they are issued. A schedule of
compute actions alone says when a stage works; where its values come from follows from the stages. A schedule with
communication also says when transfers are issued.

The kinds of action, and how they are written, are those of `torch.distributed.pipelining`
(torch/distributed/pipelining/schedules.py, torch 2.13), so that schedules are exchanged with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from meshweave.base.errors import LayoutError


class ActionKind(Enum):
    """What an action does. The value is how torch writes it."""

    FORWARD = "F"
    BACKWARD = "B"
    """Input and weight gradients as one action."""
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    SEND_FORWARD = "SEND_F"
    RECV_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECV_BACKWARD = "RECV_B"
    UNSHARD = "UNSHARD"
    """Gather the sharded parameters of a stage (FSDP)."""
    RESHARD = "RESHARD"
    """Free the gathered parameters of a stage."""
    REDUCE_GRAD = "REDUCE_GRAD"
    """Reduce the gradients of a stage over its data-parallel ranks."""
    OVERLAP = "OVERLAP_F_B"
    """A forward and a backward, of different micro-batches, that run concurrently."""

    __hash__ = object.__hash__  # members are singletons; that of Enum hashes their names in Python, each time

    @property
    def computes(self) -> bool:
        """Return whether the action is a forward, a backward, one of its gradients, or an overlap of these."""
        return self in _COMPUTE

    @property
    def communicates(self) -> bool:
        """Return whether the action sends or receives an activation or its gradient."""
        return self in _COMMUNICATE

    @property
    def per_micro_batch(self) -> bool:
        """Return whether an action of this kind names one micro-batch.

        UNSHARD, RESHARD and REDUCE_GRAD belong to a stage alone; the parts of an OVERLAP name micro-batches of
        their own.
        """
        return self not in (
            ActionKind.UNSHARD,
            ActionKind.RESHARD,
            ActionKind.REDUCE_GRAD,
            ActionKind.OVERLAP,
        )


COMPUTE_WORDS = {
    ActionKind.FORWARD: "forward",
    ActionKind.INPUT_GRAD: "input gradient",
    ActionKind.WEIGHT_GRAD: "weight gradient",
    ActionKind.BACKWARD: "backward",
}
"""What pictures call the actions that compute; an overlap is drawn by its parts."""

MAKES_INPUT_GRAD = frozenset({ActionKind.BACKWARD, ActionKind.INPUT_GRAD})
_COMPUTE = frozenset({*COMPUTE_WORDS, ActionKind.OVERLAP})
_COMMUNICATE = frozenset(
    {
        ActionKind.SEND_FORWARD,
        ActionKind.RECV_FORWARD,
        ActionKind.SEND_BACKWARD,
        ActionKind.RECV_BACKWARD,
    }
)


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a pipeline rank.

    Attributes:
        kind: what it does.
        stage: the stage that it works on; -1 for an overlap.
        micro_batch: the micro-batch, from 0; None for kinds that belong to no single one.
        peer: the stage at the other end of a transfer, where that is not the neighbour (a skip connection).
        parts: the actions of an overlap, in order.
    """

    kind: ActionKind
    stage: int
    micro_batch: int | None = None
    peer: int | None = None
    parts: tuple[Action, ...] = ()

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind.value}"
        return f"{self.stage}{self.kind.value}{'' if self.micro_batch is None else self.micro_batch}"

    @property
    def leaves(self) -> tuple[Action, ...]:
        """Return the parts of an overlap, or else this action alone, as a tuple."""
        return self.parts or (self,)


@dataclass(frozen=True)
class Schedule:
    """The actions of every pipeline rank, in the order in which each is issued.

    Attributes:
        stage_ranks: for each stage the pipeline rank that holds it.
        num_micro_batches: the micro-batches of a step.
        actions: for each pipeline rank its actions.

    Raises:
        LayoutError: an action names a stage that its rank does not hold, or a micro-batch that does not exist.
    """

    stage_ranks: tuple[int, ...]
    num_micro_batches: int
    actions: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        stage_ranks, num_stages = self.stage_ranks, self.num_stages
        for rank, order in enumerate(self.actions):
            for listed in order:
                for action in listed.parts or (listed,):
                    if not 0 <= action.stage < num_stages or stage_ranks[action.stage] != rank:
                        raise LayoutError(
                            f"pipeline rank {rank} has action {action} of a stage that it does not hold"
                        )
                    micro_batch = action.micro_batch
                    if micro_batch is not None and not 0 <= micro_batch < self.num_micro_batches:
                        raise LayoutError(
                            f"action {action} of pipeline rank {rank} names micro-batch {micro_batch}, "
                            f"and there are {self.num_micro_batches}"
                        )

    @property
    def num_stages(self) -> int:
        """Return the number of stages."""
        return len(self.stage_ranks)

    @property
    def num_ranks(self) -> int:
        """Return the number of pipeline ranks."""
        return len(self.actions)

    @property
    def has_communication(self) -> bool:
        """Return whether sends and receives are listed among the actions."""
        return any(action.kind.communicates for action in self.leaves())

    def leaves(self) -> Iterator[Action]:
        """Yield the actions of all ranks, rank after rank, with the parts of an overlap in place of it."""
        return (leaf for order in self.actions for action in order for leaf in action.leaves)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a pipeline rank holds, ascending."""
        return tuple(stage for stage, holder in enumerate(self.stage_ranks) if holder == rank)


def looped(num_ranks: int, per_rank: int) -> tuple[int, ...]:
    """Return for each stage its rank, dealt out in turn: stage s on rank s mod `num_ranks`.

    There are `num_ranks` times `per_rank` stages: (2, 2) gives (0, 1, 0, 1).
    """
    return tuple(stage % num_ranks for stage in range(num_ranks * per_rank))


def folded(num_ranks: int) -> tuple[int, ...]:
    """Return for each of 2 P stages its rank, down P ranks and back up (a V): for P = 2 (0, 1, 1, 0)."""
    return (*range(num_ranks), *reversed(range(num_ranks)))
