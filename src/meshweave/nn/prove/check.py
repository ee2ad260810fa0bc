"""What `parallelize` proves before it replaces anything: its strategy on reduced copies of the model."""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from meshweave.base import errors
from meshweave.base.errors import ProofError, UnsupportedError
from meshweave.nn.parallel.strategy import LayerStrategy
from meshweave.nn.parallel.structure import ModelMap
from meshweave.nn.prove.differences import ProofRanks
from meshweave.nn.prove.given import Given, generated, outputs_of
from meshweave.nn.prove.proof import NOT_RUN, ModelPair, Proof
from meshweave.nn.prove.reduced import kinds_of, reduced
from meshweave.nn.prove.runs import context_for, free_bytes
from meshweave.nn.prove.state import WIDE
from meshweave.nn.prove.whole_model import check_whole

_TOKENS = 24
_LONGEST = 1 << 20
_DEPTH = 3


def check_layers(
    module: nn.Module, names: ModelMap, strategy: LayerStrategy, make: Callable[[nn.Module], Any], title: str
) -> str:
    """Prove that a strategy computes what the model's own forward pass does, on reduced copies. Collective.

    Each kind of layer is proved in a copy of the model with that layer alone, in which attention windows and the
    original context length are shorter than the inputs; then the first layers of up to three kinds, at least two
    layers, in one copy.

    Args:
        module: the model.
        names: the names of its modules.
        strategy: the strategy on its ranks.
        make: parallelises a copy, in place, and returns what `parallelize` returns.
        title: the architecture that the model was taken for, for errors.

    Returns:
        Text on what was proved, such as "1 kinds of layers one by one, and layers 0, 1, in float64".

    Raises:
        ProofError: something differs, on every rank.
        UnsupportedError: the model's own forward pass takes something else than tokens, it cannot be copied, or
            does not run under the strategy.
    """
    kinds = kinds_of(module, names)
    first = sorted(set(kinds))
    depth = first[:_DEPTH]
    depth += [number for number in range(len(kinds)) if number not in depth][: max(0, 2 - len(depth))]
    cases = [((number,), True) for number in first] + [(tuple(sorted(depth)), False)]
    device = next(module.parameters()).device
    if device.type == "meta":
        device = torch.device(strategy.device_mesh.device_type)
    ranks = ProofRanks(strategy.mesh.ranks, strategy.rank, context_for(strategy, device))
    fits = _fits(module, names, device, len(ranks.ranks))
    sizes = _sizes(strategy, min(_TOKENS, _longest(module, names)))
    dtype = WIDE if all(ranks.say(fits).values()) else torch.float32
    for chosen, binds in cases:
        for bound in (("window", "positions"), ("window",)) if binds else ((),):
            whole = _copy(module, names, strategy, chosen, bound, device, dtype, sizes[1])
            given = generated(whole, len(ranks.ranks), device, sizes)
            if all(ranks.say(not bound or _takes(whole, given)).values()):
                break
        made = make(copy.deepcopy(whole))
        proof = _proved(whole, made, given)
        if proof.difference is not None:
            told = _with_numbers(str(proof.difference), names, chosen)
            where = f"layer {chosen[0]} alone" if binds else f"layers {', '.join(map(str, chosen))}"
            if proof.difference.what == NOT_RUN:
                raise UnsupportedError(
                    f"{type(module).__name__} does not run under {strategy.name}, in a copy with {where}: "
                    f"{_why(proof.difference.cause, strategy)}"
                )
            raise ProofError(
                f"{type(module).__name__}, taken for {title}, is another model under {strategy.name}: in a "
                f"copy with {where}, {told}"
            )
    if isinstance(names, ModelMap):
        every, longest = range(len(kinds)), _longest(module, names)
        whole = _copy(module, names, strategy, every, (), device, dtype, longest, shares=True)
        check_whole(whole, module, names, kinds, longest)
    kind = str(proof.dtype).removeprefix("torch.")
    return (
        f"{len(first)} kinds of layers one by one, and layers {', '.join(map(str, sorted(depth)))}, in {kind}"
    )


def _why(cause: str, strategy: LayerStrategy) -> str:
    """Return in a sentence why a model does not run, of an error with its type, and which strategies are right."""
    if hasattr(errors, cause.partition(":")[0]):
        return cause
    roles = strategy.roles
    is_split = "inner" in (*roles.core(True), *roles.core(False))
    hint = "; data_parallel and zero3 compute whole layers" if is_split else ""
    return f"its own code does not compute with what a rank has of it ({cause}){hint}"


def _takes(whole: nn.Module, given: Given) -> bool:
    """Return whether a copy takes as many tokens: positions may be the most that there are."""
    try:
        with torch.no_grad():
            outputs_of(whole, given)
    except Exception:
        return False
    return True


def _with_numbers(said: str, names: ModelMap, chosen: tuple[int, ...]) -> str:
    """Return what is said of a copy with the numbers that its layers have in the model."""
    layer = re.compile(rf"{re.escape(names.layers)}\.(\d+)")
    return layer.sub(lambda match: f"{names.layers}.{chosen[int(match[1])]}", said)


def _proved(whole: nn.Module, made: Any, given: Given) -> Proof:
    try:
        return ModelPair(whole, made, given).proof()
    except UnsupportedError as error:
        said = str(error).partition("; give")[0]
        raise UnsupportedError(f"it cannot be proved: {said}; check=False trains it unproved") from error


def _copy(
    module: nn.Module,
    names: ModelMap,
    strategy: LayerStrategy,
    chosen: Sequence[int],
    binds: Collection[str],
    device: torch.device,
    dtype: torch.dtype,
    sequence: int,
    shares: bool = False,
) -> nn.Module:
    ranks = math.prod(strategy.mesh.shape)
    own = int(module.get_submodule(names.embedding).weight.shape[0])
    words = ranks * -(-_TOKENS // ranks) + own % ranks
    sizes: dict[str, Any] = {"words": words, "sequence": sequence, "shares": shares}
    return reduced(module, names, chosen, **sizes, binds=binds, device=device, dtype=dtype)


def _longest(module: nn.Module, names: ModelMap) -> int:
    """Return how many tokens a row may have: no more than there are positions, and `_LONGEST`."""
    most = [_LONGEST]
    if names.positions:
        most.append(int(module.get_submodule(names.positions).weight.shape[0]))
    config = getattr(module, "config", None)
    stated = (getattr(config, name, None) for name in _POSITIONS)
    return min(most + [number for number in stated if isinstance(number, int) and number > 0])


_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "block_size", "max_seq_len")
"""What configurations call the number of their positions."""


def _sizes(strategy: LayerStrategy, most: int) -> tuple[int, int]:
    """Return a batch and a sequence of at most `most` tokens, if ranks can share so few evenly."""
    roles = strategy.roles
    sizes = {"batch": 1, "sequence": 1}
    for axis, size in enumerate(strategy.mesh.shape):
        dims = {lies[axis] for lies in (roles.residual, roles.core(True), roles.core(False))}
        for word in sizes:
            sizes[word] *= size if word in dims else 1
    batch = math.lcm(sizes["batch"] * strategy.config.chunks, 2)
    return batch, sizes["sequence"] * max(most // sizes["sequence"], 1)


def _fits(module: nn.Module, names: ModelMap, device: torch.device, ranks: int) -> bool:
    """Return whether copies with the largest layers fit in double precision into the memory of local ranks."""
    layers = module.get_submodule(names.layers)
    largest = max(sum(p.numel() for p in layer.parameters()) for layer in layers)
    local = min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
    return bool(32 * int(largest) * _DEPTH * local < 0.7 * free_bytes(device, local))
