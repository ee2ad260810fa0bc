"""Values that look alike are kept apart: numbers named as tensors, named fields, inputs that are none."""

from __future__ import annotations

from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")

from meshweave.base.errors import BindError, LayoutError  # noqa: E402
from meshweave.execute.memory.in_place import InPlaceProgram  # noqa: E402
from meshweave.execute.torch.context import TorchContext  # noqa: E402
from meshweave.execute.torch.world import join_ranks  # noqa: E402
from meshweave.ir.program.parse import parse  # noqa: E402
from meshweave.nn.prove.given import vocabulary_of  # noqa: E402
from meshweave.nn.prove.proof import _given  # noqa: E402
from meshweave.nn.reshard_state import _rebuilt  # noqa: E402

COPY = """program("copy")
tp = mesh((1,), ("x",))
A = tensor((2, 2), "float64")
C = tensor((2, 2), "float32")
computes(C, same(A))
a = input(A, tp[R])
c = output(C, tp[R])
compute = lane()
with tp:
    copy(c, a, lane=compute)
"""


class Pair(NamedTuple):
    """Two fields of a state."""

    first: object
    second: object


def test_only_tensors_of_a_state_are_replaced() -> None:
    old, new = torch.zeros(1), torch.ones(1)
    state = {"a.b": 3, "a": {"b": old}, "pair": Pair(old, 4)}
    made = _rebuilt(state, {"a.b": new, "pair.0": new})
    assert made["a.b"] == 3 and made["a"]["b"] is new and made["pair"] == Pair(new, 4)


def test_no_inputs_are_no_proof() -> None:
    with pytest.raises(LayoutError, match="inputs are empty"):
        _given(torch.nn.Linear(2, 2), (), None)


def test_a_model_without_a_table_has_no_vocabulary() -> None:
    model = torch.nn.Linear(2, 2)
    model.config = type("Config", (), {"vocab_size": 7})()
    assert vocabulary_of(model) == 0


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT"])
def test_an_environment_without_numbers_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(each, "none" if each == name else "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(BindError, match=r"whole numbers in the environment.*'none'"):
        join_ranks()


def test_inputs_have_the_dtypes_of_their_own_buffers() -> None:
    program = parse(COPY)
    made = InPlaceProgram(program, 0, TorchContext())
    given = torch.full((2, 2), 0.5, dtype=torch.float64)
    assert torch.equal(made(given), given.float())
    with pytest.raises(BindError, match=r"buffer a is of shape \(2, 2\) and torch.float64"):
        made(given.float())
