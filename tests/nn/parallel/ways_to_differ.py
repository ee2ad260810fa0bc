"""Ways in which the state of one rank of a training run may differ from that of others, and what comes of each.

A way is a function that changes the state of the odd rank: before `parallelize`, after it, or before the third
step. It says which error names it on every rank, or that it is harmless: weights are then those of one process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from plain_models import PlainLlama
from torch import nn

from meshweave.algorithms.block import BlockConfig
from meshweave.algorithms.step import Parallelism

HARMLESS = "harmless"
NOT_COMPARED = "harmless, with other masks"


@dataclass(frozen=True)
class Way:
    """A way to differ.

    Attributes:
        when: "model" before `parallelize`, "step" after it, "later" before the third step.
        expected: what the error of every rank contains, or `HARMLESS`.
        error: the class of the error, where it is not a LayoutError.
        every: `debug_every` of the run.
        strategy, dropout: of the run on all ranks.
    """

    name: str
    when: str
    expected: str
    change: Callable[[Any], None]
    error: str = "LayoutError"
    every: int = 0
    strategy: str = "megatron_sp"
    dropout: float = 0.0


WAYS: list[Way] = []


def way(when: str, expected: str, **options: Any) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """List a function as a way to differ."""

    def listed(change: Callable[[Any], None]) -> Callable[[Any], None]:
        WAYS.append(Way(change.__name__.removeprefix("_"), when, expected, change, **options))
        return change

    return listed


# --- the model and what parallelize is given ------------------------------------------------------------------


@way("model", "other weights")
def _one_weight(s: Any) -> None:
    s.model.transformer.h[0].mlp.c_fc.weight.data[1, 2] += 1e-9


@way("model", "other weights")
def _two_rows_swapped(s: Any) -> None:
    weight = s.model.transformer.h[0].mlp.c_fc.weight.data
    weight[:2] = weight[:2].flip(0).clone()


@way("model", "other weights")
def _sign_of_zero(s: Any) -> None:
    s.model.transformer.ln_f.bias.data[0] = -0.0


@way("model", "other weights")
def _seed_of_the_weights(s: Any) -> None:
    torch.manual_seed(17)
    for parameter in s.model.parameters():
        nn.init.normal_(parameter, std=0.3)


@way("model", HARMLESS)
def _weights_that_are_broadcast(s: Any) -> None:
    """The odd rank is not the first, whose weights all take: given `broadcast_weights` on all ranks."""
    _seed_of_the_weights(s)


@way("model", "frozen")
def _a_frozen_parameter(s: Any) -> None:
    s.model.transformer.ln_f.weight.requires_grad_(False)


@way("model", "other parameters")
def _dtype_of_a_parameter(s: Any) -> None:
    s.model.transformer.ln_f.float()


@way("model", "other parameters")
def _dtype_of_all(s: Any) -> None:
    s.model.float()


@way("model", "other modules")
def _a_layer_more(s: Any) -> None:
    s.model = s.make(layers=3)


@way("model", "other modules")
def _another_width(s: Any) -> None:
    s.model = s.make(width=24)


@way("model", "other configuration")
def _another_class(s: Any) -> None:
    s.model = PlainLlama(layers=2).double()


@way("model", "other modules")
def _another_epsilon(s: Any) -> None:
    s.model.transformer.ln_f.eps = 1e-6


@way("model", "other modules")
def _another_activation(s: Any) -> None:
    s.model.transformer.h[1].mlp.gelu = nn.GELU("tanh")


@way("model", "other modules")
def _another_probability_of_dropout(s: Any) -> None:
    s.model.transformer.drop.p = 0.1


@way("model", "other modules")
def _untied(s: Any) -> None:
    s.model.lm_head.extra = "untied"
    s.model.lm_head.weight = nn.Parameter(s.model.lm_head.weight.detach().clone())


@way("model", "other configuration")
def _another_configuration(s: Any) -> None:
    s.model.config.n_head = 2


@way("model", "other arguments")
def _another_strategy(s: Any) -> None:
    s.plan = "megatron"


@way("model", "other arguments")
def _a_strategy_that_does_not_exist(s: Any) -> None:
    s.plan = "megatrom"


@way("model", "other arguments")
def _a_parallelism(s: Any) -> None:
    s.plan = Parallelism(strategy="megatron_sp", tensor=s.mesh.size())


@way("model", "other arguments")
def _recompute(s: Any) -> None:
    s.plan = Parallelism(strategy="megatron_sp", tensor=s.mesh.size(), recompute="full")


@way("model", "other arguments")
def _chunks(s: Any) -> None:
    s.options["config"] = BlockConfig(chunks=2)


@way("model", "other arguments")
def _accepted_overlap(s: Any) -> None:
    s.options["overlap"] = "sites"


@way("model", "other arguments")
def _debugging(s: Any) -> None:
    s.options["debug_every"] = 3


@way("model", "other arguments")
def _no_mesh(s: Any) -> None:
    s.mesh, s.plan = None, f"megatron_sp:{s.mesh.size()}"


@way("model", "other settings")
def _precision_of_products(s: Any) -> None:
    torch.set_float32_matmul_precision("medium")


@way("model", "other settings")
def _deterministic_algorithms(s: Any) -> None:
    torch.use_deterministic_algorithms(True)


@way("model", "other settings")
def _default_dtype(s: Any) -> None:
    torch.set_default_dtype(torch.float64)


@way("model", "other versions")
def _version_of_meshweave(s: Any) -> None:
    import meshweave

    s.patch(meshweave, "__version__", "0.0.1")


@way("model", "other versions")
def _version_of_torch(s: Any) -> None:
    s.patch(torch, "__version__", "2.9.0")


@way("model", "other versions")
def _version_of_transformers(s: Any) -> None:
    module = SimpleNamespace(__version__="4.0.0")
    s.stack.callback(_put_back, "transformers", sys.modules.get("transformers"))
    sys.modules["transformers"] = module  # type: ignore[assignment]


def _put_back(name: str, module: Any) -> None:
    if module is None:
        sys.modules.pop(name, None)
    else:
        sys.modules[name] = module
