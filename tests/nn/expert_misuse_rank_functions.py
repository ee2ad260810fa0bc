"""What ranks do in tests of wrong inputs of `ExpertExchange`: each way is given by one rank, or by all."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshweave.base.errors import MeshweaveError
from meshweave.execute.ranks.job import RankContext
from meshweave.execute.torch.context import TorchContext
from meshweave.nn import ExpertExchange

ODD = 1
EXPERTS, TOKENS, HIDDEN = 24, 6, 4


@dataclass
class Given:
    """What a rank gives an exchange."""

    x: Tensor
    choices: Any
    gates: Any
    settings: dict[str, Any] = field(default_factory=dict)
    experts: Callable[[Tensor], Any] = lambda rows: rows * 2
    before_combine: Callable[[], None] = lambda: None


Way = Callable[[Given], None]


def _set(**values: Any) -> Way:
    def change(given: Given) -> None:
        for name, value in values.items():
            setattr(given, name, value(getattr(given, name)) if callable(value) else value)

    return change


def _settings(**values: Any) -> Way:
    return lambda given: given.settings.update(values)


def _in_place(name: str, value: Any) -> Way:
    def change(given: Given) -> None:
        getattr(given, name)[0, 0] = value

    return change


def _experts(change: Callable[[Tensor], Any]) -> Way:
    def set_experts(given: Given) -> None:
        given.experts = change

    return set_experts


def _turned(given: Given) -> None:
    given.settings["ranks"] = range(dist.get_world_size())[::-1]


WRONG: dict[str, tuple[Way, str]] = {
    "tokens of three dims": (_set(x=lambda x: x[None]), "tokens"),
    "tokens of one dim": (_set(x=lambda x: x[0]), "tokens"),
    "whole tokens": (_set(x=lambda x: x.to(torch.int64)), "int64"),
    "complex tokens": (_set(x=lambda x: x.to(torch.complex64)), "float"),
    "tokens in a list": (_set(x=lambda x: x.tolist()), "tensor"),
    "no features": (_set(x=lambda x: x[:, :0]), "hidden"),
    "choices of other tokens": (_set(choices=lambda c: c[:-1]), "choices"),
    "choices of one dim": (_set(choices=lambda c: c[:, 0]), "choices"),
    "choices in a list": (_set(choices=lambda c: c.tolist()), "choices"),
    "real choices": (_set(choices=lambda c: c.float()), "choices"),
    "choices of truth": (_set(choices=lambda c: c > 0), "choices"),
    "an expert too high": (_in_place("choices", EXPERTS), "expert 24"),
    "an expert far too high": (_in_place("choices", 2**40), "expert 1099511627776"),
    "an expert below -1": (_in_place("choices", -2), "expert -2"),
    "an expert twice": (_set(choices=lambda c: c[:, :1].repeat(1, 2)), "twice"),
    "more experts a token than there are": (
        _set(choices=lambda c: torch.arange(EXPERTS + 1).repeat(TOKENS, 1) % EXPERTS),
        "of 24 experts",
    ),
    "gates of other tokens": (_set(gates=lambda g: g[:-1]), "gates"),
    "gates of other experts": (_set(gates=lambda g: g[:, :1]), "gates"),
    "gates of another type": (_set(gates=lambda g: g.double()), "gates"),
    "whole gates": (_set(gates=lambda g: g.to(torch.int64)), "gates"),
    "rows left out": (_experts(lambda rows: rows[:-1]), "rows"),
    "rows of three dims": (_experts(lambda rows: rows[None]), "rows"),
    "rows that are whole": (_experts(lambda rows: rows.to(torch.int64)), "int64"),
    "a list of rows": (_experts(lambda rows: rows.tolist()), "tensor"),
}
"""What one rank, or all, gives wrongly, and a word of the error on every rank."""

UNLIKE: dict[str, tuple[Way, str]] = {
    "another number of experts": (_settings(num_experts=48), "experts"),
    "another capacity": (_settings(capacity=2), "capacity"),
    "another algorithm": (_settings(entry="experts_pairwise"), "experts_pairwise"),
    "other ranks": (_turned, "ranks"),
    "another width": (_set(x=lambda x: x.repeat(1, 2)), "hidden"),
    "another type": (_set(x=lambda x: x.double(), gates=lambda g: g.double()), "float64"),
    "more experts a token": (_set(choices=lambda c: c[:, :1], gates=lambda g: g[:, :1]), "experts a token"),
    "rows of another width": (_experts(lambda rows: rows.repeat(1, 2)), "rows of experts"),
    "rows of another type": (_experts(lambda rows: rows.double()), "float64"),
}
"""What is right by itself, and other than what the others give."""

SETTINGS: dict[str, tuple[Way, str]] = {
    "no ranks": (_settings(ranks=()), "ranks"),
    "one rank": (_settings(ranks=2), "ranks"),
    "a rank twice": (_settings(ranks=(0, 1, 1)), "ranks"),
    "ranks that are not there": (_settings(ranks=(0, 1, 2, 3)), "ranks"),
    "ranks in words": (_settings(ranks="01"), "ranks"),
    "experts that do not divide": (_settings(num_experts=7), "7 experts"),
    "no experts": (_settings(num_experts=0), "0 experts"),
    "experts in words": (_settings(num_experts="24"), "experts"),
    "half an expert": (_settings(num_experts=24.0), "experts"),
    "a capacity of none": (_settings(capacity=0), "capacity"),
    "a capacity below none": (_settings(capacity=-1), "capacity"),
    "a capacity of half": (_settings(capacity=1.5), "capacity"),
    "no such algorithm": (_settings(entry="experts_none"), "experts_none"),
    "an algorithm for something else": (_settings(entry="summa"), "summa"),
    "an algorithm for hosts": (_settings(entry="experts_hierarchical"), "experts_hierarchical"),
}
"""What every rank makes an exchange with, wrongly."""


def _given(rank: int) -> Given:
    draw = torch.Generator().manual_seed(rank)
    x = torch.randn((TOKENS, HIDDEN), generator=draw)
    choices = torch.rand((TOKENS, EXPERTS), generator=draw).argsort(1)[:, :2]
    return Given(x, choices, torch.rand((TOKENS, 2), generator=draw))


def _exchanged(given: Given, torch_context: TorchContext, num_ranks: int) -> Tensor:
    settings = {"ranks": range(num_ranks), "num_experts": EXPERTS, **given.settings}
    exchange = ExpertExchange(settings.pop("ranks"), context=torch_context, **settings)
    rows, handle = exchange.dispatch(given.x, given.choices)
    made = given.experts(rows)
    given.before_combine()
    return exchange.combine(made, handle, given.gates)


TABLES = {"wrong": WRONG, "unlike": UNLIKE, "settings": SETTINGS}


def misuse(context: RankContext, payload: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return for each way of the payload's tables what this rank was told, and after how many seconds.

    Settings are those of all ranks; the rest is what the odd one has, or all of `by_all`.
    """
    torch.set_num_threads(1)
    said = {}
    for table, name in [(each, name) for each in payload["tables"] for name in TABLES[each]]:
        dist.barrier()
        torch_context = TorchContext(liveness=context.liveness, deadline_s=payload["deadline_s"])
        given = _given(context.rank)
        if payload["by_all"] or table == "settings" or context.rank == ODD:
            TABLES[table][name][0](given)
        began = time.monotonic()
        try:
            _exchanged(given, torch_context, context.num_ranks)
            answer: dict[str, Any] = {"error": "", "text": ""}
        except MeshweaveError as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        except Exception as error:
            answer = {"error": f"raw {type(error).__name__}", "text": traceback.format_exc()[-600:]}
        said[name] = answer | {"seconds": time.monotonic() - began}
        torch_context.close()
    return said


def right_but_odd(context: RankContext, payload: Mapping[str, Any]) -> dict[str, float]:
    """Return for inputs that are right, and seldom, by how much outputs and gradients differ from one process."""
    torch.set_num_threads(1)
    torch_context = TorchContext(liveness=context.liveness)
    exchange = ExpertExchange(
        range(context.num_ranks), EXPERTS, context=torch_context, entry=payload["entry"]
    )
    worst = {}
    for name in ODDITIES:
        given = _given(context.rank)
        ODDITIES[name](given, context.rank)
        x = given.x.detach().requires_grad_()
        gates = given.gates.detach().requires_grad_()
        rows, handle = exchange.dispatch(x, given.choices)
        y = exchange.combine(rows * 2, handle, gates)
        y.float().sum().backward()
        wanted, dx, dgates = _alone(given)
        pairs = ((y, wanted), (x.grad, dx), (gates.grad, dgates))
        worst[name] = max(_apart(one, other) for one, other in pairs)
    return worst


def _alone(given: Given) -> tuple[Tensor, Tensor, Tensor]:
    x, gates = given.x.detach().double().requires_grad_(), given.gates.detach().double().requires_grad_()
    weights = torch.where(given.choices >= 0, gates, torch.zeros(()).double())
    y = (2 * x)[:, None].mul(weights[..., None]).sum(1)
    y.sum().backward()
    return y, x.grad, gates.grad


def _apart(one: Tensor | None, other: Tensor | None) -> float:
    if one is None or other is None or one.shape != other.shape:
        return float("inf")
    one, other = one.detach().double(), other.detach().double()
    if not torch.equal(one.isnan(), other.isnan()):
        return float("inf")
    return float((one - other).nan_to_num().abs().max()) if one.numel() else 0.0


def _empty(given: Given, rank: int) -> None:
    given.x, given.choices, given.gates = given.x[:0], given.choices[:0], given.gates[:0]


def _empty_on_one(given: Given, rank: int) -> None:
    if rank == ODD:
        _empty(given, rank)


def _strided(given: Given, rank: int) -> None:
    given.x = given.x.t().contiguous().t()
    given.choices = given.choices.t().contiguous().t()
    given.gates = given.gates.repeat_interleave(2, 1)[:, ::2]


def _expanded(given: Given, rank: int) -> None:
    given.x = given.x[:1].expand(TOKENS, -1)


def _half(given: Given, rank: int) -> None:
    given.x, given.gates = given.x.half(), given.gates.half()


def _bfloat16(given: Given, rank: int) -> None:
    given.x, given.gates = given.x.bfloat16(), given.gates.bfloat16()


def _nan(given: Given, rank: int) -> None:
    given.x[0] = float("nan")


def _dropped(given: Given, rank: int) -> None:
    """Pairs without an expert count for nothing, whatever their gates and the other rows are."""
    given.choices[1:, 1] = -1
    given.gates[1:, 1] = float("nan")
    given.x[0] = float("inf")


def _all_dropped(given: Given, rank: int) -> None:
    given.choices[:] = -1


def _narrow(given: Given, rank: int) -> None:
    given.choices = given.choices.to(torch.uint8)


ODDITIES: dict[str, Callable[[Given, int], None]] = {
    "no tokens": _empty,
    "no tokens on one rank": _empty_on_one,
    "strided": _strided,
    "expanded": _expanded,
    "half": _half,
    "bfloat16": _bfloat16,
    "nan": _nan,
    "dropped pairs": _dropped,
    "all pairs dropped": _all_dropped,
    "choices of a byte": _narrow,
}


def die_in_exchange(context: RankContext, payload: Mapping[str, Any]) -> None:
    """Exchange twice; the odd rank ends or stops itself in the second, and others write what they are told."""
    torch.set_num_threads(1)
    torch_context = TorchContext(liveness=context.liveness, deadline_s=payload["deadline_s"])
    given = _given(context.rank)
    _exchanged(given, torch_context, context.num_ranks)

    def die() -> None:
        if context.rank == ODD:
            os.kill(os.getpid(), getattr(signal, payload["signal"]))
            time.sleep(60.0)  # after SIGTERM a rank still reports, and would meanwhile exchange to the end

    if payload["before"] == "combine":
        given.before_combine = die
    else:
        die()
    began = time.monotonic()
    try:
        _exchanged(given, torch_context, context.num_ranks)
    except MeshweaveError as error:
        said = [type(error).__name__, list(getattr(error, "missing", ())), time.monotonic() - began]
        Path(payload["folder"], f"{context.rank}.json").write_text(json.dumps(said))
        raise
