"""Meanings: what each tensor of a program is computed from, declared beside the ops and proved by `validate`.

A program says *how* each rank computes; a meaning says *what* comes out, as an equation between whole
tensors:

    computes(Y, product(X, W))                        Y = X W, also with leading batch dims
    computes(Z, add(X, Y))                            Z = X + Y, a residual
    computes(Q, same(P))                              Q = P, element for element in row-major order
    computes(N[i, :], call("norm", X[i, :], G))       row i of N is norm(row i of X, all of G)
    computes(M[i], call("row_max", S[i, j], reduce="max"))
                                                      M[i] = max over j of what calls make of S[i, j]
    computes(D[a, b], call("grad", E[i, b], X[i, a], reduce="sum"))
                                                      a weight gradient: a sum over rows i

The last three declare how the results of a `call` depend on the rows of its inputs: a name stands for one
position of a dim, `:` for the whole dim. That is all that a proof needs to know of a function.
"""

from __future__ import annotations

from dataclasses import dataclass

PositionNames = tuple[str | None, ...]
"""Per dim the name of a position, or None for the whole dim."""


@dataclass(frozen=True)
class Product:
    """`out`[m, n] = sum over k of a[m, k] b[k, n]; a stored (K, M) / b stored (N, K) where transposed.

    With leading batch dims `out`[..., m, n] is the product of a[..., m, k] and b[..., k, n], or of a[..., m,
    k] and one matrix b for the whole batch (or the reverse). Where a and b have batch dims and `out`
    has none, `out` is the sum of the products over the batch, as a weight gradient is.
    """

    out: str
    a: str
    b: str
    transpose_a: bool = False
    transpose_b: bool = False


@dataclass(frozen=True)
class Same:
    """`out` is `src`, element for element: a reshard, or a reshape of equally many elements in row-major order."""

    out: str
    src: str


@dataclass(frozen=True)
class Sum:
    """`out` is the sum of tensors of its shape, element by element."""

    out: str
    terms: tuple[str, ...]


@dataclass(frozen=True)
class TensorPart:
    """The part of a tensor that one application of a function reads or makes: `X[i, :]` is row i of X."""

    tensor: str
    dims: PositionNames

    def __str__(self) -> str:
        if all(name is None for name in self.dims):
            return self.tensor
        return f"{self.tensor}[{', '.join(':' if name is None else name for name in self.dims)}]"


@dataclass(frozen=True)
class Function:
    """`part` is what calls of `fn` make of parts of other tensors, at equal positions of equal names.

    Names that the result does not have are reduced over: the result is the `reduce` ("sum", "max", "min",
    "prod", or a word of the function's own) of what is made at each of their positions. An input that names a
    result of the same function is the reduction so far, which the call continues.

    Attributes:
        part: the result.
        fn: the name that `call` ops carry.
        ins: the inputs, in the order of the op's.
        stash: of a backward part, the inputs of the forward part whose stash the call reads; a weight gradient
            may list those of the input gradient after them.
        reduce: the reduction over names that the result does not have; "" where there are none.
        output: which of the call's results this is, from 0.
    """

    part: TensorPart
    fn: str
    ins: tuple[TensorPart, ...] = ()
    stash: tuple[TensorPart, ...] = ()
    reduce: str = ""
    output: int = 0

    @property
    def out(self) -> str:
        """Return the name of the tensor that this is the meaning of."""
        return self.part.tensor

    @property
    def reduced(self) -> tuple[str, ...]:
        """Return the names that are reduced over, in the order of their first use."""
        names = (name for part in (*self.ins, *self.stash) for name in part.dims if name is not None)
        return tuple(dict.fromkeys(name for name in names if name not in self.part.dims))


Meaning = Product | Same | Sum | Function


def sources_of(meaning: Meaning) -> tuple[str, ...]:
    """Return the names of the tensors that a meaning computes its tensor from, in order, those of a stash last.

    A name may come twice.
    """
    match meaning:
        case Product():
            return meaning.a, meaning.b
        case Same():
            return (meaning.src,)
        case Sum():
            return meaning.terms
    return tuple(part.tensor for part in (*meaning.ins, *meaning.stash))
