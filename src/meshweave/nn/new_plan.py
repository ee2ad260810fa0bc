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
    """The best plan of a training step beside the plan that runs, both priced at measured rates.

    A plan is searched on the cluster with each level of its links slowed by (measured over predicted time of these
    links) / (measured over predicted time of products). All predicted seconds are then multiplied by the factor of
    products, `compute_factor`.

    Attributes:
        running: the degrees of parallelism of the plan that runs.
        running_s: predicted seconds of a step of the plan that runs, times `compute_factor`.
        plan: the plan that the search gives, its best row first; its seconds are not multiplied by
            `compute_factor`.
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
        """Search the best plan of a step at measured rates.

        Args:
            step: the step that runs.
            options: which plans are searched; None for all that the stack of the step executes.
            level_factors: measured over predicted seconds of transfers, by position of their links in
                `link_levels` of the cluster; links of other levels count as fast as described (factor 1).
            compute_factor: measured over predicted seconds of products.

        Raises:
            UnsupportedError: no plan fits or can be laid out, or the stack does not execute the step.
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
        """Return the degrees of parallelism of the first row of `plan`."""
        return Parallelism(**self.plan.step.ranked[0].degrees.model_dump())

    @property
    def gain_s(self) -> float:
        """Return `running_s` less `best_s`, in seconds a step; 0 where the best plan is not faster."""
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
