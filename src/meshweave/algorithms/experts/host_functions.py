"""What calls of a layer of experts over hosts do: a token goes once to each host that has experts of it.

A host has `per_host` consecutive experts. Rows for hosts are ordered by host, and for one host by token; the
choices and gates of a token are sent with its row. On host number `host`, rows are packed by expert as on a
source. There `choices`, `gates` and rows by token are in the order in which these rows arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshweave.algorithms.experts.functions import (
    Array,
    add_rows,
    gate_gradient,
    numbers_like,
    only,
    pack,
    pack_weighted,
    weigh,
)


def _needed(choices: Array, hosts: int, per_host: int) -> NDArray[np.bool_]:
    """Return whether each host has an expert of each token, (hosts, tokens)."""
    table = np.asarray(choices)
    return np.stack([((table >= 0) & (table // per_host == host)).any(axis=1) for host in range(hosts)])


def _on_host(choices: Array, host: int, per_host: int) -> NDArray[Any]:
    """Return the choices of rows, (rows, top_k), -1 for experts of other hosts."""
    table = np.asarray(choices).reshape(-1, choices.shape[-1])
    return np.where((table >= 0) & (table // per_host == host), table, -1)


def _flat(rows: Array) -> Array:
    return rows.reshape(-1, rows.shape[-1])


def pack_hosts(x: Array, choices: Array, hosts: int, per_host: int) -> Array:
    """Return rows (1, rows, features): for each host the rows of `x` of the tokens with an expert on it.

    They are ordered by host, then token.

    Args:
        x: a row for each token, (tokens, features).
        choices: experts of each token, (tokens, top_k), -1 for a dropped one.
        hosts: number of hosts.
        per_host: experts of a host.
    """
    tokens = np.nonzero(_needed(choices, hosts, per_host))[1]
    return x[tokens][None]


def sum_hosts(rows: Array, choices: Array, hosts: int, per_host: int) -> Array:
    """Return for each token the sum of the rows that hosts sent back for it: (tokens, features).

    Args:
        rows: (..., features), one for each host that has experts of a token, ordered as by `pack_hosts`.
        choices: experts of each token, (tokens, top_k), -1 for a dropped one.
        hosts: number of hosts.
        per_host: experts of a host.
    """
    needed, flat = _needed(choices, hosts, per_host), _flat(rows)
    if not flat.shape[0]:
        return numbers_like(np.zeros((needed.shape[1], flat.shape[1])), flat)
    places = np.cumsum(needed.reshape(-1)).reshape(needed.shape) - 1
    return only(flat[np.maximum(places, 0)], needed).sum(0)


def fan_out(rows: Array, choices: Array, host: int, per_host: int) -> Array:
    """Return packed rows (1, rows, features): for each expert on a host the rows of its tokens.

    They are ordered by expert, then token.

    Args:
        rows: those that arrived on this host, (..., features), one for each token that has experts here.
        choices: the experts of each of these tokens, (..., top_k), those of other hosts among them.
        host: the number of this host.
        per_host: experts of a host.
    """
    return pack(_flat(rows), _on_host(choices, host, per_host))


def fan_in(rows: Array, gates: Array, choices: Array, host: int, per_host: int) -> Array:
    """Return for each token on a host the sum of its experts' outputs there, each times its gate.

    The result is (1, tokens, features), in the order in which the tokens arrived.

    Args:
        rows: the outputs of the host's experts, (..., features), ordered by expert, then token.
        gates, choices: gates and experts of the tokens that arrived on the host, (..., top_k).
        host: the number of the host.
        per_host: experts of a host.
    """
    return weigh(rows, _flat(gates), _on_host(choices, host, per_host))[None]


def fan_out_weighted(rows: Array, gates: Array, choices: Array, host: int, per_host: int) -> Array:
    """Return packed rows (1, rows, features): for each expert on a host the rows of its tokens times their gates.

    They are ordered by expert, then token.

    Args:
        rows: a row for each token that arrived on the host, (..., features).
        gates, choices: gates and experts of the same tokens, (..., top_k).
        host: the number of the host.
        per_host: experts of a host.
    """
    return pack_weighted(_flat(rows), _flat(gates), _on_host(choices, host, per_host))


def fan_in_sum(rows: Array, choices: Array, host: int, per_host: int) -> Array:
    """Return for each token on a host the sum of its rows of experts there: (1, tokens, features).

    Tokens are in the order in which they arrived.

    Args:
        rows: a row for each token of each expert of the host, (..., features), ordered by expert, then token.
        choices: experts of the tokens that arrived on the host, (..., top_k).
        host: the number of the host.
        per_host: experts of a host.
    """
    return add_rows(rows, _on_host(choices, host, per_host))[None]


def fan_gradient(rows: Array, arriving: Array, choices: Array, host: int, per_host: int) -> Array:
    """Return the gradient of the gates of the tokens that arrived on a host, (1, tokens, top_k).

    It is 0 for experts of other hosts.

    Args:
        rows: the outputs of this host's experts, (..., features), packed by expert, then token.
        arriving: the gradient of the loss with respect to the result of `fan_in`, (..., features), by token.
        choices: the experts of each of these tokens, (..., top_k).
        host: the number of this host.
        per_host: experts of a host.
    """
    return gate_gradient(rows, _flat(arriving), _on_host(choices, host, per_host))[None]


def host_functions() -> Mapping[str, Callable[..., Any]]:
    """Return the functions of this module by name, as programs call them."""
    listed = (pack_hosts, sum_hosts, fan_out, fan_in, fan_out_weighted, fan_in_sum, fan_gradient)
    return {function.__name__: function for function in listed}
