"""The proof of a program in the C++ core: from the columns of its template, without binding ops in Python.

The core says whether all holds. Where it does not, or where a program has what the core does not know, the
reference in Python decides and finds the words, so that a doubt of the core costs time and never a verdict.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from meshweave._core import prove
from meshweave.base.errors import MeshweaveError
from meshweave.base.limits import PROOF_ELEMENTS, PROOF_WORK
from meshweave.ir.analysis.native_labels import label_columns
from meshweave.ir.analysis.proof import most_summands, num_buffer_elements, trust_notes
from meshweave.ir.columns.proof import ProofColumns
from meshweave.ir.program import Program


class Verdict(IntEnum):
    """What the core says of a program."""

    UNKNOWN = 0
    """It does not hold, or only the reference can say."""
    HOLDS = 1
    UNLABELLED = 2
    """It holds but for what is computed, which would take too much work to prove."""


class CoreProof:
    """The proof of a program whose declarations are checked.

    Args:
        labels: whether to prove what is computed as well.

    Attributes:
        holds: True if the core proves the program sound; False if it does not, or if the core cannot say.
        skipped: what was not proved, and why; of use only where `holds` is True.
    """

    def __init__(self, program: Program, labels: bool) -> None:
        self.holds = False
        self.skipped: tuple[str, ...] = ()
        try:
            count = num_buffer_elements(program)
            is_small = count <= PROOF_ELEMENTS.most
            data = proof_columns(program, labels and is_small)
            verdict = Verdict(prove(data))
        except (MeshweaveError, OverflowError, ValueError):
            return
        self.holds = verdict is not Verdict.UNKNOWN
        if not labels:
            self.skipped = ("index labels: not asked for",)
        elif not is_small:
            self.skipped = (f"index labels: the program {PROOF_ELEMENTS.refusal(count)}",)
        elif verdict is Verdict.UNLABELLED:
            self.skipped = (f"index labels: the program {PROOF_WORK.refusal()}",)
        else:
            self.skipped = trust_notes(program)


def proof_columns(program: Program, labels: bool) -> dict[str, NDArray[np.int64]]:
    """Return the columns of a program, by the names that the core knows.

    Args:
        labels: whether to prove what is computed as well.

    Raises:
        MeshweaveError: the program has what the core does not know, or an op names what is not declared.
    """
    columns = ProofColumns(program)
    data = dict(columns.data)
    data["labels"] = np.array([int(labels)])
    data["most_work"] = np.array([PROOF_WORK.most])
    data["summands"] = np.array([most_summands(program) if labels else 0])
    if labels:
        data |= label_columns(program, columns)
    return data
