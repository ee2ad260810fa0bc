"""How much tensors of a model and its original differ, and the first that all ranks find to differ."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshweave.base.errors import listed
from meshweave.execute.ranks.agreement import exchange
from meshweave.execute.torch.context import TorchContext
from meshweave.nn.parallel.checksums import checksum
from meshweave.nn.prove.causes import RankSample, likely_cause
from meshweave.nn.prove.shards import LocalTensor

_SAMPLES = 512
_MASKED = 1e30
"""Equal numbers above it, as of logits that are left out, are beyond all norms."""
_LISTED = 8
_ENOUGH = 4
"""How many numbers, not all alike, are said to be another parameter's."""


@dataclass(frozen=True)
class Difference:
    """The first tensor in which a parallelised model is not its original.

    Attributes:
        what: the tensor, such as "gradient of model.norm.weight".
        rank: the first rank that has it wrong.
        shard: which part of the tensor that rank has, as ranges of positions along each dim.
        error: the norm of the difference over that of what would be right; infinite where shapes differ, or
            ranks compare other tensors; nan where one is missing, only copies differ, or a model does not run.
        allowed: the error that rounding explains.
        cause: the likely cause, in words.
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
    """A tensor of this rank beside the original's, and how far they may differ.

    Attributes:
        what: its name in messages.
        actual: this rank's shard; None where it has none.
        wanted: the whole tensor of the original; None where the original has none.
        allowed: the norm of a difference that rounding explains, over the norm of this rank's part of `wanted`.
        floor: the absolute difference per element that rounding explains in addition.
        has_copies: whether ranks with the same shard must have the same bits.
        hint: what is known of the place where it is computed.
        bias: what may have been added to it, in the shape of its last dim.
    """

    what: str
    actual: LocalTensor | None
    wanted: Tensor | None
    allowed: float = 0.0
    floor: float = 0.0
    has_copies: bool = False
    hint: str = ""
    bias: Tensor | None = None

    def error(self) -> tuple[float, float]:
        """Return (error, allowed error): norms of differences over the norm of this rank's part of `wanted`.

        Where that norm is 0 both are absolute. Both are 0 where all elements are equal. The error is infinite
        where one of the two tensors is missing, has another shape, or has nan where the other has none; nan in the
        same places is no error. Of integers it is 0 or 1.
        """
        if self.actual is None or self.wanted is None:
            return (0.0 if self.actual is None and self.wanted is None else math.inf), 0.0
        wanted = self._wanted()
        if wanted.shape != self.actual.values.shape:
            return math.inf, 0.0
        kind = torch.promote_types(wanted.dtype, self.actual.values.dtype)
        if not kind.is_floating_point and not kind.is_complex:
            return float(not torch.equal(self.actual.values, wanted)), 0.0
        actual, wanted = self.actual.values.to(kind), wanted.to(kind)
        if torch.equal(actual, wanted):
            return 0.0, 0.0
        off, norm = _norms(actual, wanted)
        if not off + norm < _MASKED:  # none is beyond all norms, or nan, where these are not
            masked = (actual == wanted) & (wanted.abs() > _MASKED) | actual.isnan() & wanted.isnan()
            actual, wanted = actual[~masked], wanted[~masked]
            off, norm = _norms(actual, wanted)
        own = self.allowed * norm + self.floor * math.sqrt(max(actual.numel(), 1))
        if math.isnan(off) or math.isnan(norm):
            return math.inf, 0.0  # nan in one of the two
        scale = norm or 1.0
        return off / scale, own / scale

    def _wanted(self) -> Tensor:
        assert self.actual is not None and self.wanted is not None
        shape = self.wanted.shape
        fits = self.actual.places is None or tuple(map(len, self.actual.places)) == self.actual.values.shape
        return self.actual.of(self.wanted) if fits and len(shape) == self.actual.values.ndim else self.wanted

    def digest(self) -> tuple[int, int]:
        """Return (number of this rank's shard, checksum of its values); (0, 0) where this rank has none.

        Ranks with copies of a shard must have equal pairs. -0 counts as 0.
        """
        if self.actual is None:
            return 0, 0
        return self.actual.key, int(checksum(self.actual.values + 0))

    def sample(self) -> RankSample:
        """Return up to 512 elements of this rank's shard, and of the original's same part, for `likely_cause`."""
        if self.actual is None or self.wanted is None:
            return RankSample(0, [], [], [], [], "", [], "")
        actual, wanted = self.actual.values.flatten().double(), self._wanted().flatten().double()
        if actual.numel() != wanted.numel() or not actual.numel():
            shape = f"it has shape {tuple(self.actual.values.shape)}"
            return RankSample(self.actual.key, [], [], [], [], shape, [], "")
        flat = _positions(actual.numel())
        live = wanted.nonzero().flatten().cpu()
        near = live[_positions(live.numel())] if live.numel() else flat
        bias: list[float] = []
        if self.bias is not None and self.wanted.ndim:
            line = LocalTensor(self.bias, (self.actual.places[-1],) if self.actual.places else None).of(
                self.bias
            )
            bias = line.double()[near.to(line.device) % line.numel()].tolist()
        return RankSample(
            self.actual.key,
            actual[near].tolist(),
            wanted[near].tolist(),
            actual[flat].tolist(),
            wanted[flat].tolist(),
            _elsewhere(self.actual.values, self._wanted(), self.wanted),
            bias,
            _extent(self.actual.values, self._wanted()),
        )


def _norms(actual: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Return the norms of a difference and of what is right; 0 for no elements."""
    off, norm = (torch.linalg.vector_norm(each) for each in (actual - wanted, wanted))
    return float(off), float(norm)


def _positions(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randperm(count, generator=generator)[:_SAMPLES]


def _elsewhere(actual: Tensor, wanted: Tensor, whole: Tensor) -> str:
    """Return in words where else the numbers of a local tensor are: in a whole one, or in its own part.

    Args:
        wanted: the part of the whole that the local tensor should be.
    """
    if actual.ndim != whole.ndim or not actual.numel() or actual.dtype != whole.dtype:
        return ""
    cut = [dim for dim in range(actual.ndim) if actual.shape[dim] < whole.shape[dim]]
    if actual.ndim == 2:
        turned = whole.t()
        if actual.shape == turned.shape and torch.equal(actual, turned):
            return "the transpose"
        if whole.shape == turned.shape and len(cut) == 1 and _starts(actual, turned, cut[0]):
            return "a part of the transpose"
    if len(cut) == 1 and actual.shape != whole.shape:
        if starts := _starts(actual, whole, cut[0]):
            return f"positions {starts[0]}:{starts[0] + actual.shape[cut[0]]} along dim {cut[0]}"
        lines, rows = _lines(whole, cut[0]), _lines(actual, cut[0])
        if bool((lines[:, None, :16] == rows[None, :64, :16]).all(-1).any(0).all()):
            return f"other rows of dim {cut[0]}, in another order"
    if not actual.is_floating_point() or actual.shape != wanted.shape:
        return ""
    off = torch.linalg.vector_norm(actual - wanted)
    in_order = actual.flatten().sort().values - wanted.flatten().sort().values
    return "its own numbers in another order" if torch.linalg.vector_norm(in_order) < 1e-3 * off else ""


def _lines(tensor: Tensor, dim: int) -> Tensor:
    return tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1)


def _starts(actual: Tensor, whole: Tensor, dim: int) -> list[int]:
    """Return the first position along a dim at which a local tensor stands in a whole one, in a list; or none."""
    lines, rows = _lines(whole, dim), _lines(actual, dim)
    for start in (lines[:, :64] == rows[0, :64]).all(-1).nonzero().flatten().tolist():
        if torch.equal(lines[start : start + len(rows)], rows):
            return [start]
    return []


def filled_from_text(local: LocalTensor, name: str, original: Mapping[str, Tensor]) -> str:
    """Return, in words, what a shard of parameter `name` was filled with by mistake; "" where that is not known.

    It is another parameter of `original`, or the right values rounded to a narrower dtype.
    """
    wanted, values = original.get(name), local.values
    if wanted is None or values.numel() < _ENOUGH or bool((values == values.flatten()[0]).all()):
        return ""
    for other, tensor in original.items():
        is_like = tensor.shape == wanted.shape and tensor is not wanted
        if is_like and torch.equal(local.of(tensor.detach()).to(values.dtype), values):
            return f"it has the numbers of {other}: weights of two names are exchanged"
    right = local.of(wanted.detach())
    for kind in (torch.bfloat16, torch.float16):
        if right.shape == values.shape and torch.equal(right.to(kind).to(values.dtype), values):
            return f"it is rounded to {str(kind).removeprefix('torch.')}: filled from weights of that type"
    return ""


def _extent(actual: Tensor, wanted: Tensor) -> str:
    """Return in words where along a dim two tensors differ, if that is in some places alone."""
    if actual.shape != wanted.shape or not actual.is_floating_point():
        return ""
    off = (actual - wanted).abs()
    off = off > 1e-6 * wanted.abs().max()
    for dim in range(actual.ndim):
        lines = off.movedim(dim, 0).reshape(off.shape[dim], -1).any(-1)
        wrong = lines.nonzero().flatten().tolist()
        if (
            actual.ndim == 3
            and dim == 1
            and wrong
            and wrong == list(range(wrong[0], len(lines)))
            and wrong[0]
        ):
            return f"from token {wrong[0]} of sequences on"
        if wrong and 2 * len(wrong) <= len(lines):
            return f"only at positions {listed(wrong)} along dim {dim} of the shard"
    return ""


@dataclass
class ProofRanks:
    """The ranks of a proof, which exchange their results.

    Attributes:
        ranks: the global ranks.
        rank: this one.
        context: communicates between them.
        lines: the groups of ranks along each axis of the meshes, over which a sum may be missing.
    """

    ranks: tuple[int, ...]
    rank: int
    context: TorchContext
    lines: list[list[int]] = field(default_factory=list)

    def say(self, words: Any) -> dict[int, Any]:
        """Send `words`, any JSON value, to all ranks; return {global rank: its `words`}. Collective."""
        said = exchange(self.context, self.ranks, json.dumps(words), "all ranks of a proof", topic="proof")
        return {rank: json.loads(text) for rank, text in said.items()}

    def failures(self, error: Exception | None) -> dict[int, str]:
        """Return {global rank: text of its `error`} for the ranks whose `error` is not None. Collective."""
        own = "" if error is None else f"{type(error).__name__}: {' '.join(str(error).split())}"
        return {rank: text for rank, text in self.say(own).items() if text}

    def first_difference(self, compared: Iterable[Compared]) -> Difference | None:
        """Return the first tensor that differs on a rank by more than allowed, or whose copies differ.

        None where there is none. Collective: every rank gives the same tensors in the same order, and gets the
        same answer. Where ranks give tensors of different names, that is the difference.
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
            "copies": [
                item.digest() if item.has_copies and len(self.ranks) > 1 else (0, 0) for item in items
            ],
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
            item.actual.where(item.actual.values.shape if item.wanted is None else item.wanted.shape)
            if item.actual
            else "none"
        )
        answers = self.say([*item.sample().as_list(), place, item.actual is None, item.wanted is None])
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
        cause = self.say(cause)[rank]  # others may have other meshes
        return Difference(item.what, rank, answers[rank][-3], error, allowed, cause)


_OTHER_NAMES = "ranks have modules of other names, or an original that differs between ranks"


def _drifting(copies: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    """Return the numbers of tensors of which ranks with the same part have other bits."""
    actual = []
    for number, own in enumerate(zip(*copies, strict=True)):
        if len({(key, value) for key, value in own}) > len({key for key, _ in own}):
            actual.append(number)
    return actual


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
