"""The result for a step: its time and memory, in parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from functools import cached_property

from meshweave.algorithms.step.block_tasks import PartTime
from meshweave.algorithms.step.ceiling import RateCeiling, rate_ceiling
from meshweave.algorithms.step.memory import Memory
from meshweave.algorithms.step.problem import Parallelism, StepProblem
from meshweave.algorithms.step.stages import Stages
from meshweave.algorithms.step.step_memory import memory_of_stages
from meshweave.base.shown import Shown
from meshweave.base.units import format_bytes, format_s
from meshweave.describe.machine.left_out import unmeasured_kernels
from meshweave.describe.model.memory import Pairs, step_flops

_LEAST_BOUND = 0.005
"""A smaller share of a step than would be printed as 1 %."""


@dataclass(frozen=True)
class StepParts:
    """Seconds of a step on the pipeline rank that works longest; they add up to its time.

    Attributes:
        compute: products, attention and element-wise work of layers, forward and backward.
        recompute: what the backward part computes again, its communication included.
        ends: embedding, last norm, logits and loss, their communication included.
        tensor, context: exposed communication inside layers.
        bubble: waiting for other ranks, as it would be if transfers took no time.
        transfers: what transfers between stages add to the step.
        data: exposed reductions of gradients and gathers of weights.
        optimizer: the update of weights after the pipeline.
        host: waiting for hosts that have not issued the next operation.
        software: seconds outside the model, by the constants of the stack.
    """

    compute: float
    recompute: float
    ends: float
    tensor: float
    context: float
    bubble: float
    transfers: float
    data: float
    optimizer: float
    host: float
    software: float

    @property
    def total(self) -> float:
        """Return the sum of all parts in seconds, which is the time of the step."""
        return float(sum(getattr(self, each.name) for each in fields(self)))

    @property
    def exposed(self) -> float:
        """Return the seconds of exposed communication, except that of recomputation, embedding, head and loss."""
        return self.tensor + self.context + self.transfers + self.data


@dataclass(frozen=True, repr=False)
class Step(Shown):
    """A training step laid on a cluster.

    Attributes:
        time_s: seconds of a step.
        stages: the time of a micro-batch on each stage.
        pipeline_s: seconds from the begin of the step to the end of its last micro-batch.
        optimizer_s: seconds of the update of weights after the pipeline, on the rank that ends last.
    """

    problem: StepProblem
    parallelism: Parallelism
    time_s: float
    stages: Stages
    pipeline_s: float
    optimizer_s: float

    def __repr__(self) -> str:
        """Return the model, the chips, the degrees, time, utilization and memory, in a line."""
        of, laid = self.problem, self.parallelism
        return (
            f"<Step of {of.model.name} on {of.cluster.num_chips} chips of {of.cluster.name}: dp {laid.data} "
            f"pp {laid.pipeline} cp {laid.context} tp {laid.tensor}, {format_s(self.time_s)}, "
            f"{100 * self.mfu:.1f} % MFU, {format_bytes(self.memory.total)}>"
        )

    def __str__(self) -> str:
        """Return for people time, utilization and memory, what is to be said of them, and its defaults."""
        of, chip, usable = self.problem, self.problem.cluster.chip, self.problem.usable_bytes()
        kept_free = f"{format_bytes(chip.memory_bytes - usable)} kept free"
        lines = (
            f"{of.model.name} on {of.cluster.num_chips} chips of {of.cluster.name}: {of.batch} sequences of "
            f"{of.sequence} tokens, {of.dtype}{f', products of layers in {of.precision}' if of.precision else ''}",
            unmeasured_kernels(chip, of.dtype),
            of.precision_reading,
            of.attention_reading,
            f"{format_s(self.time_s)} a step, {100 * self.mfu:.1f} % MFU (causal pairs), "
            f"{self.tokens_per_second_per_chip:.0f} tokens/s per chip, {format_bytes(self.memory.total)} of "
            f"{format_bytes(chip.memory_bytes)}, {kept_free}{'' if self.fits() else ': does not fit'}",
            self.host_line,
            self.ceiling.reason(self.mfu),
            f"defaults: {', '.join((*_left_at_default(of), *_left_at_default(self.parallelism)))}",
        )
        return "\n".join(filter(None, lines))

    @cached_property
    def memory(self) -> Memory:
        """Return the bytes on a chip of each pipeline rank, counted when they are first asked for."""
        return memory_of_stages(self.stages)

    @cached_property
    def parts(self) -> StepParts:
        """Return the parts of the step's time in seconds, on the pipeline rank that works longest.

        They add up to `time_s`.
        """
        bare_s = self.stages.pipeline(with_transfers=False, with_gathers=False).makespan_s
        sent_s = self.stages.pipeline(with_gathers=False).makespan_s
        times, count = self.stages.times, self.num_micro_batches
        busiest = max(
            self._stages_of_ranks(), key=lambda stages: sum(times[stage].total_s for stage in stages)
        )
        own = [times[stage] for stage in busiest]
        work = sum((time.work for time in own), PartTime())
        software_s = self.problem.stack.step_s
        outside_s = self.time_s - sent_s - self.optimizer_s - software_s
        return StepParts(
            compute=count * work.compute_s,
            recompute=count * sum(time.recompute_s for time in own),
            ends=count * sum(time.ends_s for time in own),
            tensor=count * work.tensor_s,
            context=count * work.context_s,
            bubble=bare_s - count * sum(time.total_s for time in own),
            transfers=sent_s - bare_s,
            data=count * sum(time.data_s for time in own) + outside_s,
            optimizer=self.optimizer_s,
            host=count * sum(time.host_s for time in own),
            software=software_s,
        )

    @property
    def host_bound(self) -> float:
        """Return the share of the step (0 to 1) in which the time to issue operations on the host sets the pace.

        It counts forward and backward parts of the pipeline rank that works longest (`StageTime.bound_s`).
        """
        times = self.stages.times
        busiest = max(self._stages_of_ranks(), key=lambda own: sum(times[stage].total_s for stage in own))
        return self.num_micro_batches * sum(times[stage].bound_s for stage in busiest) / self.time_s

    @property
    def host_line(self) -> str:
        """Return words on how much of the step is host-bound; "" below 0.5 % or where no host is known."""
        share = self.host_bound
        waits = f"chips wait {100 * self.parts.host / self.time_s:.0f} % of it"
        return f"host-bound: {100 * share:.0f} % of the step; {waits}" if share >= _LEAST_BOUND else ""

    def _stages_of_ranks(self) -> list[list[int]]:
        """Return the stages of each pipeline rank."""
        ranks: dict[int, list[int]] = {}
        for stage, rank in enumerate(self.stages.stage_ranks):
            ranks.setdefault(rank, []).append(stage)
        return list(ranks.values())

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """Return the number of layers of each stage."""
        return self.stages.layers

    @property
    def num_micro_batches(self) -> int:
        """Return the number of micro-batches that go through each pipeline in a step."""
        return self.stages.micro_batches

    @property
    def not_priced(self) -> tuple[str, ...]:
        """Return the parts of the model that the step's time and memory leave out, in a few words each."""
        return self.problem.model.not_priced_at(self.problem.sequence)

    @property
    def tokens_per_second_per_chip(self) -> float:
        """Return the tokens of a step, of all replicas, divided by its time and the number of chips."""
        return self.problem.workload.tokens / self.time_s / self.parallelism.num_ranks

    def flops(self, pairs: Pairs = "causal", *, recomputed: bool = False) -> int:
        """Return the model's FLOPs of a step over all chips.

        Args:
            pairs: the pairs of tokens that count in attention: "causal" for those under the mask, or "all".
            recomputed: whether the FLOPs of recomputation are included.
        """
        of, again = self.problem, self.parallelism.recompute if recomputed else "none"
        flops = step_flops(of.model, of.workload, pairs, again)
        if again == "full" and of.stack.stops_early:  # before the last product of a layer
            last = ((count, kind.layer.linears[-1].parameters[0]) for count, kind in of.model.kinds)
            flops -= 2 * of.workload.tokens * sum(count * weight.size for count, weight in last)
        return flops

    @property
    def mfu(self) -> float:
        """Return model FLOPs utilization (0 to 1): causal `flops()` over what all chips do in `time_s` at peak."""
        return self._utilization(self.flops())

    @property
    def mfu_all_pairs(self) -> float:
        """Return `mfu` with attention over all pairs of tokens, as PaLM (Chowdhery et al., 2022, appendix B)."""
        return self._utilization(self.flops("all"))

    @property
    def hfu(self) -> float:
        """Return the hardware FLOPs utilization: `mfu` with the FLOPs of recomputation included."""
        return self._utilization(self.flops(recomputed=True))

    @property
    def ceiling(self) -> RateCeiling:
        """Return the highest share of peak that was measured on the chip, and what the step prices above it."""
        return rate_ceiling(self.problem)

    def _utilization(self, flops: int) -> float:
        peak = self.problem.cluster.chip.peak(self.problem.dtype)
        return flops / self.time_s / (peak * self.parallelism.num_ranks)

    def fits(self, limit_bytes: float | None = None) -> bool:
        """Return whether the fullest chip's bytes are at most `limit_bytes`; None: its memory less the reserve."""
        return self.memory.total <= (self.problem.usable_bytes() if limit_bytes is None else limit_bytes)


_OF_EXPERTS = ("expert", "expert_tensor", "dispatcher", "imbalance")


_OF_THE_STACK = {"attention": "attention_kind", "attention_share": "attention_rate", "loss": "loss_kind"}


def _left_at_default(of: StepProblem | Parallelism) -> Iterator[str]:
    """Yield the attributes that have the value of their default, or the stack's, but for those that are None."""
    for each in fields(of):
        if each.name in _OF_EXPERTS and (isinstance(of, Parallelism) or not of.model.is_routed):
            continue
        default = each.default if each.default_factory is MISSING else each.default_factory()
        is_left = default is not MISSING and getattr(of, each.name) == default
        value = getattr(of, _OF_THE_STACK.get(each.name, each.name))
        if is_left and value is not None:
            text = "-".join(value) if isinstance(value, tuple) else getattr(value, "name", value)
            yield f"{each.name} {text}"
