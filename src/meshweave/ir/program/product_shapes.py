"""The shapes of products, with and without leading batch dims: one rule for declared tensors and for ops."""

from __future__ import annotations

from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ProductShape:
    """The sizes of a product of a (*batch_a, M, K) and b (*batch_b, K, N), operands transposed already.

    Attributes:
        batch_a, batch_b: the leading dims of each operand. They are equal, or one operand has none.
        sums_batch: whether the result is summed over the batch, which both operands then have.
    """

    batch_a: Shape
    batch_b: Shape
    m: int
    n: int
    k: int
    sums_batch: bool = False

    @property
    def batch(self) -> Shape:
        """Return the leading dims of the product before any sum."""
        return self.batch_a or self.batch_b

    @property
    def out(self) -> Shape:
        """Return the shape of the result."""
        return (self.m, self.n) if self.sums_batch else (*self.batch, self.m, self.n)


def product_shape(
    a: Shape, b: Shape, transpose_a: bool, transpose_b: bool, out_dims: int
) -> ProductShape | str:
    """Return the sizes of a product of operands stored in shapes `a` and `b`, with a result of `out_dims` dims.

    All have two dims or more. With `transpose_a` the last two dims of a are stored (K, M), with `transpose_b`
    those of b (N, K). Where the shapes do not fit, the result is a sentence on why.
    """
    left = (*a[:-2], *a[:-3:-1]) if transpose_a else a
    right = (*b[:-2], *b[:-3:-1]) if transpose_b else b
    if left[-1] != right[-2]:
        return f"multiplies {left} by {right}: the inner sizes differ"
    batch_a, batch_b = left[:-2], right[:-2]
    if batch_a and batch_b and batch_a != batch_b:
        return f"multiplies {left} by {right}: the batch dims differ"
    sums_batch = bool(batch_a and batch_b) and out_dims == 2
    return ProductShape(batch_a, batch_b, left[-2], right[-1], left[-1], sums_batch)
