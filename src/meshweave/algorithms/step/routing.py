"""How many copies of tokens ranks with experts get: evenly, or by a power law of the popularity of experts.

Tokens choose k of E experts with the weights i^-a of a random order of these (a = 0: evenly). Every micro-batch
of a layer draws anew, and all wait for the rank with the most copies. Its expected share follows from drawn
micro-batches: popularities are drawn by a seed, and counts of a rank from the normal distribution of a sum of many
choices. "Evenly" is what benchmarks force: no rank then has more than its part.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meshweave.algorithms.block.problem import ExpertRanks
from meshweave.algorithms.step.problem import Parallelism, StepProblem

Shares = NDArray[np.float64]
_DRAWS = 64
SEED = 0


def expert_ranks(problem: StepProblem, parallelism: Parallelism) -> ExpertRanks | None:
    """Return how a layer's experts are divided over ranks, and the load of the busiest; None without experts.

    A token is copied to each expert that it chooses. The load is the expected number of copies on the rank with
    the most, divided by the mean over these ranks; 1 where tokens go evenly to experts.
    """
    experts = problem.model.layer.num_experts
    if experts == 1:
        return None
    p = parallelism
    load = 1.0
    if problem.imbalance and p.expert > 1:
        load = float(np.mean(drawn_loads(*_drawn_by(problem, p))))
    return ExpertRanks(p.expert, p.expert_tensor, load, problem.dispatcher, problem.stack.grouped_experts)


def rank_loads(problem: StepProblem, parallelism: Parallelism) -> tuple[float, ...]:
    """Return the expected copies of tokens on each rank that divides experts, over their mean, descending.

    There are as many numbers as `parallelism.expert`; the first is the load of `expert_ranks`. () without
    imbalance, expert parallelism or experts.
    """
    p = parallelism
    if not problem.imbalance or p.expert == 1 or problem.model.layer.num_experts == 1:
        return ()
    drawn = np.sort(_drawn_shares(*_drawn_by(problem, p)), axis=1)[:, ::-1].mean(axis=0)
    first = float(np.mean(drawn_loads(*_drawn_by(problem, p))))
    return (first, *(min(float(each), first) for each in drawn[1:]))


def _drawn_by(problem: StepProblem, p: Parallelism) -> tuple[int, int, int, int, float]:
    """Return what micro-batches are drawn by: experts, ranks, choices, tokens of a group, and the exponent."""
    layer = problem.model.layer
    ranks = p.expert * p.expert_tensor
    tokens = -(-p.micro_batch * problem.sequence * ranks // (p.context * p.tensor_size))
    chosen = max(weight.chosen for weight in layer.parameters)
    return layer.num_experts, p.expert, chosen, tokens, problem.imbalance


def expert_load(problem: StepProblem, parallelism: Parallelism) -> float:
    """Return the expected copies of tokens on the busiest expert rank, divided by the mean of these ranks.

    It is 1 without experts, expert parallelism or imbalance.
    """
    ranks = expert_ranks(problem, parallelism)
    return ranks.load if ranks is not None else 1.0


@lru_cache(maxsize=1024)
def drawn_loads(
    experts: int, ranks: int, chosen: int, tokens: int, exponent: float, seed: int = SEED
) -> tuple[float, ...]:
    """Return for each of 64 random micro-batches the token copies on the fullest rank over the mean of all ranks.

    These are ratios, at least 1 each.

    Args:
        experts, ranks: experts of a layer, and ranks that divide them.
        chosen: experts that each token takes.
        tokens: tokens of a micro-batch on all these ranks.
        exponent: that of the power law of the experts' popularity.
        seed: that of the random numbers.
    """
    shares = _drawn_shares(experts, ranks, chosen, tokens, exponent, seed)
    return tuple(max(1.0, float(each)) for each in shares.max(axis=1))


@lru_cache(maxsize=256)
def _drawn_shares(
    experts: int, ranks: int, chosen: int, tokens: int, exponent: float, seed: int = SEED
) -> Shares:
    """Return for drawn micro-batches the copies of each rank over the average, shape (micro-batches, ranks)."""
    random = np.random.default_rng(seed)
    popularity = np.arange(1, experts + 1, dtype=np.float64) ** -exponent
    popularity /= popularity.sum()
    share = chosen_shares(popularity, chosen)
    shares = []
    for _ in range(_DRAWS):
        own = random.permutation(share)
        counts = tokens * own + np.sqrt(tokens * own * (1 - own)) * random.standard_normal(experts)
        of_ranks = np.maximum(counts, 0.0).reshape(ranks, -1).sum(axis=1)
        shares.append(of_ranks * ranks / (tokens * chosen))
    return np.array(shares)


def chosen_shares(popularity: Shares, chosen: int) -> Shares:
    """Return for each expert the probability that a token chooses it, shape (experts,).

    A token chooses `chosen` different experts. The probability is 1 - (1 - p)^c, with p from `popularity`, shape
    (experts,), whose sum is 1, and the c for which the probabilities add up to `chosen`.
    """
    low, high = float(chosen), float(chosen)
    while (1 - (1 - popularity) ** high).sum() < chosen and high < 1e12:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if (1 - (1 - popularity) ** middle).sum() < chosen else (low, middle)
    out: Shares = 1 - (1 - popularity) ** high
    return out
