"""Proof that an algorithm keeps its contract for a problem: sound programs, right numbers, exact closed forms, and
copies of results that have the same bits."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshweave.algorithms.contract import Algorithm, Array, is_accurate
from meshweave.base.errors import MeshweaveError, ProgramError, UnsupportedError
from meshweave.execute.numpy import run_numpy
from meshweave.ir.analysis.lifetimes import peak_bytes
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program import Program
from meshweave.ir.work import traffic

ORDER_SEEDS = (None, 1, 2)
"""Orders in which each program runs: that of the program, and two other legal ones."""


@dataclass(frozen=True)
class ConfigProof:
    """What was proved of one config of an algorithm.

    Attributes:
        algorithm: name of the algorithm.
        config: the config as text.
        num_ops: ops of all ranks together, includes expanded; 0 where no program ran.
        unproved: in words what `validate` left unproved, or why nothing was proved; "" where all was.
        replicas: how copies of an output on several ranks come to have the same bits; "" where there are none.
        max_abs_error: largest absolute difference from the dense reference, over all orders; None where no
            program ran.
        failed: why the program is not what the contract says; "" where it is.
    """

    algorithm: str
    config: str
    num_ops: int = 0
    unproved: str = ""
    replicas: str = ""
    max_abs_error: float | None = None
    failed: str = ""

    @property
    def is_wrong(self) -> bool:
        """Return whether this config breaks the contract; `failed` says why."""
        return bool(self.failed)


def prove_contract(
    entry: Algorithm[Any, Any], problem: Hashable, *, max_configs: int = 8
) -> Iterator[ConfigProof]:
    """Yield a proof for each of the first `max_configs` configs that an algorithm offers for a problem.

    A config passes if `validate` proves its program, the numbers are those of the dense reference in several
    legal orders, the closed forms agree with the program (traffic on every rank, peak memory on the lowest, if
    the algorithm states an accuracy for it), and copies of outputs have the same bits. Programs of an algorithm
    whose calls have no equations are run and not proved. A config that fails is yielded, not raised; so is one
    without a program.

    Raises:
        ProgramError: the algorithm refuses the problem.
    """
    refusal = entry.refusal(problem)
    if refusal is not None:
        raise ProgramError(f"{entry.name} does not solve this problem: {refusal}")
    for number, config in enumerate(entry.candidates(problem)):
        if number == max_configs:
            return
        try:
            yield _proof(entry, problem, config)
        except UnsupportedError as error:  # it has closed forms alone
            yield ConfigProof(entry.name, str(config), unproved=f"no program: {error}")
        except MeshweaveError as error:
            yield ConfigProof(entry.name, str(config), failed=str(error))


def _largest_difference(result: Array, wanted: Array) -> float:
    """Return the largest difference where a number is wanted; a result that is no number counts as infinite."""
    apart = np.abs(result - wanted)[~np.isnan(wanted)]
    return float(np.max(np.nan_to_num(apart, nan=np.inf, posinf=np.inf), initial=0.0))


def _proof(entry: Algorithm[Any, Any], problem: Hashable, config: Any) -> ConfigProof:
    program = entry.program(problem, config)
    unproved, replicas, are_certain = "its calls have no equations", "", True
    if entry.is_proved:
        validation = validate(program)
        unproved, replicas = "; ".join(validation.skipped), validation.replicas_text
        are_certain = all(agreement.is_certain for agreement in validation.replicas)
    inputs = entry.random_inputs(problem)
    expected = entry.reference(problem, inputs)
    error = 0.0
    operands, calls = entry.operands(problem, config, inputs), entry.calls(problem, config)
    for seed in ORDER_SEEDS:
        outputs = entry.results(problem, config, run_numpy(program, operands, seed=seed, calls=calls).outputs)
        for name, value in expected.items():
            error = max(error, _largest_difference(outputs[name], value))
    failed = f"numbers differ by {error:g}" if error else _wrong_closed_form(entry, problem, config, program)
    if not are_certain:
        failed = failed or replicas
    num_ops = sum(len(ops) for ops in program.expanded.ops_by_rank.values())
    return ConfigProof(entry.name, str(config), num_ops, unproved, replicas, error, failed)


def _wrong_closed_form(entry: Algorithm[Any, Any], problem: Hashable, config: Any, program: Program) -> str:
    for rank in program.ranks:
        claimed, moved = entry.traffic(problem, config, rank), traffic(program, rank)
        if claimed != moved:
            return f"rank {rank} moves {moved} bytes, and the closed form says {claimed}"
    rank = program.ranks[0]
    if entry.memory_accuracy is None:
        return ""
    claimed_bytes, held_bytes = entry.peak_bytes(problem, config, rank), peak_bytes(program, rank)
    if not is_accurate(entry.memory_accuracy, claimed_bytes, held_bytes):
        return f"rank {rank} holds {held_bytes} bytes at most, and the closed form says {claimed_bytes}"
    return ""
