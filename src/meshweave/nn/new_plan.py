"""What a new plan would win on a cluster whose links and products are not as fast as they were planned for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshweave.algorithms.step import Parallelism, Step, step_of
from meshweave.base.units import format_s
from meshweave.describe.machine.levels import link_levels
from meshweave.tune.plan import Plan
from meshweave.tune.step_search import SpaceOptions, plan_step


@dataclass(frozen=True)
class NewPlan:
    """The plan of a step that runs beside the best one, both priced at measured rates.

    A rank that computes `compute_factor` times as long slows all kernels alike, so that only the rates of links
    beside its own matter for a plan: both are priced on a cluster whose links are slower by their factor over
    that of products, and their seconds are multiplied by that of products.

    Attributes:
        running: the degrees that run.
        running_s: predicted seconds of its step.
        plan: the best plan; its seconds are those without `compute_factor`.
        best_s: predicted seconds of a step of the first row of `plan`, times `compute_factor`.
    """

    running: Parallelism
    running_s: float
    plan: Plan
    best_s: float

    @classmethod
    def of(
        cls,
        step: Step,
        options: SpaceOptions | None,
        level_factors: Mapping[int, float],
        compute_factor: float,
    ) -> NewPlan:
        """Search the best plan at measured rates.

        Args:
            step: the step that runs.
            options: what is searched; None for all that the stack of the step executes.
            level_factors: measured over predicted seconds on links, by position in `link_levels`; others are
                taken to be as fast as described.
            compute_factor: measured over predicted seconds of products.

        Raises:
            UnsupportedError: nothing fits or can be laid out, or the stack does not execute the step.
        """
        cluster = step.problem.cluster
        for number in range(len(link_levels(cluster))):
            change = link_levels(cluster)[number][1]
            cluster = change(compute_factor / level_factors.get(number, 1.0))
        problem = replace(step.problem, cluster=cluster)
        running_s = step_of(problem, step.parallelism).time_s * compute_factor
        plan = plan_step(problem, options)
        return cls(step.parallelism, running_s, plan, plan.step.ranked[0].step_s * compute_factor)

    @property
    def best(self) -> Parallelism:
        """Return the degrees of the best plan."""
        return Parallelism(**self.plan.step.ranked[0].degrees.model_dump())

    @property
    def gain_s(self) -> float:
        """Return by how many seconds a step of the best plan is shorter than the running one; 0 if it is not."""
        return max(self.running_s - self.best_s, 0.0)

    def __str__(self) -> str:
        now = f"at measured rates a step is predicted to take {format_s(self.running_s)}"
        if not self.gain_s:
            return f"{now}; no plan is faster"
        share = 100 * self.gain_s / self.running_s
        best = self.best
        return (
            f"{now}, and {format_s(self.best_s)} ({share:.0f} % less) with dp {best.data} pp {best.pipeline} "
            f"cp {best.context} tp {best.tensor} {best.strategy}, micro-batches of {best.micro_batch}"
        )
