"""The base of strategies for blocks: a strategy says what each mesh axis does; the rest follows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from meshweave.algorithms.block.assembly import write_program, write_sized_skeleton, write_skeleton
from meshweave.algorithms.block.end_equations import IDS_IN, IDS_OUT, TARGETS, TOKENS_IN
from meshweave.algorithms.block.folds import functions_of
from meshweave.algorithms.block.parts import BlockParts, write_parts
from meshweave.algorithms.block.pieces import Piece
from meshweave.algorithms.block.problem import BlockConfig, BlockProblem, Overlap
from meshweave.algorithms.block.reference import reference
from meshweave.algorithms.block.ring_equations import POSITIONS
from meshweave.algorithms.block.roles import IDLE, AxisRole, Roles
from meshweave.algorithms.block.sized import SizedSkeleton
from meshweave.algorithms.contract import Accuracy, Algorithm, Array, Arrays
from meshweave.base.errors import LayoutError
from meshweave.cost.machine import Machine
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.model.memory import Recompute
from meshweave.estimate import Estimate, estimate_skeleton
from meshweave.ir.program import Program
from meshweave.ir.skeleton import Skeleton


class BlockAlgorithm(Algorithm[BlockProblem, BlockConfig]):
    """A strategy for the layers of a transformer: one role for each mesh axis, which says what that axis shards.

    The residual is the stream of activations between layers. A config may cut a rank's batch into chunks, so that
    one chunk communicates while another computes.

    Attributes:
        roles: what each mesh axis does, in the order of the mesh; IDLE for the second axis of a strategy with one.
        is_searched: whether a plan tries the strategy where none is named.
        max_equal_slices: into how many equal slices a product may be cut, at most; 1 for products that are whole,
            None where slices may be unequal or of any number.
    """

    problem_type = BlockProblem
    estimate_accuracy: ClassVar[Accuracy] = "upper_bound"
    roles: ClassVar[tuple[AxisRole, ...]]
    is_searched: ClassVar[bool] = True
    max_equal_slices: ClassVar[int | None] = 1

    @property
    def is_one_dimensional(self) -> bool:
        """Return whether the strategy uses one mesh axis: it has two roles, and the second is IDLE."""
        return len(self.roles) == 2 and self.roles[1] is IDLE

    def roles_of(self, problem: BlockProblem) -> Roles:
        """Return the roles of the axes of a problem's mesh: those of `roles`, but IDLE for an axis of one rank."""
        pairs = zip(self.roles, problem.mesh_shape, strict=True)
        return Roles(tuple(role if size > 1 else IDLE for role, size in pairs))

    def examples(self) -> Iterator[BlockProblem]:
        """Yield two small `exact` problems, the first with training; the mesh does not divide all their sizes."""
        for problem in _EXAMPLES:
            yield replace(problem, mesh_shape=(3, 1)) if self.roles[1] is IDLE else problem

    def refusal(self, problem: BlockProblem) -> str | None:
        """Return why the strategy cannot use the problem's mesh, to be read after its name; None if it can.

        The mesh must have as many axes as there are `roles`, and one rank along the second axis if that is IDLE.
        """
        if len(problem.mesh_shape) != len(self.roles):
            axes = ", ".join(AXIS_SIZES[-len(self.roles) :])
            return f"has {len(self.roles)} mesh axes; give a mesh of ({axes})"
        if self.roles[1] is IDLE and problem.mesh_shape[1] > 1:
            return "has one mesh axis; give a mesh of (ranks, 1)"
        return None

    def candidates(self, problem: BlockProblem, cluster: Cluster | None = None) -> Iterator[BlockConfig]:
        """Yield configs that cut a rank's batch into at most 1, 2 and 4 chunks; equal numbers are yielded once.

        Other fields have their defaults; `cluster` is ignored.
        """
        batch = self.max_chunks(problem)
        sizes = (-(-batch // count) for count in (1, 2, 4) if count <= batch)
        yield from map(BlockConfig, dict.fromkeys(-(-batch // size) for size in sizes))

    def max_chunks(self, problem: BlockProblem) -> int:
        """Return the most chunks into which a rank's batch can be cut: the most sequences that any rank has."""
        batch = problem.batch
        for dim, parts in zip(self.roles_of(problem).residual, problem.mesh_shape, strict=True):
            batch = -(-batch // parts) if dim == "batch" else batch
        return batch

    def program(self, problem: BlockProblem, config: BlockConfig) -> Program:
        """Return one program of all layers, and if the problem has a vocabulary, of embedding and head, too.

        Raises:
            LayoutError: the problem or config does not fit.
            UnsupportedError: the layer has experts or latent attention; such layers have `parts` alone.
        """
        self._check(problem, config)
        layers = "1 layer" if problem.layers == 1 else f"{problem.layers} layers"
        name = f"{self.title}, {layers}, {config}"
        return write_program(problem, config, self.roles_of(problem), problem.mesh, name)

    def parts(
        self,
        problem: BlockProblem,
        config: BlockConfig,
        *,
        piece: Piece = "layers",
        recompute: Recompute = "none",
    ) -> BlockParts:
        """Return a piece of the model as a forward and a backward program, which run once per micro-batch.

        Args:
            problem: one with training.
            piece: "layers", or with a vocabulary "embedding" or "head" (norm, logits and loss) alone.
            recompute: what the backward program recomputes: "none", "full" for all, or "selective" for attention.

        Raises:
            LayoutError: the problem or config does not fit, or the problem is one without training.
            UnsupportedError: the strategy is ZeRO-1; attention cannot be recomputed alone; one of several layers
                has experts or latent attention, or ranks have unequal tokens there; or the backward program
                needs what cannot be kept. `write_parts` lists the cases.
        """
        self._check(problem, config)
        name = f"{self.title}, {piece}, {config}"
        return write_parts(
            problem, config, self.roles_of(problem), problem.mesh, name, piece=piece, recompute=recompute
        )

    def _check(self, problem: BlockProblem, config: BlockConfig) -> None:
        """Raise LayoutError where a problem or a config is none of this strategy."""
        if (reason := self.refusal(problem)) is not None:
            raise LayoutError(f"{self.name} {reason}")
        roles, most = self.roles_of(problem), self.max_chunks(problem)
        if not 1 <= config.chunks <= most:
            raise LayoutError(f"{self.name}: chunks is {config.chunks}; give 1 to {most} for this problem")
        if config.slices < 0 or (config.slices and not roles.product_2d):
            raise LayoutError(
                f"{self.name}: slices is {config.slices}; only strategies of 2D products have slices, give 0"
            )
        if config.packets < 1 or (config.packets > 1 and roles.product_2d != "summa"):
            raise LayoutError(
                f"{self.name}: packets is {config.packets}; only broadcasts of SUMMA are cut into packets, give 1"
            )
        if config.scatter != "reduce_scatter" and not Roles(self.roles).scatters_core:
            raise LayoutError(
                f"{self.name}: scatter is '{config.scatter}', which is for sums that are scattered over inner "
                "features; here are none, give 'reduce_scatter'"
            )

    def estimate(self, problem: BlockProblem, config: BlockConfig, machine: Machine) -> Estimate:
        """Return the predicted time of rank 0, which has the largest shards, without contention of transfers.

        Raises:
            LayoutError: the problem or config does not fit.
        """
        return estimate_skeleton(self.skeleton(problem, config), machine)

    def skeleton(self, problem: BlockProblem, config: BlockConfig, piece: Piece | None = None) -> Skeleton:
        """Return the skeleton (tasks, lanes, what waits for what) of rank 0 in the program.

        Args:
            piece: "layers", "embedding" or "head" for that piece of the model alone, without the all-reduces of
                gradients of weights and of the loss, which a training step does once; None for the program.

        Raises:
            LayoutError: the problem or config does not fit.
        """
        self._check(problem, config)
        return write_skeleton(problem, config, self.roles_of(problem), problem.mesh, piece)

    def sized_skeleton(self, problem: BlockProblem, overlap: Overlap = "layers") -> SizedSkeleton:
        """Return the tasks of rank 0 if its batch is not cut, for any number of sequences per rank.

        The problem's `batch` is not read. `overlap` is as in `BlockConfig`.

        Raises:
            LayoutError: the problem does not fit.
        """
        self._check(problem, BlockConfig())
        return write_sized_skeleton(problem, self.roles_of(problem), problem.mesh, overlap)

    def reference(self, problem: BlockProblem, inputs: Arrays) -> dict[str, Array]:
        """Return the whole outputs by name, computed by numpy in one process from whole `inputs`.

        Raises:
            UnsupportedError: a layer has experts, latent attention or other nodes without functions.
        """
        return reference(problem, inputs)

    def functions(self, problem: BlockProblem) -> Mapping[str, Callable[..., Any]]:
        """Return the functions that the program calls, by name; they give small integers for an `exact` problem.

        Raises:
            UnsupportedError: a node is attention with sinks or a norm over all heads together, which have no
                functions, or there is no record of its type.
        """
        return functions_of(problem)

    def random_inputs(self, problem: BlockProblem, seed: int = 0) -> dict[str, Array]:
        """Return whole random inputs by name: small integers if `exact`, else normal with standard deviation 0.5.

        Tokens and targets are drawn from the vocabulary; POSITIONS, IDS_IN and IDS_OUT are 0, 1, 2, ...
        """
        inputs = super().random_inputs(problem, seed)
        draw = np.random.default_rng(seed)
        for name, value in inputs.items():
            if name in (TOKENS_IN, TARGETS):
                value[...] = draw.integers(0, problem.vocabulary, value.shape)
            elif name in (IDS_IN, IDS_OUT, POSITIONS):
                value[...] = np.arange(value.size)
            elif not problem.exact:
                value[...] = draw.standard_normal(value.shape) / 2
        return inputs


AXIS_SIZES = ("outer", "replicas", "depth", "rows", "columns")
"""What the sizes of a mesh are called."""

_EXAMPLES = (
    BlockProblem(3, 2, 5, 3, 3, 2, 5, (2, 2), exact=True, biases=True),
    BlockProblem(2, 2, 6, 4, 2, 2, 3, (2, 1), family="llama", training=False, exact=True),
)
