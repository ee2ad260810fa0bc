"""Decoders of plain torch as users write them, with names that are known: exact, or refused, and for what.

Each is a small GPT or Llama with one change that copies with few layers and short inputs do not show.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from plain_models import HEADS, WORDS, PlainGpt, PlainLlama
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from meshweave.base.errors import MeshweaveError
from meshweave.execute.ranks.job import RankContext
from meshweave.nn.parallel.known import recognised
from meshweave.nn.parallel.parallelize import parallelize
from meshweave.nn.prove.reduced import kinds_of, reduced
from meshweave.nn.prove.whole_model import check_whole

LAYERS = 6
Pass = Callable[[nn.Module, int, Tensor, Tensor], Tensor]
"""(layer, its number, the residual, that before the first layer) -> the residual after it."""


class Gpt(PlainGpt):
    """A GPT whose layers are called in some way."""

    def __init__(
        self, run: Pass | None = None, scale: Callable[[Any], float] | None = None, **options: Any
    ) -> None:
        super().__init__(LAYERS, **options)
        self.run, self.scale = run, scale
        self.num_layers = LAYERS
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        own = self.transformer
        x = first = own.drop(own.wte(tokens) + own.wpe(torch.arange(tokens.shape[1])))
        for number in range(self.num_layers):
            x = own.h[number](x) if self.run is None else self.run(own.h[number], number, x, first)
        return self.lm_head(own.ln_f(x)) * (1.0 if self.scale is None else self.scale(self))


def _counted(model: Any) -> float:
    model.steps += model.training
    return 0.5 if model.steps > 3 else 1.0


def _numbered(model: Any) -> float:
    model.calls = getattr(model, "calls", 0) + model.training
    return 0.5 if model.calls > 3 else 1.0


def _decayed(layer: Any, number: int, x: Tensor, first: Tensor) -> Tensor:
    if number == 4 and layer.training:
        layer.mlp.c_fc.weight.data.mul_(0.9)
    return layer(x)


def _shown(layer: Any, number: int, x: Tensor, first: Tensor) -> Tensor:
    x = layer(x)
    layer.norm_of_last = float(x.detach().norm())
    return x


def _averaged(layer: Any, number: int, x: Tensor, first: Tensor) -> Tensor:
    x = layer(x)
    layer.mean = 0.9 * getattr(layer, "mean", 1.0) + 0.1 * float(x.detach().mean())
    return x


def _with_unset() -> nn.Module:
    model = Gpt()
    model.register_buffer("unset", torch.tensor([1.0, float("nan")]))
    return model


class Windowed(nn.Module):
    """Attention with a window that no attribute names; `late` in layer 4 alone, which knows its number."""

    def __init__(self, own: Any, number: int, late: bool) -> None:
        super().__init__()
        self.c_attn, self.c_proj, self.n_head = own.c_attn, own.c_proj, HEADS
        self.number, self.late = number, late

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.c_attn(x).chunk(3, -1))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        mask = mask & ~mask.tril(-26 if not self.late else -3) if not self.late or self.number == 4 else mask
        return self.c_proj(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))


def _windowed(late: bool) -> nn.Module:
    model = Gpt()
    for number, layer in enumerate(model.transformer.h):
        layer.attn = Windowed(layer.attn, number, late)
    return model


def _with_inner(module: nn.Module) -> nn.Module:
    model = Gpt()
    for layer in model.transformer.h:
        layer.mlp.gelu = nn.Sequential(nn.GELU(), module)
    return model


class LossAlone(PlainLlama):
    """Returns the loss where it is given targets."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        logits = super().forward(tokens)
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class WithTargets(PlainGpt):
    """Is always given targets."""

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = super().forward(tokens)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Caching(Windowed):
    """Attention that keeps its mask, and for how many tokens, from call to call."""

    longest = 0

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] != self.longest:
            self.longest = x.shape[1]
            self.mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.c_attn(x).chunk(3, -1))
        return self.c_proj(F.scaled_dot_product_attention(q, k, v, self.mask).transpose(1, 2).flatten(2))


class Dropping(Windowed):
    """Attention that drops out in evaluation, too."""

    def __init__(self, own: Any) -> None:
        super().__init__(own, 0, False)
        self.attention_dropout = 0.1

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.c_attn(x).chunk(3, -1))
        made = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.attention_dropout)
        return self.c_proj(made.transpose(1, 2).flatten(2))


class Recomputing(nn.Module):
    """A feed-forward part in a checkpoint that enters anew."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.c_fc, self.gelu, self.c_proj, self.dropout = own.c_fc, own.gelu, own.c_proj, own.dropout

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: self.dropout(self.c_proj(self.gelu(self.c_fc(x)))), x, use_reentrant=True)


def _with_parts(part: str, make: Callable[[Any], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        model = Gpt()
        for layer in model.transformer.h:
            setattr(layer, part, make(getattr(layer, part)))
        return model

    return made


def _noisy(layer: nn.Module, number: int, x: Tensor, first: Tensor) -> Tensor:
    return x if layer.training and np.random.random() < 0.1 else layer(x)


def _skipped(layer: nn.Module, number: int, x: Tensor, first: Tensor) -> Tensor:
    return x if layer.training and float(torch.rand(())) < 0.1 * number else layer(x)


def _called(run: Callable[[Any, int, Tensor, Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Gpt(run)


POPULATION: Mapping[str, tuple[Callable[[], nn.Module], str]] = {
    "plain": (Gpt, ""),
    "checkpoints": (_called(lambda layer, n, x, f: checkpoint(layer, x, use_reentrant=False)), ""),
    "checkpoints that enter anew": (_called(lambda layer, n, x, f: checkpoint(layer, x, use_reentrant=True)), ""),
    "a loss alone": (lambda: LossAlone(2), ""),
    "targets": (lambda: WithTargets(3), ""),
    "dropout": (lambda: Gpt(dropout=0.1), ""),
    "a number that is shown": (lambda: Gpt(_shown, dropout=0.1), ""),
    "a buffer that is not set": (_with_unset, ""),
    "an average": (lambda: Gpt(_averaged, dropout=0.1), "changes transformer.h.0.mean in each call"),
    "by name": (_called(lambda layer, n, x, f: layer(x=x)), ""),
    "a mask that is kept": (_with_parts("attn", lambda own: Caching(own, 0, False)), ""),
    "checkpoints in layers": (_with_parts("mlp", Recomputing), ""),
    "the first residual, late": (_called(lambda layer, n, x, f: layer(x + f if n > 3 else x)), "not the result"),
    "a skip, late": (_called(lambda layer, n, x, f: x + layer(x) if n == 4 else layer(x)), "not the result"),
    "twice, late": (_called(lambda layer, n, x, f: layer(layer(x)) if n == 5 else layer(x)), "once, in order"),
    "detached, late": (_called(lambda layer, n, x, f: layer(x.detach() if n == 4 else x)), "not the result"),
    "another layer, late": (lambda: _windowed(late=True), "h.4 computes something else"),
    "a window": (lambda: _windowed(late=False), "sees 26 tokens of 32"),
    "a counter": (lambda: Gpt(scale=_counted), "changes steps"),
    "a number": (lambda: Gpt(scale=_numbered), "changes calls"),
    "a weight, late": (lambda: Gpt(_decayed), "changes transformer.h.0.mlp.c_fc.weight in each call"),
    "fewer layers in evaluation": (
        _called(lambda layer, n, x, f: layer(x) if n < 5 or layer.training else x), "it has other logits",
    ),
    "a scale in evaluation": (lambda: Gpt(scale=lambda own: 1.0 if own.training else 0.5), "it has other logits"),
    "dropout in evaluation": (_with_parts("attn", Dropping), "in evaluation, too"),
    "inner dropout": (lambda: _with_inner(nn.Dropout(0.5)), "drops out with probabilities"),
    "layers at random": (lambda: Gpt(_skipped), "random numbers beside dropout"),
    "layers at random, by numpy": (lambda: Gpt(_noisy), "random numbers beside dropout"),
}  # fmt: skip
"""By name: what makes a model, and what a refusal says of it; "" for one that is computed."""


def tried(context: RankContext, payload: Mapping[str, Any]) -> dict[str, str]:
    """Return what is said of the models `names`: "" where the loss and gradients of a call are its own."""
    torch.set_num_threads(1)
    return {name: _said(POPULATION[name][0]) for name in payload["names"]}


def checked(model: nn.Module, dtype: torch.dtype = torch.float64, longest: int = 32) -> str:
    """Return what is said of a model in a copy with all layers; "" where nothing differs."""
    _, names = recognised(model)
    kinds = kinds_of(model, names)
    options = {
        "words": WORDS,
        "sequence": longest,
        "binds": (),
        "device": torch.device("cpu"),
        "dtype": dtype,
    }
    copied = reduced(model, names, range(len(kinds)), **options, shares=True)  # type: ignore[arg-type]
    try:
        check_whole(copied, model, names, kinds, longest)
    except MeshweaveError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _said(make: Callable[[], nn.Module]) -> str:
    torch.manual_seed(3)
    np.random.seed(3)
    whole = make().double()
    tokens, targets = (torch.randint(0, WORDS, (4, 30)) for _ in range(2))
    try:
        made = parallelize(copy.deepcopy(whole), "megatron", init_device_mesh("cpu", (2,)))
    except MeshweaveError as error:
        return f"{type(error).__name__}: {error}"
    drops = any(isinstance(child, nn.Dropout) and child.p for child in whole.modules())
    for model in (whole, made.module) if drops else ():
        model.eval()
    loss = made.module(tokens, targets).loss if isinstance(whole, LossAlone) else made.loss(tokens, targets)
    out = whole(tokens, targets)[0] if isinstance(whole, WithTargets) else whole(tokens)
    wanted = F.cross_entropy(out.flatten(0, 1), targets.flatten())
    loss.backward()
    wanted.backward()
    right = dict(whole.named_parameters())
    off = [
        float((p.grad.full_tensor() - right[n].grad).abs().max())  # type: ignore[union-attr,operator]
        for n, p in made.module.named_parameters()
    ]
    worst = max(abs(float(loss.detach() - wanted.detach())), *off)
    return "" if worst < 1e-9 else f"off by {worst}"


def annealed(context: RankContext, payload: Mapping[str, Any]) -> dict[str, str]:
    """What is said where dropout is set, or put into another mode, after `parallelize`."""
    torch.manual_seed(3)
    made = parallelize(Gpt(dropout=0.5).double(), "megatron", init_device_mesh("cpu", (2,)))
    own = made.module.transformer
    layer: Any = own.h[1]
    changes: dict[str, tuple[Any, str, Any]] = {
        "after attention": (layer.attn.resid_dropout, "p", 0.25),
        "of attention": (layer.attn, "attention_dropout", 0.0),
        "of the embedding": (own.drop, "p", 0.0),
        "mode of a layer's": (layer.mlp.dropout, "training", False),
        "mode of the embedding's": (own.drop, "training", False),
        "none": (layer, "training", True),
    }
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    said = {}
    for name, (owner, attribute, value) in changes.items():
        before = getattr(owner, attribute)
        setattr(owner, attribute, value)
        try:
            said[name] = str(made.loss(tokens, tokens).item() > 0)
        except MeshweaveError as error:
            said[name] = str(error)
        setattr(owner, attribute, before)
    return said
