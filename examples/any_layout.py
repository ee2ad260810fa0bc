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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from meshweave import load_cluster, matmul
from meshweave.algorithms.universal import UniversalProblem
from meshweave.cost.rates import RankRates
from meshweave.describe.layout import Layout, Partial, Placement, Replicate, Shard
from meshweave.describe.layout.mesh import Mesh
from meshweave.execute.ranks.launch import Context, launch
from meshweave.lab.bench.dtensor_traffic import PlacedProduct, to_torch, dtensor_traffics
from meshweave.tune.universal import tune_universal

M, N, K = 96, 64, 128
SQUARE, LINE = (2, 2), (4,)
WORDS: dict[str, Placement] = {"S0": Shard(0), "S1": Shard(1), "R": Replicate(), "P": Partial()}
CASES = [  # mesh and placements of A, of B
    (SQUARE, "S0 R", SQUARE, "R S1"),
    (SQUARE, "S0 S1", SQUARE, "S0 S1"),
    (SQUARE, "S0 S0", SQUARE, "R S0"),
    (SQUARE, "P R", SQUARE, "S1 S1"),
    (SQUARE, "R S1", SQUARE, "S0 S0"),
    (SQUARE, "S0 S1", LINE, "S0"),
]


def placed(words: str) -> tuple[Placement, ...]:
    return tuple(WORDS[word] for word in words.split())


def words(placements: tuple[Placement, ...]) -> str:
    return " ".join(next(word for word, known in WORDS.items() if known == one) for one in placements)


def main() -> None:
    asked = [PlacedProduct(placed(a), placed(b), (M, N, K)) for mesh_a, a, mesh_b, b in CASES if mesh_a == mesh_b]
    counted = iter(dtensor_traffics(SQUARE, asked))
    rates = RankRates.of(load_cluster("local-cpu"))
    rows = []
    for mesh_a, a, mesh_b, b in CASES:
        theirs = next(counted) if mesh_a == mesh_b else None
        out = theirs.out_placements if theirs else placed("S0 S1")
        layouts = [
            Layout(Mesh.of(f"mesh{len(shape)}", shape, ("row", "col")[: len(shape)]), how)
            for shape, how in ((mesh_a, placed(a)), (mesh_b, placed(b)), (mesh_a, out))
        ]
        tuned = tune_universal(UniversalProblem(M, N, K, *layouts), rates, objective="bytes")
        rows.append((a, b, words(out), theirs, tuned))

    cases = [[*case, row[2]] for case, row in zip(CASES, rows, strict=True)]
    here = {"PYTHONPATH": str(Path(__file__).parent)}
    said = launch("any_layout:on_a_rank", 4, {"cases": cases}, timeout_s=100, env=here)[0]
    print(f"{'A':7}{'B':7}{'C':7}{'DTensor moves':>14}{'ours':>9}  how")
    for (a, b, out, theirs, tuned), dtensor_can in zip(rows, said, strict=True):
        moved = theirs.received_bytes if theirs and dtensor_can else "refuses"
        print(f"{a:7}{b:7}{out:7}{moved:>14}{tuned.moved_bytes:9}  {tuned.config}")
    print("products and gradients equal the dense ones")


def on_a_rank(context: Context, payload: dict[str, Any]) -> list[bool]:
    """Whether DTensor can multiply the operands of each case. Ours has to."""
    meshes = {shape: init_device_mesh("cpu", shape) for shape in (SQUARE, LINE)}
    generator = torch.Generator().manual_seed(0)
    dense_a, dense_b, weight = (
        torch.randint(-4, 5, shape, generator=generator).float() for shape in ((M, K), (K, N), (M, N))
    )
    dtensor_can = []
    for mesh_a, a, mesh_b, b, out in payload["cases"]:
        left = lay(dense_a, meshes[tuple(mesh_a)], a)
        right = lay(dense_b, meshes[tuple(mesh_b)], b)
        c = matmul(left, right, to_torch(placed(out)))
        assert torch.equal(c.full_tensor(), dense_a @ dense_b)
        (c.full_tensor() * weight).sum().backward()
        assert torch.equal(left.grad.full_tensor(), weight @ dense_b.T)
        assert torch.equal(right.grad.full_tensor(), dense_a.T @ weight)
        try:
            left.detach() @ right.detach()
            dtensor_can.append(True)
        except (RuntimeError, ValueError):
            dtensor_can.append(False)
    return dtensor_can


def lay(dense: torch.Tensor, mesh: Any, how: str) -> DTensor:
    return distribute_tensor(dense, mesh, to_torch(placed(how))).requires_grad_()


if __name__ == "__main__":
    main()
