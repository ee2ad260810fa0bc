"""The likely cause of a difference: what explains the numbers of all ranks, tried one after another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshweave.execute.ranks.blame import ranks_text

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class RankSample:
    """Some elements that a rank has of a tensor that differs from the original.

    Attributes:
        key: a number of the shard, equal on ranks that have the same shard.
        actual, wanted: the rank's values and the original's, at positions where the original is not 0; the same
            positions on ranks with the same shard.
        flat_actual, flat_wanted: the same at positions that all ranks whose shards have one size share.
        elsewhere: where else in the original these values are, in words, or the shard's shape where that is wrong;
            "" for neither.
        bias: for each of `actual` the bias that may have been added to it; empty where there is none.
        extent: the positions at which the tensor differs, in words; "" where it differs at most of them.
    """

    key: int
    actual: list[float]
    wanted: list[float]
    flat_actual: list[float]
    flat_wanted: list[float]
    elsewhere: str
    bias: list[float]
    extent: str

    def as_list(self) -> list[Any]:
        """Return the attributes as a list, in the order of their declaration."""
        return list(vars(self).values())


def likely_cause(
    samples: dict[int, RankSample],
    wrong: Sequence[int],
    lines: Sequence[Sequence[int]],
    hint: str,
    near: float,
) -> str:
    """Return, in words, what likely makes a tensor differ from the original.

    Args:
        samples: elements of the tensor on each rank, by global rank.
        wrong: the ranks whose shards are wrong, at least one.
        lines: groups of ranks over which a sum may be missing: along each axis of a mesh, and each whole mesh.
        hint: what is known of where the tensor is computed; returned where nothing explains the values.
        near: the relative difference up to which values count as equal.
    """
    pairs = {rank: (_vector(one.actual), _vector(one.wanted)) for rank, one in samples.items()}
    if any(not np.isfinite(pairs[rank][0]).all() for rank in wrong):
        return "it has numbers that are infinite or none at all"
    if any(not pairs[rank][0].size for rank in wrong):
        return samples[wrong[0]].elsewhere or "it has another shape"
    sizes = sorted({len(line) for line in lines})
    tried = (
        _scaled(pairs, wrong, sizes, near),
        _term(samples, pairs, wrong, lines, near),
        _shards(samples, wrong, near),
        _biased(samples, pairs, wrong, near),
        _drifted(samples, pairs, wrong, near),
        "" if samples[wrong[0]].extent else _function(pairs, wrong),
    )
    told = next((text for text in tried if text), "")
    if told and hint:
        return f"{told} ({hint})"
    return told or ", ".join(
        filter(None, (hint or "it is computed otherwise than in the original", samples[wrong[0]].extent))
    )


def _vector(values: Sequence[float]) -> Vector:
    return np.asarray(values, dtype=np.float64)


def _close(a: Vector, b: Vector, near: float) -> bool:
    scale = float(np.linalg.norm(b))
    return bool(a.size == b.size and np.linalg.norm(a - b) <= near * scale and scale > 0)


def _scaled(
    pairs: dict[int, tuple[Vector, Vector]], wrong: Sequence[int], sizes: Sequence[int], near: float
) -> str:
    """One factor on all ranks that differ."""
    actual = np.concatenate([pairs[rank][0] for rank in wrong])
    wanted = np.concatenate([pairs[rank][1] for rank in wrong])
    square = float(wanted @ wanted)
    if not square:
        return ""
    factor = float(actual @ wanted) / square
    if np.linalg.norm(actual) <= 1e-12 * math.sqrt(square):
        return "it is 0: nothing reaches it, or its gradient is dropped"
    if not _close(actual, factor * wanted, near):
        return _scaled_apart(pairs, wrong, near)
    if abs(factor - 1) < near:
        return ""
    for size in sizes:
        if abs(factor - size) < near * size:
            return f"it is {size} times too large: scaled twice, or summed once too often over {size} ranks"
        if abs(factor * size - 1) < near:
            return (
                f"it is 1/{size} of what it should be: divided once too often by {size} ranks, or a sum over them "
                "is missing"
            )
    if actual.size < 4:
        return ""
    if abs(factor + 1) < near:
        return "it has the opposite sign"
    return f"it is {factor:.4g} times what it should be throughout: a factor of {1 / factor:.4g} is missing"


def _scaled_apart(pairs: dict[int, tuple[Vector, Vector]], wrong: Sequence[int], near: float) -> str:
    """A factor of its own on each rank that differs."""
    factors = []
    for rank in wrong:
        actual, wanted = pairs[rank]
        factors.append(float(actual @ wanted) / max(float(wanted @ wanted), 1e-300))
        if actual.size < 4 or not _close(actual, factors[-1] * wanted, near):
            return ""
    said = ", ".join(
        f"{factor:.4g} on rank {rank}" for factor, rank in list(zip(factors, wrong, strict=True))[:4]
    )
    return (
        f"each rank has it times a factor of its own ({said}): clipped or scaled by what that rank alone has"
    )


def _term(
    samples: dict[int, RankSample],
    pairs: dict[int, tuple[Vector, Vector]],
    wrong: Sequence[int],
    lines: Sequence[Sequence[int]],
    near: float,
) -> str:
    """Each rank has a term of a sum, or of an average."""
    for line in lines:
        if wrong[0] not in line or len({samples[rank].key for rank in line}) > 1:
            continue
        total = sum((pairs[rank][0] for rank in line), np.zeros_like(pairs[line[0]][0]))
        wanted = pairs[line[0]][1]
        is_alike = all(_close(pairs[rank][0], pairs[line[0]][0], near) for rank in line)
        if not is_alike and _close(total, wanted, near):
            return f"a sum over {ranks_text(line)} is missing: what they have adds up to it"
        if not is_alike and _close(total / len(line), wanted, near):
            return f"an average over {ranks_text(line)} is missing: what they have makes it on average"
        bias = _vector(samples[line[0]].bias)
        if bias.size and not is_alike and _close(total, wanted + (len(line) - 1) * bias, near):
            return f"a sum over {ranks_text(line)} is missing, and each of them adds the bias"
    return ""


def _shards(samples: dict[int, RankSample], wrong: Sequence[int], near: float) -> str:
    """A rank has what another should have, or another part of the whole."""
    for rank in wrong:
        own = _vector(samples[rank].flat_actual)
        for other, sample in samples.items():
            theirs = _vector(sample.flat_wanted)
            if sample.key != samples[rank].key and _close(own, theirs, near):
                return f"a wrong order of shards: rank {rank} has the shard of rank {other}"
        if samples[rank].elsewhere:
            return f"a wrong slice or order: rank {rank} has {samples[rank].elsewhere}"
    return ""


def _biased(
    samples: dict[int, RankSample], pairs: dict[int, tuple[Vector, Vector]], wrong: Sequence[int], near: float
) -> str:
    """A bias is added another number of times."""
    rank = wrong[0]
    bias, (actual, wanted) = _vector(samples[rank].bias), pairs[rank]
    if not bias.size or not float(bias @ bias):
        return ""
    times = float((actual - wanted) @ bias) / float(bias @ bias)
    if not _close(actual - wanted, times * bias, max(near, 1e-3)):
        return ""
    if abs(times + 1) < 0.01:
        return "its bias is not added"
    return f"its bias is added {times + 1:.3g} times: on every rank before a sum"


def _drifted(
    samples: dict[int, RankSample], pairs: dict[int, tuple[Vector, Vector]], wrong: Sequence[int], near: float
) -> str:
    """Copies of one part differ."""
    for rank in wrong:
        copies = [other for other in samples if samples[other].key == samples[rank].key]
        right = [other for other in copies if other not in wrong]
        apart = [other for other in copies if not _close(pairs[other][0], pairs[rank][0], near * 1e-2)]
        if right:
            bad = [other for other in copies if other in wrong]
            return f"copies drift: {ranks_text(bad)} differ from {ranks_text(right)}, which have it right"
        if apart:
            return f"copies drift: {ranks_text(copies)} have the same part with other numbers"
    return ""


def _function(pairs: dict[int, tuple[Vector, Vector]], wrong: Sequence[int]) -> str:
    """What is there follows from each element of what is wanted, by a function that never falls."""
    actual, wanted = pairs[wrong[0]]
    if actual.size < 32 or np.linalg.norm(actual - wanted) < 1e-3 * np.linalg.norm(wanted):
        return ""  # what is nearly the same is in the same order
    order = np.argsort(actual, kind="stable")
    steps = np.diff(wanted[order])
    scale = float(np.abs(wanted).max())
    if bool((steps >= -1e-9 * scale).all()):
        return "each element is a function of the right one: a soft cap, a clamp or another activation"
    return ""
