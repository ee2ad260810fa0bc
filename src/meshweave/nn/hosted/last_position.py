"""Rotary embeddings whose frequencies follow from the last position of a call, where a rank has some positions."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.base.errors import UnsupportedError
from meshweave.nn.hosted.residual import Tokens


def share_last_position(module: nn.Module, tokens: Tokens) -> None:
    """Make rotary embeddings that scale with the last position use that of all ranks, `Tokens.last_position`.

    These are the kinds "dynamic" and "longrope" of transformers. The modules of `module` are changed in place.
    """
    for path, child in module.named_modules():
        kinds = getattr(child, "rope_type", "")
        for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
            if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
                child.forward = partial(_with_last_position, path, child, tokens)


def _with_last_position(
    path: str, rotary: nn.Module, tokens: Tokens, x: Tensor, *given: Any, **named: Any
) -> Any:
    """Return what a rotary embedding makes of positions (..., sequence), with the last one of all ranks beside."""
    forward, last = type(rotary).forward, tokens.last_position
    if last is None:
        return forward(rotary, x, *given, **named)
    positions, *rest = given if given else (named.pop("position_ids"),)
    longer = torch.cat((positions, last.to(positions).expand(*positions.shape[:-1], 1)), -1)
    made = forward(rotary, x, longer, *rest, **named)
    parts = made if isinstance(made, tuple) else (made,)
    if any(part.ndim < 2 or part.shape[-2] != longer.shape[-1] for part in parts):
        raise UnsupportedError(
            f"{path}: {type(rotary).__name__} makes no row for each position, and ranks have other last positions"
        )
    own = tuple(part[..., :-1, :] for part in parts)
    return own if isinstance(made, tuple) else own[0]
