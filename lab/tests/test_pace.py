"""Paced products are the same products, at the pace."""

import os
import subprocess
import sys
import threading
import time

import pytest

from meshweave.base.errors import DescriptionError
from meshweave.cost.calls import call_flops
from meshweave.ir.work import Compute
from meshweave_lab import startup
from meshweave_lab.pace import Pacer, paced, read_reports

torch = pytest.importorskip("torch")
pytest.importorskip("torch.library", reason="old torch")
if not hasattr(torch.library, "get_kernel"):
    pytest.skip("pacing needs torch.library.get_kernel", allow_module_level=True)


WORKS = "norm", "softmax"


def tensors(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


A, B, C, ROW = tensors((30, 20), (20, 40), (30, 40), (40,))


def linear():
    layer = torch.nn.Linear(20, 40)
    with torch.no_grad():
        layer.weight.copy_(B.t())
        layer.bias.copy_(ROW)
    x = A.clone().requires_grad_()
    layer(x).square().sum().backward()
    return torch.cat([x.grad.flatten(), layer.weight.grad.flatten(), layer.bias.grad])


PRODUCTS = {
    "mm": (lambda: A @ B, 1),
    "mm into": (lambda: torch.mm(A, B, out=torch.full((30, 40), float("nan"))), 1),
    "mm into a transposed": (lambda: torch.mm(A, B, out=torch.empty(40, 30).t()), 1),
    "mm into nothing": (lambda: torch.mm(A, B, out=torch.empty(0)), 1),
    "addmm": (lambda: torch.addmm(ROW, A, B, beta=0.5, alpha=2.0), 1),
    "addmm in place": (lambda: C.clone().addmm_(A, B), 1),
    "addmm into": (lambda: (lambda c: torch.addmm(c, A, B, out=c))(C.clone()), 1),
    "bmm": (lambda: torch.bmm(A.expand(3, 30, 20), B.expand(3, 20, 40)), 3),
    "bmm into": (lambda: torch.bmm(A[None], B[None], out=torch.empty(1, 30, 40)), 1),
    "baddbmm": (lambda: torch.baddbmm(ROW, A[None], B[None], beta=2.0), 1),
    "einsum": (lambda: torch.einsum("ab,bc->ac", A, B), 1),
    "integers": (lambda: A.mul(9).long() @ B.mul(9).long(), 1),
    "bfloat16": (lambda: (A.bfloat16() @ B.bfloat16()).float(), 1),
    "conjugate": (lambda: torch.view_as_real(A.to(torch.complex64).conj() @ B.to(torch.complex64)), 1),
    "linear, forward and backward": (linear, 3),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_product_is_what_it_was_and_is_counted(name):
    function, count = PRODUCTS[name]
    expected = function()
    with paced(1e12) as pacer:
        result = function()
    assert result.shape == expected.shape and result.dtype == expected.dtype
    torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-3)
    assert pacer.report().flops == count * 2 * 30 * 20 * 40
    again = pacer.report()
    function()  # no longer paced
    assert pacer.report() == again


def test_empty_products_and_mistakes():
    with paced(1e12) as pacer:
        assert (A[:0] @ B).shape == (0, 40)
        assert torch.equal(A[:, :0] @ B[:0], torch.zeros(30, 40))
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            A @ A
    assert pacer.report().num_products == 2


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_pace_must_be_positive(rate):
    with pytest.raises(DescriptionError, match="give a positive number"), paced(rate):
        pass


def attention_and_norm():
    """Attention, a norm and GELU, forward and backward; the gradients of what goes in."""
    q, x, gain = (t.clone().requires_grad_() for t in tensors((2, 3, 8, 4), (6, 32), (32,)))
    heads = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    normal = torch.nn.functional.layer_norm(x, [32], gain, torch.zeros(32))
    (heads.square().sum() + torch.nn.functional.gelu(normal, approximate="tanh").sum()).backward()
    return torch.cat([t.grad.flatten() for t in (q, x, gain)])


def test_fused_kernels_are_counted_as_calls_of_their_work():
    expected = attention_and_norm()
    with paced(1e15) as pacer:
        assert torch.equal(attention_and_norm(), expected)
    works = [
        ("attention", "", (2, 3, 8, 8, 4)),
        ("attention", "input_grad", (2, 3, 8, 8, 4)),
        ("norm", "", (6, 32)),
        ("norm", "input_grad", (6, 32)),
        ("norm", "weight_grad", (6, 32)),
        ("elementwise", "", (192,)),
        ("elementwise", "input_grad", (192,)),
    ]
    assert pacer.report().flops == sum(call_flops(*work) for work in works)


class Time:
    """A clock that only advances when it is set; `sleep` overshoots."""

    def __init__(self, overshoot_s):
        self.now, self.overshoot_s = 100.0, overshoot_s

    def sleep(self, seconds):
        self.now += seconds + self.overshoot_s

    def work(self, seconds):
        def run():
            self.now += seconds

        return run


def test_oversleeping_does_not_add_up():
    fake = Time(overshoot_s=1e-4)
    pacer = Pacer(1e9, lambda: fake.now, fake.sleep)
    for _ in range(100):
        pacer.product(2_000_000, fake.work(5e-4))
    report = pacer.report()
    assert fake.now - 100.0 == pytest.approx(0.2 + 1e-4)
    assert report.paced_s == pytest.approx(0.2)
    assert report.error_mean_s == pytest.approx(1e-6) and report.error_worst_s == pytest.approx(1e-4)
    assert report.num_overruns == 0


def test_calls_take_the_rate_of_their_kind():
    fake = Time(overshoot_s=0.0)
    pacer = Pacer(1e9, lambda: fake.now, fake.sleep, call_flops_per_s=(("norm", 1e6),))
    norm, softmax = (Compute("call", 0, 0, dtype="float32", call=work, shape=(10, 10)) for work in WORKS)
    pacer.call(fake.work(1e-5), norm, softmax)
    pacer.call(fake.work(0.0), Compute("call", 0, 5_000_000))
    report = pacer.report()
    assert fake.now - 100.0 == pytest.approx(700 / 1e6 + 500 / 1e9 + 1e-3)
    assert (report.flops, report.paced_s) == (1200, pytest.approx(fake.now - 100.0))


def test_products_shorter_than_an_overshoot_pay_it_back():
    fake = Time(overshoot_s=1e-4)
    pacer = Pacer(1e9, lambda: fake.now, fake.sleep)
    for _ in range(1000):
        pacer.product(20_000, fake.work(1e-6))
    assert fake.now - 100.0 == pytest.approx(0.02, abs=2e-4)


def test_time_between_products_is_not_made_up_for():
    fake = Time(overshoot_s=0.0)
    pacer = Pacer(1e9, lambda: fake.now, fake.sleep)
    for _ in range(10):
        pacer.product(1_000_000, fake.work(0.0))
        fake.now += 0.01
    assert fake.now - 100.0 == pytest.approx(10 * 0.011)


def test_an_overrun_is_counted_and_neither_an_error_nor_made_up_for():
    fake = Time(overshoot_s=0.0)
    pacer = Pacer(1e9, lambda: fake.now, fake.sleep)
    pacer.product(1_000_000, fake.work(0.005))
    pacer.product(1_000_000, fake.work(0.0))
    report = pacer.report()
    assert (report.num_overruns, report.overrun_s) == (1, pytest.approx(0.004))
    assert report.error_worst_s == pytest.approx(0.0, abs=1e-9)
    assert fake.now - 100.0 == pytest.approx(0.006)


def test_a_rank_has_one_engine_that_is_never_faster_than_its_rate():
    x = torch.ones(50, 50)
    with paced(2 * 50**3 / 0.02) as pacer:
        threads = [threading.Thread(target=lambda: x @ x) for _ in range(5)]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert time.perf_counter() - begin > 0.099
    assert pacer.report().num_products == 5


def test_products_that_are_too_large_are_overruns():
    x = torch.ones(300, 300)
    with paced(1e15) as pacer:
        x @ x
    report = pacer.report()
    assert report.num_overruns == 1 and report.overrun_s > 0


def test_other_threads_run_during_a_product():
    x, ticks, done = torch.ones(1200, 1200), [], threading.Event()

    def tick():
        while not done.wait(0.001):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    with paced(1e15):
        thread.start()
        begin = time.perf_counter()
        for _ in range(4):
            x @ x
        end = time.perf_counter()
    done.set()
    thread.join()
    assert len([t for t in ticks if begin < t < end]) > (end - begin) / 0.02


def test_any_program_is_paced_by_its_environment(tmp_path):
    script = (
        "import sys; assert 'torch' not in sys.modules; import torch; x = torch.ones(10, 10); x @ x; x @ x\n"
        "import sitecustomize, mine; assert mine.here"
    )
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("import mine; mine.here = True")
    (hidden / "mine.py").write_text("")
    path = [startup.__path__[0], str(hidden), *filter(None, sys.path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "RANK": "3"}
    env |= {"MESHWEAVE_PACE_FLOPS_PER_S": "1e6", "MESHWEAVE_PACE_REPORT": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], env=env, check=True, timeout=120)
    (rank, report), *rest = read_reports(tmp_path).items()
    assert not rest and rank == 3
    assert (report.num_products, report.flops) == (2, 4000)
