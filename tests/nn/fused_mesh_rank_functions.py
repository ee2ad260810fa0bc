"""What the ranks of test_fused_meshes run: fused products on any mesh axis, and `matmul` that takes them."""

import torch
from matmul_rank_functions import placed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import ShardOrderEntry

import meshweave as mw
from meshweave.describe.machine.cluster import load_cluster
from meshweave.execute.torch.context import TorchContext
from meshweave.nn.fused import all_gather_linear, linear_reduce_scatter

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)


class _Names:
    """Records the names of the programs that run."""

    def __init__(self):
        self.names = []

    def add(self, program, trace):
        self.names.append(program.name)


class _Dense:
    """The layer of one process, with its gradients."""

    def __init__(self, x_shape, features):
        generator = torch.Generator().manual_seed(0)

        def normal(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.x, self.weight = normal(*x_shape), normal(features, x_shape[-1])
        self.grad = normal(*x_shape[:-1], features)
        x, weight = self.x.clone().requires_grad_(), self.weight.clone().requires_grad_()
        self.result = torch.nn.functional.linear(x, weight)
        self.result.backward(self.grad)
        self.grad_x, self.grad_w = x.grad, weight.grad
        self.result = self.result.detach()


def placed_cases(context, payload):
    """Layers of three-dim DTensors on the axes of a 2 x 2 mesh whose ranks are not in order: what differs."""
    wrong = []
    order = torch.tensor(payload["ranks"]).view(2, 2)
    mesh = DeviceMesh("cpu", order, mesh_dim_names=("dp", "tp"))
    dense = _Dense((4, 6, 8), 12)
    cases = [
        ("sequence of a batch", linear_reduce_scatter, (S0, S2), (R, S1), (S0, S1), {"dim": 1}),
        ("columns on the other axis", linear_reduce_scatter, (S2, R), (S1, S0), (S0, S2), {}),
        ("other axis idle", linear_reduce_scatter, (S2, R), (S1, R), (S1, R), {"dim": -2}),
        ("gather of a batch", all_gather_linear, (S0, S1), (R, S0), (S0, S2), {}),
        ("gather of rows of rows", all_gather_linear, (R, S0), (R, S0), (R, S2), {"algorithm": "t3_direct"}),
    ]
    for number, (name, layer, of_x, of_w, of_out, options) in enumerate(cases):
        for transport in ("shared", "messages") if payload["all"] else (("shared", "messages")[number % 2],):
            x, weight = (
                distribute_tensor(one.clone(), mesh, where).requires_grad_()
                for one, where in ((dense.x, of_x), (dense.weight, of_w))
            )
            result = layer(x, weight, transport=transport, **options)
            result.backward(distribute_tensor(dense.grad.clone(), mesh, of_out))
            pairs = (result, dense.result), (x.grad, dense.grad_x), (weight.grad, dense.grad_w)
            if [tuple(one.placements) for one, _ in pairs] != [of_out, of_x, of_w]:
                wrong.append((name, transport, "placements"))
            if not all(torch.allclose(one.full_tensor(), expected) for one, expected in pairs):
                wrong.append((name, transport, "values"))
    wrong += [*_local_faults(mesh, dense), *_faults_without_columns(mesh)]
    if payload["all"] and not _compiles(mesh, dense):
        wrong.append("compiled")
    return wrong


def _local_faults(mesh, dense):
    """Local tensors on a sub-mesh, whose ranks are not consecutive."""
    ring = mesh["dp"]
    own = ring.get_local_rank()
    x, weight = (one.chunk(2, -1)[own].clone().requires_grad_() for one in (dense.x, dense.weight))
    result = linear_reduce_scatter(x, weight, dim=1, device_mesh=ring)
    result.backward(dense.grad.chunk(2, 1)[own])
    expected = dense.result.chunk(2, 1)[own], dense.grad_x.chunk(2, 2)[own], dense.grad_w.chunk(2, 1)[own]
    for one, want in zip((result, x.grad, weight.grad), expected, strict=True):
        if not torch.allclose(one, want):
            yield "local"
    gathered = all_gather_linear(
        dense.x.chunk(2, 1)[own], dense.weight.chunk(2)[own], dim=1, device_mesh=ring
    )
    if not torch.allclose(gathered, dense.result.chunk(2, 2)[own]):
        yield "local gather"


def _faults_without_columns(mesh):
    """A ring that has no column of the result beside one that has the only one."""
    dense = _Dense((4, 6, 8), 1)
    x, weight = (
        _on(mesh, one, where).requires_grad_()
        for one, where in ((dense.x, (R, S2)), (dense.weight, (S0, S1)))
    )
    result = linear_reduce_scatter(x, weight, dim=1)
    result.backward(_on(mesh, dense.grad, (S2, S1)))
    pairs = (result, dense.result), (x.grad, dense.grad_x), (weight.grad, dense.grad_w)
    if not all(torch.allclose(one.full_tensor(), expected) for one, expected in pairs):
        yield "no columns"


def _compiles(mesh, dense):
    """Whether a function of torch.compile may call a layer, which breaks its graph."""
    ring = mesh["dp"]
    own = ring.get_local_rank()

    @torch.compile(backend="eager")
    def doubled(x, weight):
        return linear_reduce_scatter(x, weight, dim=1, device_mesh=ring) * 2

    x, weight = (one.chunk(2, -1)[own] for one in (dense.x, dense.weight))
    return torch.allclose(doubled(x, weight), 2 * dense.result.chunk(2, 1)[own])


def refusals(context, payload):
    """What is said of layers that no ring computes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x, weight = torch.ones(3, 5, 8), torch.ones(12, 8)
    calls = [
        lambda: linear_reduce_scatter(torch.ones(8), weight),
        lambda: linear_reduce_scatter(x, weight, dim=2),
        lambda: linear_reduce_scatter(x, weight, dim=1, device_mesh=mesh["tp"]),
        lambda: linear_reduce_scatter(x, weight, device_mesh=mesh),
        lambda: linear_reduce_scatter(_on(mesh, x, (R, S0)), _on(mesh, weight, (R, S1))),
        lambda: linear_reduce_scatter(_on(mesh, x, (R, S2)), _on(mesh, weight, (R, S1)), dim=1),
        lambda: all_gather_linear(_on(mesh, x, (S0, S0)), _on(mesh, weight, (S0, S0))),
        lambda: linear_reduce_scatter(_on(mesh, x[0, :3], (S0, S1)), _on(mesh, weight, (R, S1))),
        lambda: mw.matmul(_on(mesh, x, (R, R)), _on(mesh, weight.t(), (R, S1)), (R, S2), overlap="fused"),
        lambda: mw.matmul(_on(mesh, x, (R, R)), _on(mesh, weight.t(), (R, S1)), (R, S2), overlap="tiles"),
        lambda: all_gather_linear(
            placed(torch.ones(8, 8), mesh, (S0, S0), (ShardOrderEntry(0, (1, 0)),)),
            _on(mesh, weight, (R, S0)),
        ),
    ]
    said = []
    for call in calls:
        try:
            call()
            said.append("completed")
        except mw.MeshweaveError as error:
            said.append(str(error))
    return said


def _on(mesh, tensor, placements):
    return distribute_tensor(tensor.clone(), mesh, placements)


def products(context, payload):
    """Products of `matmul` that are a reduce-scatter or an all-gather: what differs, and which programs ran."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dense = _Dense((8, 6, 16), 12)
    wrong, ran = [], []
    slow = load_cluster(payload["cluster"])
    for name, given in (
        ("slices", {"overlap": "slices", "cluster": slow, "transport": "messages"}),
        ("auto", {"cluster": slow, "transport": "messages"}),
        ("fused", {"overlap": "fused"}),
    ):
        for of_a, of_b, of_out in (((S0, S2), (R, S0), (S0, S0)), ((R, S0), (R, S1), (R, S2))):
            ours = TorchContext(liveness=False, deadline_s=30.0)
            ours.recorder = _Names()
            a, b = (
                distribute_tensor(one.clone(), mesh, where).requires_grad_()
                for one, where in ((dense.x, of_a), (dense.weight.t(), of_b))
            )
            result = mw.matmul(a, b, of_out, context=ours, **given)
            result.backward(distribute_tensor(dense.grad.clone(), mesh, of_out))
            pairs = (result, dense.result), (a.grad, dense.grad_x), (b.grad, dense.grad_w.t())
            if not all(torch.allclose(one.full_tensor(), expected) for one, expected in pairs):
                wrong.append((name, of_out))
            ran.append((name, sorted(set(ours.recorder.names))))
            ours.close()
    wrong += _layer_faults(mesh, dense)
    return wrong, ran


def _layer_faults(mesh, dense):
    """A row-parallel layer with a bias, under `universal_linear`; a replicated one is no fused product."""
    ours = TorchContext(liveness=False, deadline_s=30.0)
    ours.recorder = _Names()
    bias = torch.arange(12.0, dtype=torch.float64)
    for of_x, of_w, of_out, is_fused in (
        ((S0, S2), (R, S1), (S0, S0), True),
        ((S0, R), (R, R), (S0, R), False),
    ):
        x, weight, one = (
            distribute_tensor(given.clone(), mesh, where).requires_grad_()
            for given, where in ((dense.x, of_x), (dense.weight, of_w), (bias, (R, R)))
        )
        ours.recorder.names.clear()
        with mw.nn.universal_linear(of_out, context=ours, overlap="fused"):
            result = torch.nn.functional.linear(x, weight, one)
        if any(name.startswith("T3") for name in ours.recorder.names) != is_fused:
            yield "programs of a layer", ours.recorder.names
        result.backward(distribute_tensor(dense.grad.clone(), mesh, of_out))
        pairs = (result, dense.result + bias), (x.grad, dense.grad_x), (weight.grad, dense.grad_w)
        if not all(torch.allclose(part.full_tensor(), expected) for part, expected in pairs):
            yield "a layer", of_x
        if not torch.allclose(one.grad.full_tensor(), dense.grad.sum((0, 1))):
            yield "a layer's bias", of_x
    ours.close()
