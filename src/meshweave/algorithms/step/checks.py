"""Check that a step can be laid out, before anything is priced."""

from __future__ import annotations

import math

from meshweave.algorithms.block.roles import TOKENS
from meshweave.algorithms.step.placement import expert_axes
from meshweave.algorithms.step.problem import Parallelism, StepProblem
from meshweave.algorithms.step.strategies import strategy_of
from meshweave.algorithms.table import SCHEDULES
from meshweave.base.errors import LayoutError, MeshweaveError, UnsupportedError, did_you_mean, listed
from meshweave.describe.model.latent import LatentAttention


def check_step(problem: StepProblem, parallelism: Parallelism) -> None:
    """Raise an error of one line where a step, or the experts of its model, cannot be laid out on the chips.

    Raises:
        LayoutError: the degrees do not fit the chips, the batch, the model or the strategy, or the strategy does
            not fit experts.
        UnsupportedError: a strategy or schedule is unknown.
    """
    check_laid_out(problem, parallelism)
    _check_experts(problem, parallelism)


def can_be_laid_out(problem: StepProblem, parallelism: Parallelism) -> bool:
    """Return whether a step, with the experts of its model, can be laid out on the chips (`check_step`)."""
    try:
        check_step(problem, parallelism)
    except MeshweaveError:
        return False
    return True


def check_laid_out(problem: StepProblem, parallelism: Parallelism) -> None:
    """Raise an error of one line where a step cannot be laid out on the chips; experts are not checked.

    Raises:
        LayoutError: the degrees do not fit the chips, the batch, the model or the strategy.
        UnsupportedError: a strategy or schedule is unknown.
    """
    model, p = problem.model, parallelism
    _check_chips(problem, p)
    strategy_of(p)
    if p.schedule not in SCHEDULES:
        raise UnsupportedError(
            f"there is no schedule '{p.schedule}'{did_you_mean(p.schedule, SCHEDULES)}; there are "
            f"{listed(SCHEDULES)}"
        )
    if problem.batch % (p.data * p.micro_batch):
        raise LayoutError(
            f"a batch of {problem.batch} is not a multiple of data {p.data} x micro-batch {p.micro_batch}"
        )
    if p.num_stages > model.num_layers + 2:  # embedding and loss may be stages of their own
        raise LayoutError(f"{model.name} has {model.num_layers} layers, too few for {p.num_stages} stages")
    if p.virtual_stages > 1 and p.pipeline == 1:
        raise LayoutError("virtual_stages needs a pipeline of at least 2 ranks; give 1")
    rows = p.tensor_mesh[0]
    roles = strategy_of(p).roles[-2:]
    groups = min(node.groups for node in model.layer.attentions)
    if roles[0].attention == "inner" and rows > groups:
        raise LayoutError(f"{model.name} has {groups} groups of heads, too few for tensor {rows}")
    if problem.sequence % p.context:
        raise LayoutError(f"sequences of {problem.sequence} tokens do not divide over context {p.context}")


def _check_experts(problem: StepProblem, parallelism: Parallelism) -> None:
    """Raise LayoutError where experts cannot be laid out so."""
    model, p = problem.model, parallelism
    layers = [graph for _, graph in model.layers if graph.num_experts > 1]
    if not layers:
        if p.experts != (1, 1):
            raise LayoutError(f"{model.name} has no experts; give expert=1 and expert_tensor=1")
        return
    for graph in layers:
        if graph.num_experts % p.expert:
            raise LayoutError(
                f"{model.name} has {graph.num_experts} experts, not a multiple of expert {p.expert}"
            )
    roles = strategy_of(p).roles
    if any(role.residual == "hidden" for role in roles):
        raise LayoutError(
            f"{p.strategy} divides the features of tokens, which experts need whole; give another"
        )
    if p.tensor_size > 1 and not any(role.residual in TOKENS for role in roles[-2:]):
        raise LayoutError(
            f"{p.strategy} gives each of {p.tensor_size} ranks all tokens, so that experts would get copies of "
            "them; give megatron_sp"
        )
    if p.context > 1 and any(isinstance(node, LatentAttention) for node in model.layer.attentions):
        raise LayoutError("latent attention has no ring yet; give context=1")
    expert_axes(p)


def _check_chips(problem: StepProblem, parallelism: Parallelism) -> None:
    """Raise LayoutError where the degrees do not make up the cluster."""
    p, chips = parallelism, problem.cluster.num_chips
    if p.num_ranks == chips:
        return
    parts = [f"{degree} {p.size(degree)}" for degree in ("data", "pipeline", "context", "tensor")]
    replicas, rest = divmod(chips, math.prod(p.size(degree) for degree in ("pipeline", "context", "tensor")))
    hint = "no number of replicas fills it" if rest else f"data={replicas} would fill it"
    raise LayoutError(
        f"{' x '.join(parts)} is {p.num_ranks} ranks, and {problem.cluster.name} has {chips} chips; {hint}"
    )
