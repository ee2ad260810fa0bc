"""A loss that is on its way is a tensor like others: whoever looks at it waits, and a backward pass does not."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")

from torch import Tensor  # noqa: E402

from meshweave.nn.parallel.awaited import AwaitedTensor, awaited_mean  # noqa: E402

COUNT, TOTAL = 4, 13.0


def _made(total: Callable[[], float] | None = None) -> tuple[Tensor, Tensor, list[int]]:
    """Return a weight, the mean of twice it over ranks, and what gets a number where somebody has waited."""
    weight, waited = torch.tensor(3.0, requires_grad=True), []

    def arrive() -> float:
        waited.append(1)
        return TOTAL if total is None else total()

    return weight, awaited_mean(weight * 2, torch.tensor(COUNT), arrive), waited


def _plain() -> Tensor:
    return (torch.tensor(TOTAL / COUNT / 2, requires_grad=True) * 2).as_subclass(torch.Tensor)


@pytest.mark.parametrize("run", [
    lambda loss: loss.backward(), lambda loss: torch.autograd.backward(loss),
    lambda loss: torch.autograd.backward([loss]), lambda loss: loss.backward(torch.tensor(1.0)),
    lambda loss: loss.backward(gradient=torch.tensor(1.0), retain_graph=True),
])  # fmt: skip
def test_a_backward_pass_does_not_wait(run: Callable[[Tensor], None]) -> None:
    weight, loss, waited = _made()
    run(loss)
    assert weight.grad == 2 / COUNT and not waited
    assert loss.item() == TOTAL / COUNT == float(loss) and waited == [1]


def _methods() -> list[str]:
    named = (name for name in dir(torch.Tensor) if not name.startswith("_") or name in _SPOKEN)
    return [name for name in named if name != "set_"]  # torch hangs in it, of any subclass


_SPOKEN = ("__repr__", "__str__", "__float__", "__int__", "__bool__", "__neg__", "__abs__", "__hash__")
_OF_THE_OBJECT = {"data_ptr", "const_data_ptr", "untyped_storage", "storage", "__hash__"}
"""What another object says otherwise."""


def test_every_method_and_attribute_says_what_a_plain_tensor_says() -> None:
    others = []
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        for name in _methods():
            plain, own = (_answer(loss, name) for loss in (_plain(), _made()[1]))
            if isinstance(own, torch.Tensor) and name not in ("requires_grad_", "retain_grad"):
                others += [name] if type(own) is not type(plain) else []
            if name not in _OF_THE_OBJECT and isinstance(plain, _COMPARED) and not _same(plain, own):
                others.append(name)
    assert not others


_COMPARED = torch.Tensor | int | float | str | tuple | list | type


def _answer(loss: Tensor, name: str) -> Any:
    torch.manual_seed(0)
    try:
        taken = getattr(loss, name)
        return taken() if callable(taken) else taken
    except Exception as error:
        return type(error)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor):
            return False
        a, b = one.detach(), other.detach()
        if a.layout != torch.strided:
            a, b = a.to_dense(), b.to_dense()
        if a.is_complex():
            a, b = a.to(torch.complex64), b.to(torch.complex64)
        return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a, b) or a.isnan().all())
    if isinstance(one, str):
        return one.split(", grad_fn")[0] == str(other).split(", grad_fn")[0]
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def test_it_is_stored_and_sent_as_a_plain_tensor() -> None:
    file = io.BytesIO()
    torch.save(_made()[1], file)
    file.seek(0)
    stored = [
        torch.load(file, weights_only=True),
        pickle.loads(pickle.dumps(_made()[1])),
        copy.copy(_made()[1]),
    ]
    assert [(type(each), each.item()) for each in stored] == [(torch.Tensor, TOTAL / COUNT)] * 3


def test_functions_of_several_and_scaled_losses_wait() -> None:
    _, first, waited = _made()
    assert torch.stack([first, torch.tensor(1.0)]).tolist() == [TOTAL / COUNT, 1.0] and waited
    weight, loss, waited = _made()
    (loss / 2).backward()
    assert weight.grad == 1 / COUNT and waited
    weight, loss, _ = _made()
    torch.amp.GradScaler("cpu", init_scale=8.0).scale(loss).backward()
    assert weight.grad == 16 / COUNT
    compiled = torch.compile(lambda loss: loss * 2, backend="eager")
    assert compiled(_made()[1]).item() == 2 * TOTAL / COUNT


def test_who_looks_at_a_sum_that_failed_gets_its_error_each_time() -> None:
    def fail() -> float:
        raise RuntimeError("rank 1 is gone")

    _, loss, _ = _made(fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="rank 1 is gone"):
            loss.item()


def test_without_gradients_the_value_is_there_at_once() -> None:
    with torch.no_grad():
        _, loss, waited = _made()
    assert type(loss) is torch.Tensor and waited == [1] and loss == TOTAL / COUNT
    assert isinstance(_made()[1], AwaitedTensor)
