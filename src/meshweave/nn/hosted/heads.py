"""The code of attention with the heads that a rank has: attributes that count heads, and operands by head."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from meshweave.algorithms.block.roles import Side
from meshweave.nn.hosted.columns import HeadColumns
from meshweave.nn.hosted.residual import Tokens

_COUNT = re.compile(r"(^|_)n?(um)?_?(attention_|query_|q_)?heads?$")
_KEY_COUNT = re.compile(r"(key_value|kv)_?heads?$")
_WIDTH = re.compile(
    r"embed_dim|hidden_size|split_size|all_head_size|(kv|inner|attn|q|k|v)_?(dim|size)$|d_model"
)
_BY_HEAD = ("alibi", "position_bias", "attention_mask")
"""Arguments of attention that may have a dim of heads."""


def take_heads(
    attention: nn.Module, columns: HeadColumns, units: int, tokens: Tokens
) -> Callable[[], None] | None:
    """Return a function that makes a module of attention compute with this rank's heads only; None if it has all.

    The function changes attributes of the module and its `forward`, and gives it a copy of its configuration.

    Args:
        attention: the module.
        columns: which columns of the linear layers before attention each head reads, for all heads of the model.
        units: the number of equal runs of consecutive heads; a rank has whole runs.
        tokens: gives the strategy.
    """
    first, end = local_heads(columns, units, tokens)
    if end - first == columns.heads:
        return None
    own_units = (end - first) * units // columns.heads
    keys = own_units if units != columns.groups else (end - first) * columns.groups // columns.heads
    holders = [each for each in attention.modules() if list(each.children())]  # in BERT one within another
    changes = [(vars(each), _changes(each, columns, end - first, keys)) for each in holders]

    def take() -> None:
        for attributes, changed in changes:
            attributes.update(changed)
        config = vars(attention).get("config")
        if config is not None:
            vars(attention)["config"] = _config_of_heads(config, columns, end - first, keys)
        attention.forward = _with_own_heads(attention, columns.heads, first, end)

    return take


def local_heads(columns: HeadColumns, units: int, tokens: Tokens) -> tuple[int, int]:
    """Return (first, end): this rank has query heads `first` to `end` - 1.

    Heads are cut into `units` equal runs of consecutive ones, of which a rank has whole ones.
    """
    per_unit = columns.heads // units
    return tokens.strategy.span(Side("inner", units, per_unit), tokens.strategy.roles.core(True))


def _changes(attention: nn.Module, columns: HeadColumns, heads: int, keys: int) -> dict[str, int]:
    """Return the attributes of a module that count heads, or features of all of them, with what they are here."""
    changes: dict[str, int] = {}
    for name, value in vars(attention).items():
        if not isinstance(value, int) or isinstance(value, bool) or name.startswith("_"):
            continue
        if _KEY_COUNT.search(name) and value == columns.groups:
            changes[name] = keys
        elif _COUNT.search(name) and value == columns.heads:
            changes[name] = heads
        elif name in ("num_key_value_groups", "n_rep") and value == columns.heads // columns.groups:
            changes[name] = heads // keys
        elif _WIDTH.search(name) and value == columns.heads * columns.width:
            changes[name] = heads * columns.width
        elif _WIDTH.search(name) and value == columns.groups * columns.width:
            changes[name] = keys * columns.width
    return changes


def _config_of_heads(config: Any, columns: HeadColumns, heads: int, keys: int) -> Any:
    own = copy.copy(config)
    for name, value in list(vars(config).items()):
        if isinstance(value, bool) or not isinstance(value, int):
            continue
        if _KEY_COUNT.search(name) and value == columns.groups:
            object.__setattr__(own, name, keys)
        elif _COUNT.search(name) and value == columns.heads:
            object.__setattr__(own, name, heads)
    return own


def _with_own_heads(attention: nn.Module, heads: int, first: int, end: int) -> Callable[..., Any]:
    """Return the forward of a module of attention, given this rank's part of what has a dim of heads."""
    forward = type(attention).forward.__get__(attention)
    order = list(inspect.signature(forward).parameters)
    places = [(order.index(name), name) for name in _BY_HEAD if name in order]
    if not places:
        return forward  # type: ignore[no-any-return]

    def of_heads(*given: Any, **named: Any) -> Any:
        for place, name in places:
            value = given[place] if place < len(given) else named.get(name)
            if not isinstance(value, Tensor):
                continue
            own = _heads_of(value, heads, first, end)
            if place < len(given):
                given = (*given[:place], own, *given[place + 1 :])
            else:
                named[name] = own
        return forward(*given, **named)

    return of_heads


def _heads_of(value: Tensor, heads: int, first: int, end: int) -> Tensor:
    """Return what some heads have of a tensor (heads, ...), (batch * heads, ...) or (batch, heads, ...)."""
    if value.ndim == 4:
        return value[:, first:end] if value.shape[1] == heads else value
    if value.ndim == 3 and value.shape[0] % heads == 0:
        return value.unflatten(0, (-1, heads))[:, first:end].flatten(0, 1)
    return value
