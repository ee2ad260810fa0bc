"""The entry of the table for a training step: a step is a problem, and its parallelism a config.

The time of a step is a closed form (`compose`). The estimate is that of the program without contention, and of
what lies outside of it (`program.outside_s`).

What a program holds at once is counted from those of its layers (`program_memory`). Beside it stand optimizer
states, fragmentation, context and communicators, each a term of its own. Together they are the memory of a step
(`step_memory`), by which plans choose. What cannot fit is ruled out before by a lower bound.

Of the relations of the contract *soundness* is not held yet: calls that make matrices of a bucket and add
gradients to it have no equations, so that `validate` proves nothing; programs are run on integers instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

from meshweave.algorithms.contract import Algorithm, Array, Arrays, within
from meshweave.algorithms.step.block_program import lay_step
from meshweave.algorithms.step.compose import least_step_s, step_of
from meshweave.algorithms.step.meaning import LaidWeights, dense_step, random_weights
from meshweave.algorithms.step.parts import ChoicePart, LayoutPart, LayoutsPart, StepPart, StepTree, row_key
from meshweave.algorithms.step.problem import Parallelism, StepProblem
from meshweave.algorithms.step.program import outside_s
from meshweave.algorithms.step.program_memory import program_memory
from meshweave.algorithms.step.result import Step
from meshweave.algorithms.step.space import StepSpace
from meshweave.algorithms.step.step_memory import least_memory, memory_of
from meshweave.base.errors import MeshweaveError
from meshweave.cost.machine import Machine
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.describe.model.transformer import Transformer
from meshweave.estimate import Estimate
from meshweave.ir.program import Program


class StepEstimate(Estimate):
    """The estimated time of a training step: `total_s` in seconds, and parts of it computed on demand.

    Parts are seconds of the pipeline rank that works longest, from `Step.parts`. They add up to `total_s`, less
    the time in which the chip waits for its host (`StepParts.host`), which no part has.
    """

    step: Step

    def __init__(self, step: Step) -> None:
        object.__setattr__(self, "step", step)
        object.__setattr__(self, "total_s", step.time_s)

    @property
    def compute_s(self) -> float:
        """Return the seconds of computing layers, recomputation, embedding, head and loss.

        Exposed communication of recomputation, embedding, head and loss is included; that of layers is not: it is
        in `transfer_s`.
        """
        parts = self.step.parts
        return parts.compute + parts.recompute + parts.ends

    @property
    def copy_s(self) -> float:
        """Return the seconds of the optimizer's update of weights after the end of the pipeline."""
        return self.step.parts.optimizer

    @property
    def launch_s(self) -> float:
        """Return the seconds of a step outside the model, such as logging (`SoftwareStack.step_s`)."""
        return self.step.parts.software

    @property
    def sync_s(self) -> float:
        """Return the seconds of the pipeline bubble as it would be if transfers between stages took no time."""
        return self.step.parts.bubble

    @property
    def transfer_s(self) -> float:
        """Return the seconds of exposed communication, except that of recomputation, embedding, head and loss."""
        return self.step.parts.exposed


class StepAlgorithm(Algorithm[StepProblem, Parallelism]):
    """A training step: layers sharded over tensor-parallel ranks, in a pipeline, on data-parallel replicas."""

    name = "step"
    title = "Training step"
    source = "Narayanan et al., Megatron-LM, SC '21; Rajbhandari et al., ZeRO, SC '20"
    problem_type = StepProblem
    estimate_accuracy = within(0.05)
    memory_accuracy = within(0.2)  # most within 4 %; full recomputation is claimed up to 16 % high
    is_proved = False

    def examples(self) -> Iterator[StepProblem]:
        """Yield steps of two small models on four chips."""
        cluster = load_cluster("dgx-a100:4")
        tiny = Transformer("tiny", 2, 8, 4, 4, 2, 16, 12, False, "made up", tied_embeddings=False)
        yield StepProblem(tiny, cluster, 4, 4, "float32")
        grouped = Transformer("grouped", 4, 8, 4, 2, 2, 12, 8, True, "made up", tied_embeddings=False)
        yield StepProblem(grouped, cluster, 8, 4, "float32")

    def candidates(self, problem: StepProblem, cluster: Cluster | None = None) -> Iterator[Parallelism]:
        """Yield the configurations that may fit in memory (`least_memory`), fewest model-parallel ranks first.

        They are for the cluster of the problem; `cluster` is not used. Configurations that cannot be laid out are
        left out.
        """
        for choice in StepSpace(problem).choices():
            try:
                if least_memory(problem, choice).total <= problem.usable_bytes():
                    yield choice
            except MeshweaveError:
                continue

    def program(self, problem: StepProblem, config: Parallelism) -> Program:
        """Return the program of one step on all chips of the problem's cluster.

        Raises:
            LayoutError: the degrees do not fit the chips, the batch or the model.
            UnsupportedError: no program is written for a step of this kind.
        """
        return lay_step(step_of(problem, config).stages, folds=False).program

    def machine(self, problem: StepProblem, config: Parallelism, cluster: Cluster) -> Machine:
        """Return the machine that `program` runs on: the problem's cluster; `cluster` is not used.

        Raises:
            LayoutError: the degrees do not fit the chips, the batch or the model.
            UnsupportedError: no program is written for a step of this kind.
        """
        return lay_step(step_of(problem, config).stages, folds=False).machine

    # --- closed forms -----------------------------------------------------------------------------------

    def estimate(self, problem: StepProblem, config: Parallelism, machine: Machine) -> Estimate:
        """Return the time of a step in closed form, on the problem's cluster; `machine` is not used."""
        return StepEstimate(step_of(problem, config))

    def outside_s(self, problem: StepProblem, config: Parallelism) -> float:
        """Return the seconds that no op of the program takes (`program.outside_s`).

        They are `SoftwareStack.step_s`, and the sum of a tied embedding's gradient over first and last pipeline
        rank.
        """
        return outside_s(step_of(problem, config))

    def peak_bytes(self, problem: StepProblem, config: Parallelism, rank: int = 0) -> int:
        """Return the peak bytes of weights, gradients and buffers on a chip of a pipeline rank.

        Buffers include kept activations. Optimizer states, fragmentation, context and communicators are left
        out; `step_memory.memory_of` adds them.

        Args:
            rank: a global rank; the bytes are those of the pipeline rank that it belongs to.

        Raises:
            LayoutError: the degrees do not fit the chips, the batch or the model.
            UnsupportedError: no program is written for such a step, or layers have experts or latent attention.
        """
        return program_memory(step_of(problem, config).stages)[
            rank // config.stride("pipeline") % config.pipeline
        ]

    # --- the search -------------------------------------------------------------------------------------

    def branches(
        self, problem: StepProblem, part: StepPart | None = None, limit_s: float = math.inf
    ) -> Iterator[StepPart] | None:
        """Return the subsets into which a search divides a set of configurations; None for a `Parallelism`.

        All configurations are two `LayoutsPart`. Each is divided into `LayoutPart`s, a `LayoutPart` into
        `ChoicePart`s, and a `ChoicePart` into `Parallelism`s. Layouts and configurations that surely do not fit
        the memory are left out, and counted in `part.tree`.

        Args:
            part: a part that this method gave, or None for all configurations.
            limit_s: seconds of a step. Of a `LayoutsPart`, degrees whose FLOPs alone take at least as long are
                left out. Other parts ignore it.
        """
        if isinstance(part, Parallelism):
            return None
        if part is None:
            return iter(StepTree(StepSpace(problem), problem.usable_bytes()).parts)
        return part.tree.branches(part, limit_s)

    def lower_bound(self, problem: StepProblem, part: StepPart, *, is_tight: bool = False) -> float:
        """Return a lower bound, in seconds, of every step among the configurations of `part`.

        It is 0 for a `LayoutsPart`.

        Args:
            is_tight: whether a `LayoutPart`'s communication is priced on the links between its ranks: a higher
                bound, but slower to compute. Other parts ignore it.
        """
        if isinstance(part, Parallelism):
            return least_step_s(problem, part)
        return 0.0 if isinstance(part, LayoutsPart) else part.tree.bound_s(part, is_tight=is_tight)

    def row(self, problem: StepProblem, part: StepPart) -> Hashable:
        """Return the key of `part` in a ranking, which shows the best step of each key.

        The key has the degrees and the strategy (`row_key`); a `LayoutsPart`, which has many, is its own key.
        """
        match part:
            case Parallelism():
                return row_key(part)
            case LayoutPart():
                return row_key(part.layout)
            case ChoicePart():
                return row_key(part.choice)
        return part

    def admits(self, problem: StepProblem, config: Parallelism) -> bool:
        """Return whether the step's bytes on its fullest chip (`memory_of`) fit in memory less the reserve."""
        return memory_of(problem, config).total <= problem.usable_bytes()

    def preference(self, problem: StepProblem, config: Parallelism, estimate: Estimate) -> Any:
        """Return (bytes of the fullest chip, configuration in words), by which ties in time are broken."""
        assert isinstance(estimate, StepEstimate)
        return estimate.step.memory.total, str(config)

    # --- meaning ----------------------------------------------------------------------------------------

    def random_inputs(self, problem: StepProblem, seed: int = 0) -> dict[str, Array]:
        """Return random integers from -4 to 4 for the weights of the model, by name, in the problem's dtype."""
        return random_weights(problem, seed)

    def reference(self, problem: StepProblem, inputs: Arrays) -> dict[str, Array]:
        """Return for each weight W its gradient over the batch, as "DW", and its updated value, as "NEW_W"."""
        return dense_step(problem, inputs)

    def operands(self, problem: StepProblem, config: Parallelism, inputs: Arrays) -> dict[str, Array]:
        """Return the program's input tensors by name: each stage's weights as vectors (`LaidWeights.buckets`).

        `inputs` are the unsharded weights of the model by name.
        """
        return LaidWeights(step_of(problem, config)).buckets(inputs)

    def results(self, problem: StepProblem, config: Parallelism, outputs: Arrays) -> dict[str, Array]:
        """Return for each weight W of the model its gradient, as "DW", and its updated value, as "NEW_W".

        `outputs` are the program's output tensors.

        Raises:
            LayoutError: the degrees do not fit the chips, the batch or the model.
            UnsupportedError: the model has 2^24 weights or more, or no program is written that can be executed.
        """
        return LaidWeights(step_of(problem, config)).whole(outputs)

    def calls(self, problem: StepProblem, config: Parallelism) -> Mapping[str, Callable[..., Any]]:
        """Return the functions that the program calls, by name.

        They compute on integers; the optimizer subtracts the gradient from the weight.
        """
        return LaidWeights(step_of(problem, config)).calls()


TRAINING_STEP = StepAlgorithm()

ENTRIES = (TRAINING_STEP,)
