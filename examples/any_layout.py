"""Products of DTensors as they lie, beside what DTensor moves for the same results.

    python examples/any_layout.py

Four processes on gloo multiply operands in several placements, the last ones on meshes of two shapes, and check
products and gradients against the dense ones. Bytes are what all ranks together receive; DTensor's are counted
without moving any.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import meshweave as mw
from meshweave_lab import PlacedProduct, dtensor_traffics

M, N, K = 96, 64, 128
SQUARE, LINE = (2, 2), (4,)
OURS = {"S0": mw.Shard(0), "S1": mw.Shard(1), "R": mw.Replicate(), "P": mw.Partial()}
TORCHS = {"S0": Shard(0), "S1": Shard(1), "R": Replicate(), "P": Partial()}
CASES = [  # mesh and placements of A, of B
    (SQUARE, "S0 R", SQUARE, "R S1"),
    (SQUARE, "S0 S1", SQUARE, "S0 S1"),
    (SQUARE, "S0 S0", SQUARE, "R S0"),
    (SQUARE, "P R", SQUARE, "S1 S1"),
    (SQUARE, "R S1", SQUARE, "S0 S0"),
    (SQUARE, "S0 S1", LINE, "S0"),
]


def placements(words: str) -> tuple[mw.describe.Placement, ...]:
    return tuple(OURS[word] for word in words.split())


def main() -> None:
    products = [PlacedProduct(placements(a), placements(b), (M, N, K)) for mesh_a, a, mesh_b, b in CASES
                if mesh_a == mesh_b]  # fmt: skip
    traffics = iter(dtensor_traffics(SQUARE, products))
    rates = mw.simulation.RankRates.of(mw.load_cluster("local-cpu"))
    rows, cases = [], []
    for mesh_a, a, mesh_b, b in CASES:
        theirs = next(traffics) if mesh_a == mesh_b else None
        out = theirs.out_placements if theirs else placements("S0 S1")
        layouts = [
            mw.Layout(mw.Mesh.of(f"mesh{len(shape)}", shape, ("row", "col")[: len(shape)]), placed)
            for shape, placed in ((mesh_a, placements(a)), (mesh_b, placements(b)), (mesh_a, out))
        ]
        tuned = mw.tune.tune_universal(
            mw.algorithms.UniversalProblem(M, N, K, *layouts), rates, objective="bytes"
        )
        c = " ".join(word for placement in out for word, ours in OURS.items() if ours == placement)
        rows.append((a, b, c, theirs.received_bytes if theirs else "refuses", tuned))
        cases.append((mesh_a, a, mesh_b, b, c))

    here = {"PYTHONPATH": str(Path(__file__).parent)}
    mw.launch("any_layout:on_a_rank", 4, {"cases": cases}, timeout_s=100, env=here)
    print(f"{'A':7}{'B':7}{'C':7}{'DTensor moves':>14}{'ours':>9}  config")
    for a, b, c, their_bytes, tuned in rows:
        print(f"{a:7}{b:7}{c:7}{their_bytes:>14}{tuned.moved_bytes:9}  {tuned.config}")
    print("products and gradients equal the dense ones")


def on_a_rank(context: mw.nn.RankContext, payload: dict[str, Any]) -> None:
    """Multiply the operands of every case, and check the product and both gradients."""
    meshes = {shape: init_device_mesh("cpu", shape) for shape in (SQUARE, LINE)}
    generator = torch.Generator().manual_seed(0)
    dense_a, dense_b, dense_grad = (
        torch.randint(-4, 5, shape, generator=generator).float() for shape in ((M, K), (K, N), (M, N))
    )
    for shape_a, words_a, shape_b, words_b, words_c in payload["cases"]:
        mesh_a, mesh_b = meshes[tuple(shape_a)], meshes[tuple(shape_b)]
        a = distributed(dense_a, mesh_a, words_a).requires_grad_()
        b = distributed(dense_b, mesh_b, words_b).requires_grad_()
        c = mw.matmul(a, b, [TORCHS[word] for word in words_c.split()])
        check(c, dense_a @ dense_b)
        c.backward(distributed(dense_grad, mesh_a, words_c.replace("P", "R")))
        check(a.grad, dense_grad @ dense_b.T)
        check(b.grad, dense_a.T @ dense_grad)
        if mesh_a != mesh_b:
            try:
                a.detach() @ b.detach()
            except (RuntimeError, ValueError):
                continue
            raise AssertionError("DTensor multiplies operands on different meshes now")


def distributed(dense: torch.Tensor, mesh: DeviceMesh, words: str) -> DTensor:
    return distribute_tensor(dense, mesh, [TORCHS[word] for word in words.split()])


def check(tensor: DTensor, dense: torch.Tensor) -> None:
    """Compare what this rank holds with its part of a dense tensor; terms of a sum are added up first."""
    local = tensor.to_local()
    if all(placement.is_partial() for placement in tensor.placements):
        total = local.clone()
        dist.all_reduce(total)
        assert torch.equal(total, dense)
    else:
        assert torch.equal(local, distribute_tensor(dense, tensor.device_mesh, tensor.placements).to_local())


if __name__ == "__main__":
    main()
