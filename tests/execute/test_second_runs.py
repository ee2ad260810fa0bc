"""A second run of a bound program, from another thread or while a first one's transfer is under way."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from meshweave.base.errors import UnsupportedError  # noqa: E402
from meshweave.execute.ranks.launch import launch  # noqa: E402
from meshweave.execute.torch.bind import bind  # noqa: E402
from meshweave.execute.torch.context import TorchContext  # noqa: E402
from meshweave.ir.program.parse import parse  # noqa: E402

ENV = {"PYTHONPATH": str(Path(__file__).parent)}

TWICE = """
program("twice")
q = mesh((1,), ("x",))
X = tensor((4,), "int64")
x = input(X, q[R])
y = output(X, q[R])
compute = lane()
with q:
    call(fn="wait", outs=(y,), ins=(x,), lane=compute)
    add(y, x, lane=compute)
"""


def test_a_run_that_is_refused_does_not_touch_the_inputs_of_the_one_under_way() -> None:
    said: list[str] = []

    def other() -> None:
        with pytest.raises(UnsupportedError) as refused:
            bound.run({"x": torch.full((4,), 7)})
        said.append(str(refused.value))

    def wait(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(30)
        return x + 0

    bound = bind(parse(TWICE), 0, {}, context=TorchContext(), calls={"wait": wait})
    for _ in range(2):  # the refusal breaks nothing
        bound.run({"x": torch.ones(4, dtype=torch.int64)})
        assert bound.outputs["y"].tolist() == [2] * 4
    assert len(said) == 2 and "a program already runs in this context" in said[0]


@pytest.mark.gloo
def test_new_inputs_wait_for_the_transfer_that_was_begun_on_the_old_ones() -> None:
    found = launch("backend_rank_functions:begun_and_run", 2, {}, timeout_s=60.0, env=ENV)
    assert found == [[[1, 2], [3, 6]]] * 2


@pytest.mark.gloo
def test_a_refused_run_of_another_program_is_no_call() -> None:
    found = launch("backend_rank_functions:refused_beside", 2, {}, timeout_s=60.0, env=ENV)
    refusal = "a program already runs in this context: give each its own TorchContext"
    assert found == [[[refusal], [3, 3]], [[], [3, 3]]]
