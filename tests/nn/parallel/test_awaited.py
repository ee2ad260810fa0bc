"""A loss that is on its way is a tensor like others: whoever looks at it waits, and a backward pass does not."""

from __future__ import annotations

import collections
import copy
import io
import operator
import pickle
import threading
import time
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")

from torch import Tensor  # noqa: E402

from meshweave.execute.torch.call_order import OpenCall  # noqa: E402
from meshweave.nn.parallel.awaited import AwaitedTensor, awaited_mean  # noqa: E402

COUNT, TOTAL = 4, 13.0


def _made(total: Callable[[], float] | None = None, count: Any = None) -> tuple[Tensor, Tensor, list[int]]:
    """Return a weight, the mean of twice it over ranks, and what gets a number where somebody has waited."""
    weight, waited = torch.tensor(3.0, requires_grad=True), []

    def begin(term: Tensor, take: Callable[[float], object]) -> Callable[[], None]:
        def wait() -> None:
            if not waited:
                take(TOTAL if total is None else total())
                waited.append(1)

        return wait

    mean = awaited_mean(weight * 2, torch.tensor(COUNT) if count is None else count, begin)
    assert mean is not None
    return weight, mean, waited


def _plain() -> Tensor:
    return torch.tensor(TOTAL / COUNT / 2, requires_grad=True) * 2


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
    return list(named)


_SPOKEN = ("__repr__", "__str__", "__float__", "__int__", "__bool__", "__neg__", "__abs__", "__hash__")
_OF_THE_OBJECT = {"data_ptr", "grad_fn", "const_data_ptr", "untyped_storage", "storage", "__hash__"}
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


def test_where_nothing_is_begun_there_is_no_mean() -> None:
    assert awaited_mean(torch.tensor(3.0, requires_grad=True), 4, lambda term, take: None) is None


def test_what_takes_no_notice_of_subclasses_reads_nan_until_the_ranks_have_waited() -> None:
    _, loss, _ = _made()
    assert torch.tensor(loss).isnan() and torch.zeros(1).new_tensor(loss).isnan()
    loss.__dict__["_arrive"]()  # as the next call of the ranks does
    assert torch.tensor(loss) == TOTAL / COUNT == torch.as_tensor(loss)


def test_hooks_in_a_backward_pass_see_tensors_as_ever() -> None:
    weight, loss, waited = _made()
    seen: list[Any] = []
    weight.register_hook(lambda grad: seen.append((loss.item(), type(loss + 1))))
    loss.backward()
    assert seen == [(TOTAL / COUNT, Tensor)] and waited == [1]


def test_gradients_that_are_given_are_waited_for() -> None:
    for run in (
        lambda loss, other: loss.backward(gradient=other),
        lambda loss, other: torch.autograd.backward(tensors=[loss], grad_tensors=[other]),
        lambda loss, other: torch.autograd.backward(loss, grad_tensors=other),
    ):
        (weight, loss, waited), (_, other, is_there) = _made(), _made()
        run(loss, other)
        assert weight.grad == 2 / COUNT * TOTAL / COUNT and is_there and not waited
    _, other, is_there = _made()
    plain = torch.tensor(1.0, requires_grad=True)
    (plain * 2).backward(gradient=other)
    assert plain.grad == 2 * TOTAL / COUNT and is_there
    (weight, loss, _), (_, other, _) = _made(), _made()
    (grad,) = torch.autograd.grad(outputs=loss, inputs=[weight], grad_outputs=other)
    assert grad == 2 / COUNT * TOTAL / COUNT


def test_losses_in_tuples_with_names_are_waited_for() -> None:
    losses = collections.namedtuple("losses", "one other")(_made()[1], _made()[1])
    assert torch.stack(losses).tolist() == [TOTAL / COUNT] * 2


def test_a_count_is_that_of_the_call() -> None:
    count = torch.tensor([COUNT])
    weight, loss, _ = _made(count=count)
    count += 100
    loss.backward()
    assert loss.shape == () and loss.item() == TOTAL / COUNT and weight.grad == 2 / COUNT
    assert _made(count=torch.tensor(0))[1].isinf() and _made(count=0)[1].isinf()


def test_a_backward_pass_where_no_graph_is_made() -> None:
    weight, loss, waited = _made()
    with torch.no_grad():
        loss.backward()
    assert weight.grad == 2 / COUNT and not waited


def test_what_changes_a_loss_in_place_changes_it_and_its_gradient() -> None:
    for change in (lambda loss: loss.mul_(3), lambda loss: operator.imul(loss, 3)):
        weight, loss, _ = _made()
        change(loss)
        assert loss.item() == 3 * TOTAL / COUNT
        loss.backward()
        assert weight.grad == 3 * 2 / COUNT
    _, loss, _ = _made()
    loss.data = torch.tensor(5.0)
    assert loss.item() == 5.0


def test_threads_that_look_at_once_get_the_same() -> None:
    order = types.SimpleNamespace(open=None)
    begun, release, seen = threading.Event(), threading.Event(), list[str]()

    def finish() -> None:
        begun.set()
        assert release.wait(10)
        seen.append("there")

    call = OpenCall(order, finish)
    order.open = call

    def look() -> None:
        call.end()
        seen.append("looked")

    threads = [threading.Thread(target=look) for _ in range(2)]
    threads[0].start()
    assert begun.wait(10)
    threads[1].start()
    time.sleep(0.05)
    assert seen == [] and order.open is call  # whoever begins another call waits as well
    release.set()
    for thread in threads:
        thread.join(10)
    assert seen == ["there", "looked", "looked"] and order.open is None
