"""How far tensors of a model and its original lie apart, and the first that all ranks find to differ."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshweave.base.errors import listed
from meshweave.execute.ranks.agreement import exchange
from meshweave.execute.torch.context import TorchContext
from meshweave.nn.prove.causes import RankSample, likely_cause
from meshweave.nn.prove.shards import LocalTensor

_SAMPLES = 512
_LISTED = 8


@dataclass(frozen=True)
class Difference:
    """The first tensor in which a parallelised model is not its original.

    Attributes:
        what: the tensor, such as "gradient of model.norm.weight".
        rank: the first rank that has it wrong.
        shard: which part of the tensor that rank has, as ranges of positions along each dim.
        error: the norm of the difference over that of what would be right.
        allowed: the error that rounding explains.
        cause: what likely is the cause.
    """

    what: str
    rank: int
    shard: str
    error: float
    allowed: float
    cause: str

    def __str__(self) -> str:
        of = (
            ""
            if math.isnan(self.error)
            else f" by {self.error:.2g} of its norm (rounding: {self.allowed:.1g})"
        )
        return f"{self.what} differs on rank {self.rank} ({self.shard}){of}; likely cause: {self.cause}"


@dataclass(frozen=True)
class Compared:
    """A tensor of a rank beside what it should be.

    Attributes:
        what: its name in messages.
        found: this rank's part; None where it has none.
        wanted: the whole of the original; None where that has none.
        allowed: the norm of a difference that rounding explains, over the norm of `wanted`, and
        floor: that of each element of it beside.
        has_copies: whether ranks with the same part must have the same bits.
        hint: what is known of the place where it is computed.
        bias: what may have been added to it, in the shape of its last dim.
    """

    what: str
    found: LocalTensor | None
    wanted: Tensor | None
    allowed: float = 0.0
    floor: float = 0.0
    has_copies: bool = False
    hint: str = ""
    bias: Tensor | None = None

    def error(self) -> tuple[float, float]:
        """Return the error and what is allowed, both relative; the error is infinite where one is missing."""
        if self.found is None or self.wanted is None:
            return (0.0 if self.found is None and self.wanted is None else math.inf), 0.0
        wanted = self._wanted()
        if wanted.shape != self.found.values.shape:
            return math.inf, 0.0
        kind = torch.promote_types(wanted.dtype, self.found.values.dtype)
        if not kind.is_floating_point and not kind.is_complex:
            return float(not torch.equal(self.found.values, wanted)), 0.0
        found, wanted = self.found.values.to(kind), wanted.to(kind)
        off = float(torch.linalg.vector_norm(found - wanted)) if found.numel() else 0.0
        norm = float(torch.linalg.vector_norm(wanted)) if found.numel() else 0.0
        own = self.allowed * norm + self.floor * math.sqrt(max(found.numel(), 1))
        if math.isnan(off):
            same = torch.equal(found.isnan(), wanted.isnan())
            off = 0.0 if same else math.inf
        scale = norm or 1.0
        return off / scale, own / scale

    def _wanted(self) -> Tensor:
        assert self.found is not None and self.wanted is not None
        shape = self.wanted.shape
        fits = self.found.places is None or tuple(map(len, self.found.places)) == self.found.values.shape
        return self.found.of(self.wanted) if fits and len(shape) == self.found.values.ndim else self.wanted

    def digest(self) -> tuple[int, int]:
        """Return a number for the part and one for its values; zeros of both signs are the same."""
        if self.found is None:
            return 0, 0
        values = self.found.values
        data = (values + 0).contiguous().cpu().flatten().view(torch.uint8).numpy() if values.numel() else b""
        return self.found.key, zlib.crc32(data)

    def sample(self) -> RankSample:
        """Return some elements for `likely_cause`."""
        if self.found is None or self.wanted is None:
            return RankSample(0, [], [], [], [], "", [], "")
        found, wanted = self.found.values.flatten().double(), self._wanted().flatten().double()
        if found.numel() != wanted.numel() or not found.numel():
            shape = f"it has shape {tuple(self.found.values.shape)}"
            return RankSample(self.found.key, [], [], [], [], shape, [], "")
        flat = _positions(found.numel())
        live = wanted.nonzero().flatten().cpu()
        near = live[_positions(live.numel())] if live.numel() else flat
        bias: list[float] = []
        if self.bias is not None and self.wanted.ndim:
            line = LocalTensor(self.bias, (self.found.places[-1],) if self.found.places else None).of(
                self.bias
            )
            bias = line.double()[near.to(line.device) % line.numel()].tolist()
        return RankSample(
            self.found.key,
            found[near].tolist(),
            wanted[near].tolist(),
            found[flat].tolist(),
            wanted[flat].tolist(),
            _elsewhere(self.found.values, self.wanted),
            bias,
            _extent(self.found.values, self._wanted()),
        )


def _positions(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randperm(count, generator=generator)[:_SAMPLES]


def _elsewhere(found: Tensor, whole: Tensor) -> str:
    """Return where else in a whole tensor a local one is, in words; "" where it is not."""
    if found.ndim != whole.ndim or not found.numel() or found.dtype != whole.dtype:
        return ""
    if found.ndim == 2 and found.shape == whole.shape[::-1] and torch.equal(found, whole.t()):
        return "the transpose"
    cut = [dim for dim in range(found.ndim) if found.shape[dim] < whole.shape[dim]]
    if len(cut) != 1:
        return ""
    (dim,) = cut
    lines, rows = whole.movedim(dim, 0).flatten(1), found.movedim(dim, 0).flatten(1)
    for start in (lines[:, :64] == rows[0, :64]).all(-1).nonzero().flatten().tolist():
        if torch.equal(lines[start : start + len(rows)], rows):
            return f"positions {start}:{start + len(rows)} along dim {dim}"
    if bool((lines[:, None, :16] == rows[None, :64, :16]).all(-1).any(0).all()):
        return f"other rows of dim {dim}, in another order"
    return ""


def _extent(found: Tensor, wanted: Tensor) -> str:
    """Return in words where along a dim two tensors differ, if that is in some places alone."""
    if found.shape != wanted.shape or not found.is_floating_point():
        return ""
    off = (found - wanted).abs()
    off = off > 1e-6 * wanted.abs().max()
    for dim in range(found.ndim):
        lines = off.movedim(dim, 0).reshape(off.shape[dim], -1).any(-1)
        wrong = lines.nonzero().flatten().tolist()
        if found.ndim == 3 and dim == 1 and wrong and wrong == list(range(wrong[0], len(lines))) and wrong[0]:
            return f"from token {wrong[0]} of sequences on"
        if wrong and 2 * len(wrong) <= len(lines):
            return f"only at positions {listed(wrong)} along dim {dim} of the shard"
    return ""


@dataclass
class ProofRanks:
    """The ranks of a proof, which tell one another what they find."""

    ranks: tuple[int, ...]
    rank: int
    context: TorchContext
    lines: list[list[int]] = field(default_factory=list)

    def say(self, words: Any) -> dict[int, Any]:
        """Return what each rank says, by rank."""
        said = exchange(self.context, self.ranks, json.dumps(words), "all ranks of a proof", topic="proof")
        return {rank: json.loads(text) for rank, text in said.items()}

    def failures(self, error: Exception | None) -> dict[int, str]:
        """Return the errors of ranks that have one; every rank gives its own or None."""
        own = "" if error is None else f"{type(error).__name__}: {' '.join(str(error).split())}"
        return {rank: text for rank, text in self.say(own).items() if text}

    def first_difference(self, compared: Iterable[Compared]) -> Difference | None:
        """Return the first tensor that differs on any rank, or whose copies differ; None where all are equal.

        Every rank gives the same tensors in the same order, and gets the same answer.
        """
        items = list(compared)
        wrong: dict[int, tuple[float, float]] = {}
        for number, item in enumerate(items):
            error, allowed = item.error()
            if not error <= allowed and len(wrong) < _LISTED:
                wrong[number] = error, allowed
        own = {
            "wrong": [[number, *values] for number, values in wrong.items()],
            "names": zlib.crc32(repr([item.what for item in items]).encode()),
            "copies": [item.digest() if item.has_copies else (0, 0) for item in items],
        }
        said = self.say(own)
        if len({answer["names"] for answer in said.values()}) > 1:
            return Difference("the list of tensors", self.ranks[0], "the whole", math.inf, 0, _OTHER_NAMES)
        numbers = [entry[0] for answer in said.values() for entry in answer["wrong"]]
        numbers += _drifting([answer["copies"] for answer in said.values()])
        return self._explained(items[min(numbers)], min(numbers), said) if numbers else None

    def _explained(self, item: Compared, number: int, said: dict[int, Any]) -> Difference:
        errors = {
            rank: (entry[1], entry[2])
            for rank, answer in said.items()
            for entry in answer["wrong"]
            if entry[0] == number
        }
        drifts = not errors
        place = (
            item.found.where(item.found.values.shape if item.wanted is None else item.wanted.shape)
            if item.found
            else "none"
        )
        answers = self.say([*item.sample().as_list(), place, item.found is None, item.wanted is None])
        samples = {rank: RankSample(*answer[:-3]) for rank, answer in answers.items()}
        if drifts:
            rank = _odd_one(said, number)
            cause = "copies of it drift apart: ranks that have the same part have other bits"
            return Difference(item.what, rank, answers[rank][-3], math.nan, 0.0, cause)
        rank = min(errors)
        if answers[rank][-2] or answers[rank][-1]:
            lacking = "the parallelised model has none" if answers[rank][-2] else "the original has none"
            if item.what.startswith("gradient"):
                lacking += ": a weight that is frozen, takes no part, or whose reduction is put off"
            return Difference(item.what, rank, answers[rank][-3], math.nan, 0.0, lacking)
        error, allowed = errors[rank]
        cause = likely_cause(samples, sorted(errors), self.lines, item.hint, max(1e-3, 4 * allowed))
        return Difference(item.what, rank, answers[rank][-3], error, allowed, cause)


_OTHER_NAMES = "ranks have modules of other names, or an original that differs between ranks"


def _drifting(copies: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    """Return the numbers of tensors of which ranks with the same part have other bits."""
    found = []
    for number, own in enumerate(zip(*copies, strict=True)):
        if len({(key, value) for key, value in own}) > len({key for key, _ in own}):
            found.append(number)
    return found


def _odd_one(said: dict[int, Any], number: int) -> int:
    """Return the first rank whose copy of a tensor is not that of most ranks that have the same part."""
    by_part: dict[int, dict[int, list[int]]] = {}
    for rank, answer in said.items():
        key, value = answer["copies"][number]
        by_part.setdefault(key, {}).setdefault(value, []).append(rank)
    for values in by_part.values():
        if len(values) > 1:
            return min(values.values(), key=lambda ranks: (len(ranks), -ranks[0]))[0]
    raise AssertionError(by_part)
