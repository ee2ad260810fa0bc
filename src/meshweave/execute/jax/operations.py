"""The operations of which emitted functions are made, on the arrays of one device.

`source` copies those that a function uses in front of it, so each may use jax, and functions of this file, and no
more. Arrays of ranks with unequal shards have the largest shape of all ranks. What lies past a rank's own size is
never used: it reads as zero (`keep`, `take`) and is not stored where something else lies (`put`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

Axes = str | tuple[str, ...]
"""Names of mesh axes, as `jax.lax` takes them."""


def pick(table: tuple[Any, ...], at: Array) -> Array:
    """Return entry `at` of a table of integers; of a nested table, `at` is a tuple of one index per level."""
    return jnp.asarray(table, jnp.int32)[at]


def product(
    a: Array,
    b: Array,
    onto: Array | None = None,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    sum_batch: bool = False,
) -> Array:
    """Return a (..., M, K) @ b (..., K, N), plus `onto` if given; float16 and bfloat16 operands give float32.

    Args:
        transpose_a, transpose_b: the operand is stored (..., K, M) or (..., N, K).
        sum_batch: sum the matmuls of all batch indices; the result is (M, N).
    """
    a = a.swapaxes(-1, -2) if transpose_a else a
    b = b.swapaxes(-1, -2) if transpose_b else b
    if sum_batch:
        a = jnp.moveaxis(a, -2, 0).reshape(a.shape[-2], -1)
        b = b.reshape(-1, b.shape[-1])
    kind = jnp.float32 if a.dtype in (jnp.bfloat16, jnp.float16) else a.dtype
    out = jnp.matmul(a, b, preferred_element_type=kind)
    return out if onto is None else onto.astype(kind) + out


# --- parts of a dim ----------------------------------------------------------------------------------------


def keep(x: Array, dim: int, start: int | Array, stop: int | Array) -> Array:
    """Return x with zeros at all indices outside of [start, stop) along `dim`."""
    at = lax.broadcasted_iota(jnp.int32, x.shape, dim)
    return jnp.where((at >= start) & (at < stop), x, 0)


def blocks(x: Array, dim: int, first: int | Array, block: int, stride: int) -> Array:
    """Return elements [first, first + block) of each run of `stride` elements along `dim`, concatenated.

    The size of `dim` is a multiple of `stride`: first 1, block 2, stride 4 of 8 elements -> 1, 2, 5, 6.
    """
    before, count, after = x.shape[:dim], x.shape[dim] // stride, x.shape[dim + 1 :]
    periods = x.reshape(*before, count, stride, *after)
    if isinstance(first, int):
        chosen = lax.slice_in_dim(periods, first, first + block, axis=dim + 1)
    else:
        chosen = lax.dynamic_slice_in_dim(periods, first, block, axis=dim + 1)
    return chosen.reshape(*before, count * block, *after)


def put_blocks(x: Array, dim: int, first: int | Array, block: int, stride: int, value: Array) -> Array:
    """Return x with `value` stored where `blocks` with the same arguments reads.

    These are elements [first, first + block) of each run of `stride` elements along `dim`, whose size is a
    multiple of `stride`. `value` has the shape that `blocks` returns.
    """
    before, count, after = x.shape[:dim], x.shape[dim] // stride, x.shape[dim + 1 :]
    whole = x.reshape(*before, count, stride, *after)
    pieces = value.reshape(*before, count, block, *after)
    return lax.dynamic_update_slice_in_dim(whole, pieces, first, axis=dim + 1).reshape(x.shape)


def span(start: int | Array, stop: int | Array, most: int, extent: int) -> Array:
    """Return start, ..., stop - 1, filled with `extent` up to `most` integers: (2, 4, 3, 8) -> 2, 3, 8.

    They are indices into a dim of size `extent`; at index `extent` `take` reads zeros and `put` stores nothing.
    """
    at = start + jnp.arange(most)
    return jnp.where(at < stop, at, extent)


def dealt(
    first: int | Array,
    block: int,
    stride: int,
    start: int | Array,
    stop: int | Array,
    most: int,
    extent: int,
) -> Array:
    """Return the indices in [start, stop) that lie in blocks [first + t stride, first + t stride + block), any t.

    They are `most` integers, ascending, filled at the end with `extent`, the size of the dim: first 1, block 2,
    stride 4, start 0, stop 8, most 5, extent 8 -> 1, 2, 5, 6, 8.
    """

    def below(position: int | Array) -> Array:
        turns, rest = jnp.divmod(jnp.asarray(position - first), stride)
        return turns * block + jnp.minimum(rest, block)

    number = below(start) + jnp.arange(most)
    at = first + number // block * stride + number % block
    return jnp.where(number < below(stop), at, extent)


def place(x: Array, value: Array, *starts: int | Array) -> Array:
    """Return x with `value` stored from index `starts[d]` of each dim d on."""
    return lax.dynamic_update_slice(x, value, [jnp.asarray(start, jnp.int32) for start in starts])


def take(x: Array, dim: int, positions: Array) -> Array:
    """Return the elements of x at indices `positions` along `dim`; zeros for indices past its end."""
    return jnp.take(x, positions, axis=dim, mode="fill", fill_value=0)


def put(x: Array, positions: tuple[Array | None, ...], value: Array) -> Array:
    """Return x with `value` at indices `positions[d]` of each dim d (None: all); dropped where past its end."""
    index = [jnp.arange(size) if at is None else at for at, size in zip(positions, x.shape, strict=True)]
    return x.at[jnp.ix_(*index)].set(value, mode="drop")


def join(x: Array, dim: int, sizes: tuple[int, ...], most: int) -> Array:
    """Return x without the padding of its parts along `dim`, where each part is padded to `most` elements.

    Part p is the sizes[p] elements from index p * most on.
    """
    parts = [lax.slice_in_dim(x, p * most, p * most + size, axis=dim) for p, size in enumerate(sizes)]
    return jnp.concatenate(parts, axis=dim)


def split(x: Array, dim: int, sizes: tuple[int, ...], most: int) -> Array:
    """Return x with each part along `dim` padded with zeros to `most` elements; part p has sizes[p] of them."""
    parts, start = [], 0
    for size in sizes:
        part = lax.slice_in_dim(x, start, start + size, axis=dim)
        parts.append(jnp.pad(part, [(0, most - size if d == dim else 0) for d in range(x.ndim)]))
        start += size
    return jnp.concatenate(parts, axis=dim)


def join_at(x: Array, dim: int, sizes: Array, most: int, total: int) -> Array:
    """Return x without the padding of its parts along `dim`, then zeros up to `total` elements along it.

    Part p is the sizes[p] elements from index p * most on; `sizes` is traced and may differ between devices.
    """
    ends, at = jnp.cumsum(sizes), jnp.arange(total)
    part = jnp.searchsorted(ends, at, side="right")
    positions = part * most + at - (ends - sizes)[part]
    return take(x, dim, jnp.where(at < ends[-1], positions, x.shape[dim]))


def split_at(x: Array, dim: int, sizes: Array, most: int) -> Array:
    """Return x with each part along `dim` padded with zeros to `most` elements; part p has sizes[p] of them.

    `sizes` is traced and may differ between devices.
    """
    part, at = jnp.divmod(jnp.arange(len(sizes) * most), most)
    positions = (jnp.cumsum(sizes) - sizes)[part] + at
    return take(x, dim, jnp.where(at < sizes[part], positions, x.shape[dim]))


# --- between devices ---------------------------------------------------------------------------------------


def after(x: Array, *made: Array | None) -> Array:
    """Return x, which the compiler may use only after all of `made` are computed. None in `made` is ignored."""
    conditions = [value for value in made if value is not None]
    if not conditions:
        return x
    ordered: Array = lax.optimization_barrier((x, *conditions))[0]
    return ordered


def gather(x: Array, axes: Axes, dim: int, *, turned: bool = False) -> Array:
    """Return the all-gather of x over `axes`: the x of all devices there, concatenated along `dim`, not 0.

    On a CPU XLA would transpose x before and the result after for any dim but 0. There the pieces are
    gathered along a new first dim and then moved.

    Args:
        turned: x is a matrix, `dim` is 1, and matmuls read the result transposed. A CPU then keeps the result
            in memory column by column, as its fast matmuls need; its shape is the same.
    """

    def in_front(x: Array) -> Array:
        pieces = lax.all_gather(x, axes)
        size = pieces.shape[0] * x.shape[dim]
        if turned:
            return lax.optimization_barrier(pieces.swapaxes(1, 2).reshape(size, x.shape[0])).T
        return jnp.moveaxis(pieces, 0, dim).reshape(*x.shape[:dim], size, *x.shape[dim + 1 :])

    def along(x: Array) -> Array:
        return lax.all_gather(x, axes, axis=dim, tiled=True)

    gathered: Array = lax.platform_dependent(x, cpu=in_front, default=along)
    return gathered


def sum_scatter(x: Array, axes: Axes, dim: int, count: int) -> Array:
    """Return the reduce-scatter (sum) of x over `axes`: this device's one of `count` equal parts along `dim`.

    `count` is the number of devices along `axes`; `dim` is not 0. On a CPU the parts are moved to the front
    first: XLA would transpose x before and the result after.
    """

    def in_front(x: Array) -> Array:
        parts = x.reshape(*x.shape[:dim], count, x.shape[dim] // count, *x.shape[dim + 1 :])
        return lax.psum_scatter(jnp.moveaxis(parts, dim, 0), axes, scatter_dimension=0)

    def along(x: Array) -> Array:
        return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)

    scattered: Array = lax.platform_dependent(x, cpu=in_front, default=along)
    return scattered


def shift(x: Array, axes: Axes, count: int, by: int) -> Array:
    """Return the x of the device `by` steps before this one in the ring of `count` devices along `axes`."""
    shifted: Array = lax.ppermute(x, axes, [(at, (at + by) % count) for at in range(count)])
    return shifted


def broadcast(x: Array, axes: Axes, root: int | Array, at: Array) -> Array:
    """Return the x of the device with index `root` along `axes` on all devices; `at` is this device's index.

    It is computed as an all-reduce in which the other devices add zeros.
    """
    total: Array = lax.psum(jnp.where(at == root, x, 0), axes)
    return total


def multiply_all(x: Array, axes: Axes) -> Array:
    """Return the all-reduce of x by elementwise multiplication over the devices along `axes`."""
    return jnp.prod(lax.all_gather(x, axes), axis=0).astype(x.dtype)


# --- calls ---------------------------------------------------------------------------------------------------

Shapes = tuple[tuple[int, ...], ...]


def call_in_class(
    number: Array, function: Callable[..., Any], classes: tuple[tuple[Shapes, Shapes], ...], *ins: Array
) -> tuple[Array, ...]:
    """Return the results of `function` on arrays whose shapes differ between devices.

    Each device cuts `ins` to its own shapes and pads the results with zeros to the largest shape on any device.

    Args:
        number: the index in `classes` of this device's class; devices of a class have equal shapes.
        classes: for each class of devices (the shapes of the arguments, the shapes of the results).
    """
    most = [
        tuple(map(max, zip(*shapes, strict=True)))
        for shapes in zip(*(made for _, made in classes), strict=True)
    ]

    def of_class(given: Shapes) -> Callable[..., tuple[Array, ...]]:
        def run(*xs: Array) -> tuple[Array, ...]:
            own = (x[tuple(map(slice, shape))] for x, shape in zip(xs, given, strict=True))
            outs = called(function, *own)
            return tuple(fill_all(out, shape) for out, shape in zip(outs, most, strict=True))

        return run

    results: tuple[Array, ...] = lax.switch(number, [of_class(given) for given, _ in classes], *ins)
    return results


def called(function: Callable[..., Any], *args: Any) -> tuple[Array, ...]:
    """Return `function(*args)` as a tuple of arrays; a single array becomes a tuple of one."""
    outs = function(*args)
    return tuple(outs) if isinstance(outs, (tuple, list)) else (outs,)


# --- whole tensors -----------------------------------------------------------------------------------------


def require_x64(dtype: str) -> None:
    """Raise ValueError where jax_enable_x64 is off: jax would compute the 64-bit `dtype` in 32 bits."""
    if not jax.config.jax_enable_x64:
        need = "jax.config.update('jax_enable_x64', True)"
        raise ValueError(f"the program has {dtype}, for which jax needs {need}")


def spread(x: Array, dim: int, positions: tuple[int, ...]) -> Array:
    """Return the elements of x at indices `positions` along `dim`; zeros for index -1.

    `positions` lists the indices of each shard in turn, each filled with -1 to the size of the largest shard, so
    that the result cut into equal parts gives the padded shards.
    """
    at = jnp.asarray(positions)
    return jnp.take(x, jnp.where(at < 0, x.shape[dim], at), axis=dim, mode="fill", fill_value=0)


def terms(x: Array, count: int) -> Array:
    """Return `count` terms whose sum is x, stacked along a new first dim.

    Term t has the elements t, t + count, ... of x in row-major order, and zeros elsewhere.
    """
    number = jnp.arange(x.size).reshape(x.shape) % count
    return jnp.stack([jnp.where(number == term, x, 0) for term in range(count)])


def collect(x: Array, dim: int, positions: tuple[int, ...]) -> Array:
    """Return the elements of x at indices `positions` along `dim`."""
    return jnp.take(x, jnp.asarray(positions), axis=dim)


def fill(x: Array, dim: int, size: int) -> Array:
    """Return x padded with zeros at the end of `dim` to `size` elements."""
    return jnp.pad(x, [(0, size - x.shape[d] if d == dim else 0) for d in range(x.ndim)])


def fill_all(x: Array, shape: tuple[int, ...]) -> Array:
    """Return x padded with zeros at the end of every dim to `shape`."""
    return jnp.pad(x, [(0, size - own) for size, own in zip(shape, x.shape, strict=True)])
