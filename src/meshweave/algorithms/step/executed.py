"""What the runtime of this library refuses to execute of a step, whether or not a stack prices it.

The rules are those of modules that run a model's own code (`nn.hosted`), checked on roles and sizes alone.
"""

from __future__ import annotations

from meshweave.algorithms.block.roles import IDLE, Roles, num_parts
from meshweave.algorithms.block.two_d import IncludedProducts
from meshweave.algorithms.step.checks import check_laid_out
from meshweave.algorithms.step.problem import Parallelism, StepProblem
from meshweave.algorithms.step.stack_checks import check_parallelism
from meshweave.algorithms.step.strategies import strategy_of
from meshweave.algorithms.table import STRATEGIES
from meshweave.base.errors import UnsupportedError


def check_executed(problem: StepProblem, parallelism: Parallelism) -> None:
    """Raise an error of one line where this runtime does not execute a configuration of a model.

    Raises:
        LayoutError: the degrees do not fit the chips, the batch, the model or the strategy.
        UnsupportedError: a strategy or schedule is unknown, the problem's stack does not run the configuration,
            or the strategy splits rows that a router reads, or has weights in parts that ZeRO cannot divide.
    """
    check_parallelism(problem.stack, parallelism)
    check_laid_out(problem, parallelism)
    if refusal := zero_refusal(parallelism):
        raise UnsupportedError(refusal)
    if problem.model.is_routed and splits_rows(*layer_roles(parallelism)):
        raise UnsupportedError(
            f"a router of {problem.model.name} reads whole rows of the residual, which {parallelism.strategy} "
            "splits"
        )


def splits_rows(roles: Roles, mesh: tuple[int, ...]) -> bool:
    """Return whether a rank has only a part of each token's residual features, which a router needs whole.

    `roles` and `mesh` (sizes of its axes) are those that `layer_roles` returns.
    """
    return roles.is_flat or num_parts(roles.residual, mesh, ("hidden",)) > 1


def zero_refusal(parallelism: Parallelism) -> str:
    """Return one line that says why ZeRO cannot shard weights over data ranks; "" where it can or shards nothing.

    Included 2D products take weights that are sharded over the rows of their mesh. The runtime does not shard such
    shards again.
    """
    p = parallelism
    if not p.zero or p.data == 1 or p.tensor_mesh[0] == 1 or not layer_roles(p)[0].is_flat:
        return ""
    return (
        f"products of {p.strategy} have weights in parts along rows, which cannot be in parts along data as well: "
        "give zero=0, or collective_block"
    )


def sequence_refusal(parallelism: Parallelism, sequence: int) -> str:
    """Return one line that says why `mw.parallelize` refuses sequences of `sequence` tokens; "" if it does not.

    Where the residual is divided over more ranks along the sequence than attention is, these ranks must have equal
    shares of it.
    """
    roles, mesh = layer_roles(parallelism)
    whole, core = (num_parts(dims, mesh, ("sequence",)) for dims in (roles.residual, roles.core(True)))
    if whole // core <= 1 or sequence % whole == 0:
        return ""
    return (
        f"mw.parallelize takes models of transformers by {parallelism.strategy} where {whole} ranks have equal "
        f"shares of a sequence, which {sequence} tokens are not: give {-(-sequence // whole) * whole}, or fix "
        "another strategy"
    )


def layer_roles(parallelism: Parallelism) -> tuple[Roles, tuple[int, ...]]:
    """Return the role of each axis of a layer's mesh (which dim of each tensor it splits), and the axes' sizes.

    The axes are (context, d1, d2) with a ring of context ranks, else (d1, d2), where d1 x d2 are the
    tensor-parallel ranks. An axis of a single rank is idle. Degrees of experts are not read.

    Raises:
        UnsupportedError: there is no such strategy.
        LayoutError: a step cannot have this strategy, or not with context ranks (`strategy_of`).
    """
    context = (parallelism.context,) if parallelism.context > 1 else ()
    mesh = (*context, *parallelism.tensor_mesh)
    axes = zip(strategy_of(parallelism).roles, mesh, strict=True)
    entry = STRATEGIES.named(parallelism.strategy)
    product_2d = entry.product_2d if isinstance(entry, IncludedProducts) else ""
    return Roles(tuple(role if size > 1 else IDLE for role, size in axes), product_2d), mesh
