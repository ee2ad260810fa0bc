"""Checks what a program declares to compute: names, shapes, and that no tensor is computed from itself."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from meshweave.base.errors import ProgramError, require_known
from meshweave.ir.program.meanings import Function, Meaning, Product, Same, Sum, sources_of
from meshweave.ir.program.product_shapes import product_shape
from meshweave.ir.program.program import Program
from meshweave.ir.program.written import Tensor


def check_meanings(program: Program) -> None:
    """Check the meanings of a program: names, shapes, at most one per tensor, and no tensor made from itself.

    Raises ProgramError naming the tensor.
    """
    for meaning in program.computes:
        _check_meaning(program.tensor_of, meaning)
    for name, count in Counter(meaning.out for meaning in program.computes).items():
        if count > 1:
            raise ProgramError(f"tensor '{name}' is declared to compute {count} things")
    _check_cycles({meaning.out: meaning for meaning in program.computes})


def _check_meaning(tensors: Mapping[str, Tensor], meaning: Meaning) -> None:
    for name in (meaning.out, *sources_of(meaning)):
        require_known(name, tensors, "computes with tensor", ProgramError)
    out, *sources = (tensors[name].shape for name in (meaning.out, *sources_of(meaning)))
    match meaning:
        case Product():
            if min(map(len, (out, *sources))) < 2:
                raise ProgramError(f"'{meaning.out}' is a product of tensors that are no matrices")
            shape = product_shape(sources[0], sources[1], meaning.transpose_a, meaning.transpose_b, len(out))
            if isinstance(shape, str) or shape.out != out:
                a, b = (
                    _turned(s, t)
                    for s, t in zip(sources, (meaning.transpose_a, meaning.transpose_b), strict=True)
                )
                raise ProgramError(f"'{meaning.out}' of shape {out} cannot be the product of {a} and {b}")
        case Same():
            if math.prod(out) != math.prod(sources[0]):
                raise ProgramError(
                    f"'{meaning.out}' of shape {out} cannot be '{meaning.src}' of shape {sources[0]}"
                )
        case Sum():
            for name, shape_of in zip(meaning.terms, sources, strict=True):
                if shape_of != out:
                    raise ProgramError(
                        f"'{meaning.out}' of shape {out} cannot be a sum with '{name}' of shape {shape_of}"
                    )
        case Function():
            _check_function(tensors, meaning)


def _turned(shape: tuple[int, ...], is_transposed: bool) -> tuple[int, ...]:
    return (*shape[:-2], *shape[:-3:-1]) if is_transposed else shape


def _check_function(tensors: Mapping[str, Tensor], meaning: Function) -> None:
    def require(condition: bool, message: str) -> None:
        if not condition:
            raise ProgramError(f"'{meaning.out}', computed by call '{meaning.fn}', {message}")

    sizes: dict[str, int] = {}
    for part in (meaning.part, *meaning.ins, *meaning.stash):
        shape = tensors[part.tensor].shape
        require(
            len(part.dims) == len(shape),
            f"names {len(part.dims)} dims of {part.tensor}, which has {len(shape)}",
        )
        names = [name for name in part.dims if name is not None]
        require(len(set(names)) == len(names), f"names a position of {part.tensor} twice: {part}")
        for name, size in zip(part.dims, shape, strict=True):
            if name is not None:
                require(name.isidentifier(), f"has a position named '{name}'")
                known = sizes.setdefault(name, size)
                require(known == size, f"takes '{name}' of size {size} and of size {known} for one position")
    require(meaning.output >= 0, f"is result number {meaning.output}")
    reduced = ", ".join(meaning.reduced)
    require(
        not reduced or bool(meaning.reduce),
        f'has no position {reduced}: say how it is reduced, as reduce="sum"',
    )
    require(bool(reduced) or not meaning.reduce, "is reduced over no position of its inputs")


def _check_cycles(meanings: Mapping[str, Meaning]) -> None:
    """Raise ProgramError for a tensor that is computed from itself. A reduction may name what it reduces."""
    done: set[str] = set()
    for root in meanings:
        path: list[tuple[str, list[str]]] = [(root, _inner(meanings, root))] if root not in done else []
        while path:
            name, left = path[-1]
            if not left:
                done.add(name)
                path.pop()
                continue
            source = left.pop()
            if any(source == earlier for earlier, _ in path):
                raise ProgramError(f"'{source}' is computed from itself")
            if source not in done:
                path.append((source, _inner(meanings, source)))


def _inner(meanings: Mapping[str, Meaning], name: str) -> list[str]:
    meaning = meanings.get(name)
    if meaning is None:
        return []
    running = running_tensors(meanings, meaning)
    return [source for source in sources_of(meaning) if source not in running]


def running_tensors(meanings: Mapping[str, Meaning], meaning: Meaning) -> frozenset[str]:
    """Return the inputs that hold partial reductions which a meaning continues: those reduced by its `fn`.

    Args:
        meanings: every declared meaning, by its result.
        meaning: that of a function's result, which may itself be no reduction: a call can return gradients
            of inputs beside sums of those of parameters. Of other meanings the result is empty.
    """
    if not isinstance(meaning, Function):
        return frozenset()
    return frozenset(
        part.tensor
        for part in meaning.ins
        if isinstance(known := meanings.get(part.tensor), Function)
        and known.fn == meaning.fn
        and known.reduce
    )
