"""Proof that programs compute what they declare: by validation, on numpy in this process, on local processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from meshweave.base.errors import LayoutError, MeshweaveError, UnsupportedError
from meshweave.base.owner import temporary_folder
from meshweave.base.progress import Progress, no_progress
from meshweave.check.processes import ProgramRun, read_log, run_on_processes
from meshweave.check.reduced import ReducedProduct, reduce_products
from meshweave.check.reference import Tensors, random_inputs, reference
from meshweave.execute.numpy import run_numpy
from meshweave.ir.analysis.dataflow import Dataflow
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program import Program
from meshweave.ir.program.text import to_text
from meshweave.lower import lower_rings
from meshweave.tune.plan import Plan
from meshweave.tune.selection import select_products

ORDER_SEEDS = (None, 1, 2)
"""Orders in which each program runs in process: that of the program, and two other legal ones."""

NumRingDirections = Literal[0, 1, 2]
"""Rings that collectives are lowered to on processes: of 1 or 2 directions, or 0 for gloo's own collectives."""


@dataclass
class Verification:
    """One program and the results of its checks. An error is the largest absolute difference from the reference.

    Attributes:
        product: the product of a plan that `program` computes at reduced size; None for a program given by itself.
        error_in_process: the error on numpy, over all orders and lowered to rings; None until that has run.
        error_on_processes: the error on local processes over gloo; None if the program was not run there.
        failed: why the program could not be proved or run; "" if it could.
        unproved: what `validate` left unproved.
        replicas: how copies of an output on several ranks come to have the same bits, or that they may not; ""
            where there are none.
    """

    title: str
    program: Program
    product: ReducedProduct | None = None
    error_in_process: float | None = None
    error_on_processes: float | None = None
    failed: str = ""
    unproved: str = ""
    replicas: str = ""

    @property
    def is_wrong(self) -> bool:
        """Return whether a result differs at all from the reference, or `failed` is not "".

        There is no tolerance. `unproved`, and checks that have not run (None), do not make a program wrong.
        """
        return bool(self.failed or self.error_in_process or self.error_on_processes)

    def to_json(self) -> dict[str, Any]:
        """Return the results as JSON values, without the program.

        A program given by itself is named by "title", a product by "algorithm", "layer", "pass", "dataflow",
        "mesh_shape", "m_n_k" and "config".
        """
        if self.product is None:
            head: dict[str, Any] = {"title": self.title}
        else:
            problem = self.product.problem
            assert problem is not None
            head = {
                **_product_json(self.product),
                "dataflow": problem.dataflow,
                "mesh_shape": list(problem.mesh_shape),
                "m_n_k": [problem.m, problem.n, problem.k],
                "config": str(self.product.config),
            }
        return head | {
            "max_abs_error_in_process": self.error_in_process,
            "max_abs_error_on_processes": self.error_on_processes,
            "failed": self.failed,
            "unproved": self.unproved,
            "replicas": self.replicas,
        }


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` checked, in order, and what it could not check.

    Attributes:
        num_ranks: number of local processes.
        skipped: products that have no program at this size or on so many ranks.
        not_run: why nothing ran on processes; "" where something did.
    """

    num_ranks: int
    verifications: tuple[Verification, ...]
    skipped: tuple[ReducedProduct, ...] = ()
    not_run: str = ""

    @property
    def num_wrong(self) -> int:
        """Return the number of programs that are wrong; see `Verification.is_wrong`."""
        return sum(verification.is_wrong for verification in self.verifications)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values.

        Keys: "ranks", "processes" ("ran", or why not), "products", "skipped" (with "reason") and "wrong", a
        number.
        """
        return {
            "ranks": self.num_ranks,
            "processes": self.not_run or "ran",
            "products": [verification.to_json() for verification in self.verifications],
            "skipped": [_product_json(product) | {"reason": product.skipped} for product in self.skipped],
            "wrong": self.num_wrong,
        }


def _product_json(product: ReducedProduct) -> dict[str, Any]:
    planned = product.planned
    return {"algorithm": product.algorithm, "layer": planned.layer.name, "pass": planned.pass_plan.name}


def verify(
    subject: Plan | Program | Sequence[Program],
    *,
    num_ranks: int | None = None,
    layers: Sequence[str] | None = None,
    algorithms: Sequence[str] | None = None,
    max_dim: int = 512,
    num_ring_directions: NumRingDirections = 1,
    seed: int = 0,
    timeout_s: float = 300.0,
    on_processes: bool = True,
    progress: Progress = no_progress,
) -> VerifyReport:
    """Check that every product of a plan, or every program given, computes exactly what it declares.

    First, in this process, each program is validated, on index labels too. It runs on numpy in several legal
    orders, and lowered to rings. Then all programs run on local processes over gloo, started once. Inputs are
    small integers, so results must equal the dense reference.

    Args:
        subject: a plan, whose products are checked at reduced size, or programs, checked as they are.
        num_ranks: number of local processes. None is 4 for a plan; for programs it is raised to the ranks of the
            largest.
        layers: names of the layers of a plan to check; None for all.
        algorithms: names of the algorithms of a plan to check; None for all.
        max_dim: sizes of a plan are reduced by one factor until none is larger.
        num_ring_directions: directions of the rings that collectives run as on processes, 1 or 2; 0 leaves them
            to gloo.
        seed: seed of the inputs.
        timeout_s: seconds after which the processes are stopped.
        on_processes: whether to run on processes at all.
        progress: called with (checks done, checks in all); a program has one in process, and one on processes.

    Raises:
        DescriptionError: the plan has no such layer or algorithm.
        LayoutError: an argument is out of range, or nothing can be checked on so many ranks.
        UnsupportedError: a program calls functions, whose results nothing here can predict.
    """
    check_num_ring_directions(num_ring_directions)
    if not (8 <= max_dim <= 4096 and 0 < timeout_s < 1e6 and 0 <= seed < 1 << 63):
        raise LayoutError("max-dim must be 8 to 4096, timeout positive seconds, seed at least 0")
    skipped: tuple[ReducedProduct, ...] = ()
    if isinstance(subject, Plan):
        num_ranks = check_num_ranks(4 if num_ranks is None else num_ranks)
        verifications, skipped = _planned_verifications(subject, layers, algorithms, num_ranks, max_dim)
    else:
        programs = [subject] if isinstance(subject, Program) else list(subject)
        verifications = [Verification(program.name, program) for program in programs]
        needed = [max(program.ranks) + 1 for program in programs]
        num_ranks = check_num_ranks(max([num_ranks or 1, *needed]))
    num_programs = len(verifications)
    total = num_programs * (2 if on_processes else 1)
    for number, verification in enumerate(verifications, 1):
        verify_in_process(verification, num_ring_directions, seed)
        progress(number, total)
    not_run = "left out"
    if on_processes:
        not_run = verify_on_processes(
            verifications, num_ranks, num_ring_directions, seed, timeout_s,
            lambda done, _: progress(num_programs + done, total),
        )  # fmt: skip
    return VerifyReport(num_ranks, tuple(verifications), skipped, not_run)


def check_num_ranks(num_ranks: int) -> int:
    """Return `num_ranks`. Raises LayoutError unless it is a number of local processes, 1 to 64."""
    if not 1 <= num_ranks <= 64:
        raise LayoutError(f"{num_ranks} local processes: give 1 to 64")
    return num_ranks


def check_num_ring_directions(num_directions: int) -> None:
    """Raise LayoutError unless `num_directions` is 0 (no rings), 1 or 2."""
    if num_directions not in (0, 1, 2):
        raise LayoutError(f"a ring runs in 1 or 2 directions, or 0 for none, not {num_directions}")


def _planned_verifications(
    plan: Plan,
    layers: Sequence[str] | None,
    algorithms: Sequence[str] | None,
    num_ranks: int,
    max_dim: int,
) -> tuple[list[Verification], tuple[ReducedProduct, ...]]:
    """Return the products that can be checked, and those that cannot. Raises LayoutError where all cannot."""
    selected = select_products(plan, layers=layers, algorithms=algorithms)
    products = list(reduce_products(selected, num_ranks, max_dim))
    skipped = tuple(product for product in products if product.skipped)
    if len(skipped) == len(products):
        raise LayoutError(
            f"nothing to check on {num_ranks} ranks: {products[0].algorithm}: {products[0].skipped}"
        )
    verifications = [
        Verification(product.title, product.program, product)
        for product in products
        if product.program is not None
    ]
    return verifications, skipped


# --- in this process ------------------------------------------------------------------------------------


def verify_in_process(verification: Verification, num_ring_directions: NumRingDirections, seed: int) -> None:
    """Validate a program, run it on numpy against the reference, and record the results in `verification`.

    Sets `unproved`, `replicas` and `error_in_process`, or `failed` where the program is unsound or cannot run.

    Args:
        num_ring_directions: directions of the rings in one more run, lowered to rings; 0 counts as 1.
        seed: seed of the inputs.

    Raises UnsupportedError where the program calls functions, which have no reference.
    """
    program = verification.program
    try:
        validation = validate(program)
        verification.unproved = "; ".join(validation.skipped)
        verification.replicas = validation.replicas_text
        lowered = lower_rings(program, 2 if num_ring_directions == 2 else 1)
        lowered_flow = validate(lowered, labels=False).flow
        inputs = random_inputs(program, seed)
        expected = reference(program, inputs)
        runs = [(program, validation.flow, order) for order in ORDER_SEEDS] + [(lowered, lowered_flow, 3)]
        verification.error_in_process = max(
            _numpy_error(version, inputs, expected, flow, order) for version, flow, order in runs
        )
    except UnsupportedError:
        raise
    except MeshweaveError as error:
        verification.failed = f"in process: {error}"


def _numpy_error(
    program: Program, inputs: Tensors, expected: Tensors, flow: Dataflow, order: int | None
) -> float:
    outputs = run_numpy(program, inputs, seed=order, flow=flow).outputs
    return max(
        (
            float(np.nan_to_num(np.abs(outputs[name] - whole).astype(float), nan=np.inf).max(initial=0.0))
            for name, whole in expected.items()
        ),
        default=0.0,
    )


# --- on processes ---------------------------------------------------------------------------------------


def verify_on_processes(
    verifications: Sequence[Verification],
    num_ranks: int,
    num_ring_directions: NumRingDirections,
    seed: int,
    timeout_s: float,
    progress: Progress = no_progress,
) -> str:
    """Run the programs that have not failed on local processes, and set `error_on_processes` or `failed` of each.

    Args:
        num_ring_directions: directions of the rings that collectives become, 1 or 2; 0 leaves them to gloo.
        seed: seed of the inputs.
        timeout_s: seconds after which the processes are stopped.
        progress: called with (programs that rank 0 is through with, programs in all).

    Returns:
        Why nothing ran; "" where something did.
    """
    sound = [verification for verification in verifications if not verification.failed]
    if not sound:
        return "no product is sound in process"
    try:
        import torch.distributed  # noqa: F401

        from meshweave.execute.ranks.launch import RankError
    except ImportError:
        return "torch is missing: pip install 'meshweave[torch]'"
    deadline_s = max(timeout_s - 10, timeout_s / 2)
    requests = [program_run(item.program, num_ring_directions, seed, deadline_s) for item in sound]
    with temporary_folder("verify") as folder:
        failure = ""
        try:
            with _progress_from_log(folder, len(sound), progress):
                run_on_processes(requests, num_ranks, timeout_s, Path(folder))
        except (MeshweaveError, RankError) as error:
            failure = " ".join(str(error).split())
        logs = [read_log(folder, rank) for rank in range(num_ranks)]
    set_process_results(sound, logs, failure)
    return ""


def program_run(
    program: Program, num_ring_directions: NumRingDirections, seed: int, deadline_s: float, repeat: int = 0
) -> ProgramRun:
    """Return the request to run a program on processes.

    Args:
        num_ring_directions: its all-gathers and reduce-scatters become rings of so many directions; 0 leaves
            them to gloo.
        seed: seed of the inputs.
        deadline_s: seconds that one wait for another rank may take.
        repeat: number of measured runs, after one to warm up; all of them are checked, that one, too.

    Raises ProgramError where a collective cannot become a ring.
    """
    if num_ring_directions:
        program = lower_rings(program, 2 if num_ring_directions == 2 else 1)
    return ProgramRun(to_text(program), repeat, seed, deadline_s)


def set_process_results(
    verifications: Sequence[Verification], logs: Sequence[Sequence[dict[str, Any]]], failure: str
) -> None:
    """Set `error_on_processes` or `failed` of each program from what the ranks logged.

    The first program that not every rank completed gets `failure` as its reason. Those after it did not run, and
    `failed` says so.

    Args:
        logs: for each rank the lines that it logged (`check.processes.read_log`).
        failure: the error of the processes; "" if there was none.
    """
    for number, verification in enumerate(verifications):
        lines = [line for log in logs for line in log if line["number"] == number]
        errors = [line["error"] for line in lines if "error" in line]
        if errors:
            verification.error_on_processes = max(errors)
        if len(errors) < len(logs):
            verification.failed = f"on processes: {failure or 'a rank gave no result'}"
            for later in verifications[number + 1 :]:
                later.failed = f"on processes: not run, for {verification.title} failed"
            return


@contextmanager
def _progress_from_log(folder: str, total: int, progress: Progress) -> Iterator[None]:
    """Call `progress` with the number of programs that rank 0 has logged, four times a second."""
    ended = threading.Event()

    def follow() -> None:
        while not ended.wait(0.25):
            progress(len(read_log(folder, 0)), total)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
