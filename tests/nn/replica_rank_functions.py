"""What the ranks of test_replicas run: products and reshards by lot, and each tells the bits that it got.

All ranks draw the same. They differ in what must make no difference: the number of threads, and where and how
their local tensors lie in memory. The test compares what they tell.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import meshweave
from meshweave.execute.torch.context import TorchContext
from meshweave.nn.dtensor import layout_of
from meshweave.nn.shard_spec import ShardSpec

KINDS: tuple[Placement, ...] = (Shard(0), Shard(1), Replicate(), Partial())
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
Placements = tuple[Placement, ...]
Reports = list[tuple[str, str, str]]
"""(case, what of a tensor a rank has, digest of its bits)."""


@dataclass(frozen=True)
class Case:
    """A product C = A B, and how its matrices lie."""

    mesh: int
    a: Placements
    b: Placements
    out: Placements | None
    sizes: tuple[int, int, int]
    dtype: torch.dtype
    transport: str
    seed: int
    is_trained: bool = False
    has_bias: bool = False

    def __str__(self) -> str:
        listed = [f"mesh {self.mesh}", f"{self.a} @ {self.b} -> {self.out}", "x".join(map(str, self.sizes))]
        return ", ".join([*listed, str(self.dtype), self.transport, f"seed {self.seed}"])


class Replicas:
    """What one rank found out."""

    def __init__(self, context: Any) -> None:
        self.rank = context.rank
        torch.set_num_threads(1 + context.rank % 3)
        self.context = TorchContext(liveness=context.liveness, deadline_s=60)
        shapes = [(2, 2), (4,), (4, 1)] if context.num_ranks == 4 else [(2, 3), (6,), (3, 2)]
        self.meshes = [init_device_mesh("cpu", shape) for shape in shapes]
        self.reports: Reports = []
        self.wrong: list[str] = []

    # --- operands -------------------------------------------------------------------------------------------

    def operand(
        self, shape: tuple[int, int], mesh: DeviceMesh, placements: Placements, dtype: torch.dtype, seed: int
    ) -> tuple[DTensor, Tensor, Tensor]:
        """Return a DTensor of normal random numbers, its value in float64 and the sum of its terms' magnitudes."""
        generator = torch.Generator().manual_seed(seed)
        layout = layout_of(ShardSpec(mesh, placements).torch_spec(shape, dtype))
        axes = [axis for axis, one in enumerate(placements) if isinstance(one, Partial)]
        num_terms = math.prod(mesh.shape[axis] for axis in axes)
        terms = torch.randn(num_terms, *shape, generator=generator, dtype=torch.float64).to(dtype)
        term, coords = 0, layout.mesh.coords(self.rank)
        for axis in axes:
            term = term * layout.mesh.shape[axis] + coords[axis]
        rows, columns = (torch.from_numpy(index) for index in layout.indices(shape, self.rank))
        local = self.laid_out(terms[term][rows][:, columns], seed)
        spec = ShardSpec(mesh, placements).torch_spec(shape, dtype)
        exact = terms.double()
        return DTensor(local, spec, requires_grad=False), exact.sum(0), exact.abs().sum(0)

    def laid_out(self, local: Tensor, seed: int) -> Tensor:
        """Return the same numbers in memory as no other rank has them: off any alignment, wider, or transposed."""
        how = random.Random(f"{seed} {self.rank}").randrange(5)
        if how < 2:
            return local.contiguous()
        rows, columns = local.shape
        if how == 4:
            return local.t().contiguous().t()
        pad = 3 if how == 3 else 0
        room = torch.empty(1 + rows * (columns + pad), dtype=local.dtype)
        return room.as_strided(
            (rows, columns), (columns + pad, 1), 1 + pad if pad and rows == 0 else 1
        ).copy_(local)

    # --- what is compared -----------------------------------------------------------------------------------

    def tell(self, case: str, tensor: DTensor) -> None:
        layout, local = layout_of(tensor), tensor.detach().to_local()
        coords = layout.mesh.coords(self.rank) if self.rank in layout.mesh else ()
        terms = [at for at, one in zip(coords, tensor.placements, strict=True) if isinstance(one, Partial)]
        shape = (math.prod(tensor.shape[:-1]), tensor.shape[-1])
        indices = [index.tolist() for index in layout.indices(shape, self.rank)]
        self.reports.append((case, _digest(repr((indices, terms)).encode()), _bits(local)))

    def close(self, case: str, tensor: DTensor, exact: Tensor, bound: Tensor) -> None:
        """Compare a result with what it is exactly, and how far that may be off."""
        whole = tensor.detach()
        if any(isinstance(one, Partial) for one in tensor.placements):
            whole = whole.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
        layout = layout_of(whole)
        rows, columns = (torch.from_numpy(i) for i in layout.indices(tuple(exact.shape), self.rank))
        off = (whole.to_local().double() - exact[rows][:, columns]).abs() - bound[rows][:, columns]
        if off.numel() and not float(off.max()) <= 0:
            self.wrong.append(f"{case}: off by {float(off.max()):.3g} more than rounding")

    # --- products -------------------------------------------------------------------------------------------

    def product(self, case: Case) -> None:
        mesh, (m, n, k) = self.meshes[case.mesh], case.sizes
        a, exact_a, size_a = self.operand((m, k), mesh, case.a, case.dtype, case.seed)
        b, exact_b, size_b = self.operand((k, n), mesh, case.b, case.dtype, case.seed + 1)
        if case.is_trained:
            a, b = a.requires_grad_(), b.requires_grad_()
        results = [self.results(case, a, b) for _ in range(2)]
        for number, (first, second) in enumerate(zip(*results, strict=True)):
            name = f"{case} [{number}]"
            self.tell(name, first)
            if _bits(first.detach().to_local()) != _bits(second.detach().to_local()):
                self.wrong.append(f"{name}: two calls differ")
        unit = torch.finfo(case.dtype).eps
        self.close(
            str(case), results[0][0], exact_a @ exact_b, _roundings(k) * unit * (size_a @ size_b) + 1e-30
        )

    def results(self, case: Case, a: DTensor, b: DTensor) -> list[DTensor]:
        """Return C, and A' and B' if the case is trained."""
        c = meshweave.matmul(a, b, case.out, transport=case.transport, context=self.context)
        if not case.is_trained:
            return [c]
        placements = tuple(Replicate() if isinstance(p, Partial) else p for p in c.placements)
        grad, _, _ = self.operand(tuple(c.shape), c.device_mesh, placements, case.dtype, case.seed + 2)
        return [c, *torch.autograd.grad(c, [a, b], grad)]

    def layer(self, case: Case) -> None:
        """A linear layer with a bias: its result, and the gradients of input, weight and bias."""
        mesh, (m, n, k) = self.meshes[case.mesh], case.sizes
        x, _, _ = self.operand((m, k), mesh, case.a, case.dtype, case.seed)
        weight, _, _ = self.operand((n, k), mesh, case.b, case.dtype, case.seed + 1)
        row, _, _ = self.operand((1, n), mesh, tuple(Replicate() for _ in case.a), case.dtype, case.seed + 3)
        bias = DTensor.from_local(row.to_local()[0].contiguous(), mesh, row.placements, run_check=False)
        leaves = [one.detach().requires_grad_() for one in (x, weight, bias)]
        with meshweave.nn.universal_linear(out=case.out, transport=case.transport, context=self.context):
            y = torch.nn.functional.linear(*leaves)
            placements = tuple(Replicate() if isinstance(p, Partial) else p for p in y.placements)
            grad, _, _ = self.operand(tuple(y.shape), mesh, placements, case.dtype, case.seed + 2)
            results = [y, *torch.autograd.grad(y, leaves, grad)]
        for number, one in enumerate(results[:3]):
            self.tell(f"layer {case} [{number}]", one)
        if all(isinstance(placement, Replicate) for placement in results[3].placements):
            self.reports.append((f"layer {case} [bias]", "", _bits(results[3].to_local())))

    # --- reshards -------------------------------------------------------------------------------------------

    def reshard(self, number: int, chooser: random.Random) -> None:
        source, target = (self.meshes[chooser.randrange(len(self.meshes))] for _ in "st")
        placed = tuple(chooser.choice(KINDS) for _ in source.shape)
        wanted = tuple(chooser.choice((*KINDS[:3], Replicate())) for _ in target.shape)
        shape = (_size(chooser), _size(chooser))
        dtype, seed = chooser.choice(DTYPES), chooser.randrange(1 << 30)
        case = f"reshard {number}: {source.shape} {placed} -> {target.shape} {wanted}, {shape}, {dtype}"
        tensor, exact, size = self.operand(shape, source, placed, dtype, seed)
        first, second = (meshweave.reshard(tensor, target, wanted, context=self.context) for _ in range(2))
        self.tell(case, first)
        if _bits(first.to_local()) != _bits(second.to_local()):
            self.wrong.append(f"{case}: two calls differ")
        num_terms = math.prod(
            n for n, one in zip(source.shape, placed, strict=True) if isinstance(one, Partial)
        )
        unit = torch.finfo(dtype).eps * (num_terms > 1)
        self.close(case, first, exact, num_terms * unit * size)


def _bits(tensor: Tensor) -> str:
    data = tensor.contiguous().view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)
    return _digest(data.numpy().tobytes())


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _roundings(k: int) -> float:
    """How many roundings, each by half a unit, a sum of k products on a few ranks and its operands may have."""
    return 24.0 + k


def _size(chooser: random.Random) -> int:
    most = chooser.choice((3, 9, 33, 33, 130, 260))
    return chooser.randint(1, most)


def drawn_cases(seed: int, count: int, meshes: Sequence[DeviceMesh]) -> Iterator[Case]:
    """Yield products by lot."""
    chooser = random.Random(seed)
    for _ in range(count):
        mesh = chooser.randrange(len(meshes))
        num_dims = meshes[mesh].ndim
        a, b, c = (tuple(chooser.choice(KINDS) for _ in range(num_dims)) for _ in "abc")
        copies = tuple(chooser.choice((*KINDS, Replicate(), Replicate())) for _ in range(num_dims))
        yield Case(
            mesh,
            a,
            b,
            chooser.choice((None, c, copies)),
            (_size(chooser), _size(chooser), _size(chooser)),
            chooser.choice(DTYPES),
            chooser.choice(("messages", "shared")),
            chooser.randrange(1 << 30),
            chooser.random() < 0.3,
            chooser.random() < 0.1,
        )


def every_case(step: int, transports: Sequence[str]) -> Iterator[Case]:
    """Yield every `step`-th of all pairs of placements of A and B on a 2x2 mesh, with copies of C, trained."""
    placed = list(itertools.product(KINDS, repeat=2))
    outs = [one for one in placed if Replicate() in one]
    cases = itertools.product(placed, placed, outs)
    for number, (a, b, out) in enumerate(itertools.islice(cases, 0, None, step)):
        dtype, transport = DTYPES[number % 3], transports[number // 3 % len(transports)]
        sizes = [(5, 7, 6), (33, 17, 129), (1, 40, 70), (64, 1, 33)][number % 4]
        yield Case(0, a, b, out, sizes, dtype, transport, number, True, number % 5 == 0)


def run(context: Any, payload: Mapping[str, Any]) -> tuple[Reports, list[str]]:
    """Run the cases of a payload: "products" and "reshards" by lot from a "seed", or every "step"-th of all pairs.

    "only" lists the numbers of those to run; None means all of them.
    """
    replicas = Replicas(context)
    transports = payload["transports"]
    if "step" in payload:
        only = payload.get("only")
        listed = enumerate(every_case(payload["step"], transports))
        cases = (case for number, case in listed if only is None or number in only)
    else:
        cases = drawn_cases(payload["seed"], payload["products"], replicas.meshes)
    for case in cases:
        if case.transport in transports:
            replicas.product(case)
            if case.has_bias:
                replicas.layer(case)
    chooser = random.Random(payload.get("seed", 0))
    for number in range(payload.get("reshards", 0)):
        replicas.reshard(number, chooser)
    replicas.context.close()
    return replicas.reports, replicas.wrong
