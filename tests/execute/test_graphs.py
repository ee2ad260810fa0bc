"""Bound programs as CUDA graphs; the list of calls that the linear executor issues."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from backend_programs import inputs_for  # noqa: E402
from backend_rank_functions import shards  # noqa: E402
from cuda_world import needs_cuda  # noqa: E402
from test_cuda import LANES  # noqa: E402

from meshweave.base.errors import UnsupportedError  # noqa: E402
from meshweave.execute.numpy import run_numpy  # noqa: E402
from meshweave.execute.torch.bind import bind  # noqa: E402
from meshweave.execute.torch.context import TorchContext  # noqa: E402
from meshweave.execute.torch.graphs import CapturedRun, check_graph  # noqa: E402
from meshweave.execute.torch.streams import IssueList  # noqa: E402
from meshweave.ir.program.parse import parse  # noqa: E402


def test_a_graph_is_refused_in_one_line_where_there_is_none() -> None:
    with pytest.raises(
        UnsupportedError, match="a graph is of CUDA, this context's tensors are on cpu"
    ) as info:
        bind(parse(LANES), 0, {}, graph=True)
    assert "\n" not in str(info.value)
    device = TorchContext()
    device.device = torch.device("cuda:0")
    with pytest.raises(UnsupportedError, match="one-sided"):
        check_graph(device, is_one_sided=True, is_timed=False)
    with pytest.raises(UnsupportedError, match="without trace"):
        check_graph(device, is_one_sided=False, is_timed=True)


def test_a_run_is_captured_once_after_a_first_one_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Graph:
        def replay(self) -> None:
            log.append("replay")

    class Capture:
        def __init__(self, graph: Graph, capture_error_mode: str) -> None:
            assert capture_error_mode == "thread_local"

        def __enter__(self) -> None:
            log.append("capture")

        def __exit__(self, *error: object) -> None:
            log.append("captured")

    for name, fake in {"CUDAGraph": Graph, "graph": Capture, "synchronize": lambda device: None}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    run = CapturedRun(lambda: log.append("run") or {}, torch.device("cuda:0"))
    for _ in range(3):
        assert run() == {}
    assert log == ["run", "capture", "run", "captured", "replay", "replay"]


def test_an_error_in_a_list_of_calls_names_its_op() -> None:
    calls = IssueList(["first", "second", "third"])
    seen: list[int] = []

    def fail() -> None:
        raise ValueError("no")

    calls.add(0, lambda: seen.append(0), lambda: seen.append(1))
    calls.add(1, lambda: seen.append(2), fail)
    calls.add(2, lambda: seen.append(3))
    with pytest.raises(ValueError, match="no") as info:
        calls()
    assert seen == [0, 1, 2] and info.value.__notes__ == ["in second"]


@pytest.mark.gpu
def test_a_replayed_graph_computes_with_new_inputs() -> None:
    needs_cuda()
    program, context = parse(LANES), TorchContext(device="cuda")
    bound = bind(program, 0, {}, context=context, graph=True)
    for seed in range(5):
        values = inputs_for(program, seed)
        bound.run({name: x.cuda() for name, x in shards(program, values, 0).items()})
        expected = run_numpy(program, values)
        for name, tensor in bound.outputs.items():
            np.testing.assert_array_equal(tensor.cpu().numpy(), expected.memory[0, name, 0])
