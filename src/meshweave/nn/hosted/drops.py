"""Dropout in code that knows nothing of ranks: each shard of a tensor has its own mask, and its copies the same.

Functions of torch that drop are intercepted while a model runs. Between a linear layer that enters the inner
features and that which leaves them they are taken to drop inner features, else parts of the residual.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshweave.base.errors import UnsupportedError
from meshweave.nn.hosted.residual import Tokens, as_plain
from meshweave.nn.parallel.dropout import ShardDropout


class RankDropout(TorchFunctionMode):  # type: ignore[misc]
    """Intercepts `dropout` and `scaled_dot_product_attention` of torch, to drop by a mask of this rank's shard.

    To intercept each function of torch takes longer than some of them. On CPUs, once a forward pass has drawn no
    random numbers, later ones with the same probabilities are not intercepted.

    Args:
        tokens: its `place` is the layout of the tensor that is computed now.
        sources: where the model's dropout probabilities are set, as `sources_of` returns it.
    """

    def __init__(self, tokens: Tokens, sources: Sequence[Source]) -> None:
        super().__init__()
        self._tokens, self._sources = tokens, sources
        self._drops_nothing: set[tuple[float, ...]] = set()

    @contextmanager
    def around(self) -> Iterator[None]:
        """Intercept dropout in the block, a forward pass; not where an earlier pass drew no random numbers.

        Raises UnsupportedError where the block is not intercepted and draws random numbers all the same.
        """
        probabilities = tuple([getattr(owner, name) for owner, name in self._sources])
        if probabilities not in self._drops_nothing:
            before = torch.get_rng_state()
            with self:
                yield
            on_cpu = self._tokens.strategy.device_mesh.device_type == "cpu"
            if on_cpu and torch.equal(before, torch.get_rng_state()):
                self._drops_nothing.add(probabilities)
            return
        before = torch.get_rng_state()
        yield
        if not torch.equal(before, torch.get_rng_state()):
            raise UnsupportedError(
                "a forward pass draws random numbers that an earlier one with the same dropout did not draw: "
                "ranks would drop by masks of their own"
            )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, or its stand-in that drops by the mask of a shard."""
        named = dict(kwargs or {})
        if func is nn.functional.dropout:
            return self._dropped(*args, **named)
        if func is nn.functional.scaled_dot_product_attention:
            named |= zip(("dropout_p", "is_causal"), args[4:], strict=False)
            p, args = named.pop("dropout_p", 0.0), args[:4]
            if p:
                return self._attention(p, *args, **named)
            named["dropout_p"] = 0.0
        return func(*args, **named)

    def _dropped(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Return a tensor with elements dropped."""
        if not training or not p:
            return x
        made: Tensor = ShardDropout(p, self._tokens.strategy, self._tokens.place)(as_plain(x), True)
        return made.as_subclass(type(x)) if type(x) is not Tensor else made

    def _attention(
        self,
        p: float,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Return softmax attention (batch, heads, sequence, width) with weights dropped.

        Of a query that sees no key it is 0, as that of torch.
        """
        if enable_gqa:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        if is_causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
            scores = scores.masked_fill(~seen, float("-inf"))
        if attn_mask is not None:
            is_bool = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, float("-inf")) if is_bool else scores + attn_mask
        sees_some = (scores != float("-inf")).any(-1, keepdim=True)
        weights = scores.masked_fill(~sees_some, 0.0).softmax(-1) * sees_some
        return self._dropped(weights, p).to(v.dtype) @ v


Source = tuple[Any, str]
"""(object, name of its attribute) of a probability of dropout."""


def sources_of(module: nn.Module) -> list[Source]:
    """Return (object, name of its attribute) for each dropout probability of a model that is not 0.

    Raises UnsupportedError where there are some, and attention kernels drop by themselves (flash, flex).
    """
    sources: list[Source] = []
    dropping = []
    for path, child in module.named_modules():
        config: Any = vars(child).get("config")
        for owner, where in ((child, path), (config, "config")):
            names = [
                name
                for name, value in getattr(owner, "__dict__", {}).items()
                if _is_share(owner, name, value)
            ]
            dropping += [f"{where}.{name}" for name in names]
            sources += [(owner, name) for name in names]
    kernels = str(getattr(getattr(module, "config", None), "_attn_implementation", ""))
    if dropping and ("flash" in kernels or "flex" in kernels):
        raise UnsupportedError(
            f"{dropping[0]} is not 0: {kernels} drops by itself; take sdpa or eager attention"
        )
    return list({(id(owner), name): (owner, name) for owner, name in sources}.values())


def _is_share(owner: Any, name: str, value: Any) -> bool:
    is_dropout = name == "p" and "drop" in type(owner).__name__.lower()
    return isinstance(value, float) and value > 0 and (is_dropout or "drop" in name.lower())
