"""What a program should compute: its inputs drawn at random, its outputs computed densely from what it declares.

Inputs are small integers, so that every order of summation gives the same floating-point numbers and a result is
compared with `==`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshweave.base.errors import UnsupportedError
from meshweave.describe.layout import Partial
from meshweave.execute.numpy import numpy_dtype, run_numpy
from meshweave.ir.program import Program
from meshweave.ir.program.meanings import Product, Same, Sum, sources_of

Array = NDArray[Any]
Tensors = Mapping[str, Array]
"""Whole tensors by name."""

_LARGEST = 4
"""Inputs are integers of at most this size: sums of k products stay exact in float32 up to k = 2**20."""

_LARGEST_OF_HALVES = 1
"""That of float16 and bfloat16, which hold integers up to 2**11 and 2**8: sums of 1,000 of them stay below."""


def random_inputs(program: Program, seed: int) -> dict[str, Array]:
    """Return {name: whole tensor of random integers} of every tensor that an input buffer of a program holds.

    Equal values of `seed` give equal values for a tensor of the same name, shape and dtype (`random_tensor`).
    """
    names = dict.fromkeys(buffer.tensor for buffer in program.buffers if buffer.kind == "input")
    inputs = {}
    for name in names:
        assert name is not None
        tensor = program.tensor_of[name]
        inputs[name] = random_tensor(name, tensor.shape, tensor.dtype, seed)
    return inputs


def random_tensor(name: str, shape: Sequence[int], dtype: str, seed: int) -> Array:
    """Return random integers in `shape`, as the numpy dtype of `dtype`; equal for equal `name` and `seed`.

    They are from -4 to 4, for float16 and bfloat16 from -1 to 1, so that sums of many are exact.
    """
    largest = _LARGEST_OF_HALVES if dtype in ("float16", "bfloat16") else _LARGEST
    generator = np.random.default_rng([seed, *name.encode()])
    values = generator.integers(-largest, largest, tuple(shape), dtype=np.int8, endpoint=True)
    return values.astype(numpy_dtype(dtype))


def reference(program: Program, inputs: Tensors) -> dict[str, Array]:
    """Return {name: whole tensor} of a program's outputs, computed with numpy from its declared meanings.

    Args:
        inputs: whole tensors by name.

    Raises:
        UnsupportedError: an output depends on a `call`, whose function the program does not hold, or the
            program does not declare what it is computed from.
    """
    tensors, waiting = dict(inputs), list(program.computes)
    while meaning := next((m for m in waiting if all(name in tensors for name in sources_of(m))), None):
        waiting.remove(meaning)
        shape = program.tensor_of[meaning.out].shape
        match meaning:
            case Product():
                left, right = tensors[meaning.a], tensors[meaning.b]
                left = left.swapaxes(-1, -2) if meaning.transpose_a else left
                right = right.swapaxes(-1, -2) if meaning.transpose_b else right
                product = _product(left, right, program.tensor_of[meaning.out].dtype)
                leading = tuple(range(product.ndim - len(shape)))
                tensors[meaning.out] = product.sum(axis=leading) if leading else product
            case Sum():
                tensors[meaning.out] = np.asarray(sum(tensors[name] for name in meaning.terms))
            case Same():
                tensors[meaning.out] = tensors[meaning.src].reshape(shape)
    outputs = {buffer.tensor for buffer in program.buffers if buffer.kind == "output"}
    missing = sorted(str(name) for name in outputs if name not in tensors)
    if missing:
        raise UnsupportedError(
            f"program {program.name} does not declare what {', '.join(missing)} is computed from; "
            "outputs of calls cannot be checked"
        )
    return {name: tensors[name] for name in tensors if name in outputs}


def _product(left: Array, right: Array, dtype: str) -> Array:
    """Return left @ right in a program's `dtype`; integers are summed in int64: operands may not hold it."""
    wide = np.int64 if left.dtype.kind in "iu" and right.dtype.kind in "iu" else None
    return np.asarray(np.matmul(left, right, dtype=wide)).astype(numpy_dtype(dtype))


def expected_shard(program: Program, inputs: Tensors, buffer: str, rank: int) -> Array:
    """Return the shard of output `buffer` that `rank` should hold, of a product in the output's dtype in numpy.

    A product of two inputs is computed for this shard alone. Of partial sums it is the share that the program has
    on numpy, since no declaration says which terms are whose.

    Args:
        inputs: whole tensors by name.

    Raises:
        UnsupportedError: the output depends on a `call` or on what is not declared.
        BindError: it is in partial sums, and the program has calls.
    """
    declared = program.buffer_of[buffer]
    assert declared.layout is not None and declared.tensor is not None
    if any(isinstance(placement, Partial) for placement in declared.layout.placements):
        return run_numpy(program, inputs).memory[rank, buffer, 0]
    indices = declared.layout.indices(program.tensor_of[declared.tensor].shape, rank)
    meaning = next((meaning for meaning in program.computes if meaning.out == declared.tensor), None)
    if isinstance(meaning, Product) and all(
        name in inputs and inputs[name].ndim == 2 for name in (meaning.a, meaning.b)
    ):
        rows, columns = indices
        a, b = inputs[meaning.a], inputs[meaning.b]
        left = a[:, rows].T if meaning.transpose_a else a[rows]
        right = b[columns].T if meaning.transpose_b else b[:, columns]
        return _product(left, right, program.tensor_of[meaning.out].dtype)
    return np.asarray(reference(program, inputs)[declared.tensor][np.ix_(*indices)])
