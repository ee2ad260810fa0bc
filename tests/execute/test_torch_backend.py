"""Programs over gloo: equal to the numpy run to the last bit, in order, and clear about what goes wrong."""

import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from backend_programs import PROGRAMS, golden, inputs_for, ring  # noqa: E402

from meshweave.algorithms.matmul2d import Matmul2dConfig, Matmul2dProblem  # noqa: E402
from meshweave.algorithms.table import PRODUCTS_2D  # noqa: E402
from meshweave.base.errors import BindError, DeadlineError, RankLostError, UnsupportedError  # noqa: E402
from meshweave.execute.calls import CallTable  # noqa: E402
from meshweave.execute.numpy import run_numpy  # noqa: E402
from meshweave.execute.ranks.launch import RankError, launch  # noqa: E402
from meshweave.execute.torch.bind import bind  # noqa: E402
from meshweave.execute.torch.comm import bind_communication  # noqa: E402
from meshweave.execute.torch.compute import Binder  # noqa: E402
from meshweave.execute.torch.context import TorchContext  # noqa: E402
from meshweave.execute.torch.groups import assign_channels, group_keys  # noqa: E402
from meshweave.execute.torch.lanes import cross_lane_waits  # noqa: E402
from meshweave.execute.torch.streams import Streams  # noqa: E402
from meshweave.execute.torch.views import Staging, StridedView, bind_view, empty_in_order  # noqa: E402
from meshweave.execute.torch.wire import Wire, wire_orders  # noqa: E402
from meshweave.ir.analysis.dataflow import analyse  # noqa: E402
from meshweave.ir.analysis.interpret import numpy_index  # noqa: E402
from meshweave.ir.analysis.validate import validate  # noqa: E402
from meshweave.ir.program.parse import parse  # noqa: E402
from meshweave.ir.program.views import Blocked, Range, View  # noqa: E402
from meshweave.lower import lower_chains  # noqa: E402
from meshweave.trace import Trace, check_order, merge  # noqa: E402

ENV = {"PYTHONPATH": str(Path(__file__).parent)}
CPU = torch.device("cpu")

LOCAL = """
program("local")
q = mesh((1,), ("x",))
X = tensor((4, 6), "int64")
x = input(X, q[R], slots=2)
y = output(X, q[R])
z = scratch((4, 6), "int64", on=q)
compute = lane()
other = lane()
with q:
    all_gather(y, x, over="q.x", dim=0, lane=other)
    call(fn="think", outs=(z,), ins=(x(1),), lane=compute)
    add(y, z, lane=other)
    fence(over="q", lane=other)
"""


def rank_0(text, tensors, deadline_s=0.2, **options):
    return bind(parse(text), 0, tensors, context=TorchContext(deadline_s=deadline_s), **options)


# --- between processes -----------------------------------------------------------------------------------


@pytest.mark.gloo
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_program_equals_its_numpy_run(num_ranks):
    names = [name for name, make in PROGRAMS.items() if (len(make().ranks) == 2) == (num_ranks == 2)]
    names += ["ring 2"] if num_ranks == 4 else []  # a program over some of the ranks
    found = launch("backend_rank_functions:compare", num_ranks, {"programs": names}, timeout_s=120.0, env=ENV)
    assert [rank["wrong"] for rank in found] == [[]] * num_ranks
    whole = [0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22]
    in_place = [[[[source] * 3, whole]] * 10 for source in (2, 0, 1)]
    assert [rank["in_place"] for rank in found if rank["in_place"]] == (in_place if num_ranks == 4 else [])
    for name in names:
        program = PROGRAMS[name]()
        trace = merge([Trace.from_json(found[rank]["traces"][name]) for rank in program.ranks])
        assert trace.source == "torch"
        assert check_order(trace, analyse(program)) > 0


@pytest.mark.gloo
def test_a_failure_in_one_lane_stops_the_rank_and_is_named_by_the_other():
    with pytest.raises(RankError, match=r"^rank 1: KeyError: 'boom'") as caught:
        launch("backend_rank_functions:trouble", 2, {"how": "fails"}, timeout_s=60.0, env=ENV, stale_s=1.0)
    assert "in call 0.0.3.1 of lane compute" in caught.value.remote_traceback
    words = caught.value.reports[0]  # of its liveness, or of its calls, whichever is heard of first
    waits = "rank 1 failed (KeyError: 'boom') while waiting for ring 0.0."
    assert words.startswith((waits, "rank 1 failed in program lanes that wait (call 2): KeyError: 'boom'")), (
        words
    )


@pytest.mark.gloo
def test_a_rank_that_dies_is_named_with_the_op_that_waits_for_it():
    with pytest.raises(RankLostError, match=r"^rank 1 was killed by SIGKILL$") as caught:
        launch("backend_rank_functions:trouble", 2, {"how": "dies"}, timeout_s=60.0, env=ENV, stale_s=1.0)
    assert caught.value.missing == (1,)
    words = caught.value.reports[0]
    assert words.startswith("rank 1 stopped answering while waiting for ring 0.0."), words
    assert words.endswith("in lane net"), words


# --- in this process -------------------------------------------------------------------------------------


def test_a_twin_is_the_same_program_on_other_memory():
    """Whoever runs one of two twins counts on the other: programs that are none are refused as they are bound."""
    context, calls = TorchContext(), {"think": lambda x: x}
    bound = bind(parse(LOCAL), 0, {}, context=context, calls=calls)
    bind(parse(LOCAL), 0, {}, context=context, calls=calls, twin=bound)
    with pytest.raises(BindError, match="for mode 'threads', without messages"):
        bind(parse(LOCAL), 0, {}, context=context, calls=calls, twin=bound, mode="linear")
    for program, where in ((parse(LOCAL.replace("4, 6", "4, 8")), context), (parse(LOCAL), TorchContext())):
        with pytest.raises(BindError, match="the same program, bound in the same context"):
            bind(program, 0, {}, context=where, calls=calls, twin=bound)


def test_one_rank_needs_no_process_group():
    program, values = parse(LOCAL), {"X": np.arange(24).reshape(4, 6)}
    calls = {"think": lambda x: 10 * x}
    expected = run_numpy(program, values, calls=calls).outputs["X"]
    x = torch.from_numpy(values["X"].copy())
    for mode in ("threads", "linear"):
        bound = rank_0(LOCAL, {"x": x}, calls=calls, mode=mode, trace=True)
        assert bound.inputs["x"] is not None and bound.inputs["x"].data_ptr() == x.data_ptr()
        assert check_order(bound.run(), analyse(program)) > 0
        np.testing.assert_array_equal(bound.outputs["y"].numpy(), expected)
        bound.run({"x": torch.ones(4, 6, dtype=torch.int64)})  # into the second slot too
        assert (bound.outputs["y"] == 11).all() and (x == 1).all()
        x.copy_(torch.from_numpy(values["X"]))
    ring_of_one, values = ring(1), inputs_for(ring(1))
    bound = bind(ring_of_one, 0, {}, context=TorchContext())
    bound.run({"a": torch.from_numpy(values["A"]), "b": torch.from_numpy(values["B"])})
    expected = run_numpy(ring_of_one, values).outputs
    assert all(np.array_equal(bound.outputs[name.lower()].numpy(), expected[name]) for name in "CD")


def test_outputs_may_be_given_and_layouts_are_kept():
    y = torch.zeros(6, 4, dtype=torch.int64).t()
    bound = rank_0(LOCAL, {"x": torch.ones(4, 6, dtype=torch.int64), "y": y}, calls={"think": lambda x: x})
    bound.run()
    assert (y == 2).all() and bound.outputs["y"].data_ptr() == y.data_ptr()
    assert empty_in_order((3, 5), torch.int8, (1, 0), CPU).stride() == (1, 3)


@pytest.mark.parametrize(
    ("tensors", "options", "error", "message"),
    [
        ({"xx": torch.zeros(1)}, {}, BindError, r"no input or output buffer 'xx' \(did you mean 'x'\?\)"),
        ({"z": torch.zeros(4, 6)}, {}, BindError, "no input or output buffer 'z'"),
        ({"x": torch.zeros(6, 4)}, {}, BindError, r"x is of shape \(4, 6\) and torch.int64, what was given"),
        ({"x": torch.zeros(4, 6)}, {}, BindError, r"given of \(4, 6\) and torch.float32"),
        ({}, {"calls": {}}, BindError, "no function is bound to call 'think'"),
        ({}, {"order": [0, 1, 2, 3]}, BindError, "an order is for mode 'linear'"),
        ({}, {"mode": "linear", "order": [0, 1]}, BindError, "must list each of the 4 ops once"),
        ({}, {"mode": "linear", "order": [0, 2, 1, 3]}, BindError, r"has add 0.2 before call 0.1"),
    ],
)
def test_what_does_not_fit_is_refused_at_bind(tensors, options, error, message):
    with pytest.raises(error, match=message):
        rank_0(LOCAL, tensors, **{"calls": {"think": lambda x: x}, **options})


def test_refusals_that_name_the_rank_or_the_op():
    with pytest.raises(BindError, match="has no rank 7"):
        bind(parse(LOCAL), 7, {}, context=TorchContext())
    with pytest.raises(BindError, match=r"communicates over ranks .*: initialise torch.distributed"):
        bind(ring(2), 0, {}, context=TorchContext())
    text = LOCAL.replace("add(y, z, lane=other)", "put(at(rank, y), z, lane=other)")
    with pytest.raises(UnsupportedError, match=r"put 0.2 of rank 0 reaches into .*lower one-sided ops"):
        rank_0(text, {}, calls={"think": lambda x: x})
    bound = rank_0(LOCAL, {}, calls={"think": lambda x: x})
    with pytest.raises(BindError, match="input buffer x of program local has no value"):
        bound.run()
    with pytest.raises(BindError, match="no input buffer 'y'"):
        bound.run({"y": torch.zeros(4, 6)})


TWO_CALLS = """
program("two calls")
q = mesh((1,), ("x",))
X = tensor((4, 6), "int64")
x = input(X, q[R])
y = output(X, q[R])
z = scratch((4, 6), "int64", on=q)
one = lane()
other = lane()
with q:
    call(fn="where", outs=(z,), ins=(x,), lane=one)
    call(fn="where", outs=(y,), ins=(SECOND,), lane=other)
"""


@pytest.mark.parametrize(("second", "num_threads"), [("z", 1), ("x", 2)])
def test_a_lane_gets_a_thread_only_where_it_may_run_beside_another(second, num_threads):
    threads = []
    text = TWO_CALLS.replace("SECOND", second)
    x = torch.arange(24).view(4, 6)
    bound = rank_0(text, {"x": x}, calls={"where": lambda x: threads.append(threading.get_ident()) or x + 1})
    bound.run()
    assert len(set(threads)) == num_threads and len(threads) == 2
    assert torch.equal(bound.outputs["y"], x + (2 if second == "z" else 1))


BESIDE = LOCAL.replace("with q:", 'with q:\n    call(fn="same", outs=(y,), ins=(x(1),), lane=other)')
"""Both lanes have calls: the calling thread runs the other lane than that which thinks."""


def test_a_lane_that_does_not_get_on_is_named():
    """The run ends while that lane is still in the middle of its op."""
    may_end, has_ended = threading.Event(), threading.Event()

    def think(x):
        may_end.wait(240.0)
        has_ended.set()
        return x

    calls = {"think": think, "same": lambda x: x}
    bound = rank_0(BESIDE, {"x": torch.ones(4, 6, dtype=torch.int64)}, calls=calls)
    try:
        with pytest.raises(
            DeadlineError, match=r"^add 0.3 of lane other gave up after 0.6 s: call 0.2 of lane compute"
        ):
            bound.run()
        assert not has_ended.is_set()
    finally:
        may_end.set()


@pytest.mark.slow
def test_a_lane_that_finds_out_after_its_deadline_who_is_lost_is_heard():
    """Its wait ends at the deadline, and then it listens to the others, longer where the store hangs."""

    def think(x):
        time.sleep(7.0)
        raise RankLostError("rank 1 stopped answering", (1,))

    tensors = {"x": torch.ones(4, 6, dtype=torch.int64)}
    calls = {"think": think, "same": lambda x: x}
    bound = rank_0(BESIDE, tensors, deadline_s=3.0, calls=calls)
    with pytest.raises(RankLostError):
        bound.run()


def test_a_context_keeps_one_cache_per_owner_and_closes_what_is_in_it():
    class Programs(dict[str, object]):
        pass

    class Memories(dict[str, object]):
        pass

    class Memory:
        is_closed = False

        def close(self):
            self.is_closed = True

    context, memory = TorchContext(), Memory()
    context.cache(Programs)["p"] = object()
    context.cache(Memories)["shared"] = memory
    assert list(context.cache(Programs)) == ["p"]
    assert list(TorchContext().cache(Programs)) == []
    context.close()
    assert memory.is_closed
    assert not context.cache(Programs) and not context.cache(Memories)


def test_one_run_at_a_time_in_a_context():
    inner = []
    context = TorchContext()
    x = torch.ones(4, 6, dtype=torch.int64)
    nested = bind(parse(LOCAL), 0, {"x": x}, context=context, calls={"think": lambda x: x})
    calls = {"think": lambda x: inner.append(nested.run()) or x}
    with pytest.raises(UnsupportedError, match="already runs in this context"):
        bind(parse(LOCAL), 0, {"x": x}, context=context, calls=calls).run()
    with pytest.raises(
        UnsupportedError, match=r"context is broken: an earlier run in it failed.*already runs"
    ):
        nested.run()


def test_what_a_call_returns_is_checked():
    bound = rank_0(LOCAL, {"x": torch.ones(4, 6, dtype=torch.int64)}, calls={"think": lambda x: x[:1]})
    with pytest.raises(
        BindError, match=r"call 'think' must return shapes \[\(4, 6\)\], not \[\(1, 6\)\]"
    ) as caught:
        bound.run()
    assert caught.value.__notes__ == ["in call 0.1 of lane compute"]


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        ("wait timed out after 60000ms", DeadlineError, r"^gave up waiting for the ring after 0:00:00.2"),
        (
            "Connection closed by peer. GLHF!",
            RankLostError,
            r"broke while waiting for the ring: Connection closed",
        ),
    ],
)
def test_without_liveness_an_error_says_at_least_what_was_waited_for(said, error, message):
    with pytest.raises(error, match=message), TorchContext(deadline_s=0.2).guard("the ring", (1,)):
        raise RuntimeError(said)


@pytest.mark.parametrize("tag", [-1, 65_534])
def test_tags_that_would_be_those_of_another_program_are_refused(tag):
    text = 'program("p")\nq = mesh((2,), ("x",))\nb = scratch((4,), "float32", on=q)\nnet = lane()\n'
    program = parse(f"{text}with ranks(0):\n    send(b, peer=1, tag={tag}, lane=net)\n")
    binder = Binder(0, {}, Staging(CPU), CallTable({}, program, 0))
    with pytest.raises(BindError, match=f"a tag is at least 0 and below 65534, {tag} is not"):
        bind_communication(Wire(TorchContext(), binder, program, {}, {}), program.ops_on_rank(0)[0])


def test_groups_come_from_the_text_and_are_shared_by_messages():
    wang = golden("uneven_wang")
    assert group_keys(wang, assign_channels(wang, shared=False)) == [
        (0, (0, 3)),
        (0, (1, 4)),
        (0, (2, 5)),
        (1, (0, 1, 2, 3, 4, 5)),
    ]
    assert wire_orders(ring(2)) == {("right", "permute ", 2): (1, 0), ("left", "permute ", 2): (0, 1)}


def test_lanes_share_a_channel_only_where_they_never_meet_on_a_connection():
    wang, both_ways = golden("uneven_wang"), ring(2)
    assert assign_channels(wang) == {"row": 0, "col": 0}  # two axes of a mesh have one rank in common
    assert assign_channels(both_ways) == {"right": 0, "left": 1}  # one axis, in two directions
    assert assign_channels(golden("one_f_one_b")) == {"activations": 0, "gradients": 1}  # one pair of ranks
    summa = PRODUCTS_2D["summa"].program(Matmul2dProblem(16, 16, 16, (4, 4)), Matmul2dConfig(packets=2))
    found = assign_channels(lower_chains(summa))  # messages between neighbours of either axis
    assert found["row"] == found["col"] != found["row_odd"] == found["col_odd"]


def test_waits_between_lanes_are_the_last_and_only_the_needed():
    #       0: a   1: b    2: a      3: b  4: c       5: c
    lanes = [0, 1, 0, 1, 2, 2]
    before = [(), (0,), (0, 1), (1,), (0, 1, 2), (1, 3)]
    assert cross_lane_waits(lanes, before, 3) == [(), ((0, 1),), ((1, 1),), (), ((0, 2),), ((1, 2),)]


def test_streams_wait_for_the_events_of_other_lanes(monkeypatch):
    """What CUDA is told to keep in order, told to a stand-in."""
    log, current, made, switches = [], [], [], []

    class Stream:
        def __init__(self, device=None):
            self.name = f"stream {len(made)}"
            made.append(self)

        def wait_stream(self, other):
            log.append((self.name, "follows", other.name))

        def wait_event(self, event):
            log.append((self.name, "waits for", event.after))

    class Event:
        def __init__(self, enable_timing=False):
            self.after = None

        def record(self, stream):
            assert current == [stream]
            self.after = log[-1][2]

    @contextmanager
    def stream(chosen):
        current.append(chosen)
        yield
        current.pop()

    def set_stream(chosen):
        switches.append(chosen)
        current[:] = [chosen]

    def act(label):
        return lambda: log.append((current[-1].name, "runs", label))

    caller = Stream()
    for name, fake in {
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "set_stream": set_stream,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: caller)
    labels, lane_of = ["a0", "b0", "a1", "b1"], [0, 1, 0, 1]
    waits = cross_lane_waits(lane_of, [(), (0,), (0, 1), ()], 2)
    streams = Streams(torch.device("cuda"), list(map(act, labels)), labels, lane_of, waits, trace=False)
    for _ in range(2):
        log.clear()
        assert streams.run() == []
        assert log == [
            ("stream 1", "follows", "stream 0"),
            ("stream 2", "follows", "stream 0"),
            ("stream 1", "runs", "a0"),
            ("stream 2", "waits for", "a0"),
            ("stream 2", "runs", "b0"),
            ("stream 1", "waits for", "b0"),
            ("stream 1", "runs", "a1"),
            ("stream 2", "runs", "b1"),
            ("stream 0", "follows", "stream 1"),
            ("stream 0", "follows", "stream 2"),
        ]
        assert not current  # the caller has its own stream again
    labels, lane_of = ["a0", "a1", "b0", "b1"], [0, 0, 1, 1]
    switches.clear()
    Streams(torch.device("cuda"), list(map(act, labels)), labels, lane_of, [()] * 4, trace=False).run()
    assert len(switches) == 2


@st.composite
def selectors(draw, size):
    start, stop = sorted((draw(st.integers(0, size)), draw(st.integers(0, size))))
    stride = draw(st.integers(1, 7))
    block = draw(st.integers(0, stride))
    if block == stride:
        return Range(start, stop)
    return Blocked(draw(st.integers(-9, 9)), block, stride, start, stop)


@given(st.data(), st.integers(1, 20), st.integers(1, 20), st.sampled_from([None, (1, 0)]))
def test_views_alias_what_numpy_selects(data, rows, columns, order):
    view = View("x", (data.draw(selectors(rows)), data.draw(selectors(columns))))
    buffer = empty_in_order((rows, columns), torch.int64, order, CPU)
    buffer.copy_(torch.arange(rows * columns).view(rows, columns))
    expected = buffer.numpy()[numpy_index(view)].copy()
    found, packed, staging = bind_view(view, buffer), torch.zeros(view.shape, dtype=torch.int64), Staging(CPU)
    for action in staging.transfer("lane", StridedView.of(packed), found):
        action()
    np.testing.assert_array_equal(packed.numpy(), expected)
    assert found.direct is None or np.array_equal(found.direct.numpy(), expected)
    for action in staging.transfer("lane", found, StridedView.of(packed), add=True):
        action()
    np.testing.assert_array_equal(buffer.numpy()[numpy_index(view)], 2 * expected)
    rest = buffer.clone()
    rest.numpy()[numpy_index(view)] = expected
    assert torch.equal(rest, torch.arange(rows * columns).view(rows, columns))


def test_wide_lanes_that_a_program_needs_are_refused_not_hung():
    """Two sends before two receives: fine in a lane of width 2, a deadlock where lanes run one op at a time."""
    program = parse("""
program("wide")
tp = mesh((2,), ("x",))
s = scratch((4,), "float32", on=tp, slots=2)
net = lane(width=2)
with tp:
    zero(s, lane=net)
    send(s, peer=1 - rank, lane=net)
    recv(s(1), peer=1 - rank, lane=net)
""")
    validate(program)
    with pytest.raises(BindError, match="one op at a time here, in program order; that ends in a deadlock"):
        bind(program, 0, {}, context=TorchContext())
