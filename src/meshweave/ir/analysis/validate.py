"""Proves, before anything runs, that a program is sound.

In this order, each naming op, rank and buffer where it fails: what is declared makes sense; every view fits
its buffer; ranks agree on the order of collectives in each group; each send has its recv; shapes fit; it
cannot deadlock (it is run untimed, with lanes); no one-sided accesses race; and, run on index labels, every
element that is read was written and every output element is the sum over exactly the right k, each once.

A program that others include is proved once, by itself, and each include of it is one op in the proof of the
program that it stands in (`ir.analysis.include`).

Copies of an output whose bits may differ between ranks are no fault of a program. `Validation.replicas` says how
the copies of each output come about.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from meshweave.base.errors import ProgramError, listed
from meshweave.ir.analysis.cells import COUNTS_TRIED, check_cells, sampled_counts
from meshweave.ir.analysis.dataflow import Dataflow, Event, analyse, analyse_as_written, untimed_order
from meshweave.ir.analysis.include import (
    PartSummary,
    Summaries,
    check_include_uses,
    part_notes,
    summarise,
    with_include_lane,
)
from meshweave.ir.analysis.native_proof import CoreProof
from meshweave.ir.analysis.proof import prove_outputs, unproved
from meshweave.ir.analysis.races import check_races
from meshweave.ir.analysis.replicas import ReplicaAgreement, replica_agreements
from meshweave.ir.analysis.shapes import check_op
from meshweave.ir.program import Include, Program
from meshweave.ir.program.declarations import check_header, check_statements
from meshweave.ir.program.include import include_error

ORDERS_TRIED = 20
"""Random legal orders in which a program is run whose deadlocks may depend on timing."""
OPS_TRIED = 20_000
"""Ops of all these orders together; of a program of more ops one order is tried."""


@dataclass(frozen=True)
class Validation:
    """What `validate` proved.

    Attributes:
        program: the program.
        skipped: what was not proved, only sampled or taken on trust, and why, in words.
    """

    program: Program
    skipped: tuple[str, ...] = ()
    _analysed: tuple[Dataflow, list[Event]] | None = field(default=None, repr=False, compare=False)

    @cached_property
    def flow(self) -> Dataflow:
        """Return the dataflow of the program, in which an include is one op."""
        return self._analysed[0] if self._analysed else analyse_as_written(self.program)

    @cached_property
    def order(self) -> list[Event]:
        """Return one legal order of the events of `flow`; an event is the (rank, index) of one op or more."""
        return self._analysed[1] if self._analysed else untimed_order(self.flow)

    @cached_property
    def replicas(self) -> tuple[ReplicaAgreement, ...]:
        """Return how the copies of each output buffer agree; () for a program too large to be run on symbols.

        Raises:
            ProgramError: the program has an `Exchange`, which cannot be run on symbols.
        """
        if unproved(self.flow):
            return ()
        if not self.program.includes:
            return replica_agreements(self.flow, self.order)
        flow = analyse(self.program)
        return replica_agreements(flow, untimed_order(flow))

    @property
    def replicas_text(self) -> str:
        """Return how copies of outputs agree, in words, such as `copies of c are copied`; "" without copies."""
        return "; ".join(str(agreement) for agreement in self.replicas if agreement.kind != "single")


def validate(program: Program, *, labels: bool = True, native: bool = True) -> Validation:
    """Return the proof that a program is sound.

    Args:
        labels: whether to prove what is computed, too. That is left out, and listed in `skipped`, also for a
            program over `base.limits.PROOF_ELEMENTS` or `base.limits.PROOF_WORK`.
        native: whether to try the C++ core first. False proves in Python alone, which says the same and takes
            longer.

    A program with counts is proved at one row a cell, which holds for all values, and tried on some
    (`ir.analysis.cells`).

    Raises:
        ProgramError: at the first fault.
    """
    if program.counts:
        return _validate_counted(program, labels, native)
    parts: dict[str, PartSummary] = {}
    for name, part in program.parts.items():
        try:
            proof = _validate(part, parts, labels, native)
        except ProgramError as error:
            raise include_error(name, error) from None
        parts[name] = summarise(proof.flow, parts, proof.skipped if labels else ())
    proof = _validate(program, parts, labels, native)
    return replace(proof, skipped=(*proof.skipped, *part_notes(parts)))


def _validate_counted(program: Program, labels: bool, native: bool) -> Validation:
    """Return the proof of a program with counts: that of one row a cell."""
    check_header(program)
    proof = validate(program.one_row_a_cell, labels=labels, native=native)
    check_cells(program, proof.flow)
    for seed in range(COUNTS_TRIED):
        values = sampled_counts(program, seed)
        try:
            validate(program.with_counts(values), labels=False, native=native)
        except ProgramError as error:
            shown = ", ".join(f"{name} {table.tolist()}" for name, table in values.items())
            raise ProgramError(
                f"{error.message} (counts {shown})", op=error.op, rank=error.rank, buffer=error.buffer
            ) from None
    return proof


def _validate(program: Program, parts: Summaries, labels: bool, native: bool) -> Validation:
    """Return the proof of a program, given those of the programs that it includes."""
    check_header(program)
    if native and not program.includes:
        proof = CoreProof(program, labels)
        if proof.holds:
            return Validation(program, proof.skipped)
    check_statements(program)
    return _validate_in_python(program, parts, labels)


def _validate_in_python(program: Program, parts: Summaries, labels: bool) -> Validation:
    """Return the proof of a program as the reference makes it."""
    flow = analyse_as_written(with_include_lane(program))
    checked: set[int] = set()
    for rank, ops in flow.matched.ops.items():
        for bound in ops:
            if id(bound.op) in checked or isinstance(bound.op, Include):
                continue
            check_op(program, bound, rank)
            if all(view.rank is None for _, view in bound.op.accesses()):
                checked.add(id(bound.op))
    order = _order(check_include_uses(flow, parts)) if program.includes else untimed_order(flow)
    skipped = _try_ready_lanes(flow)
    check_races(flow, order)
    if not labels:
        notes: tuple[str, ...] = ("index labels: not asked for",)
    elif reason := unproved(flow):
        notes = (f"index labels: the program {reason}",)
    else:
        notes = prove_outputs(flow, order)
    return Validation(program, (*skipped, *notes), (flow, order))


def _order(flow: Dataflow) -> list[Event]:
    """Return an order of a program with includes, each of which waits for all that is before it in its lanes.

    Where there is none, the expanded program, in which parts of an include wait for less, says whether it can end.
    """
    try:
        return untimed_order(flow)
    except ProgramError:
        untimed_order(analyse(flow.program))
        return untimed_order(analyse_as_written(flow.program))


def _try_ready_lanes(flow: Dataflow) -> tuple[str, ...]:
    """Try random orders for deadlocks that depend on timing, and return notes on what was only sampled.

    Fifo lanes leave no choice: if one order can finish, all can. A ready-first lane chooses, and a collective
    or message that waits in it for its partner keeps others out.
    """
    lanes = flow.program.lane_of
    names = {flow.op(joint.members[0]).lane for joint in flow.matched.joints}
    names = {name for name in names - {""} if lanes[name].order == "ready"}
    if not names:
        return ()
    num_ops = sum(map(len, flow.matched.ops.values()))
    num_orders = min(ORDERS_TRIED, max(OPS_TRIED // num_ops, 1))
    for seed in range(num_orders):
        untimed_order(flow, seed)
    return (f"deadlocks of ready-first lanes {listed(sorted(names))}: {num_orders} orders tried",)
