"""What the ranks of test_matmul run; started through `meshweave.execute.launch`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import meshweave
from meshweave.execute.groups import TorchContext

KINDS: tuple[Placement, ...] = (Shard(0), Shard(1), Replicate(), Partial())


def integers(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Small integers, so that every order of summation gives the same."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


def placed(whole: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    """A DTensor of a global value; where it is partial, of unequal terms that sum up to it."""
    plain = [Replicate() if isinstance(p, Partial) else p for p in placements]
    local = distribute_tensor(whole, mesh, plain).to_local()
    for dim, placement in enumerate(placements):
        if isinstance(placement, Partial):
            count, at = mesh.size(dim), mesh.get_local_rank(dim)
            local = local - (count - 1) * 3 if at == 0 else torch.full_like(local, 3)
            if any(isinstance(p, Partial) for p in placements[dim + 1 :]):
                local = local.clone()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def global_value(tensor: DTensor) -> Tensor:
    """The whole tensor, on every rank, by plain gathers of our own: DTensor's are not under test here."""
    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim).to_local()


def every_pair(context: Any, payload: Mapping[str, Any]) -> list[str]:
    """All pairs of placements, forward and backward, against dense autograd. Returns what differs."""
    mesh = init_device_mesh("cpu", tuple(payload["mesh"]), mesh_dim_names=("row", "col"))
    shared = TorchContext(liveness=context.liveness, deadline_s=60)
    m, n, k = payload["sizes"]
    kinds = KINDS[: payload["kinds"]]
    whole_a, whole_b, weight = integers((m, k), 1), integers((k, n), 2), integers((m, n), 3)
    wrong = []
    pairs = list(itertools.product(itertools.product(kinds, repeat=2), repeat=2))
    for number, (left, right) in enumerate(pairs[payload.get("from", 0) : payload.get("to")]):
        out = None if number % 3 == 0 else pairs[(7 * number) % len(pairs)][number % 2]
        a, b = placed(whole_a, mesh, left).requires_grad_(), placed(whole_b, mesh, right).requires_grad_()
        c = meshweave.matmul(a, b, out, transport=payload.get("transport", "messages"), context=shared)
        case = f"{left} @ {right} -> {c.placements}"
        if out is not None and tuple(out) != tuple(c.placements):
            wrong.append(f"{case}: asked for {out}")
        found = global_value(c.detach())
        if not torch.equal(found, whole_a @ whole_b):
            wrong.append(f"{case}: C")
        grad = placed(weight, mesh, tuple(Replicate() if isinstance(p, Partial) else p for p in c.placements))
        c.backward(grad)
        for name, given, expected in (("A'", a, weight @ whole_b.T), ("B'", b, whole_a.T @ weight)):
            assert given.grad is not None
            if not torch.equal(global_value(given.grad), expected):
                wrong.append(f"{case}: {name}")
    shared.close()
    return wrong
