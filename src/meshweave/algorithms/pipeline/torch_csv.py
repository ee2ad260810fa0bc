"""Schedules as the CSV files of `torch.distributed.pipelining`, in both of its forms.

A row is a pipeline rank, a cell an action. The form without communication lists compute actions alone; torch adds
transfers when it loads it, which is also what torchtitan's `pipeline_parallel_schedule_csv` takes. The form with
communication lists sends and receives, and the gathering, freeing and reducing of sharded parameters. One function
reads both; which one a text is follows from its actions. Cells (torch 2.13, `_Action`):

    2F0 0B1 0I3 0W3       stage 2 forward of micro-batch 0; whole backward, input gradient, weight gradient
    3SEND_F1 2RECV_B0     stage 3 sends its activation of micro-batch 1; stage 2 receives the gradient of its own
    1UNSHARD 1RESHARD     gather the sharded parameters of stage 1; free them
    1REDUCE_GRAD          reduce the gradients of stage 1 over its data-parallel ranks
    (0F1;3B0)OVERLAP_F_B  a forward and a backward that overlap

An empty cell is an idle step of a picture in lockstep. A runtime skips it, and nothing follows from it, so a
`Schedule` has none: reading leaves empty cells out, and what is written has none. A text without empty cells comes
back as it was, byte by byte, if its lines end as those of Python's `csv` do (`\\r\\n`).
"""

from __future__ import annotations

import csv
import io
import re

from meshweave.algorithms.pipeline.actions import Action, ActionKind, Schedule
from meshweave.base.errors import DescriptionError, UnsupportedError, did_you_mean, printable

_CELL = re.compile(r"([0-9]{1,9})([A-Z_]+)([0-9]{0,9})")
_OVERLAP = re.compile(r"\(([^()]*)\)([A-Z_]*)")
_KINDS = {kind.value: kind for kind in ActionKind}
_SINGLE = tuple(name for name, kind in _KINDS.items() if kind is not ActionKind.OVERLAP)


class _CellError(Exception):
    """What is wrong with one cell, in words that its place goes before."""


def schedule_from_csv(text: str, name: str = "schedule") -> Schedule:
    """Return the schedule in a CSV as torch writes it: a row for each pipeline rank, a cell for each action.

    Which rank holds which stage, and the number of micro-batches, follow from the actions. Empty cells,
    and empty rows at the end, are left out. `name` is the file that errors name.

    Raises:
        DescriptionError: the text is no CSV or has no actions, a cell is no action, a row before the last
            one with actions is empty, a stage is on two ranks, or numbers of stages have gaps. That the
            schedule is complete and ends is not checked: see `prove_progress`.
    """
    rows = _rows(text, name)
    holders: dict[int, tuple[int, int]] = {}
    actions, last_micro_batch = [], -1
    for rank, row in enumerate(rows):
        listed = []
        for column, cell in enumerate(row):
            if not cell:
                continue
            try:
                action = _read_action(cell)
            except _CellError as error:
                raise DescriptionError(f"{_place(name, rank, column)}: {error}") from None
            for leaf in action.parts or (action,):
                holder = holders.setdefault(leaf.stage, (rank, column))
                if holder[0] != rank:
                    raise DescriptionError(
                        f"{_place(name, rank, column)}: {leaf} works on stage {leaf.stage}, and row "
                        f"{holder[0] + 1} does too (column {holder[1] + 1}); a stage belongs to one rank"
                    )
                if leaf.micro_batch is not None and leaf.micro_batch > last_micro_batch:
                    last_micro_batch = leaf.micro_batch
            listed.append(action)
        if not listed:
            raise DescriptionError(
                f"{printable(name)}: row {rank + 1}: rank {rank} has no action; each row is a rank, "
                "and each rank works on a stage"
            )
        actions.append(tuple(listed))
    return Schedule(_stage_ranks(holders, name), last_micro_batch + 1, tuple(actions))


def schedule_to_csv(schedule: Schedule) -> str:
    """Return a schedule as the CSV that torch loads: a row for each pipeline rank, a cell for each action.

    Lines end in CR LF. What torch itself writes has empty cells for idle steps besides.

    Raises:
        UnsupportedError: a transfer is along a skip connection, which torch's CSV cannot express, or an action
            that is no transfer has a `peer`.
    """
    rows = []
    for rank, order in enumerate(schedule.actions):
        for position, action in enumerate(order):
            if action.peer is not None:
                _require_neighbour(action, rank, position)
        rows.append(",".join(map(str, order)))
    return "".join(f"{row}\r\n" for row in rows)


def _require_neighbour(action: Action, rank: int, position: int) -> None:
    """Raise UnsupportedError where a transfer is not one between neighbouring stages."""
    kind, stage, peer = action.kind, action.stage, action.peer
    forwards = kind in (ActionKind.SEND_FORWARD, ActionKind.RECV_BACKWARD)
    if kind.communicates and peer == stage + (1 if forwards else -1):
        return
    what = "a skip connection" if kind.communicates else f"an action with peer {peer}"
    raise UnsupportedError(
        f"action {position + 1} of rank {rank}, {action} with stage {peer}, is {what}: torch's CSV names one "
        "stage an action, so that its transfers join neighbouring stages alone; run the program with meshweave"
    )


def _rows(text: str, name: str) -> list[list[str]]:
    """Return the cells of each row, stripped, without empty lines at the end."""
    try:
        rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text, newline=""))]
    except csv.Error as error:
        raise DescriptionError(f"{printable(name)}: not a CSV file: {error}") from None
    while rows and not any(rows[-1]):
        rows.pop()
    if not rows:
        raise DescriptionError(
            f"{printable(name)}: no actions; a row is a rank, a cell an action such as 0F0"
        )
    return rows


def _place(name: str, rank: int, column: int) -> str:
    return f"{printable(name)}: row {rank + 1}, column {column + 1}"


def _stage_ranks(holders: dict[int, tuple[int, int]], name: str) -> tuple[int, ...]:
    missing = next((stage for stage in range(len(holders)) if stage not in holders), None)
    if missing is not None:
        raise DescriptionError(
            f"{printable(name)}: no action of stage {missing}, and there is stage {max(holders)}; stages are "
            "numbered from 0 without gaps"
        )
    return tuple(holders[stage][0] for stage in range(len(holders)))


def _read_action(cell: str) -> Action:
    if cell[0] == "(":
        return _read_overlap(cell)
    match = _CELL.fullmatch(cell)
    if match is None:
        raise _CellError(
            f"'{printable(cell)}' is no action; an action is STAGE KIND MICRO-BATCH such as 2F0, 0I3, 3SEND_F1, "
            "or STAGE KIND such as 1UNSHARD"
        )
    stage, word, micro_batch = match.groups()
    kind = _KINDS.get(word)
    if kind is None or kind is ActionKind.OVERLAP:
        raise _CellError(
            f"'{printable(cell)}' has no known kind: '{printable(word)}'{did_you_mean(word, _SINGLE)}; there are "
            f"{', '.join(_SINGLE)}"
        )
    if kind.per_micro_batch != bool(micro_batch):
        right = f"{stage}{word}0" if kind.per_micro_batch else f"{stage}{word}"
        wants = "needs a micro-batch" if kind.per_micro_batch else "belongs to no micro-batch"
        raise _CellError(f"'{printable(cell)}': {word} {wants}; right would be {right}")
    return Action(kind, int(stage), int(micro_batch) if micro_batch else None)


def _read_overlap(cell: str) -> Action:
    """Return the action of `(0F1;3B0)OVERLAP_F_B`: two compute actions or more."""
    match = _OVERLAP.fullmatch(cell)
    if match is None or match[2] != ActionKind.OVERLAP.value:
        raise _CellError(
            f"'{printable(cell)}' is no overlap; right would be two actions or more in parentheses, such as "
            "(0F1;3B0)OVERLAP_F_B"
        )
    parts = tuple(_read_action(part.strip()) for part in match[1].split(";") if part.strip())
    if len(parts) < 2 or not all(part.kind.computes for part in parts):
        raise _CellError(
            f"'{printable(cell)}' must have two compute actions or more, such as (0F1;3B0)OVERLAP_F_B"
        )
    return Action(ActionKind.OVERLAP, -1, None, parts=parts)
