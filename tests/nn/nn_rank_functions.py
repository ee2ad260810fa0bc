"""What the ranks of tests/nn run; started through `meshweave.execute.ranks.launch`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshweave.base.errors import MeshweaveError, UnsupportedError
from meshweave.describe.layout import Layout, Shard
from meshweave.execute.torch.context import TorchContext
from meshweave.nn.matmul2d import matmul2d

_SIZES = [(24, 16, 32), (13, 11, 17), (5, 40, 9), (3, 2, 7)]
_VARIANTS = [("meshslice", 3, 1), ("meshslice", (1, 2, 1), 2), ("collective", 1, 0), ("meshslice", 2, 0)]
"""Algorithm, slices, directions of rings."""


def forward_and_backward(context: Any, payload: Mapping[str, Any]) -> list[str]:
    """Every dataflow, even and uneven sizes, slices and rings: shards of C, A' and B' against dense autograd.

    Small integers in float64 make the comparison exact. Every `payload["every"]`-th case is taken. Returns what
    differs.
    """
    rows, columns = payload["mesh"]
    mesh = init_device_mesh("cpu", (rows, columns), mesh_dim_names=("row", "col"))
    shared = TorchContext(liveness=context.liveness, deadline_s=30)
    wrong = []
    cases = itertools.product(_SIZES, ("os", "ls", "rs"), enumerate(_VARIANTS))
    for (m, n, k), dataflow, (number, (algorithm, slices, ways)) in itertools.islice(
        cases, 0, None, payload["every"]
    ):
        case = f"{algorithm} {dataflow} {m}x{n}x{k} slices {slices} rings {ways}"
        generator = torch.Generator().manual_seed(m * 1000 + n * 100 + k + number)
        a_shape = (k, m) if dataflow == "rs" else (m, k)
        b_shape = (n, k) if dataflow == "ls" else (k, n)
        a, b, weight = (
            torch.randint(-4, 5, shape, generator=generator).double() for shape in (a_shape, b_shape, (m, n))
        )
        dense_a, dense_b = a.clone().requires_grad_(), b.clone().requires_grad_()
        left = dense_a.T if dataflow == "rs" else dense_a
        right = dense_b.T if dataflow == "ls" else dense_b
        dense = left @ right
        (dense * weight).sum().backward()

        mine_a, mine_b = (_shard(mesh, t, context.rank).requires_grad_() for t in (a, b))
        out = matmul2d(
            mine_a,
            mine_b,
            mesh=mesh,
            shape=(m, n, k),
            dataflow=dataflow,
            algorithm=algorithm,
            slices=slices,
            block=2,
            ring_ways=ways,
            context=shared,
        )
        (out * _shard(mesh, weight, context.rank)).sum().backward()
        for what, found, expected in (
            ("C", out, dense),
            ("A'", mine_a.grad, dense_a.grad),
            ("B'", mine_b.grad, dense_b.grad),
        ):
            if not torch.equal(found, _shard(mesh, expected.detach(), context.rank)):
                wrong.append(f"{case}: {what}")
    wrong += _mistakes(mesh, shared, context.rank)
    shared.close()
    return wrong


def _mistakes(mesh: Any, shared: TorchContext, rank: int) -> list[str]:
    """User mistakes that must be caught before anything is sent; returns those that were not."""
    missed = []
    good = _shard(mesh, torch.zeros(4, 4), rank)
    for what, change in {
        "is no shard": {"shape": (100, 100, 100)},
        "dataflow": {"dataflow": "ws"},
        "no 2D product": {"algorithm": "meshlice"},
        "shards otherwise": {"algorithm": "fsdp"},
        "ring has": {"ring_ways": 9},
        "slices 0 ": {"slices": 0},
        "slices '4'": {"slices": "4"},
        "slices 2.5 ": {"slices": 2.5},
    }.items():
        options = {"mesh": mesh, "shape": (4, 4, 4), "context": shared, **change}
        try:
            matmul2d(good, good, **options)
        except MeshweaveError as error:
            if what not in str(error):
                missed.append(f"{what}: {error}")
        else:
            missed.append(what)
    return missed


def separate_meshes(context: Any, payload: Mapping[str, Any]) -> float:
    """Two pairs of ranks, each with a mesh of its own, as the replicas of data parallelism have."""
    both = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replica", "row", "col"))
    mesh = both["row", "col"]
    shared = TorchContext(liveness=context.liveness, deadline_s=30)
    replica = context.rank // 2
    size = 8 + 8 * replica  # the replicas need not even do the same
    a = torch.arange(size * size, dtype=torch.float64).reshape(size, size)
    mine = _shard(mesh, a, context.rank)
    out = matmul2d(mine, mine, mesh=mesh, shape=(size, size, size), slices=2, block=1, context=shared)
    error = (out - _shard(mesh, a @ a, context.rank)).abs().max()
    shared.close()
    return float(error)


def sub_mesh_then_whole(context: Any, payload: Mapping[str, Any]) -> list[float]:
    """Ranks 0 and 1 use a mesh of their own first, then all four one mesh: groups must not be mixed up."""
    shared = TorchContext(liveness=context.liveness, deadline_s=30)
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "col"))
    pairs = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pair", "row", "col"))["row", "col"]
    a = torch.arange(64, dtype=torch.float64).reshape(8, 8)
    errors = []
    for mesh in (pairs, whole) if context.rank < 2 else (whole,):
        mine = _shard(mesh, a, context.rank)
        out = matmul2d(mine, mine, mesh=mesh, shape=(8, 8, 8), slices=2, block=1, ring_ways=0, context=shared)
        errors.append(float((out - _shard(mesh, a @ a, context.rank)).abs().max()))
    shared.close()
    return errors


def _shard(mesh: Any, whole: torch.Tensor, rank: int) -> torch.Tensor:
    from meshweave.describe.layout.mesh import Mesh

    rows, columns = mesh.mesh.shape
    ranks = tuple(mesh.mesh.reshape(-1).tolist())
    layout = Layout(Mesh("m", (rows, columns), ("row", "col"), ranks), (Shard(0), Shard(1)))
    index = layout.indices(tuple(whole.shape), rank)
    return whole[torch.from_numpy(index[0])][:, torch.from_numpy(index[1])].clone()


def second_derivative(context: Any, payload: Mapping[str, Any]) -> str:
    """One rank: a gradient of a gradient must be refused, not silently wrong."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("row", "col"))
    a = torch.ones(4, 4, dtype=torch.float64, requires_grad=True)
    shared = TorchContext(liveness=context.liveness, deadline_s=30)
    out = matmul2d(a, a, mesh=mesh, shape=(4, 4, 4), slices=1, context=shared)
    if isinstance(vars(DeviceMesh).get("mesh"), property):  # which torch computes at each access, in 0.2 ms
        computed, DeviceMesh.mesh = DeviceMesh.mesh, None
        matmul2d(a, a, mesh=mesh, shape=(4, 4, 4), slices=1, context=shared)
        DeviceMesh.mesh = computed
    try:
        torch.autograd.grad(out.sum(), a, create_graph=True)
    except UnsupportedError as error:
        return str(error)
    return "no error"
