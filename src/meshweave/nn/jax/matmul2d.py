"""A 2D-parallel product of jax arrays: `matmul2d`.

Forward and both backward products are programs of one algorithm, of one row of MeshSlice's Table 1, so that no
matrix is transposed and each gradient is sharded like what it is a gradient of. Each is the function that
`meshweave show --as jax` prints; it is written and traced once per size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, get_args

import jax
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshweave.algorithms.matmul2d import Dataflow, Matmul2dConfig, Matmul2dProblem
from meshweave.algorithms.matmul2d.common.passes import STATIONARY_OF, TABLE, PassName
from meshweave.algorithms.matmul2d.meshslice import MeshSlice
from meshweave.base.errors import BindError, LayoutError
from meshweave.base.units import DTYPES
from meshweave.execute.jax.rolled_loops import Loops
from meshweave.execute.jax.run import load_source
from meshweave.execute.jax.source import jax_source
from meshweave.nn.matmul2d_programs import Slices, backward_problem, product_program, slice_widths

_MOST_KEPT = 1024
"""Products that a process keeps."""


@dataclass(frozen=True)
class _BoundProduct:
    """What a product is besides its operands."""

    problem: Matmul2dProblem
    algorithm: str
    config: Matmul2dConfig
    ring_ways: int
    mesh: Mesh
    axes: tuple[str, str]
    in_order: bool
    loops: Loops


def matmul2d(
    x: Array,
    w: Array,
    *,
    mesh: Mesh,
    dataflow: Dataflow = "os",
    algorithm: str = MeshSlice.name,
    slices: Slices = 4,
    block: int = 8,
    ring_ways: Literal[0, 1, 2] = 0,
    in_order: bool = False,
    loops: Loops = "unrolled",
) -> Array:
    """Return the product of two matrices that are sharded over a 2D mesh; it is sharded so, too.

    Rows of each matrix are sharded over the first mesh axis, columns over the second:
    `PartitionSpec(*mesh.axis_names)`. Operands with other shardings over the mesh's devices, in its order, are
    resharded first. Sizes need not divide by those of the mesh. jax has no type for unequal shards: where a size
    of the result does not divide, explicit axes have it replicated, and otherwise XLA chooses how it lies.

        dataflow  computes       x (global)  w (global)  stationary
        os        Y = X W        (M, K)      (K, N)      Y
        ls        Y = X W^T      (M, K)      (N, K)      X
        rs        Y = X^T W      (K, M)      (K, N)      W

    Differentiable in both operands, in reverse mode, under `jit`, `grad`, `scan` and `checkpoint`.
    Operands of two dtypes are promoted as by `jnp.matmul`. Halves are multiplied and summed in single
    precision on each device; for float32 on TPUs `jax.default_matmul_precision` holds.

    Args:
        algorithm: the name of a 2D product, such as "meshslice", "summa", "wang".
        slices: slice count of MeshSlice, or the relative widths of unequal slices. At most as many as the
            sliced dim (K for os, N for ls, M for rs) has elements; more are cut down to that.
        block: neighbouring elements of the sliced dim that stay together in a slice.
        ring_ways: run collectives as rings of this many directions; 0 leaves them to XLA.
        in_order: have communication wait for the product that stands before it in the program.
        loops: "rolled" writes equal slices as a `lax.fori_loop`: it compiles in less time, and overlaps
            nothing across turns. Ignored with `in_order`.

    Raises:
        LayoutError: an operand is no matrix, shapes do not fit each other or `dataflow`, the mesh is not
            2D, or the algorithm shards otherwise; of an operand's axes some are explicit and some automatic.
        UnsupportedError: there is no such algorithm.
        BindError: an option has no such value, or no program has the dtype.
    """
    if len(mesh.axis_names) != 2:
        raise LayoutError(f"matmul2d needs a mesh of 2 axes, this one has {len(mesh.axis_names)}")
    if x.ndim != 2 or w.ndim != 2:
        raise LayoutError(f"matmul2d multiplies matrices, not arrays of shapes {x.shape} and {w.shape}")
    for lies_on in (
        jax.typeof(x).sharding.mesh,
        jax.typeof(w).sharding.mesh,
        jax.sharding.get_abstract_mesh(),
    ):
        if {AxisType.Explicit, AxisType.Auto} <= set(lies_on.axis_types):
            raise LayoutError(
                f"matmul2d needs mesh axes that are all explicit or all automatic, not {lies_on.axis_types}"
            )
    if loops not in get_args(Loops):
        raise BindError(f"loops are {' or '.join(get_args(Loops))}, not {loops!r}")
    if ring_ways not in (0, 1, 2):
        raise BindError(f"a ring has 1 or 2 ways, or 0 for XLA's own collectives, not {ring_ways}")
    dtype = jax.numpy.result_type(x, w)  # of numpy arrays and weak types too, as jnp.matmul takes them
    if dtype.name not in DTYPES:
        raise BindError(f"x is {x.dtype} and w {w.dtype}; both must be one of {', '.join(DTYPES)}")
    shape: tuple[int, ...] = mesh.devices.shape
    problem = _problem(x.shape, w.shape, dataflow, shape, dtype.name)
    config = Matmul2dConfig(slice_widths(slices), block)
    product = _BoundProduct(
        problem, algorithm, config, ring_ways, mesh, tuple(mesh.axis_names), in_order, loops
    )
    y = _differentiable(x.astype(dtype), w.astype(dtype), product)
    if _is_explicit(x) or _is_explicit(w):
        y = _moved(y, _spec_of_result(product), mesh)
    return y


def _problem(
    x: tuple[int, ...], w: tuple[int, ...], dataflow: Dataflow, mesh_shape: tuple[int, ...], dtype: str
) -> Matmul2dProblem:
    """Return the problem of operands of two shapes. Raises LayoutError where they do not fit."""
    m, k = reversed(x) if dataflow == "rs" else x
    n, other = w if dataflow == "ls" else reversed(w)
    if k != other:
        raise LayoutError(
            f"x of shape {x} and w of shape {w} have K = {k} and {other} for dataflow {dataflow}"
        )
    return Matmul2dProblem(m, n, k, mesh_shape, dataflow, dtype)


@lru_cache(maxsize=_MOST_KEPT)
def _function(product: _BoundProduct, in_context: bool) -> Callable[[Array, Array], Array]:
    """Return the jitted function of a product, or the one for a context that gives a mesh with explicit axes."""
    problem, axes = product.problem, product.axes
    program = product_program(problem, product.algorithm, product.config, product.ring_ways)
    source = jax_source(program, axes, in_order=product.in_order, loops=product.loops)
    function: Callable[[Array, Array], Array]
    if in_context:
        function = jax.sharding.auto_axes(load_source(source, None), out_sharding=_spec_of_result(product))
    else:
        function = load_source(source, Mesh(product.mesh.devices, axes))
    return function


def _spec_of_result(product: _BoundProduct) -> PartitionSpec:
    """Return how the type says that a result lies: replicated where jax has no type for unequal shards."""
    sizes = product.problem.m, product.problem.n
    divides = all(size % p == 0 for size, p in zip(sizes, product.problem.mesh_shape, strict=True))
    return PartitionSpec(*product.axes) if divides else PartitionSpec()


def _is_explicit(x: Array) -> bool:
    """Return whether the type of an array says how it lies."""
    return AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types


def _moved(x: Array, spec: PartitionSpec, mesh: Mesh) -> Array:
    """Return x with a sharding in its type, on the mesh of the context if there is one."""
    in_context = not jax.sharding.get_abstract_mesh().empty
    moved: Array = jax.sharding.reshard(x, spec if in_context else NamedSharding(mesh, spec))
    return moved


def _run(a: Array, b: Array, product: _BoundProduct) -> Array:
    in_context = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    return _function(product, in_context)(a, b)


_differentiable = jax.custom_vjp(_run, nondiff_argnums=(2,))


def _forward(a: Array, b: Array, product: _BoundProduct) -> tuple[Array, tuple[Array, Array]]:
    return _run(a, b, product), (a, b)


def _backward(product: _BoundProduct, saved: tuple[Array, Array], dy: Array) -> tuple[Array, ...]:
    role = {"x": saved[0], "w": saved[1], "dy": dy}
    gradients = []
    passes: tuple[PassName, PassName] = ("backward_data", "backward_weight")
    for of, operand in zip(passes, saved, strict=True):
        left, right = TABLE[STATIONARY_OF[product.problem.dataflow]][of].operands
        problem = backward_problem(product.problem, of)
        gradient = _run(role[left], role[right], replace(product, problem=problem))
        if _is_explicit(operand):
            gradient = _moved(gradient, jax.typeof(operand).sharding.spec, product.mesh)
        gradients.append(gradient)
    return tuple(gradients)


_differentiable.defvjp(_forward, _backward)
