"""Paced compute: products of matrices take the time that a rank of the lab would take for them.

The CPU kernels of torch's matrix products are overridden below autograd and DTensor, so that anybody's code
is paced. The product really runs and then the thread sleeps until flops / rate has passed: 16 ranks do not
fight for two cores, as long as the real products are small. A rank has one engine: products of several
threads queue for it. A `call` of a bound program takes what `cost.calls` says of its FLOPs and bytes; products in
it are part of it. Fused kernels of norms, attention and activations take what a `call` of their work takes.

What is not paced: everything else (`mv`, convolutions, element-wise sums and products, code compiled by inductor),
`baddbmm_`, and any device but the CPU.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshweave.base.errors import DescriptionError, UnsupportedError
from meshweave.cost.calls import with_counts
from meshweave.cost.compute import call_s
from meshweave.describe.machine.chip import Chip
from meshweave.execute.calls import set_call_pace
from meshweave.ir.work import Compute
from meshweave_lab.fused_kernels import FUSED_KERNELS, WorksOf

_MAX_DEBT_S = 10e-3
# Where the two factors of a product stand among its arguments. Not `baddbmm_`: the others are made of it.
_FIRST_FACTOR = {
    **dict.fromkeys(("mm", "mm.out", "bmm", "bmm.out"), 0),
    **dict.fromkeys(("addmm", "addmm.out", "addmm_", "baddbmm", "baddbmm.out"), 1),
}


CallRates = tuple[tuple[str, float], ...]
"""(kind of work, FLOP/s) of calls that run at a rate of their own."""


def paced_chip(flops_per_s: float, call_flops_per_s: CallRates = ()) -> Chip:
    """Return the chip that a paced rank stands for: its FLOP rates, and a memory of 5 GB/s."""
    peaks = tuple((dtype, flops_per_s) for dtype in ("float32", "float64", "bfloat16", "float16"))
    return Chip(
        "paced rank",
        peaks,
        flops_per_s,
        2 * 10**9,
        5e9,
        source="paced",
        call_flops_per_s=call_flops_per_s,
    )


@dataclass(frozen=True)
class PaceReport:
    """How well products kept to the rate.

    Attributes:
        flops_per_s: the rate.
        num_products: products and calls paced, of `flops` in all, meant to take `paced_s` seconds.
        error_mean_s, error_worst_s: seconds a product ended after its time (before it, where negative), over
            those that slept. An overshoot is made up for by the next product, so the mean is near zero.
        num_overruns, overrun_s: products whose real computation took longer than their time, and by how many
            seconds in all. With any of these the machine is too slow for the rate.
    """

    flops_per_s: float
    num_products: int
    flops: int
    paced_s: float
    error_mean_s: float
    error_worst_s: float
    num_overruns: int
    overrun_s: float


class Pacer:
    """Makes the products and calls of one rank take their time, one after another, and counts them.

    `clock` returns seconds, and `sleep` sleeps for so many.
    """

    def __init__(
        self,
        flops_per_s: float,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        call_flops_per_s: CallRates = (),
    ) -> None:
        if not (math.isfinite(flops_per_s) and flops_per_s > 0):
            raise DescriptionError(f"a pace of {flops_per_s:g} FLOP/s makes no sense; give a positive number")
        self.flops_per_s = flops_per_s
        self._chip = paced_chip(flops_per_s, call_flops_per_s)
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._of_thread = threading.local()
        self._busy_until = 0.0
        self._num_products = self._num_slept = self._num_overruns = self._flops = 0
        self._paced_s = self._error_s = self._worst_s = self._overrun_s = 0.0

    @property
    def is_inside(self) -> bool:
        """Whether this thread is within a paced product or call, whose kernels are not paced once more."""
        return bool(getattr(self._of_thread, "is_inside", False))

    def product(self, flops: int, work: Callable[[], Any]) -> Any:
        """Run `work` and return its result, `flops / flops_per_s` seconds after the engine was free for it."""
        return self._timed(flops / self.flops_per_s, flops, work)

    def call(self, run: Callable[[], Any], *works: Compute) -> Any:
        """Call `run`, which does `works`, and return its result after the seconds that `cost` gives them."""
        duration = sum(call_s(work, self._chip) for work in works)
        flops = sum(with_counts(work).flops for work in works)
        return self._timed(duration, flops, run) if duration else run()

    def _timed(self, duration: float, flops: int, work: Callable[[], Any]) -> Any:
        begin, debt = self._clock(), getattr(self._of_thread, "debt_s", 0.0)
        with self._lock:
            due = max(begin, self._busy_until) + duration
            # A sleep overshoots by some 0.1 ms; as much sooner does the next product begin.
            end = self._busy_until = max(begin - debt, self._busy_until) + duration
        self._of_thread.is_inside = True
        try:
            result = work()
        finally:
            self._of_thread.is_inside = False
        done = self._clock()
        is_overrun = done > due
        if done < end:
            self._sleep(end - done)
        woke = self._clock()
        self._of_thread.debt_s = 0.0 if is_overrun else min(max(woke - end, 0.0), _MAX_DEBT_S)
        with self._lock:
            self._num_products += 1
            self._flops += flops
            self._paced_s += duration
            if is_overrun:
                self._num_overruns += 1
                self._overrun_s += done - due
                self._busy_until = max(self._busy_until, done)
            else:
                self._num_slept += 1
                self._error_s += woke - due
                self._worst_s = max(self._worst_s, woke - due, key=abs)
        return result

    def report(self) -> PaceReport:
        """Return how well products have kept to the rate so far."""
        with self._lock:
            return PaceReport(
                self.flops_per_s,
                self._num_products,
                self._flops,
                self._paced_s,
                self._error_s / max(self._num_slept, 1),
                self._worst_s,
                self._num_overruns,
                self._overrun_s,
            )


def flops_of(name: str, args: tuple[Any, ...]) -> int:
    """Return the FLOPs of a product, 2 per multiply-add, by its kernel's name and positional arguments."""
    at = _FIRST_FACTOR[name]
    a, b = args[at].shape, args[at + 1].shape
    return 2 * int(math.prod(a)) * int(b[-1])


_current: Pacer | None = None
_library: Any = None


def _install() -> None:
    """Register kernels that pace products in front of torch's, once. Without a pacer they change nothing."""
    global _library
    if _library is not None:
        return
    import torch.library

    get_kernel = getattr(torch.library, "get_kernel", None)
    if get_kernel is None:
        raise UnsupportedError("pacing needs torch.library.get_kernel: install a newer torch")
    set_call_pace(_pace_call)
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels are overridden is the point
        for name in _FIRST_FACTOR:
            kernel = _kernel(name, get_kernel(f"aten::{name}", "CPU"))
            library.impl(name, kernel, "CPU", with_keyset=True)
        for name, works_of in FUSED_KERNELS.items():
            kernel = _fused_kernel(works_of, get_kernel(f"aten::{name}", "CPU"))
            library.impl(name, kernel, "CPU", with_keyset=True)
    _library = library


def _pace_call(work: Compute, run: Callable[[], Any]) -> Any:
    pacer = _current
    return run() if pacer is None or pacer.is_inside else pacer.call(run, work)


def _fused_kernel(works_of: WorksOf, original: Any) -> Callable[..., Any]:
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        pacer = _current
        if pacer is None or pacer.is_inside:
            return original.call_boxed(keyset, *args, **kwargs)
        return pacer.call(lambda: original.call_boxed(keyset, *args, **kwargs), *works_of(args))

    return kernel


def _kernel(name: str, original: Any) -> Callable[..., Any]:
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        pacer = _current
        if pacer is None or pacer.is_inside:  # one kernel may be made of another
            return original.call_boxed(keyset, *args, **kwargs)
        flops = flops_of(name, args)
        return pacer.product(flops, lambda: _multiply(name, original, keyset, args, kwargs))

    return kernel


def _multiply(name: str, original: Any, keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the product itself; other threads run meanwhile."""
    import torch

    at = _FIRST_FACTOR[name]
    a, b = args[at], args[at + 1]
    shape = (*a.shape[:-1], b.shape[-1])
    out = kwargs.get("out", args[0] if name == "addmm_" else None)
    fits = a.shape[-1] == b.shape[-2] and a.shape[:-2] == b.shape[:-2] and a.dtype == b.dtype
    if not fits or (out is not None and (out.shape != shape or out.dtype != a.dtype)):
        return original.call_boxed(keyset, *args, **kwargs)
    beta, alpha = (kwargs.get("beta", 1), kwargs.get("alpha", 1)) if at else (0, 1)
    if at and (args[0].dtype != a.dtype or args[0].dim() > len(shape)):
        return original.call_boxed(keyset, *args, **kwargs)
    if out is None:
        out = torch.empty(shape, dtype=a.dtype, device=a.device)
    if beta != 0 and args[0] is not out:
        out.copy_(args[0])
    whole = out if out.dim() == 3 else out.unsqueeze(0)
    a, b = (a, b) if a.dim() == 3 else (a.unsqueeze(0), b.unsqueeze(0))
    whole.baddbmm_(a, b, beta=beta, alpha=alpha)
    return out


@contextmanager
def paced(flops_per_s: float, call_flops_per_s: CallRates = ()) -> Iterator[Pacer]:
    """Pace the matrix products of this process's CPU tensors, in all threads, at `flops_per_s`.

    Calls of the kinds of work in `call_flops_per_s` have rates of their own. Yields the `Pacer`; its `report()`
    says how well products kept to the rate. An inner `paced` replaces the outer one while its block runs.

    Raises:
        DescriptionError: the rate is not a positive number.
        UnsupportedError: this torch has no `torch.library.get_kernel`.
    """
    global _current
    pacer = Pacer(flops_per_s, call_flops_per_s=call_flops_per_s)
    _install()
    before, _current = _current, pacer
    try:
        yield pacer
    finally:
        _current = before


def pace_from_environment() -> None:
    """Pace this process for good, where MESHWEAVE_PACE_FLOPS_PER_S says at which rate.

    MESHWEAVE_PACE_CALL_FLOPS_PER_S may hold the rates of some kinds of work, as a JSON object.

    At its orderly end the process leaves its report in the folder MESHWEAVE_PACE_REPORT, if that is set.
    """
    global _current
    text = os.environ.get("MESHWEAVE_PACE_FLOPS_PER_S")
    if not text or _current is not None:
        return
    try:
        rate = float(text)
    except ValueError:
        raise DescriptionError(f"MESHWEAVE_PACE_FLOPS_PER_S is '{text}'; give a number") from None
    rates = json.loads(os.environ.get("MESHWEAVE_PACE_CALL_FLOPS_PER_S") or "{}")
    pacer = Pacer(rate, call_flops_per_s=tuple(rates.items()))
    _install()
    _current = pacer
    folder, rank = os.environ.get("MESHWEAVE_PACE_REPORT"), os.environ.get("RANK", "0")
    if folder:
        atexit.register(_write_report, pacer, Path(folder) / f"pace-{rank}-{os.getpid()}.json")


def _write_report(pacer: Pacer, path: Path) -> None:
    report = pacer.report()
    if report.num_products and path.parent.is_dir():
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(report)))
        part.replace(path)


def read_reports(folder: Path) -> dict[int, PaceReport]:
    """Return the reports in a folder, by rank; of several processes of a rank the one with most products."""
    reports: dict[int, PaceReport] = {}
    for path in sorted(folder.glob("pace-*.json")):
        rank, report = int(path.name.split("-")[1]), PaceReport(**json.loads(path.read_text()))
        if rank not in reports or report.num_products > reports[rank].num_products:
            reports[rank] = report
    return reports
