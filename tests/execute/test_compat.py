"""Each private name of torch that meshweave uses is there and does what `compat` says of it."""

import importlib
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard  # noqa: E402

from meshweave.base.errors import UnsupportedError  # noqa: E402
from meshweave.execute.torch import compat, compat_gradients, compat_groups, compat_values  # noqa: E402
from meshweave_lab.bench import observing  # noqa: E402

VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
HAS_SHARD_ORDER = VERSION >= (2, 13)


@pytest.fixture
def mesh():
    with observing.fake_default_group(1, 4):
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def test_a_name_that_is_gone_is_an_error_with_the_version_of_torch():
    with pytest.raises(UnsupportedError) as caught:
        compat._private("torch.distributed", "_no_such_name")
    assert str(caught.value) == (
        f"torch {torch.__version__} has no torch.distributed._no_such_name; meshweave was checked with torch "
        f"{compat.CHECKED_VERSIONS}"
    )
    with pytest.raises(UnsupportedError, match=r"has no torch\.no_such_module\.name"):
        compat._private("torch.no_such_module", "name")


@pytest.mark.parametrize(
    ("module", "name", "call"),
    [
        ("distributed_c10d", "_get_default_store", compat_groups.default_store),
        ("distributed_c10d", "_resolve_process_group", lambda: compat_groups.group_by_name("0")),
        (
            "distributed_c10d",
            "_process_group_name",
            lambda: compat_groups.override_group_names(str).__enter__(),
        ),
        ("tensor._dtensor_spec", "DTensorSpec", lambda: compat.make_spec(None, (), (), torch.float32)),
        ("tensor.placement_types", "_StridedShard", lambda: compat.strided_shard(0, 2)),
        (
            "tensor.placement_types",
            "shard_dim_alltoall",
            lambda: observing.observe_shard_dim_alltoall(print).__enter__(),
        ),
    ],
)
def test_every_function_says_so_where_its_name_is_gone(monkeypatch, module, name, call):
    compat._private.cache_clear()
    monkeypatch.delattr(importlib.import_module(f"torch.distributed.{module}"), name)
    try:
        with pytest.raises(UnsupportedError, match=r"torch"):
            call()
    finally:
        compat._private.cache_clear()


def test_default_store(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        compat_groups.default_store().set("key", "value")
        assert compat_groups.default_store().get("key") == b"value"
        assert compat_groups.default_store().check(["key"])
    finally:
        dist.destroy_process_group()
    with pytest.raises(ValueError, match="not been initialized"):
        compat_groups.default_store()


def test_group_by_name(mesh):
    group = mesh.get_group("tp")
    assert compat_groups.group_by_name(group.group_name) is group


def test_naming_groups():
    """Groups that a thread forms among their own ranks take the name that is made for them, others torch's."""
    with observing.fake_default_group(1, 4), ThreadPoolExecutor(1) as other:
        with compat_groups.override_group_names(lambda ranks: f"ranks {list(ranks)}"):
            own = dist.new_group([1, 3], use_local_synchronization=True)
            of_all = dist.new_group([0, 1])
            beside = other.submit(dist.new_group, [1, 2], use_local_synchronization=True).result()
            of_other = compat_groups.override_group_names(lambda ranks: "of the other")
            other.submit(of_other.__enter__).result()
        other.submit(of_other.__exit__, None, None, None).result()
        after = dist.new_group([1, 3], use_local_synchronization=True)
        assert own.group_name == "ranks [1, 3]"
        assert not of_all.group_name.startswith("ranks")
        assert not beside.group_name.startswith("ranks")
        assert not after.group_name.startswith("ranks")


def test_local_tensor(mesh):
    local = torch.ones(2, 3, requires_grad=True)
    tensor = DTensor.from_local(local, mesh, [Shard(0), Replicate()], run_check=False)
    assert compat.local_tensor(tensor).data_ptr() == local.data_ptr()
    assert not compat.local_tensor(tensor).requires_grad


def test_local_tensors(mesh, monkeypatch):
    local = torch.ones(2, 3, requires_grad=True)
    tensor = DTensor.from_local(local, mesh, [Shard(0), Replicate()], run_check=False)
    made, *others = compat.local_tensors([tensor, local, None, 3])
    assert made.data_ptr() == local.data_ptr() and not made.requires_grad
    assert others[0] is local and others[1:] == [None, 3]
    arriving = tensor.detach().redistribute(mesh, [Replicate(), Replicate()], async_op=True)
    assert [type(each) for each in compat.local_tensors([arriving])] == [torch.Tensor]
    del tensor._local_tensor
    with pytest.raises(UnsupportedError, match="_local_tensor"):
        compat.local_tensors([tensor])


def test_plain_functions():
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            raise AssertionError(function)

    loud = torch.ones(2).as_subclass(Loud)
    with pytest.raises(AssertionError):
        loud + 1
    with compat.plain_functions():
        assert type(loud + 1) is torch.Tensor


def test_local_tensor_waits_for_what_is_still_arriving(mesh):
    """A DTensor that was redistributed without waiting holds an AsyncCollectiveTensor."""
    tensor = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0), Replicate()], run_check=False)
    arriving = tensor.redistribute(mesh, [Replicate(), Replicate()], async_op=True)
    kind = compat._private("torch.distributed._functional_collectives", "AsyncCollectiveTensor")
    assert isinstance(arriving._local_tensor, kind)
    assert type(compat.local_tensor(arriving)) is torch.Tensor
    assert compat.local_tensor(arriving).shape == (4, 3)


def test_spec_of(mesh):
    """Equal for tensors that lie alike, so that it serves as a key; another for another placement."""

    def tensor(*placements):
        return DTensor.from_local(torch.ones(2, 3), mesh, placements, run_check=False)

    spec = compat.spec_of(tensor(Shard(0), Replicate()))
    assert (spec.mesh, tuple(spec.placements)) == (mesh, (Shard(0), Replicate()))
    assert tuple(spec.tensor_meta.shape) == (4, 3)
    again, another = (
        compat.spec_of(tensor(Shard(0), Replicate())),
        compat.spec_of(tensor(Shard(1), Replicate())),
    )
    assert spec == again
    assert hash(spec) == hash(again)
    assert spec != another


def test_make_spec_and_from_spec(mesh):
    spec = compat.make_spec(mesh, [Shard(0), Shard(1)], (4, 6), torch.float64)
    local = torch.ones(2, 3, dtype=torch.float64)
    tensor = compat.from_spec(local, spec)
    assert isinstance(tensor, DTensor)
    assert (tensor.shape, tensor.stride(), tensor.dtype) == ((4, 6), (6, 1), torch.float64)
    assert tensor.placements == (Shard(0), Shard(1))
    assert compat.local_tensor(tensor).data_ptr() == local.data_ptr()
    assert spec == compat.spec_of(DTensor.from_local(local, mesh, [Shard(0), Shard(1)], run_check=False))


@pytest.mark.skipif(not HAS_SHARD_ORDER, reason="not known of this version")
def test_shard_order(mesh):
    """A spec keeps the order that it was made with, and a copy of it needs that order."""
    order = ((0, (1, 0)),)
    spec = compat.make_spec(mesh, [Shard(0), Shard(0)], (4, 6), torch.float32, order)
    plain = compat.make_spec(mesh, [Shard(0), Shard(0)], (4, 6), torch.float32)
    for read in (compat.shard_order, compat.explicit_shard_order):
        assert [(int(dim), tuple(mesh_dims)) for dim, mesh_dims in read(spec)] == [(0, (1, 0))]
        assert [(int(dim), tuple(mesh_dims)) for dim, mesh_dims in read(plain)] == [(0, (0, 1))]
    assert spec != plain
    assert compat.decoded_shard_order(spec) is None


@pytest.mark.skipif(not HAS_SHARD_ORDER, reason="not known of this version")
def test_decoded_shard_order(mesh):
    """torch takes strided shards for a shard order: one that placements alone say."""
    spec = compat.make_spec(mesh, [compat.strided_shard(0, 2), Shard(0)], (4, 6), torch.float32)
    decoded = compat.decoded_shard_order(spec)
    assert [(int(dim), tuple(mesh_dims)) for dim, mesh_dims in decoded] == [(0, (1, 0))]
    assert compat.explicit_shard_order(spec) is None


def test_strided_shard():
    strided = compat.strided_shard(1, 2)
    assert (strided.dim, strided.split_factor) == (1, 2)
    assert [compat.is_strided_shard(one) for one in (strided, Shard(1), Replicate())] == [True, False, False]
    assert [compat.is_sharded(one) for one in (strided, Shard(1), Replicate())] == [True, True, False]


def test_symmetric_memory():
    symmetric = compat.symmetric_memory()
    assert callable(symmetric.empty)
    assert callable(symmetric.rendezvous)


def test_pretended_ranks():
    with observing.fake_default_group(2, 5):
        assert (dist.get_rank(), dist.get_world_size()) == (2, 5)
        dist.all_reduce(torch.ones(3))  # returns, although nobody else is there
    assert not dist.is_initialized()


def test_watching_ops(mesh):
    """The collectives of a product of DTensors are seen, with their input and the name of their group."""
    a = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0), Replicate()], run_check=False)
    seen = []
    with (
        torch.no_grad(),
        observing.observe_ops(lambda op, args: seen.append((op.namespace, op.name(), args))),
    ):
        a.redistribute(mesh, [Replicate(), Replicate()])
    gathers = [args for space, name, args in seen if space == "_c10d_functional" and "all_gather" in name]
    assert len(gathers) == 1
    assert gathers[0][0].shape == (2, 3)
    group = gathers[0][-1]
    assert (compat_groups.group_by_name(group) if isinstance(group, str) else group).size() == 2


def test_watching_shard_dim_alltoall(mesh):
    """An all-to-all is told before it begins; the ops that a CPU makes it of are under it."""
    local = torch.ones(2, 4)
    a = DTensor.from_local(local, mesh, [Shard(0), Replicate()], run_check=False)
    seen, under = [], []
    with (
        torch.no_grad(),
        observing.observe_shard_dim_alltoall(lambda *args: seen.append(args)) as is_running,
        observing.observe_ops(lambda op, args: under.append((op.namespace, is_running()))),
    ):
        a.redistribute(mesh, [Shard(1), Replicate()])
    assert [(tuple(one.shape), device_mesh, mesh_dim) for one, device_mesh, mesh_dim in seen] == [
        ((2, 4), mesh, 0)
    ]
    assert {running for space, running in under if "c10d" in space} == {True}


def test_traced_tensors():
    """Fake tensors and those of AOTAutograd are traced; outside of traces tensors are real."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert compat.is_traced(torch.ones(2))
        with compat.outside_of_traces():
            assert not compat.is_traced(torch.ones(2))
    assert not compat.is_traced(torch.nn.Parameter(torch.ones(2)))


def test_ops_that_stay_in_order():
    """Tokens lead from each to the next in graphs of AOTAutograd, although results do not depend on each other."""
    library = torch.library.Library("meshweave_test", "FRAGMENT")
    library.define("ordered(Tensor x) -> Tensor")
    library.impl("ordered", torch.clone, "CompositeExplicitAutograd")
    torch.library.register_fake("meshweave_test::ordered", torch.empty_like, lib=library)
    op = torch.ops.meshweave_test.ordered.default
    compat.keep_in_order(op)
    graphs = []

    def backend(module, example):
        from torch._dynamo.backends.common import aot_autograd

        return aot_autograd(fw_compiler=lambda graph, _: graphs.append(graph) or graph.forward)(
            module, example
        )

    function = torch.compile(lambda x: (op(x), op(x + 1)), backend=backend, fullgraph=True)
    assert torch.equal(function(torch.ones(2))[1], torch.full((2,), 2.0))
    assert str(graphs[0].code).count("with_effects") >= 2


def test_ops_that_stay_in_order_where_inductor_is_not_in_use(monkeypatch):
    monkeypatch.delitem(importlib.import_module("sys").modules, "torch._inductor.lowering", raising=False)
    compat.keep_in_inductor(torch.ops.aten.add.Tensor)


def test_inside_of_a_backward_pass():
    seen = []
    value = torch.ones(1, requires_grad=True)
    value.register_hook(lambda grad: seen.append(compat.is_in_backward()))
    (2 * value).backward()
    assert seen == [True]
    assert not compat.is_in_backward()


def test_steps_of_optimizers_without_their_hooks():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    weight.grad = torch.ones(2)
    seen = []
    handle = optimizer.register_step_post_hook(lambda *_: seen.append(1))
    assert compat.other_step_hooks(optimizer)
    compat.bare_step(type(optimizer))(optimizer)
    assert not seen
    assert weight.tolist() == [0.5, 0.5]
    optimizer.step()
    assert seen == [1]
    handle.remove()
    assert not compat.other_step_hooks(optimizer)


def test_copying_several_tensors_by_one_call():
    targets = [torch.zeros(2), torch.zeros(1, 2)]
    compat.copy_each(targets, [torch.ones(2), torch.arange(2.0)[None]])
    assert [each.tolist() for each in targets] == [[1, 1], [[0, 1]]]
    compat.copy_each([], [])


def test_adding_several_tensors_by_one_call():
    sums = [torch.ones(2), torch.zeros(1, 2)]
    compat.add_each(sums, [torch.ones(2), torch.arange(2.0)[None]])
    assert [each.tolist() for each in sums] == [[2, 2], [[0, 1]]]
    compat.add_each([], [])


class _Asked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, said, *weights):
        ctx.said, ctx.weights = said, weights
        return weights[0] + weights[1]

    @staticmethod
    def backward(ctx, grad):
        ctx.said.append(compat_gradients.only_accumulated(ctx.weights, ctx.next_functions))
        return None, grad, grad


def _two_weights():
    return [torch.ones(1, requires_grad=True) for _ in range(2)]


def _held(weight):
    return torch.autograd.graph.get_gradient_edge(weight).node


@pytest.mark.parametrize(("expected", "run"), [
    ([True, True], lambda given, first, second: given(first, second).backward()),
    ([True, False], lambda given, first, second: given(first, second).backward(inputs=[first])),
    ([False, False], lambda given, first, second: torch.autograd.grad(given(first, second), [first, second])),
    ([True, False], lambda given, first, second: given(first, 2 * second).backward()),
    ([True, False], lambda given, first, second: given(first, second.detach()).backward()),
    ([False, True], lambda given, first, second: (
        first.register_hook(lambda grad: None), given(first, second).backward())),
    ([False, True], lambda given, first, second: (
        first.register_post_accumulate_grad_hook(lambda weight: None), given(first, second).backward())),
    ([False, True], lambda given, first, second: (node := _held(first), given(first, second).backward(), node)),
    ([False, True], lambda given, first, second: (
        result := given(first, second), first.requires_grad_(False), result.backward())),
])  # fmt: skip
def test_whether_gradients_are_only_accumulated(expected, run):
    said = []
    run(lambda *weights: _Asked.apply(said, *weights), *_two_weights())
    assert said == [expected]


def test_whether_backward_passes_are_compiled():
    assert not compat_gradients.is_autograd_compiled()
    seen = []
    value = torch.ones(2, requires_grad=True)
    with torch._dynamo.compiled_autograd._enable(lambda graph: graph):
        (2 * value).sum().backward()
        seen.append(compat_gradients.is_autograd_compiled())
    assert seen == [True]
    assert not compat_gradients.is_autograd_compiled()


def test_the_dtype_of_gradients():
    weight = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    assert compat_gradients.gradient_dtype(weight) == torch.bfloat16
    if hasattr(weight, "grad_dtype"):
        weight.grad_dtype = torch.float32
        assert compat_gradients.gradient_dtype(weight) == torch.float32
        weight.grad_dtype = None
        assert compat_gradients.gradient_dtype(weight) is None


def test_functions_of_autograd_are_applied_alike():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    value = torch.ones(1, requires_grad=True)
    compat.apply_directly(Double, value).backward()
    assert value.grad.tolist() == [2]
    total = torch.func.vmap(lambda x: compat.apply_directly(_Vmapped, x))(torch.ones(3))
    assert total.tolist() == [2, 2, 2]


class _Vmapped(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


@pytest.mark.filterwarnings("ignore:DTensor random operators")
def test_values_of_dtensors_by_handlers(mesh):
    """A handler reads and draws the values of DTensors; where it does not, torch does."""
    handlers = compat_values._handlers()
    before, tensor = dict(handlers), DTensor.from_local(torch.ones(()), mesh, [Partial(), Replicate()])
    given = []
    try:
        compat_values.handle_reads(lambda op, args, kwargs: 7.0)
        assert tensor.item() == float(tensor) == 7.0
        compat_values.handle_reads(lambda *op: NotImplemented)
        assert tensor.item() == 1.0
        compat_values.handle_draws(lambda op, args, kwargs: given.append(str(op)) or args[0])
        part = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0), Replicate()])
        for draw in (torch.randn_like, torch.rand_like, torch.nn.init.normal_, torch.nn.init.uniform_):
            draw(part)
        assert bool((part.to_local() == 1).all())
        names = "randn_like", "rand_like", "normal_", "uniform_"
        assert given == [f"aten.{name}.default" for name in names]
        compat_values.handle_draws(lambda *op: NotImplemented)
        torch.nn.init.uniform_(part)
        assert bool((part.to_local() < 1).all())
    finally:
        handlers.clear()
        handlers.update(before)
